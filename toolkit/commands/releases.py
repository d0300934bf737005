"""``releases``: what a release folder holds, and whether it is still what was released."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from toolkit.session import Session, verb

Target = Annotated[Path, typer.Option("--to", help="Release folder.", show_default=False)]


def register(app: typer.Typer) -> None:
    group = typer.Typer(no_args_is_help=True, help="List and verify releases.")
    app.add_typer(group, name="releases")

    @verb(group, "ls")
    def ls(session: Session, to: Target) -> None:
        """List the releases and aliases of a folder."""
        from toolkit.release import list_releases
        from toolkit.report.status import releases_table

        found = list_releases(to)
        session.show({"target": str(to.absolute()), "releases": [release.as_dict() for release in found]},
                     [release.digest for release in found],
                     releases_table(found) if found else f"{to} holds no releases.")

    @verb(group, "verify")
    def verify(session: Session, to: Target) -> None:
        """Re-hash every released file, follow the audit log, check the aliases."""
        from toolkit.errors import DamagedReleaseError
        from toolkit.release import verify_releases

        with session.watch() as watch:
            outcome = verify_releases(to, watch)
        if outcome.faults:
            more = f" (and {len(outcome.faults) - 1} more)" if len(outcome.faults) > 1 else ""
            raise DamagedReleaseError(f"{outcome.faults[0]}{more}", "Publish the engine again into a new folder, and "
                                      "find out who changed this one.")
        session.show({"target": str(to.absolute()), "releases": outcome.releases, "files": outcome.files,
                      "bytes": outcome.bytes, "audit_head": outcome.audit_head, "faults": []},
                     [outcome.audit_head],
                     f"{outcome.releases} releases, {outcome.files} files, {outcome.bytes / 1e6:,.1f} MB: all as "
                     f"released. Audit log head {outcome.audit_head[:16]}.")

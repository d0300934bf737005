"""``verify``: re-hash and validate anybody's checkpoint or any artifact; name each fault."""

from __future__ import annotations

import typer

from toolkit.options import RefArgument
from toolkit.session import Session, verb


def register(app: typer.Typer) -> None:
    @verb(app, "verify")
    def verify(session: Session, ref: RefArgument) -> None:
        """Re-hash and validate a checkpoint or artifact.

        Anybody's checkpoint in a known layout, or an artifact of ours. Exit code 1 when a fault is found.
        """
        from rich.text import Text

        from toolkit.describe import faults_of
        from toolkit.refs import resolve
        from toolkit.store import RunStore

        with RunStore(session.home.store) as store:
            found = resolve(ref, session.home, store, offline=session.offline)
        faults = faults_of(found)
        lines = [Text.assemble(("✕ ", "red"), fault) for fault in faults]
        lines = lines or [Text.assemble(("✓ ", "green"), f"{found.kind}: every check passed")]
        session.show({"path": str(found.path), "kind": found.kind, "faults": faults}, faults, *lines)
        if faults:
            raise typer.Exit(1)

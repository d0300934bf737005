"""``publish``: an engine with its evidence into a release folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from toolkit.session import Session, verb


def register(app: typer.Typer) -> None:
    @verb(app, "publish")
    def publish(session: Session,
                ref: Annotated[str, typer.Argument(metavar="REF", help="Engine: folder, digest prefix or alias:NAME.")],
                to: Annotated[Path, typer.Option("--to", help="Release folder.", show_default=False)],
                alias: Annotated[str, typer.Option(help="Name that will point at this release.",
                                                   show_default=False)],
                policy: Annotated[Path | None, typer.Option(help="Only a verdict under this policy file counts.",
                                                            show_default=False)] = None) -> None:
        """Publish an engine with its evidence.

        Refuses without a PASS verdict for exactly this engine.
        """
        from evals.policy import load_policy
        from toolkit.publishing import publish_engine
        from toolkit.refs import resolve
        from toolkit.store import RunStore

        rules = load_policy(policy) if policy else None

        with RunStore(session.home.store) as store, session.watch() as watch:
            engine = resolve(ref, session.home, store, offline=session.offline).of_kind("engine")
            done = publish_engine(store, engine.path, to, alias,
                                  policy_sha256=rules.sha256 if rules else None, report=watch)
        session.show({"release": done.digest, "path": str(done.path), "alias": alias, "engine": done.engine_digest,
                      "target": str(to.absolute())}, [done.digest],
                     f"published {done.path}", f"alias:{alias} now names release {done.digest[:12]}")

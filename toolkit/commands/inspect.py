"""``inspect``: any artifact in words."""

from __future__ import annotations

from typing import Annotated

import typer

from toolkit.options import RefArgument
from toolkit.session import Session, verb


def register(app: typer.Typer) -> None:
    @verb(app, "inspect")
    def inspect(session: Session, ref: RefArgument,
                plan: Annotated[bool, typer.Option("--plan", help="An engine's operations before and after fusion, its "
                                                   "kernels, limits and memory.")] = False) -> None:
        """Describe any artifact, checkpoint or model."""
        from toolkit.describe import describe, describe_plan
        from toolkit.refs import resolve
        from toolkit.store import RunStore

        with RunStore(session.home.store) as store:
            found = resolve(ref, session.home, store, offline=session.offline)
        document, parts = describe_plan(found.of_kind("engine")) if plan else describe(found)
        session.show(document, [str(document.get("digest", found.path))], *parts)

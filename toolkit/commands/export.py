"""``export``: an engine in the layout that another server reads."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from toolkit.options import RefArgument
from toolkit.session import Session, verb


def register(app: typer.Typer) -> None:
    group = typer.Typer(no_args_is_help=True, help="Write an engine in another server's layout.")
    app.add_typer(group, name="export")

    @verb(group, "triton-server")
    def triton_server(session: Session, ref: RefArgument,
                      out: Annotated[Path, typer.Option("--out", help="Model repository to write into.",
                                                        show_default=False)],
                      name: Annotated[str, typer.Option("--name", help="The model's name there.")] = "model") -> None:
        """Write a model repository for Triton Inference Server: config.pbtxt and a Python backend with the engine."""
        from calib.artifact import Artifact
        from toolkit.errors import UsageError
        from toolkit.refs import resolve
        from toolkit.serve.triton_export import export
        from toolkit.store import RunStore

        if not name.replace("-", "").replace("_", "").replace(".", "").isalnum():
            raise UsageError(f"{name!r} is no name for a model", "Use letters, digits, dots, dashes and underscores.")
        with RunStore(session.home.store) as store:
            engine = Artifact.open(resolve(ref, session.home, store, offline=session.offline).of_kind("engine").path)
        folder = export(engine, out, name)
        session.show({"model": name, "path": str(folder), "engine": engine.digest}, [str(folder)],
                     f"{folder}: start Triton with --model-repository={out}")

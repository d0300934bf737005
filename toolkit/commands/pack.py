"""``pack`` and ``unpack``: an engine as one file, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from toolkit.options import OutOption, RefArgument
from toolkit.session import Session, verb


def register(app: typer.Typer) -> None:
    @verb(app, "pack")
    def pack(session: Session, ref: RefArgument,
             out: Annotated[Path, typer.Option("--out", "-o", help="File to write; it must not exist.",
                                               show_default=False)]) -> None:
        """Write an engine as one file.

        ``serve``, ``generate`` and every other verb take the file as they take the folder.
        """
        from calib.artifact import Artifact
        from toolkit.packing import pack as write
        from toolkit.refs import ENGINES, resolve
        from toolkit.store import RunStore

        with RunStore(session.home.store) as store, session.watch() as watch:
            found = resolve(ref, session.home, store, offline=session.offline).of_kind(*ENGINES)
            artifact = Artifact.open(found.path)
            write(artifact, out, watch)
        size = out.stat().st_size
        session.show({"path": str(out.absolute()), "digest": artifact.digest, "bytes": size}, [str(out)],
                     f"{out}  {size / 1e6:,.0f} MB", artifact.digest)

    @verb(app, "unpack")
    def unpack(session: Session, file: Annotated[Path, typer.Argument(exists=True, dir_okay=False, metavar="FILE",
                                                                      show_default=False)], out: OutOption) -> None:
        """Write a packed engine as a folder, every byte checked."""
        from toolkit.packing import unpack as write

        with session.watch() as watch:
            artifact = write(file, out, watch)
        session.show({"path": str(out.absolute()), "kind": artifact.kind, "digest": artifact.digest}, [artifact.digest],
                     f"{out}  {artifact.kind}", artifact.digest)

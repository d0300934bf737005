"""``ui``: the dashboard, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from typing import Annotated

import typer

from toolkit.session import Session, verb


def register(app: typer.Typer) -> None:
    @verb(app, "ui")
    def ui(session: Session,
           port: Annotated[int, typer.Option(min=1, max=65535, help="Port on 127.0.0.1.")] = 8501,
           read_only: Annotated[bool, typer.Option("--read-only", help="Show everything, start and release nothing.")
                                ] = False,
           headless: Annotated[bool, typer.Option("--headless", help="Open no browser window.")] = False) -> None:
        """Open the dashboard on 127.0.0.1."""
        command = [sys.executable, "-m", "ui", "--home", str(session.home.path), "--port", str(port)]
        if read_only:
            command.append("--read-only")
        if headless:
            command.append("--headless")
        address = f"http://127.0.0.1:{port}"
        session.show({"url": address}, [address], f"Dashboard on {address} (Ctrl-C stops it)")
        sys.stdout.flush()
        raise typer.Exit(_serve(command))


def _serve(command: list[str]) -> int:
    process = subprocess.Popen(command, stdout=sys.stderr)
    try:
        return process.wait()
    except KeyboardInterrupt:
        process.terminate()
        process.wait()
        raise

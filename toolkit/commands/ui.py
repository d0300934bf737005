"""``ui``: the dashboard, in a process of its own."""

from __future__ import annotations

from typing import Annotated

import typer

from toolkit.session import Session, verb


def register(app: typer.Typer) -> None:
    @verb(app, "ui")
    def ui(session: Session,
           port: Annotated[int, typer.Option(min=1, max=65535, help="Port on 127.0.0.1.")] = 8501,
           headless: Annotated[bool, typer.Option("--headless", help="Open no browser window.")] = False) -> None:
        """Open the dashboard on this machine (127.0.0.1 only). Stops with Ctrl-C."""
        import subprocess
        import sys

        command = [sys.executable, "-m", "ui", "--home", str(session.home.path), "--port", str(port)]
        if headless:
            command.append("--headless")
        address = f"http://127.0.0.1:{port}"
        session.show({"url": address}, [address], f"Dashboard on {address} (Ctrl-C stops it)")
        sys.stdout.flush()
        raise typer.Exit(_wait(subprocess.Popen(command, stdout=sys.stderr)))


def _wait(process: "subprocess.Popen[bytes]") -> int:  # noqa: F821, UP037
    try:
        return process.wait()
    except KeyboardInterrupt:
        process.terminate()
        process.wait()
        raise

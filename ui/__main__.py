"""``python -m ui``: serve the pages on this machine. ``toolkit ui`` starts it as a process of its own.

Streamlit is configured here and nowhere else: bound to 127.0.0.1, requests from other sites refused (XSRF, CORS), no
usage statistics, no file watcher, no toolbar for developers.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

FOLDER = Path(__file__).parent


def flags(port: int, headless: bool) -> list[str]:
    """Streamlit's own command-line options."""
    settings = {
        "server.address": "127.0.0.1", "server.port": str(port), "server.headless": str(headless).lower(),
        "server.enableXsrfProtection": "true", "server.enableCORS": "true", "server.fileWatcherType": "none",
        "server.runOnSave": "false", "server.maxUploadSize": "1", "browser.gatherUsageStats": "false",
        "browser.serverAddress": "127.0.0.1", "client.toolbarMode": "minimal", "client.showErrorDetails": "none",
        "global.developmentMode": "false", "theme.base": str(FOLDER / "theme.toml")}
    return [f"--{name}={value}" for name, value in settings.items()]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m ui", description="Serve the dashboard on 127.0.0.1.")
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--port", type=int, default=8501)
    parser.add_argument("--headless", action="store_true")
    parser.add_argument("--read-only", action="store_true")
    options = parser.parse_args()
    from streamlit.web import cli

    import toolkit.report.charts  # noqa: F401  loaded before the first page asks for it, which then opens at once

    sys.argv = ["streamlit", "run", str(FOLDER / "app.py"), *flags(options.port, options.headless),
                "--", "--home", str(options.home.absolute()), *(["--read-only"] if options.read_only else [])]
    cli.main()


if __name__ == "__main__":
    main()

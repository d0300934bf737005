"""Home: the one folder that holds everything which belongs to a user and not to a project.

    <home>/models/<name>/             models fetched by ``data prepare``, Hugging Face layout
    <home>/data/{calibration,choose,evaluation}/
    <home>/artifacts/<kind>/<name>/   checkpoints, engines, reports, sweeps, verdicts made by jobs and by ``LLM``
    <home>/unpacked/<digest>/         engines that came as one file (``toolkit pack``)
    <home>/answers/                   what models and engines answered, kept item by item
    <home>/reports/<run>.html         static reports
    <home>/logs/                      tracebacks of unexpected errors
    <home>/toolkit.db                 the store

Which folder that is, is decided once, by the command line: ``--home``, else ``$TOOLKIT_HOME``, else the user data
folder of the platform. Everything below takes a ``Home``.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from toolkit.errors import UsageError

DEMO_MODEL = "SmolLM2-135M-Instruct"


@dataclass(frozen=True, slots=True)
class Home:
    """Paths below one home folder. Nothing is created by asking for a path."""

    path: Path

    @property
    def models(self) -> Path:
        return self.path / "models"

    @property
    def data(self) -> Path:
        return self.path / "data"

    @property
    def answers(self) -> Path:
        """Models' and engines' answers, item by item (``evals.fidelity``)."""
        return self.path / "answers"

    @property
    def downloads(self) -> Path:
        return self.path / "downloads"

    @property
    def store(self) -> Path:
        return self.path / "toolkit.db"

    @property
    def reports(self) -> Path:
        return self.path / "reports"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def demo_model(self) -> Path:
        return self.models / DEMO_MODEL

    def artifacts(self, kind: str) -> Path:
        return self.path / "artifacts" / kind


def _user_data_folder() -> Path:
    if sys.platform == "darwin":
        return Path("~/Library/Application Support/llm-quant-toolkit")
    data = os.environ.get("XDG_DATA_HOME")
    return (Path(data) if data else Path("~/.local/share")) / "llm-quant-toolkit"


def expanded(path: Path) -> Path:
    """``~`` resolved, absolute. UsageError when nobody knows whose home that is."""
    try:
        found = path.expanduser()
    except RuntimeError as error:
        raise UsageError(f"{path}: this user has no home folder", "Give a folder with --home, or set HOME.") from error
    if str(path).startswith("~") and not (found.is_absolute() and os.environ.get("HOME", "/")):
        raise UsageError(f"{path} is {found}: HOME names no folder", "Give a folder with --home, or set HOME.")
    return found.absolute()


def find_home(option: Path | None, named: str | None = None) -> Home:
    """``option`` (--home), else ``named`` (the command line's $TOOLKIT_HOME), else the user data folder.

    UsageError when it is a file.
    """
    path = expanded(option or (Path(named) if named else _user_data_folder()))
    if path.exists() and not path.is_dir():
        raise UsageError(f"home {path} is a file", "Give a folder with --home.")
    return Home(path)

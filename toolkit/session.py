"""What every verb shares: the four common options, and the one place that writes to stdout.

``verb(app, "plan")`` registers a function whose first argument is a ``Session``; ``--home``, ``--json``, ``-q`` and
``--offline`` are added to its signature, so a command file holds only what is its own.

With ``--json`` exactly one JSON document goes to stdout; with ``-q`` ids only, one a line; otherwise text for people.
Progress and notes always go to stderr.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toolkit.errors import UsageError
from toolkit.home import Home, find_home
from toolkit.streams import write_json, write_text

if TYPE_CHECKING:
    from rich.console import RenderableType

    from toolkit.console import Watcher

_COMMON = [
    inspect.Parameter("home", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[
        Path | None, typer.Option("--home", help="Folder for models, data and results [default: user data folder].",
                                  show_default=False, rich_help_panel="Common options")]),
    inspect.Parameter("as_json", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Annotated[
        bool, typer.Option("--json", help="Print one JSON document.", rich_help_panel="Common options")]),
    inspect.Parameter("quiet", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Annotated[
        bool, typer.Option("--quiet", "-q", help="Print ids only.", rich_help_panel="Common options")]),
    inspect.Parameter("offline", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Annotated[
        bool, typer.Option("--offline", help="Never touch the network.", rich_help_panel="Common options")]),
    inspect.Parameter("recorded_as", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[
        str | None, typer.Option("--recorded-as", help="Record progress under this job.", hidden=True)]),
]


@dataclass(frozen=True, slots=True)
class Session:
    """One run of one verb: where home is, and how to speak."""

    home: Home
    as_json: bool = False
    quiet: bool = False
    offline: bool = False
    job: str | None = None

    def show(self, document: Any, ids: list[str], *parts: RenderableType) -> None:
        """The verb's result: ``document`` for --json, ``ids`` for -q, ``parts`` (rich) for people."""
        if self.as_json:
            write_json(document, indent=2)
        elif self.quiet:
            write_text("".join(f"{name}\n" for name in ids))
        else:
            from toolkit.console import stdout

            console = stdout()
            for part in parts:
                console.print(part, markup=False)

    def say(self, *parts: RenderableType) -> None:
        """Parts for people that stand before the result; --json and -q have one result and nothing before it."""
        if not (self.as_json or self.quiet):
            self.show(None, [], *parts)

    def watch(self) -> Watcher:
        """Progress on stderr, as a context manager whose value is a ``calib.progress.Report``.

        Work that watches is in the job table too: under its own id, or the one that started it.
        """
        from toolkit.recording import watcher

        return watcher(self.home, self.quiet, self.job)


def verb(app: typer.Typer, name: str, **settings: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register ``function(session, ...)`` as a command with the common options added."""

    def register(function: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(function, eval_str=True)
        own = list(signature.parameters.values())[1:]

        def command(**values: Any) -> None:
            if values["as_json"] and values["quiet"]:
                raise UsageError("--json and --quiet exclude each other", "Give one of them.")
            session = Session(find_home(values.pop("home"), os.environ.get("TOOLKIT_HOME")), values.pop("as_json"),
                              values.pop("quiet"), values.pop("offline"), values.pop("recorded_as"))
            function(session, **values)

        keyword = [part.replace(kind=inspect.Parameter.KEYWORD_ONLY) for part in own]
        command.__signature__ = inspect.Signature([*keyword, *_COMMON])  # type: ignore[attr-defined]
        command.__annotations__ = {part.name: part.annotation for part in [*keyword, *_COMMON]}
        command.__doc__ = function.__doc__
        command.__name__ = function.__name__
        app.command(name, **settings)(command)
        return function

    return register

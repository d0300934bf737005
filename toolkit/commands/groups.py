"""A verb that is both a command and a group: ``gate CANDIDATE ...`` and ``gate update-reference ...``."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup


def verb_group(app: typer.Typer, name: str, default: str, help_text: str) -> typer.Typer:
    """A group registered as ``name`` whose command ``default`` runs when the first word is none of its commands."""

    class WithDefault(TyperGroup):
        def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # the parser's own Context, wherever it is from
            chosen = bool(args) and args[0] in self.commands
            return super().parse_args(ctx, args if chosen else [default, *args])

    group = typer.Typer(cls=WithDefault, help=help_text)
    app.add_typer(group, name=name)
    return group

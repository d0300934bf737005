"""The root of every error a person is meant to read.

An error says what is wrong together with the value that was found (``message``) and what to do about it (``hint``).
The command line prints exactly these two lines; ``--json`` prints ``{"error": {"code", "message", "hint"}}``.
Each room has a small family of its own below ``ToolkitError``; ``exit_code`` follows the command line's contract:
2 usage or configuration, 4 environment (no device, file, package or run).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator

USAGE = 2
ENVIRONMENT = 4


class ToolkitError(Exception):
    """A fault with a mend. ``code`` is a stable snake_case word for machines."""

    code = "error"
    exit_code = USAGE

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n{self.hint}" if self.hint else self.message


def shown(value: object, most: int = 80) -> str:
    """A value as a message shows it: its repr, cut where it would fill the screen."""
    written = ""
    for piece in _written(value, most):
        written += piece
        if len(written) > most:
            return f"{written[:most]}..."
    return written


def _written(value: object, most: int) -> Iterator[str]:
    """repr in pieces: of a list with a million entries only those are written that are shown."""
    if type(value) is str:
        yield repr(value[:most + 1])
    elif isinstance(value, list | tuple) and type(value) in (list, tuple):
        begin, end = ("[", "]") if isinstance(value, list) else ("(", ",)" if len(value) == 1 else ")")
        yield begin
        for number, one in enumerate(value):
            yield ", " if number else ""
            yield from _written(one, most)
        yield end
    elif type(value) is dict:
        yield "{"
        for number, (key, one) in enumerate(value.items()):
            yield ", " if number else ""
            yield from _written(key, most)
            yield ": "
            yield from _written(one, most)
        yield "}"
    else:
        yield repr(value)


class UsageError(ToolkitError):
    """A command or a call was given something that it cannot work with."""

    code = "usage"


class ArtifactError(ToolkitError):
    """A folder that is not the artifact it should be: missing, half-written, changed, or of another kind."""

    code = "artifact"
    exit_code = ENVIRONMENT


class CalibError(ToolkitError):
    """Something in calibration cannot be done, or was done and came out wrong."""

    code = "calibration"


class CalibrationDataError(CalibError):
    """A module saw no data, or its scale is not a positive finite number."""

    code = "calibration_data"


class UnknownNameError(ToolkitError):
    """A name that is not on the list; the hint names near matches and the list, and what to do ``instead``."""

    code = "unknown_name"

    def __init__(self, what: str, name: str, known: Iterable[str], instead: str = "") -> None:
        super().__init__(f"unknown {what} {name!r}", name_hint(name, known, instead))


def name_hint(name: str, known: Iterable[str], instead: str = "") -> str:
    """What to do about a name that is not on the list: the nearest, the list where there is any, ``instead``."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    said = [f"Did you mean {near[0]!r}?"] if near else []
    said.append(f"Known: {', '.join(names)}." if names else "" if instead else "There is none here yet.")
    return " ".join(part for part in (*said, instead) if part)

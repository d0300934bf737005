"""stdout and stderr as they really are: closed, cut off by ``| head -1``, in an encoding of 1968, or on a full disk.

None of that may turn into a traceback, or change what a command's exit code says: a gate whose reader has gone away
still exits by its verdict.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from typing import Any, TextIO


def mute(stream: TextIO) -> None:
    """Let whatever is still written to ``stream`` vanish, also at the end of the process."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def open_streams() -> None:
    """Streams that can take any text: closed ones lead nowhere, and a character that a terminal lacks becomes "?"."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 (as long as the process lives)
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace" if name == "stdout" else "backslashreplace")


def write_json(document: Any, indent: int | None = None) -> None:
    """One JSON document on stdout, whatever its encoding; a reader that goes away is no error."""
    text = json.dumps(document, ensure_ascii=False, allow_nan=False, indent=indent)
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        text = json.dumps(document, allow_nan=False, indent=indent)
    write_text(text + "\n")


def write_text(text: str) -> None:
    """Plain text on stdout, at once."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        mute(sys.stdout)

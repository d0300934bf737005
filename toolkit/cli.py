"""``toolkit``: one thin command a stage, and the one place where an error becomes two lines and an exit code.

Exit codes: 0 done, 1 gate failed, 2 usage or configuration, 3 gate inconclusive or anomalous, 4 environment (no device,
file, package, or run), 130 interrupted. An error that nobody foresaw is one line too; its traceback goes to a log.

Nothing heavy is imported here: a verb's file names only options, and its body imports the rooms that it needs, so that
``toolkit --help`` answers at once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import sys
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path

import typer

from calib.errors import ENVIRONMENT, USAGE, ToolkitError, shown
from calib.faults import fault_words
from toolkit.commands import (
    build,
    data,
    doctor,
    evaluate,
    export,
    gate,
    generate,
    inspect,
    jobs,
    pack,
    plan,
    publish,
    quantize,
    releases,
    run,
    runs,
    sensitivity,
    serve,
    sweep,
    ui,
    verify,
)
from toolkit.errors import UsageError
from toolkit.home import find_home
from toolkit.streams import mute, open_streams, write_json

INTERRUPTED = 130
_ROOMS = ("calib", "engines", "evals", "toolkit")

app = typer.Typer(name="toolkit", no_args_is_help=True, add_completion=False, rich_markup_mode=None,
                  pretty_exceptions_enable=False, context_settings={"help_option_names": ["-h", "--help"]},
                  help="Calibrate, build, judge, compare and release quantized LLM engines.")
for module in (doctor, data, plan, sensitivity, quantize, build, inspect, verify, generate, serve, evaluate, sweep,
               gate, pack, run, runs, export, publish, releases, jobs, ui):
    module.register(app)

# typer has carried its own copy of click since 0.29 and depended on click before: take the class from where it is
_ClickException: type[Exception] = next(kind for kind in typer.BadParameter.__mro__
                                        if kind.__name__ == "ClickException")


def main() -> None:
    """The console script."""
    end_on_sigterm()
    sys.exit(run_command(sys.argv[1:]))


def end_on_sigterm() -> None:
    """SIGTERM ends work like Ctrl-C does: what is half-written is removed, what is done stays, exit code 130."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def run_command(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code; never raises for an error."""
    as_json = "--json" in arguments
    open_streams()
    _quiet_libraries()
    try:
        _check_text(arguments)
        code = app(args=list(arguments), standalone_mode=False, prog_name="toolkit")
        sys.stdout.flush()
        if code == INTERRUPTED:  # the parser turns Ctrl-C into this exit code itself
            raise KeyboardInterrupt
        return code if isinstance(code, int) else 0
    except ToolkitError as error:
        return _report(as_json, error.code, error.message, error.hint, error.exit_code)
    except _ClickException as error:
        return _report(as_json, "usage", *_usage(error), USAGE)
    except (KeyboardInterrupt, typer.Abort):
        return _report(as_json, "interrupted", "interrupted", "Long work goes on where it stopped: run it again.",
                       INTERRUPTED)
    except BrokenPipeError:
        mute(sys.stdout)
        return 0
    except SystemExit as error:  # the parser's own answer to a reader of its help that went away
        if isinstance(error.__context__, BrokenPipeError):
            mute(sys.stdout)
            return 0
        return _report(as_json, "internal", f"the command ended itself ({error.code})", "", ENVIRONMENT)
    except Exception as error:
        return _report(as_json, *_foreseen(error) or _unforeseen(arguments, error))


def _check_text(arguments: Sequence[str]) -> None:
    """UsageError for an argument that is no text: no record, JSON or store could hold it."""
    for argument in arguments:
        if any("\ud800" <= char <= "\udfff" for char in argument):
            raise UsageError(f"the argument {shown(argument)} is not text in this locale's encoding",
                             "Use a UTF-8 locale, and names in UTF-8.")


def _quiet_libraries() -> None:
    """Progress and notes are ours: libraries' own bars and warnings stay out of stderr (``python -W`` shows them)."""
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
    os.environ.setdefault("TQDM_DISABLE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def _foreseen(error: Exception) -> tuple[str, str, str, int] | None:
    """Faults of a record, a file system or an installation that surface as somebody else's exception."""
    if isinstance(error, ImportError) and error.name and error.name.partition(".")[0] not in _ROOMS:
        return ("missing_package", f"package {error.name!r} is not installed, or is broken: {error}",
                "Install the toolkit again: make install", ENVIRONMENT)
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "not enough memory" in str(error)):
        return ("memory", "there is not enough memory for this", "Free memory, or ask for less: a smaller batch, "
                "shorter texts, a smaller model.", ENVIRONMENT)
    if isinstance(error, sqlite3.Error):
        return ("store", f"the store cannot be used: {error}", "Free disk space if it is full; move toolkit.db out of "
                "home if it is damaged: artifacts stay, and a new store is made.", ENVIRONMENT)
    if isinstance(error, OSError) and error.strerror:
        place = f" ({shown(str(error.filename), 200)[1:-1]})" if error.filename else ""
        return ("environment", f"{error.strerror}{place}", "Check the path, its permissions and the free space.",
                ENVIRONMENT)
    if type(error).__name__ == "ValidationError" and hasattr(error, "errors"):
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or error.title  # type: ignore[attr-defined]
        return "usage", f"{place}: {fault_words(first)}", "Correct the value.", USAGE
    return None


def _unforeseen(arguments: Sequence[str], error: Exception) -> tuple[str, str, str, int]:
    where = _write_log(arguments)
    return ("internal", f"unexpected {type(error).__name__}: {' '.join(str(error).split())[:300]}",
            f"This is a fault of the toolkit; the traceback lies in {where}.", ENVIRONMENT)


def _write_log(arguments: Sequence[str]) -> str:
    from datetime import UTC, datetime

    listed = list(arguments)
    chosen = Path(listed[listed.index("--home") + 1]) if "--home" in listed[:-1] else None
    text = f"toolkit {' '.join(listed)}\n\n{traceback.format_exc()}"
    try:
        folder = find_home(chosen, os.environ.get("TOOLKIT_HOME")).logs
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{os.getpid()}.log"
        path.write_text(text, encoding="utf-8", errors="backslashreplace")
        return str(path)
    except (OSError, ToolkitError):
        with contextlib.suppress(OSError):
            sys.stderr.write(text)
        return "the lines above (no log could be written)"


def _usage(error: Exception) -> tuple[str, str]:
    """A parser's complaint as message and hint."""
    message = str(error.format_message()).strip()  # type: ignore[attr-defined]
    message, _, suggestion = message.partition(" Did you mean ")
    faults = getattr(error.__cause__, "errors", None)
    if faults is not None:  # a number's: the parser's own words for it leave the value out
        message = f"{message.partition(': ')[0]}: {fault_words(faults()[0])}"
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "toolkit"
    hint = f"Did you mean {suggestion} " if suggestion else ""
    return message.rstrip("."), f"{hint}See `{command} --help`."


def _report(as_json: bool, code: str, message: str, hint: str, exit_code: int) -> int:
    try:
        if as_json:
            write_json({"error": {"code": code, "message": message, "hint": hint}})
        else:
            _print_error(message, hint)
    except (OSError, MemoryError, ImportError):  # nobody is left to be told, or only on stderr: the exit code says it
        mute(sys.stdout)
        with contextlib.suppress(OSError):
            sys.stderr.write(f"error: {message}\n" + (f"hint:  {hint}\n" if hint else ""))
            sys.stderr.flush()
    return exit_code


def _print_error(message: str, hint: str) -> None:
    from rich.markup import escape

    from toolkit.console import stderr

    console = stderr()
    console.print(f"[bold red]error:[/] {escape(message)}", soft_wrap=True)
    if hint:
        console.print(f"[dim]hint:[/]  {escape(hint)}", soft_wrap=True)

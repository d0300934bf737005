"""The toolkit's own family of errors; the root and the exit codes are in ``calib/errors.py``."""

from __future__ import annotations

from collections.abc import Iterable

from calib.errors import ENVIRONMENT, ToolkitError, UnknownNameError
from calib.errors import UsageError as UsageError  # below, for the engine's own callers from Python


class JobError(ToolkitError):
    """A job file that cannot be run as it is written."""

    code = "job"


class MissingDataError(ToolkitError):
    """A model or data set that is not on this machine, and cannot be fetched now."""

    code = "missing_data"
    exit_code = ENVIRONMENT


class StoreError(ToolkitError):
    """The store's file cannot be opened or written now."""

    code = "store"
    exit_code = ENVIRONMENT


class NoRunError(ToolkitError):
    """The store has no run, artifact or release of that name."""

    code = "no_run"
    exit_code = ENVIRONMENT


class ReleaseError(ToolkitError):
    """Something may not be released, or a release is not what it says."""

    code = "release"


class NotPassedError(ReleaseError):
    """The engine's newest verdict is not PASS; ``exit_code`` is that verdict's, as `gate` itself gives it."""

    code = "not_passed"

    def __init__(self, message: str, hint: str, exit_code: int) -> None:
        super().__init__(message, hint)
        self.exit_code = exit_code


class DamagedReleaseError(ReleaseError):
    """A released file, alias or log entry differs from what was written."""

    code = "release_damaged"
    exit_code = ENVIRONMENT


def unknown_alias(alias: str, known: Iterable[str]) -> UnknownNameError:
    """No release is called so; where none has a name, how one gets it."""
    names = list(known)
    return UnknownNameError("alias", alias, names, "" if names else "No alias is known here: `toolkit publish ENGINE "
                            "--to TARGET --alias NAME` gives one.")

"""Errors of building, opening and running engines."""

from __future__ import annotations

from calib.errors import ENVIRONMENT, ToolkitError


class EngineError(ToolkitError):
    """An engine cannot be built, or a request is outside what an engine was built for."""

    code = "engine"


class LimitError(EngineError):
    """A request exceeds the engine's limits; the message names both numbers. HTTP calls it 400."""

    code = "limit"


class EngineMismatchError(EngineError):
    """An engine was opened where it was not built for: another device, version or precision."""

    code = "engine_mismatch"
    exit_code = ENVIRONMENT

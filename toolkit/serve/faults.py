"""What goes wrong at the server's edge, as the client will read it: a status, words, and the parameter's name."""

from __future__ import annotations

from typing import Any

#: HTTP status -> OpenAI's error type.
_TYPES = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
          405: "invalid_request_error", 408: "timeout_error", 413: "invalid_request_error",
          415: "invalid_request_error", 429: "rate_limit_error", 431: "invalid_request_error",
          501: "not_supported_error", 503: "unavailable_error", 504: "timeout_error"}
#: What a server says that takes nothing new any more.
STOPPING = "the server is shutting down"


class ApiError(Exception):
    """An answer that is an error. ``headers`` go with it."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None,
                 headers: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = headers or {}

    @property
    def body(self) -> dict[str, Any]:
        """OpenAI's error document."""
        return {"error": {"message": self.message, "type": _TYPES.get(self.status, "server_error"),
                          "param": self.param, "code": self.code}}


def settled(error: ApiError) -> ApiError:
    """An error about to be answered, without where it was raised. Its traceback holds the frames, and with them the
    request's body, and a frame may hold the error: only a collection would free that circle, and none comes while the
    server is busy (``pauses``)."""
    error.__traceback__ = error.__cause__ = error.__context__ = None
    return error


def bad(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def unavailable(message: str) -> ApiError:
    return ApiError(503, message, code="unavailable", headers={"Retry-After": "5"})

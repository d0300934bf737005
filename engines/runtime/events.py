"""What comes of a step."""

from __future__ import annotations

from dataclasses import dataclass

from engines.request import FinishReason, TokenLogprob


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One more token of request ``number``, and the text that became safe to show with it.

    ``token`` None: it ended without one (deadline or error, which ``error`` explains).
    """

    number: int
    token: int | None
    text: str
    logprob: TokenLogprob | None
    finish_reason: FinishReason | None
    error: str | None = None

"""What a caller hands to an engine and gets back: sampling parameters, outputs, prompt scores.

These are the records of the in-process face (``engines/llm.py``). A parameter that an engine does not honour does not
exist here; a value outside its range is refused at construction with the value.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import ConfigDict, Field, model_validator
from pydantic.dataclasses import dataclass as checked

from calib.scheme import Frozen

FinishReason = Literal["stop", "length", "abort"]


class SamplingParams(Frozen):
    """How tokens are chosen and when a sequence ends. ``temperature`` 0 is greedy.

    ``seed`` makes a request reproducible on its own: the random number of a token depends on (seed, position) only.
    ``logprobs`` k returns each token's log-probability and the k best alternatives (0: the chosen token only).
    """

    max_tokens: int = Field(default=128, ge=0)
    min_tokens: int = Field(default=0, ge=0)
    temperature: float = Field(default=0.0, ge=0.0, le=100.0)
    top_k: int = Field(default=0, ge=0, description="0 keeps every token")
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    stop: tuple[str, ...] = Field(default=(), max_length=16)
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = Field(default=None, ge=0, le=20)

    @model_validator(mode="after")
    def _consistent(self) -> SamplingParams:
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens {self.min_tokens} is larger than max_tokens {self.max_tokens}")
        if any(not text for text in self.stop):
            raise ValueError("a stop string must not be empty")
        return self


@checked(frozen=True, config=ConfigDict(arbitrary_types_allowed=True))
class TokenLogprob:
    """Natural-log probability of the token chosen at one position, and of the best alternatives."""

    token_id: int
    logprob: float
    top: dict[int, float]


@checked(frozen=True)
class CompletionOutput:
    """One finished (or, in a stream, partial) completion."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None
    finish_reason: FinishReason | None


@checked(frozen=True)
class RequestOutput:
    """What came of one prompt. Times are seconds from admission: first token and last token."""

    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    ttft_s: float | None = None
    e2e_s: float | None = None


@checked(frozen=True, config=ConfigDict(arbitrary_types_allowed=True))
class PromptScore:
    """Log-probabilities of a prompt's own tokens 1..n-1 given what stands before them.

    ``logprobs`` float32 [n-1], natural log. ``greedy`` bool [n-1]: the token is the most probable one. With
    ``top_k`` asked for, ``top_ids`` int32 and ``top_logprobs`` float32 [n-1, k], best first; with ``at_ids`` given,
    ``at_logprobs`` float32 of the same shape as those ids.
    """

    logprobs: np.ndarray
    greedy: np.ndarray
    top_ids: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None
    at_logprobs: np.ndarray | None = None

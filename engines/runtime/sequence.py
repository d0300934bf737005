"""Sequence: one request inside the loop. It never leaves ``runtime/``.

    tokens     prompt and generated ids so far
    computed   how many of them have their keys and values in the cache
    table      the cache blocks, in order

A step computes ``tokens[computed : computed + n]``; when that reaches the end of ``tokens``, the last row's logits
choose the next one. Preemption gives the blocks back and sets ``computed`` to 0: everything is recomputed later, and
generated tokens are kept. Blocks that ended sequences left behind may give ``computed`` a start above 0.

A step that was launched but not read yet has chosen tokens that only the device knows: each stands in ``tokens`` as
UNKNOWN, and ``unknown`` counts them. So lengths, positions and blocks are always those of what has been launched.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field

import numpy as np
import torch

from engines.request import (
    CompletionOutput,
    FinishReason,
    PromptScore,
    RequestOutput,
    SamplingParams,
    TokenLogprob,
)
from engines.runtime.bad_words import BadWords
from engines.runtime.grammar import Matcher
from engines.runtime.text_stream import TextStream

#: A token that a launched step has chosen and nobody has read yet.
UNKNOWN = -1


@dataclass(slots=True)
class ScoreRequest:
    """Log-probabilities of a prompt's own tokens. Rows are filled as chunks are computed."""

    top_k: int
    at_ids: torch.Tensor | None
    logprobs: np.ndarray
    greedy: np.ndarray
    top_ids: np.ndarray | None
    top_logprobs: np.ndarray | None
    at_logprobs: np.ndarray | None

    def result(self) -> PromptScore:
        return PromptScore(self.logprobs, self.greedy, self.top_ids, self.top_logprobs, self.at_logprobs)


@dataclass(slots=True, eq=False)
class Sequence:
    """See the module's docstring. Compared by identity."""

    number: int
    tokens: list[int]
    prompt_len: int
    params: SamplingParams
    seed: int
    stop_ids: frozenset[int]
    text: TextStream | None = None
    score: ScoreRequest | None = None
    computed: int = 0
    unknown: int = 0
    table: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: str | None = None
    preemptions: int = 0
    #: Lower runs first; among equals the older one.
    priority: int = 0
    #: Monotonic time at which it ends, finished or not.
    deadline: float | None = None
    #: Keys of its full blocks (``blocks.block_key``) as far as they were needed; [] until then. None: no prefix reuse.
    keys: list[bytes] | None = None
    root: bytes = b""
    #: How many blocks of its table are kept for others (``BlockPool.keep``).
    kept: int = 0
    #: Prompt tokens that were found in the cache when it first started.
    cached_tokens: int | None = None
    #: How often a younger sequence started before it.
    passed: int = 0
    matcher: Matcher | None = None
    bad_words: BadWords | None = None
    #: The first continuation of the same request: what it computes of their prompt is waited for and shared.
    leader: Sequence | None = None
    #: Times each token was generated, for penalties.
    counts: dict[int, int] = field(default_factory=dict)
    admitted_at: float = field(default_factory=time.perf_counter)
    started_at: float | None = None
    first_token_at: float | None = None
    finished_at: float | None = None

    @property
    def rank(self) -> tuple[int, int]:
        """The order in which sequences are served, and in which the last gives way."""
        return self.priority, self.number

    @property
    def known(self) -> int:
        """Tokens whose ids the host knows."""
        return len(self.tokens) - self.unknown

    @property
    def blocked(self) -> bool:
        """Its next token depends on one that is under way."""
        return self.unknown > 0 and self.params.stepwise

    @property
    def follows(self) -> bool:
        """Whether it waits for its leader to compute their prompt."""
        leader = self.leader
        return leader is not None and not leader.finished and leader.computed < leader.prompt_len

    @property
    def generated(self) -> Ordered[int]:
        return self.tokens[self.prompt_len:]

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def remaining(self) -> int:
        """Tokens that still must be computed before the next one can be chosen. 0 when all are launched."""
        if self.unknown and self.num_generated >= self.params.max_tokens:
            return 0
        return len(self.tokens) - self.computed

    def reserve(self) -> None:
        """A launched step will choose the next token."""
        self.tokens.append(UNKNOWN)
        self.unknown += 1

    def learn(self, token: int) -> None:
        """The oldest unknown token is this one."""
        self.tokens[len(self.tokens) - self.unknown] = token
        self.unknown -= 1

    def forget_unknown(self) -> None:
        """Drop what launched steps will still choose: the sequence has ended before."""
        if self.unknown:
            del self.tokens[-self.unknown:]
            self.unknown = 0

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def output(self) -> RequestOutput:
        """What its owner gets; times are seconds since admission."""
        assert self.text is not None

        def since(moment: float | None) -> float | None:
            return None if moment is None else moment - self.admitted_at

        completion = CompletionOutput(
            index=0, text=self.text.text, token_ids=list(self.generated), finish_reason=self.finish_reason,
            logprobs=None if self.params.logprobs is None else self.logprobs, error=self.error)
        return RequestOutput(
            prompt_token_ids=self.tokens[:self.prompt_len], outputs=[completion], ttft_s=since(self.first_token_at),
            e2e_s=since(self.finished_at), cached_tokens=self.cached_tokens or 0, queue_s=since(self.started_at))

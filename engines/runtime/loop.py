"""The loop: owner of every Sequence. schedule, launch, postprocess.

A runner may have ``lookahead`` steps launched that nobody has read: the loop schedules and launches the next step first
and reads the oldest one then, so that a device never waits for the host. What a step will choose is reserved in its
sequences as unknown tokens when it is launched; a sequence that turns out to have ended drops them.

It turns requests into sequences (refusing what exceeds the limits, with the numbers), steps until they are finished,
and gives token events. Nothing outside ``runtime/`` ever holds a Sequence.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections import deque
from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from calib.text import Tokenizer
from engines.errors import LimitError
from engines.plan import Limits
from engines.request import (
    CompletionOutput,
    FinishReason,
    PromptScore,
    RequestOutput,
    SamplingParams,
    TokenLogprob,
)
from engines.runtime.blocks import BlockPool
from engines.runtime.scheduler import Chunk, Scheduler
from engines.runtime.sequence import ScoreRequest, Sequence
from engines.runtime.text_stream import TextStream


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One more token of request ``number``, and the text that became safe to show with it."""

    number: int
    token: int
    text: str
    logprob: TokenLogprob | None
    finish_reason: FinishReason | None


class Launched(Protocol):
    """A step under way."""

    def result(self) -> list[tuple[Sequence, int, TokenLogprob | None]]:
        """Wait for it; the next token of every sequence that got one."""
        ...


class Runner(Protocol):
    """What runs chunks: ``launch`` starts a step, advances ``Sequence.computed`` and fills prompt scores."""

    lookahead: int

    def launch(self, chunks: Ordered[Chunk]) -> Launched: ...


class Loop:
    """See the module's docstring. Not thread-safe: one owner calls it."""

    def __init__(self, runner: Runner, tokenizer: Tokenizer, limits: Limits, vocab_size: int) -> None:
        self._runner, self._tokenizer, self._limits, self._vocab_size = runner, tokenizer, limits, vocab_size
        self._pool = BlockPool(limits.num_blocks, limits.block_size)
        self._scheduler = Scheduler(self._pool, limits.max_batch_size, limits.max_num_tokens)
        self._sequences: dict[int, Sequence] = {}
        self._numbers = itertools.count()
        self._flights: deque[Launched] = deque()
        self.steps = 0
        self.tokens_computed = 0
        self.tokens_generated = 0

    def admit(self, prompt: Ordered[int], params: SamplingParams) -> int:
        """Queue a generation; returns its number. LimitError for an empty, foreign or too long prompt."""
        self._check_prompt(prompt, params.max_tokens)
        ends = frozenset(params.stop_token_ids + (() if params.ignore_eos else self._tokenizer.eos_ids))
        if strange := [index for index in ends if not 0 <= index < self._vocab_size]:
            raise LimitError(f"stop token {strange[0]} is outside the vocabulary of {self._vocab_size}",
                             "Give ids of this model's tokenizer.")
        seed = secrets.randbits(63) if params.seed is None else params.seed
        sequence = Sequence(next(self._numbers), list(prompt), len(prompt), params, seed, ends,
                            text=TextStream(self._tokenizer, params.stop))
        self._sequences[sequence.number] = sequence
        if params.max_tokens == 0:
            sequence.finish_reason, sequence.finished_at = "length", sequence.admitted_at
        else:
            self._scheduler.add(sequence)
        return sequence.number

    def admit_score(self, prompt: Ordered[int], top_k: int, at_ids: np.ndarray | None) -> int:
        """Queue the scoring of a prompt of at least two tokens; returns its number."""
        self._check_prompt(prompt, 0)
        rows = len(prompt) - 1
        if rows < 1:
            raise LimitError("a prompt of 1 token has nothing to score", "Score at least two tokens.")
        if not 0 <= top_k <= self._vocab_size:
            raise LimitError(f"top_k {top_k} is outside 0..{self._vocab_size}", "Ask for fewer.")
        ids = None if at_ids is None else self._checked_ids(at_ids, rows)
        score = ScoreRequest(
            top_k, ids, np.empty(rows, np.float32), np.empty(rows, np.bool_),
            np.empty((rows, top_k), np.int32) if top_k else None,
            np.empty((rows, top_k), np.float32) if top_k else None,
            None if ids is None else np.empty(tuple(ids.shape), np.float32))
        sequence = Sequence(next(self._numbers), list(prompt), len(prompt), SamplingParams(max_tokens=0), 0,
                            frozenset(), score=score)
        self._sequences[sequence.number] = sequence
        self._scheduler.add(sequence)
        return sequence.number

    def _checked_ids(self, at_ids: np.ndarray, rows: int) -> torch.Tensor:
        ids = torch.as_tensor(np.asarray(at_ids, dtype=np.int64))
        if ids.dim() != 2 or ids.shape[0] != rows:
            raise LimitError(f"at_ids has shape {list(ids.shape)} for a prompt of {rows + 1} tokens",
                             f"Give [{rows}, k] ids.")
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < self._vocab_size:
            raise LimitError(f"at_ids holds {int(ids.min())}..{int(ids.max())}; the vocabulary has {self._vocab_size}",
                             "The ids come from another model's tokenizer.")
        return ids

    def _check_prompt(self, prompt: Ordered[int], max_tokens: int) -> None:
        limit = self._limits.max_seq_len
        if not prompt:
            raise LimitError("the prompt is empty: 0 tokens", "Give at least one token.")
        if len(prompt) + max_tokens > limit:
            raise LimitError(f"{len(prompt)} prompt tokens + {max_tokens} max_tokens exceed this engine's max_seq_len "
                             f"of {limit}", "Shorten the prompt, lower max_tokens, or build with a larger max_seq_len.")
        if strange := next((index for index in prompt if not 0 <= index < self._vocab_size), None):
            raise LimitError(f"token id {strange} is outside the vocabulary of {self._vocab_size}",
                             "The ids come from another model's tokenizer.")

    @property
    def idle(self) -> bool:
        return self._scheduler.idle and not self._flights

    def step(self) -> list[TokenEvent]:
        """Launch one step and give the new tokens of the oldest one, if it is time to read it."""
        chunks = self._scheduler.schedule()
        if chunks:
            self._launch(chunks)
        events: list[TokenEvent] = []
        while self._flights and (len(self._flights) > self._runner.lookahead or not chunks):
            events += self._read(self._flights.popleft())
        if self.idle:
            self.check()
            self._pool.defragment()
        return events

    def _launch(self, chunks: list[Chunk]) -> None:
        launched = self._runner.launch(chunks)
        self.steps += 1
        self.tokens_computed += sum(chunk.count for chunk in chunks)
        for chunk in chunks:
            sequence = chunk.sequence
            if sequence.remaining:
                continue
            if sequence.score is not None:
                self._finish(sequence, "length", time.perf_counter())
            else:
                sequence.reserve()
        self._flights.append(launched)

    def _read(self, launched: Launched) -> list[TokenEvent]:
        chosen = launched.result()
        now = time.perf_counter()
        return [self._accept(sequence, token, logprob, now) for sequence, token, logprob in chosen
                if not sequence.finished]

    def _accept(self, sequence: Sequence, token: int, logprob: TokenLogprob | None, now: float) -> TokenEvent:
        assert sequence.text is not None
        sequence.learn(token)
        known = sequence.num_generated - sequence.unknown
        self.tokens_generated += 1
        if logprob is not None:
            sequence.logprobs.append(logprob)
        if sequence.first_token_at is None:
            sequence.first_token_at = now
        text = sequence.text.push(token, may_stop=known >= sequence.params.min_tokens)
        reason: FinishReason | None = None
        if token in sequence.stop_ids or sequence.text.stopped:
            reason = "stop"
        elif known >= sequence.params.max_tokens:
            reason = "length"
        if reason is not None:
            text += sequence.text.finish()
            self._finish(sequence, reason, now)
        return TokenEvent(sequence.number, token, text, logprob, reason)

    def _finish(self, sequence: Sequence, reason: FinishReason, now: float) -> None:
        sequence.forget_unknown()
        sequence.finish_reason, sequence.finished_at = reason, now
        self._scheduler.finish(sequence)

    def abort(self, number: int) -> None:
        """End a request now and forget it; unknown and finished ones are forgotten too."""
        sequence = self._sequences.pop(number, None)
        if sequence is not None and not sequence.finished:
            self._finish(sequence, "abort", time.perf_counter())

    def take(self, number: int) -> RequestOutput:
        """The finished generation, which is then forgotten."""
        sequence = self._sequences.pop(number)
        assert sequence.text is not None
        completion = CompletionOutput(
            index=0, text=sequence.text.text, token_ids=list(sequence.generated),
            logprobs=None if sequence.params.logprobs is None else sequence.logprobs,
            finish_reason=sequence.finish_reason)
        start = sequence.admitted_at
        return RequestOutput(
            prompt_token_ids=sequence.tokens[:sequence.prompt_len], outputs=[completion],
            ttft_s=None if sequence.first_token_at is None else sequence.first_token_at - start,
            e2e_s=None if sequence.finished_at is None else sequence.finished_at - start)

    def take_score(self, number: int) -> PromptScore:
        """The finished scores, which are then forgotten."""
        score = self._sequences.pop(number).score
        assert score is not None
        return PromptScore(score.logprobs, score.greedy, score.top_ids, score.top_logprobs, score.at_logprobs)

    def check(self) -> None:
        """Every KV block is free or owned by one sequence."""
        self._scheduler.check()

    def stats(self) -> dict[str, int]:
        """Counts now and since the engine was opened."""
        return {"blocks": self._pool.num_blocks, "free_blocks": self._pool.free, "used_blocks": self._pool.used,
                "running": len(self._scheduler.running), "waiting": len(self._scheduler.waiting), "steps": self.steps,
                "preemptions": self._scheduler.preemptions, "tokens_computed": self.tokens_computed,
                "tokens_generated": self.tokens_generated}

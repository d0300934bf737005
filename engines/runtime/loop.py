"""The loop: owner of every Sequence. schedule, launch, postprocess.

A runner may have ``lookahead`` steps launched that nobody has read: the loop schedules and launches the next step first
and reads the oldest one then, so that a device never waits for the host. What a step will choose is reserved in its
sequences as unknown tokens when it is launched; a sequence that turns out to have ended drops them.

It queues what ``admission`` lets in, steps until all is finished, and gives token events. Nothing outside ``runtime/``
ever holds a Sequence.

**A fault stays where it is.** A row without a token ends its own sequence. A step that raises is run again sequence by
sequence, and those that raise alone end with ``error``; the others go on. A sequence whose deadline has passed ends
between two steps, as does an aborted one: its blocks are free before the next step is scheduled.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence as Ordered

import numpy as np

from calib.text import Tokenizer
from engines.errors import EngineError
from engines.plan import Limits
from engines.request import (
    FinishReason,
    PromptScore,
    RequestOutput,
    SamplingParams,
    TokenLogprob,
)
from engines.runtime.admission import PLAIN, Admission, Terms
from engines.runtime.blocks import BlockPool
from engines.runtime.choices import Choices, release, take_step
from engines.runtime.events import TokenEvent
from engines.runtime.grammar import GrammarError, Grammars
from engines.runtime.protocols import ChoiceRunner, Launched, Runner
from engines.runtime.sampler import Fault
from engines.runtime.scheduler import Chunk, Scheduler
from engines.runtime.sequence import Sequence

_LOG = logging.getLogger(__name__)


class Loop:
    """See the module's docstring. Not thread-safe: one owner calls it."""

    def __init__(self, runner: Runner, tokenizer: Tokenizer, limits: Limits, vocab_size: int, *, digest: str = "",
                 reuse: bool = True) -> None:
        """``digest`` is the engine's, for the keys of kept blocks; ``reuse`` False keeps none."""
        self._runner, self._limits = runner, limits
        self._pool = BlockPool(limits.num_blocks, limits.block_size, reuse=reuse)
        self._scheduler = Scheduler(self._pool, limits.max_batch_size, limits.max_num_tokens, limits.max_seq_len)
        self._grammars = Grammars(tokenizer, vocab_size)
        self._admission = Admission(tokenizer, limits, vocab_size, self._grammars, adjusts_logits=runner.adjusts_logits,
                                    digest=digest if reuse else None)
        self._deadlines = False
        self._sequences: dict[int, Sequence] = {}
        self._flights: deque[Launched] = deque()
        self.steps = 0
        self.tokens_computed = 0
        self.tokens_generated = 0
        self.faults = 0

    @property
    def limits(self) -> Limits:
        return self._limits

    def admit_all(self, prompt: Ordered[int], params: SamplingParams, terms: Terms = PLAIN) -> list[int]:
        """Queue all ``params.n`` continuations of a prompt, which is computed once for them; returns their numbers.

        LimitError says what cannot be served; then none is queued.
        """
        numbers: list[int] = []
        try:
            for index in range(params.n):
                numbers.append(self.admit(prompt, params, index=index, terms=terms, leader=next(iter(numbers), None)))
        except BaseException:
            for number in numbers:
                self.abort(number)
            raise
        return numbers

    def admit(self, prompt: Ordered[int], params: SamplingParams, *, index: int = 0, terms: Terms = PLAIN,
              leader: int | None = None) -> int:
        """Queue continuation ``index`` of a generation, which shares its prompt with continuation ``leader``; returns
        its number. LimitError says what cannot be served."""
        sequence = self._admission.generation(prompt, params, index, terms)
        sequence.leader = None if leader is None else self._sequences[leader]
        if params.max_tokens == 0:
            sequence.finish_reason, sequence.finished_at = "length", sequence.admitted_at
            self._sequences[sequence.number] = sequence
            return sequence.number
        return self._queue(sequence)

    def admit_score(self, prompt: Ordered[int], top_k: int, at_ids: np.ndarray | None, terms: Terms = PLAIN) -> int:
        """Queue the scoring of a prompt of at least two tokens; returns its number. Every row is computed: kept
        blocks are neither used nor left."""
        return self._queue(self._admission.scoring(prompt, top_k, at_ids, terms))

    def _queue(self, sequence: Sequence) -> int:
        self._deadlines |= sequence.deadline is not None
        self._sequences[sequence.number] = sequence
        self._scheduler.add(sequence)
        return sequence.number

    @property
    def idle(self) -> bool:
        return self._scheduler.idle and not self._flights

    def step(self) -> list[TokenEvent]:
        """Launch one step and give the new tokens of the oldest one, if it is time to read it."""
        events = self._expire()
        chunks = self._scheduler.schedule()
        if chunks:
            for part in self._runner.parts(chunks):
                events += self._launch(part)
        else:
            events += self._land(0)
        if self.idle:
            self._pool.settle()
        return events

    def _expire(self) -> list[TokenEvent]:
        """End the sequences whose time is over."""
        if not self._deadlines:
            return []
        now = time.monotonic()
        live = [sequence for sequence in self._scheduler if sequence.deadline is not None]
        self._deadlines = bool(live)
        late = [sequence for sequence in live if sequence.deadline is not None and sequence.deadline <= now]
        return [self._fail(sequence, "deadline", f"the deadline passed {now - (sequence.deadline or now):.1f} s ago, "
                           f"after {sequence.num_generated - sequence.unknown} tokens") for sequence in late]

    def _fail(self, sequence: Sequence, reason: FinishReason, message: str) -> TokenEvent:
        """End a sequence without a token; what it has generated stays."""
        sequence.error = message
        self.faults += reason == "error"
        self._finish(sequence, reason, time.perf_counter())
        text = "" if sequence.text is None else sequence.text.finish()
        return TokenEvent(sequence.number, None, text, None, reason, message)

    def _land(self, most: int) -> list[TokenEvent]:
        """Read the oldest launches until ``most`` are under way."""
        events: list[TokenEvent] = []
        while len(self._flights) > most:
            events += self._read(self._flights.popleft())
        return events

    def _launch(self, chunks: Ordered[Chunk]) -> list[TokenEvent]:
        """Start a step or a part of one. When it raises, start it sequence by sequence, so that the culprit fails
        alone; a runner has room for no more than its ``lookahead`` and what is being started, so older ones are read.
        """
        chunks = [chunk for chunk in chunks if not chunk.sequence.finished]  # an older launch, read meanwhile, ended it
        if not chunks:
            return []
        before = [chunk.sequence.computed for chunk in chunks]
        try:
            self._flights.append(self._runner.launch(chunks))
        except Exception as error:
            for chunk, computed in zip(chunks, before, strict=True):
                chunk.sequence.computed = computed
            if len(chunks) > 1:
                return [event for chunk in chunks for event in self._launch([chunk])]
            _LOG.exception("sequence %d failed", chunks[0].sequence.number)
            return [self._fail(chunks[0].sequence, "error", f"{type(error).__name__}: {error}")]
        self.steps += 1
        self.tokens_computed += sum(chunk.count for chunk in chunks)
        events = [event for chunk in chunks if (event := self._launched(chunk.sequence)) is not None]
        return events + self._land(self._runner.lookahead)

    def _launched(self, sequence: Sequence) -> TokenEvent | None:
        """A step has this sequence in it: keep full blocks, and await its next token; a finished score is an event."""
        self._scheduler.remember(sequence)
        if sequence.remaining:
            return None
        if sequence.score is None:
            sequence.reserve()
            return None
        self._finish(sequence, "length", time.perf_counter())
        return TokenEvent(sequence.number, None, "", None, "length")

    def _read(self, launched: Launched) -> list[TokenEvent]:
        chosen = launched.result()
        now = time.perf_counter()
        return [self._fail(sequence, "error", token.message) if isinstance(token, Fault)
                else self._accept(sequence, token, logprob, now)
                for sequence, token, logprob in chosen if not sequence.finished]

    def _accept(self, sequence: Sequence, token: int, logprob: TokenLogprob | None, now: float) -> TokenEvent:
        assert sequence.text is not None
        sequence.learn(token)
        known = sequence.num_generated - sequence.unknown
        self.tokens_generated += 1
        if logprob is not None:
            sequence.logprobs.append(logprob)
        if sequence.first_token_at is None:
            sequence.first_token_at = now
        if sequence.params.penalised:
            sequence.counts[token] = sequence.counts.get(token, 0) + 1
        text = sequence.text.push(token, may_stop=known >= sequence.params.min_tokens)
        reason: FinishReason | None = None
        try:
            if token in sequence.stop_ids or sequence.text.stopped or self._completes(sequence, token):
                reason = "stop"
            elif known >= sequence.params.max_tokens:
                reason = "length"
        except GrammarError as error:
            return self._fail(sequence, "error", error.message)
        if reason is not None:
            text += sequence.text.finish()
            self._finish(sequence, reason, now)
        return TokenEvent(sequence.number, token, text, logprob, reason)

    @staticmethod
    def _completes(sequence: Sequence, token: int) -> bool:
        """Move the grammar on; whether nothing may follow."""
        if sequence.matcher is None:
            return False
        sequence.matcher.accept(token)
        return sequence.matcher.finished

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
        return self._sequences.pop(number).output()

    def take_score(self, number: int) -> PromptScore:
        """The finished scores, which are then forgotten."""
        sequence = self._sequences.pop(number)
        if sequence.error is not None:
            raise EngineError(f"scoring failed: {sequence.error}", "See the engine's log.")
        assert sequence.score is not None
        return sequence.score.result()

    def score_choices(self, questions: Ordered[Choices]) -> list[list[PromptScore] | None]:
        """Score continuations of shared contexts in steps of their own, between other work: blocks must be free.

        None for a question that this runner, or the limits of one step, cannot take whole: score its prompts apart.
        LimitError as for prompts.
        """
        for question in questions:
            for one in question.continuations:
                self._admission.check_prompt([*question.context, *one], 0)
        found: list[list[PromptScore] | None] = [None] * len(questions)
        sizes = [question.rows(self._pool.block_size) for question in questions]
        waiting = deque(i for i, size in enumerate(sizes) if size <= self._limits.max_num_tokens)
        while isinstance(self._runner, ChoiceRunner) and (
                step := take_step(questions, sizes, waiting, self._limits.max_num_tokens, self._pool)):
            try:
                scored = self._runner.score_choices([questions[i] for i in step], list(step.values()))
            finally:
                for parts in step.values():
                    release(parts, self._pool)
            found = [scores if i not in step else scored[list(step).index(i)] for i, scores in enumerate(found)]
            self.steps += 1
            self.tokens_computed += sum(sizes[i] for i in step)
        return found

    def check(self) -> None:
        """Every KV block is free or owned by one sequence."""
        self._scheduler.check()

    def forget_prefixes(self) -> int:
        """Free all kept blocks (a measurement without reuse begins so); returns how many there were."""
        return self._pool.forget()

    def warm_grammars(self) -> None:
        """Build what all grammars share now, not with the first one that is asked for."""
        self._grammars.warm()

    def describe(self) -> list[dict[str, object]]:
        """Every live sequence in numbers, for a dump when something hangs."""
        return [{"number": its.number, "prompt": its.prompt_len, "tokens": len(its.tokens), "computed": its.computed,
                 "unknown": its.unknown, "blocks": len(its.table), "preemptions": its.preemptions,
                 "priority": its.priority, "running": its in self._scheduler.running}
                for its in self._sequences.values() if not its.finished]

    def stats(self) -> dict[str, int]:
        """Counts now and since the engine was opened; free + used + cached blocks = all."""
        return {"blocks": self._pool.num_blocks, "free_blocks": self._pool.free, "used_blocks": self._pool.used,
                "cached_blocks": self._pool.cached, "running": len(self._scheduler.running),
                "waiting": len(self._scheduler.waiting), "steps": self.steps,
                "preemptions": self._scheduler.preemptions, "tokens_computed": self.tokens_computed,
                "tokens_generated": self.tokens_generated, "prefix_tokens": self._scheduler.looked_up_tokens,
                "prefix_hit_tokens": self._scheduler.hit_tokens, "evictions": self._pool.evictions,
                "faults": self.faults}

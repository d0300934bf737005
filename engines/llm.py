"""LLM: the in-process face of one open Engine. Text or ids in, tokens, text and log-probabilities out.

    with LLM(path) as llm:
        [out] = llm.generate("The capital of France is", SamplingParams(max_tokens=16))
        print(out.outputs[0].text)
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from calib.errors import UsageError, shown
from calib.text import Tokenizer
from engines.asked import id_rows, prompt_of, prompts_of, token_ids
from engines.engine import Engine
from engines.errors import EngineError, LimitError
from engines.numbers import whole
from engines.request import OWN_FAULTS, CompletionOutput, PromptScore, RequestOutput, SamplingParams
from engines.runtime.choices import Choices
from engines.runtime.events import TokenEvent
from engines.runtime.loop import Loop
from engines.runtime.memory import MemoryWatch
from engines.runtime.protocols import Runner
from engines.runtime.runner import CpuRunner

if TYPE_CHECKING:
    from engines.runtime.cuda.open import GpuEngine

_PARAMS = "Give SamplingParams(max_tokens=16), or a list with one for each prompt."
Prompts = str | Sequence[str] | Sequence[Sequence[int]]


class LLM:
    """An engine with its weights loaded. Calls from several threads take turns."""

    def __init__(self, engine: Engine | Path | str, *, prefix_cache: bool = True) -> None:
        """Open (if a path is given) and load. ArtifactError, EngineError or EngineMismatchError in words.

        ``prefix_cache`` False computes every prompt whole (for measurements); otherwise prompts that begin like earlier
        ones use what those left in the KV cache.
        """
        if not isinstance(engine, Engine | Path | str):
            raise UsageError(f"the engine is {shown(engine)}", "Give an Engine, or the path of one.")
        self.engine = engine if isinstance(engine, Engine) else Engine.open(engine)
        self._memory = MemoryWatch()
        plan, limits = self.engine.plan, self.engine.plan.limits
        self.tokenizer: Tokenizer = self.engine.tokenizer()
        self._gpu: GpuEngine | None = None
        runner: Runner
        if plan.device.runs_triton:
            from engines.runtime.cuda.open import GpuEngine  # Triton is an optional dependency

            self._gpu = GpuEngine(self.engine)
            runner, limits = self._gpu.runner, self._gpu.limits
        else:
            from engines.runtime.native import open_cpu  # Numba is not needed on a GPU machine

            with torch.inference_mode():
                runner = CpuRunner(open_cpu(plan, self.engine.weights()), limits.block_size)
        self._loop: Loop | None = Loop(runner, self.tokenizer, limits, plan.model.vocab_size,
                                       digest=self.engine.digest, reuse=prefix_cache)
        self._lock = threading.Lock()
        self._memory.look()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Free weights and caches. Later calls are errors."""
        self._loop = None
        if self._gpu is not None:
            self._gpu.close()
            self._gpu = None

    @property
    def _open(self) -> Loop:
        if self._loop is None:
            raise EngineError(f"{self.engine.path} was closed", "Open it again.")
        return self._loop

    @property
    def loop(self) -> Loop:
        """The loop itself, for a server that owns this LLM and calls nothing else of it. EngineError when closed."""
        return self._open

    def forget_prefixes(self) -> int:
        """Free what earlier prompts left in the KV cache; returns the number of blocks."""
        with self._lock:
            return self._open.forget_prefixes()

    @property
    def numerics(self) -> str:
        """Device, compute dtype and operators: what two runs must share before their numbers may be compared."""
        plan = self.engine.plan
        operators = sorted({choice.impl for choice in plan.kernels if choice.op == "linear"})
        return f"{plan.device.kind} {plan.device.isa} {plan.compute_dtype} {'+'.join(operators)}"

    @property
    def peak_memory_bytes(self) -> int | None:
        """Highest anonymous memory seen after loading and between steps, above what was there before loading.

        On a GPU: what the engine takes of the device's memory, which does not change after loading.
        """
        return self._memory.peak if self._gpu is None else self._gpu.memory_bytes

    def stats(self) -> dict[str, int]:
        """KV blocks (free + used + cached = all), queue lengths, and counts since the engine was opened."""
        return self._open.stats() | ({} if self._gpu is None else self._gpu.stats())

    def _ids(self, prompts: list[str | list[int]]) -> list[list[int]]:
        return [self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]

    def generate(self, prompts: Prompts, params: SamplingParams | Sequence[SamplingParams] | None = None
                 ) -> list[RequestOutput]:
        """Continue prompts (text, texts, or token ids), in one batch as far as the limits allow; in order.

        ``params`` is one for all or one each. UsageError for what is neither text nor ids; LimitError before anything
        is computed when a prompt does not fit; EngineError when one failed, after the others are done.
        """
        ids = self._ids(prompts_of(prompts))
        each = self._params_for(params, len(ids))
        with self._lock:
            loop = self._open
            numbers: list[list[int]] = []
            try:
                for prompt, its in zip(ids, each, strict=True):
                    numbers.append(loop.admit_all(prompt, its))
                self._run(loop)
                return [_joined([loop.take(number) for number in group]) for group in numbers]
            except BaseException:
                for group in numbers:
                    for number in group:
                        loop.abort(number)
                raise

    @staticmethod
    def _params_for(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
        if params is None or isinstance(params, SamplingParams):
            return [params or SamplingParams()] * count
        wrong = params if isinstance(params, str | bytes) or not isinstance(params, Sequence) else next(
            (one for one in params if not isinstance(one, SamplingParams)), None)
        if wrong is not None:
            raise UsageError(f"sampling parameters are {shown(wrong)}", _PARAMS)
        if len(params) != count:
            raise EngineError(f"{len(params)} sampling parameters for {count} prompts", "Give one, or one each.")
        return list(params)

    def _run(self, loop: Loop) -> None:
        while not loop.idle:
            loop.step()
            if loop.steps % 16 == 1:
                self._memory.look()
        self._memory.look()

    def stream(self, prompt: str | Sequence[int], params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Deltas of one continuation: new ids and the text that is safe to show. Closing the iterator aborts it.

        Concatenated, the texts equal ``generate``'s text. Other calls wait until the stream ends or is closed. With
        n > 1 deltas of the continuations alternate; ``outputs[0].index`` says whose they are.
        """
        [params] = self._params_for(params, 1)
        [ids] = self._ids([prompt_of(prompt)])
        with self._lock:
            loop = self._open
            index_of: dict[int, int] = {}
            try:
                index_of |= {number: index for index, number in enumerate(loop.admit_all(ids, params))}
                while not loop.idle:
                    for event in loop.step():
                        yield RequestOutput(prompt_token_ids=ids, outputs=[_delta(event, index_of[event.number])])
            finally:
                self._memory.look()
                for number in index_of:
                    loop.abort(number)

    def loglikelihood(self, prompts: Sequence[Sequence[int]], *, top_k: int = 0,
                      at_ids: Sequence[np.ndarray] | None = None) -> list[PromptScore]:
        """Log-probabilities of each prompt's own tokens 1..n-1; see ``PromptScore``.

        ``top_k`` adds the most probable tokens of every row; ``at_ids`` ([n-1, k] a prompt) those at given ids.
        """
        asked = _id_lists(prompts, "prompts")
        wanted = None if at_ids is None else [id_rows(one, f"at_ids {at}")
                                              for at, one in enumerate(_listed(at_ids, "at_ids"))]
        try:
            top_k = whole(top_k)
        except ValueError as error:
            raise UsageError(f"top_k {error}", "Give a number of tokens, like top_k=5.") from error
        if wanted is not None and len(wanted) != len(asked):
            raise EngineError(f"{len(wanted)} at_ids for {len(asked)} prompts", "Give one array a prompt.")
        with self._lock:
            loop = self._open
            numbers: list[int] = []
            try:
                for index, prompt in enumerate(asked):
                    numbers.append(loop.admit_score(prompt, top_k, None if wanted is None else wanted[index]))
                self._run(loop)
                return [loop.take_score(number) for number in numbers]
            except BaseException:
                for number in numbers:
                    loop.abort(number)
                raise

    def score_choices(self, questions: Sequence[tuple[Sequence[int], Sequence[Sequence[int]]]]
                      ) -> list[list[PromptScore]]:
        """Log-probabilities of several continuations of each context: (context, continuations), no side empty.

        A PromptScore over each continuation's own tokens, equal to ``loglikelihood`` of context + continuation within
        1e-5: on a CPU the context is computed once (``engines.runtime.choices``).
        """
        asked = [_question(one, at) for at, one in enumerate(_listed(questions, "questions"))]
        if any(not one.context or not one.continuations or not all(one.continuations) for one in asked):
            raise EngineError("a context or a continuation is empty: 0 tokens", "Give at least one token on each side.")
        with self._lock:
            found = self._open.score_choices(asked)
            self._memory.look()
        apart = [i for i, scores in enumerate(found) if scores is None]
        scored = iter(self.loglikelihood([[*asked[i].context, *one] for i in apart for one in asked[i].continuations]))
        for i in apart:
            start = len(asked[i].context) - 1
            found[i] = [PromptScore(score.logprobs[start:], score.greedy[start:])
                        for score in itertools.islice(scored, len(asked[i].continuations))]
        return [scores for scores in found if scores is not None]


def _listed(values: Any, what: str) -> list[Any]:
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Sequence | np.ndarray | torch.Tensor):
        raise UsageError(f"{what} are {shown(values)}, not a list", "Give a list with an entry for each prompt.")
    return list(values)


def _id_lists(prompts: Any, what: str) -> list[list[int]]:
    return [token_ids(prompt, f"{what.removesuffix('s')} {at}") for at, prompt in enumerate(_listed(prompts, what))]


def _question(question: Any, at: int) -> Choices:
    parts = _listed(question, f"question {at}'s parts")
    if len(parts) != 2:
        raise UsageError(f"question {at} has {len(parts)} parts", "Give (context ids, [continuation ids, ...]).")
    return Choices(token_ids(parts[0], f"the context of question {at}"), _id_lists(parts[1], "continuations"))


def failure(reason: str | None) -> EngineError:
    """A generation that ended with an error: the request's own (LimitError), or the engine's."""
    for begin, (_, hint) in OWN_FAULTS.items():
        if reason is not None and reason.startswith(begin):
            return LimitError(f"generation failed: {reason}", hint)
    return EngineError(f"generation failed: {reason}", "Verify the checkpoint; its scales or weights may be broken.")


def _joined(outputs: list[RequestOutput]) -> RequestOutput:
    """The continuations of one prompt as one output: the first token of any, the last of all."""
    for output in outputs:
        if output.outputs[0].finish_reason == "error":
            raise failure(output.outputs[0].error)
    if len(outputs) == 1:
        return outputs[0]
    first = [output.ttft_s for output in outputs if output.ttft_s is not None]
    last = [output.e2e_s for output in outputs if output.e2e_s is not None]
    return RequestOutput(
        prompt_token_ids=outputs[0].prompt_token_ids,
        outputs=[CompletionOutput(index, each.text, each.token_ids, each.logprobs, each.finish_reason)
                 for index, output in enumerate(outputs) for each in output.outputs],
        ttft_s=min(first, default=None), e2e_s=max(last, default=None), cached_tokens=outputs[0].cached_tokens)


def _delta(event: TokenEvent, index: int) -> CompletionOutput:
    return CompletionOutput(index=index, text=event.text, token_ids=[] if event.token is None else [event.token],
                            logprobs=None if event.logprob is None else [event.logprob],
                            finish_reason=event.finish_reason, error=event.error)

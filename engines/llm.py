"""LLM: the in-process face of one open Engine. Text or ids in, tokens, text and log-probabilities out.

    with LLM(path) as llm:
        [out] = llm.generate("The capital of France is", SamplingParams(max_tokens=16))
        print(out.outputs[0].text)
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np
import torch

from calib.text import Tokenizer
from engines.engine import Engine
from engines.errors import EngineError
from engines.request import CompletionOutput, PromptScore, RequestOutput, SamplingParams
from engines.runtime.cpu import CpuBackend
from engines.runtime.loop import Loop, Runner
from engines.runtime.memory import MemoryWatch
from engines.runtime.runner import CpuRunner

if TYPE_CHECKING:
    from engines.runtime.cuda.open import GpuEngine

Prompts = str | Sequence[str] | Sequence[Sequence[int]]


class LLM:
    """An engine with its weights loaded. Calls from several threads take turns."""

    def __init__(self, engine: Engine | Path | str) -> None:
        """Open (if a path is given) and load. ArtifactError, EngineError or EngineMismatchError in words."""
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
            with torch.inference_mode():
                runner = CpuRunner(CpuBackend(plan, self.engine.weights()), limits.block_size)
        self._loop: Loop | None = Loop(runner, self.tokenizer, limits, plan.model.vocab_size)
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
        """KV blocks (free + used = all), queue lengths, and counts since the engine was opened."""
        return self._open.stats() | ({} if self._gpu is None else self._gpu.stats())

    def _ids(self, prompts: Prompts) -> list[list[int]]:
        if isinstance(prompts, str):
            prompts = [prompts]
        return [self.tokenizer.encode(prompt) if isinstance(prompt, str) else [int(index) for index in prompt]
                for prompt in prompts]

    def generate(self, prompts: Prompts, params: SamplingParams | Sequence[SamplingParams] | None = None
                 ) -> list[RequestOutput]:
        """Continue prompts (text, texts, or token ids), in one batch as far as the limits allow; in order.

        ``params`` is one for all or one each. LimitError before anything is computed when a prompt does not fit.
        """
        ids = self._ids(prompts)
        each = self._params_for(params, len(ids))
        with self._lock:
            loop = self._open
            numbers: list[int] = []
            try:
                for prompt, its in zip(ids, each, strict=True):
                    numbers.append(loop.admit(prompt, its))
                self._run(loop)
                return [loop.take(number) for number in numbers]
            except BaseException:
                for number in numbers:
                    loop.abort(number)
                raise

    @staticmethod
    def _params_for(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
        if params is None or isinstance(params, SamplingParams):
            return [params or SamplingParams()] * count
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

        Concatenated, the texts equal ``generate``'s text. Other calls wait until the stream ends or is closed.
        """
        [ids] = self._ids([prompt] if isinstance(prompt, str) else [list(prompt)])
        with self._lock:
            loop = self._open
            number = loop.admit(ids, params or SamplingParams())
            try:
                while not loop.idle:
                    for event in loop.step():
                        yield RequestOutput(prompt_token_ids=ids, outputs=[CompletionOutput(
                            index=0, text=event.text, token_ids=[event.token],
                            logprobs=None if event.logprob is None else [event.logprob],
                            finish_reason=event.finish_reason)])
            finally:
                self._memory.look()
                loop.abort(number)

    def loglikelihood(self, prompts: Sequence[Sequence[int]], *, top_k: int = 0,
                      at_ids: Sequence[np.ndarray] | None = None) -> list[PromptScore]:
        """Log-probabilities of each prompt's own tokens 1..n-1; see ``PromptScore``.

        ``top_k`` adds the most probable tokens of every row; ``at_ids`` ([n-1, k] a prompt) those at given ids.
        """
        if at_ids is not None and len(at_ids) != len(prompts):
            raise EngineError(f"{len(at_ids)} at_ids for {len(prompts)} prompts", "Give one array a prompt.")
        with self._lock:
            loop = self._open
            numbers: list[int] = []
            try:
                for index, prompt in enumerate(prompts):
                    numbers.append(loop.admit_score(list(prompt), top_k, None if at_ids is None else at_ids[index]))
                self._run(loop)
                return [loop.take_score(number) for number in numbers]
            except BaseException:
                for number in numbers:
                    loop.abort(number)
                raise

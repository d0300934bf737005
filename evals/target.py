"""Who can be judged: anything that scores text or generates it.

The protocols are structural; ``engines.llm.LLM`` satisfies both without knowing this file. Adapters for a torch module
(the fake-quantized or unquantized model), an OpenAI endpoint and recorded answers live beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from engines.request import PromptScore, RequestOutput, SamplingParams


@runtime_checkable
class Scorer(Protocol):
    """Gives log-probabilities of token sequences, each of length >= 2."""

    def loglikelihood(self, prompts: Sequence[Sequence[int]], *, top_k: int = 0,
                      at_ids: Sequence[np.ndarray] | None = None) -> list[PromptScore]: ...


@runtime_checkable
class Generator(Protocol):
    """Continues prompts."""

    def generate(self, prompts: str | Sequence[str] | Sequence[Sequence[int]],
                 params: SamplingParams | Sequence[SamplingParams] | None = None) -> list[RequestOutput]: ...

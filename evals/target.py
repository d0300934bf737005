"""Who can be judged: anything that scores text or generates it.

The protocols are structural; ``engines.llm.LLM`` satisfies both without knowing this file. Adapters for a torch module
(the fake-quantized or unquantized model) and for recorded answers are in ``adapters.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from calib.text import Tokenizer
from engines.request import PromptScore, RequestOutput, SamplingParams
from evals.errors import EvalError
from evals.report import Target

#: What stands in ``Target.template_sha256`` of a model without a chat template.
NO_TEMPLATE = "none"


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


def describe(name: str, digest: str, numerics: str, tokenizer: Tokenizer) -> Target:
    """The Target record of whoever scores with this tokenizer: all that must match before reports are compared."""
    return Target(name=name, digest=digest, numerics=numerics, tokenizer_digest=tokenizer.digest,
                  template_sha256=tokenizer.template_sha256 or NO_TEMPLATE, bos=tokenizer.adds_bos)


def checked_scores(scorer: Scorer, prompts: Sequence[Sequence[int]], *, top_k: int = 0,
                   at_ids: Sequence[np.ndarray] | None = None) -> list[PromptScore]:
    """Scores with their shapes checked: a score that is short, or lacks what was asked for, is an EvalError.

    Values are not judged here: NaN is a finding about the target, not a fault of the call.
    """
    scores = scorer.loglikelihood(prompts, top_k=top_k, at_ids=at_ids)
    if len(scores) != len(prompts):
        raise EvalError(f"{len(prompts)} prompts were scored and {len(scores)} scores came back",
                        "The scorer dropped requests; its answers cannot be matched to prompts.")
    for index, (prompt, score) in enumerate(zip(prompts, scores, strict=True)):
        expected: dict[str, tuple[np.ndarray | None, tuple[int, ...]]] = {
            "logprobs": (score.logprobs, (len(prompt) - 1,)), "greedy": (score.greedy, (len(prompt) - 1,))}
        if top_k:
            expected["top_ids"] = score.top_ids, (len(prompt) - 1, top_k)
            expected["top_logprobs"] = score.top_logprobs, (len(prompt) - 1, top_k)
        if at_ids is not None:
            expected["at_logprobs"] = score.at_logprobs, at_ids[index].shape
        for name, (found, shape) in expected.items():
            if found is None or found.shape != shape:
                raise EvalError(f"{name} of a prompt of {len(prompt)} tokens has shape "
                                f"{None if found is None else found.shape}, expected {shape}",
                                "The scorer breaks the contract of engines.request.PromptScore.")
    return scores

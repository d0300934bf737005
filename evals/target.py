"""Who can be judged: anything that scores text or generates it.

The protocols are structural; ``engines.llm.LLM`` satisfies both without knowing this file. A torch module
(the fake-quantized or unquantized model) becomes one in ``module.py``, recorded answers in ``adapters.py``.
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


#: (context ids, continuations' ids): what a question becomes. No side is empty.
Choices = tuple[Sequence[int], Sequence[Sequence[int]]]


@runtime_checkable
class ChoiceScorer(Protocol):
    """Scores several continuations of one context at once: per continuation, a PromptScore over its own tokens only.

    Equal to ``loglikelihood`` of context + continuation within 1e-5, several times cheaper.
    """

    def score_choices(self, questions: Sequence[Choices]) -> list[list[PromptScore]]: ...


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


def checked_choices(scorer: Scorer, questions: Sequence[Choices]) -> list[list[PromptScore]]:
    """Scores of each question's continuations, over their own tokens; a scorer without ``score_choices`` is asked for
    whole prompts. EvalError when scores are missing or of another shape.
    """
    if not isinstance(scorer, ChoiceScorer):
        scores = iter(checked_scores(scorer, [[*context, *one] for context, each in questions for one in each]))
        return [[_tail(next(scores), len(context) - 1) for _ in each] for context, each in questions]
    found = scorer.score_choices(questions)
    lengths = [[len(one) for one in each] for _, each in questions]
    got = [[len(score.logprobs) if len(score.logprobs) == len(score.greedy) else -1 for score in each]
           for each in found]
    if got != lengths:
        raise EvalError(f"{len(questions)} questions were scored and the scores' lengths are {got[:3]}..., expected "
                        f"{lengths[:3]}...", "The scorer breaks the contract of evals.target.ChoiceScorer.")
    return found


def _tail(score: PromptScore, start: int) -> PromptScore:
    return PromptScore(score.logprobs[start:], score.greedy[start:])

"""From a question's text to what a scorer is asked, and from its scores to one number a continuation.

**Token boundary.** A continuation's tokens are those of the whole text that differ from the context's own tokens:
context and continuation are encoded together, under the one BOS rule of ``calib.text``, as the model would see them.

**A context is computed once.** All continuations of one context are asked together (``evals.target.ChoiceScorer``): a
third of the work for four short choices. What is asked, and its answer within 1e-5, is the same as one by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from calib.artifact import canonical_json, sha256_hex
from calib.text import Tokenizer
from engines.request import PromptScore
from evals.errors import EvalError
from evals.items import Asked, Question

#: Stands between a question and each of its choices.
DELIMITER = " "


def context_of(question: Question) -> str:
    """What a multiple-choice question's choices continue; ``evals.accuracy.PROMPT`` is the same for the harness."""
    return f"Question: {question.question}\nAnswer:"


def decided_by_rule(questions: Sequence[Asked]) -> str:
    """``acc`` (the plain sum) where all questions share one set of choices, else ``acc_norm`` (per character)."""
    choices = {frozenset(question.choices) for question in questions if isinstance(question, Question)}
    return "acc" if len(choices) == 1 else "acc_norm"


def choice_scores(sums: np.ndarray, question: Question, rule: str) -> np.ndarray:
    """float64 [choices] from summed log-probabilities; the largest is the answer."""
    lengths = np.array([len(choice) for choice in question.choices]) if rule == "acc_norm" else 1.0
    return sums / lengths


def split_tokens(tokenizer: Tokenizer, context: str, continuation: str) -> tuple[list[int], int]:
    """(token ids of the whole, index of the first continuation token).

    At least one token stands before the continuation; EvalError when there is none (an empty context and no BOS).
    """
    whole = tokenizer.encode(context + continuation)
    alone = tokenizer.encode(context)
    shared = 0
    for a, b in zip(whole, alone, strict=False):
        if a != b:
            break
        shared += 1
    shared = min(shared, len(whole) - 1)
    if shared < 1:
        raise EvalError(f"the continuation {continuation!r} has no token before it",
                        "A first token has no probability; give the question some text.")
    return whole, shared


def prompt_hash(prompts: Sequence[Sequence[int]]) -> str:
    """One hash over the token ids of a question's prompts, choice by choice."""
    return sha256_hex(canonical_json([list(prompt) for prompt in prompts]))


#: A context's ids, and (key, continuation's ids) of what is asked after it.
Group = tuple[tuple[int, ...], list[tuple[str, list[int]]]]


def by_context(requests: Mapping[str, tuple[list[int], int]]) -> list[Group]:
    """Requests by key as (ids, start), gathered by what stands before ``start``: it is then computed once."""
    groups: dict[tuple[int, ...], list[tuple[str, list[int]]]] = {}
    for key, (ids, start) in requests.items():
        groups.setdefault(tuple(ids[:start]), []).append((key, ids[start:]))
    return list(groups.items())


def chunks(groups: Sequence[Group], size: int) -> Iterator[list[Group]]:
    """Groups of about ``size`` requests together, at least one group."""
    chunk: list[Group] = []
    for group in groups:
        if chunk and sum(len(each) for _, each in [*chunk, group]) > size:
            yield chunk
            chunk = []
        chunk.append(group)
    if chunk:
        yield chunk


def summed(score: PromptScore) -> dict[str, Any]:
    total = float(score.logprobs.sum(dtype=np.float64))
    return {"logprob": total if np.isfinite(total) else None, "greedy": bool(score.greedy.all())}

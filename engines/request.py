"""What a caller hands to an engine and gets back: sampling parameters, outputs, prompt scores.

These are the records of the in-process face (``engines/llm.py``). A parameter that an engine does not honour does not
exist here; a value outside its range is refused at construction with the value.
"""

from __future__ import annotations

import hashlib
import re
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from pydantic import BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic.dataclasses import dataclass as checked

from calib.errors import UsageError, name_hint
from calib.faults import fault_words
from calib.scheme import Frozen
from engines.numbers import Number, Whole, whole

#: ``stop``: an end token, a stop string, or a finished grammar. ``deadline``: its time was over. ``error``: a fault
#: that stayed in this request.
FinishReason = Literal["stop", "length", "abort", "deadline", "error"]

#: How the error of a generation begins that its own request left no token: nothing is wrong with the engine.
CONFLICT = "the request forbids every token: "
OVERRUN = "the grammar stopped: "
#: How a generation's error begins where the request is its cause -> (the server's code for it, what to do).
OWN_FAULTS = {CONFLICT: ("conflict", "Ease one of them, so that something is left to say."),
              OVERRUN: ("grammar", "Simplify the schema or expression.")}

#: Bytes of a grammar's source.
MAX_GRAMMAR_BYTES = 64 * 1024


#: How each setting is written, for whoever wrote it otherwise.
_WRITTEN = {"n": "2", "max_tokens": "128", "min_tokens": "0", "temperature": "0.7", "top_k": "50", "top_p": "0.95",
            "min_p": "0.05", "presence_penalty": "0.5", "frequency_penalty": "0.5", "repetition_penalty": "1.1",
            "logit_bias": "{1234: -5.0}", "seed": "7", "stop": "['\\n\\n', 'END']", "stop_bytes": "[b'\\x00']",
            "stop_token_ids": "[2]", "bad_words": "['secret']", "ignore_eos": "True", "logprobs": "5",
            "kind": "'regex'", "source": "'[0-9]+'",
            "grammar": "Grammar(kind='regex', source='[0-9]+')"}


def _token_of_key(key: object) -> int:
    """A token id as a key; in JSON keys are texts, so a number's digits are taken too."""
    return int(key) if isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) < 20 else whole(key)


Id = Annotated[int, BeforeValidator(_token_of_key)]

#: The first wrong entry of a list is what is said of it; the others need no look.
SETTLED = Field(fail_fast=True)


class _Given(Frozen):
    """A record that callers make by hand: what is wrong with a value is said in words, not in pydantic's report."""

    if not TYPE_CHECKING:  # a checker reads the fields
        def __init__(self, **settings: Any) -> None:
            """UsageError for a setting that is none; its cause is pydantic's."""
            try:
                super().__init__(**settings)
            except ValidationError as error:
                raise UsageError(*_refusal(error, type(self))) from error


class Grammar(_Given):
    """What a generation must match as a whole: a JSON schema (JSON text), a regular expression, or a Lark grammar."""

    kind: Literal["json_schema", "regex", "lark"]
    source: str = Field(min_length=1, max_length=MAX_GRAMMAR_BYTES)


class SamplingParams(_Given):
    """How tokens are chosen and when a sequence ends. ``temperature`` 0 is greedy.

    ``seed`` makes a request reproducible on its own: the random number of a token depends on (seed, position) only.
    ``n`` independent continuations have seeds derived from it (``seed_of``). ``logprobs`` k returns each token's
    log-probability and the k best alternatives (0: the chosen token only); they are the model's own, before anything
    below changes the logits.

    In this order: ``repetition_penalty`` divides positive and multiplies negative logits of tokens in prompt or output;
    ``presence_penalty`` is subtracted from those that were generated, ``frequency_penalty`` once a time;
    ``logit_bias`` is added; the grammar and ``bad_words`` mask; then temperature, ``top_k``, ``top_p``, and ``min_p``
    (tokens less probable than that share of the most probable one are left out). Tokens that tie with the last one
    that ``top_k`` or ``top_p`` keeps are kept with it.

    A generation ends before the first of ``stop`` (texts) or ``stop_bytes`` in what it wrote, and with the first of
    ``stop_token_ids``. ``bad_words`` never appear in what it writes, however tokens would spell them.
    """

    n: Whole = Field(default=1, ge=1, le=128)
    max_tokens: Whole = Field(default=128, ge=0)
    min_tokens: Whole = Field(default=0, ge=0)
    temperature: Number = Field(default=0.0, ge=0.0, le=100.0)
    top_k: Whole = Field(default=0, ge=0, lt=2**31, description="0 keeps every token")
    top_p: Number = Field(default=1.0, gt=0.0, le=1.0)
    min_p: Number = Field(default=0.0, ge=0.0, le=1.0)
    presence_penalty: Number = Field(default=0.0, ge=-2.0, le=2.0)
    frequency_penalty: Number = Field(default=0.0, ge=-2.0, le=2.0)
    repetition_penalty: Number = Field(default=1.0, ge=0.01, le=10.0)
    logit_bias: dict[Id, Number] = Field(default_factory=dict, max_length=1024)
    seed: Whole | None = Field(default=None, ge=0, lt=2**63)
    stop: Annotated[tuple[Annotated[str, Field(strict=True)], ...], SETTLED] = Field(default=(), max_length=16)
    stop_bytes: Annotated[tuple[bytes, ...], SETTLED] = Field(default=(), max_length=16)
    stop_token_ids: Annotated[tuple[Whole, ...], SETTLED] = Field(default=(), max_length=256)
    bad_words: Annotated[tuple[Annotated[str, Field(min_length=1, max_length=128, strict=True)], ...],
                         SETTLED] = Field(default=(), max_length=32)
    ignore_eos: bool = Field(default=False, strict=True)
    logprobs: Whole | None = Field(default=None, ge=0, le=20)
    grammar: Grammar | None = None


    @model_validator(mode="after")
    def _consistent(self) -> SamplingParams:
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens {self.min_tokens} is larger than max_tokens {self.max_tokens}")
        if any(not text for text in self.stop + self.stop_bytes):
            raise ValueError("a stop must not be empty")
        for text in (*self.stop, *self.bad_words):
            if any("\ud800" <= character <= "\udfff" for character in text):
                raise ValueError(f"{text!r} holds half of a surrogate pair, which is no character")
        if strange := [bias for bias in self.logit_bias.values() if not -100.0 <= bias <= 100.0]:
            raise ValueError(f"a logit_bias of {strange[0]} is outside -100..100")
        if self.grammar is not None and (self.min_tokens or self.ignore_eos):
            raise ValueError("a grammar says where the text ends: min_tokens and ignore_eos exclude it")
        return self

    @property
    def heat(self) -> float:
        """The temperature that logits are divided by: below 1e-6 the best token is certain, and float32 overflows."""
        return max(self.temperature, 1e-6) if self.temperature else 0.0

    @property
    def penalised(self) -> bool:
        """Whether a token's logits depend on the tokens before it, beside the model."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0

    @property
    def stepwise(self) -> bool:
        """Whether the token before must be known before the next one may be chosen."""
        return self.penalised or self.grammar is not None or bool(self.bad_words)


def _refusal(error: ValidationError, record: type[_Given]) -> tuple[str, str]:
    """Message and hint for the first setting that cannot be."""
    first = error.errors()[0]
    place, words = [str(part) for part in first["loc"] if part != "[key]"], fault_words(first)
    message = " ".join((f"{record.__name__}:", *([".".join(place)] if place else []), words))
    if not place:
        named = [name for name in record.model_fields if re.search(rf"\b{name}\b", words)]
        return message, f"Change {' or '.join(named) or 'the value'}."
    if first["type"] == "extra_forbidden":
        return message, name_hint(place[-1], record.model_fields)
    return message, f"Write it like {place[0]}={_WRITTEN[place[0]]}."


def seed_of(seed: int, index: int) -> int:
    """The seed of continuation ``index`` of a request: the request's own for 0, a hash of both otherwise."""
    if index == 0:
        return seed
    return int.from_bytes(hashlib.sha256(f"{seed} {index}".encode()).digest()[:8], "little") >> 1


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
    error: str | None = None


@checked(frozen=True)
class RequestOutput:
    """What came of one prompt. Times are seconds from admission: first step, first token and last token.

    ``cached_tokens`` of the prompt were not computed, as an earlier request had left their keys and values.
    """

    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    ttft_s: float | None = None
    e2e_s: float | None = None
    cached_tokens: int = 0
    queue_s: float | None = None


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

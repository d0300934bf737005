"""Admission: requests become sequences, or are refused with the numbers, before anything is queued."""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Sequence as Ordered
from dataclasses import dataclass

import numpy as np
import torch

from calib.text import Tokenizer
from engines.errors import LimitError
from engines.plan import Limits
from engines.request import SamplingParams, seed_of
from engines.runtime.bad_words import BadWords, Spellings
from engines.runtime.blocks import root_key
from engines.runtime.grammar import Grammars
from engines.runtime.sequence import ScoreRequest, Sequence
from engines.runtime.text_stream import TextStream


@dataclass(frozen=True, slots=True)
class Terms:
    """How a request is served, beside what it asks for. ``salt`` parts the prefix cache; a lower ``priority`` runs
    first; ``deadline_s`` is counted from admission; ``reuse`` False neither finds nor leaves kept blocks."""

    salt: str = ""
    priority: int = 0
    deadline_s: float | None = None
    reuse: bool = True

    def deadline(self) -> float | None:
        """By ``time.monotonic``, from now."""
        return None if self.deadline_s is None else time.monotonic() + self.deadline_s


PLAIN = Terms()


class Admission:
    """What an engine can serve, and the numbers of its sequences."""

    def __init__(self, tokenizer: Tokenizer, limits: Limits, vocab_size: int, grammars: Grammars, *,
                 adjusts_logits: bool, digest: str | None) -> None:
        """``digest`` is the engine's, for the keys of kept blocks; None where none are kept."""
        self._tokenizer, self._limits, self._vocab_size, self._grammars = tokenizer, limits, vocab_size, grammars
        self._adjusts_logits, self._digest = adjusts_logits, digest
        self._numbers = itertools.count()
        self._spellings: Spellings | None = None

    def generation(self, prompt: Ordered[int], params: SamplingParams, index: int, terms: Terms) -> Sequence:
        """Continuation ``index`` of a generation.

        LimitError for an empty, foreign or too long prompt, an id outside the vocabulary, a grammar that cannot be
        used, or a parameter that this device does not honour.
        """
        self.check_prompt(prompt, params.max_tokens)
        self._check_honoured(params)
        ends = frozenset(params.stop_token_ids + (() if params.ignore_eos else self._tokenizer.eos_ids))
        if strange := [index for index in ends if not 0 <= index < self._vocab_size]:
            raise LimitError(f"stop token {strange[0]} is outside the vocabulary of {self._vocab_size}",
                             "Give ids of this model's tokenizer.")
        seed = secrets.randbits(63) if params.seed is None else seed_of(params.seed, index)
        matcher = None if params.grammar is None else self._grammars.matcher(params.grammar)
        sequence = Sequence(next(self._numbers), list(prompt), len(prompt), params, seed, ends,
                            text=TextStream(self._tokenizer, params.stop + params.stop_bytes), matcher=matcher,
                            priority=terms.priority)
        if params.bad_words:
            sequence.bad_words = self._bad_words(params)
        if terms.reuse and self._digest is not None:
            sequence.keys, sequence.root = [], root_key(self._digest, terms.salt)
        sequence.deadline = terms.deadline()
        return sequence

    def _bad_words(self, params: SamplingParams) -> BadWords:
        if self._spellings is None:
            self._spellings = Spellings(self._tokenizer, self._vocab_size)
        return BadWords(params.bad_words, self._spellings)

    def _check_honoured(self, params: SamplingParams) -> None:
        for index in params.logit_bias:
            if not 0 <= index < self._vocab_size:
                raise LimitError(f"logit_bias names token {index}, outside the vocabulary of {self._vocab_size}",
                                 "Give ids of this model's tokenizer.")
        if self._adjusts_logits:
            return
        asked = [name for name, given in (
            ("presence_penalty", params.presence_penalty), ("frequency_penalty", params.frequency_penalty),
            ("repetition_penalty", params.repetition_penalty != 1.0), ("logit_bias", params.logit_bias),
            ("grammar", params.grammar), ("bad_words", params.bad_words), ("min_p", params.min_p)) if given]
        if asked:
            raise LimitError(f"{', '.join(asked)} cannot be honoured on this engine's device", "Leave it out.")

    def scoring(self, prompt: Ordered[int], top_k: int, at_ids: np.ndarray | None, terms: Terms) -> Sequence:
        """A prompt of at least two tokens to be scored; it has no keys, so that every row is computed."""
        self.check_prompt(prompt, 0)
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
                            frozenset(), score=score, priority=terms.priority)
        sequence.deadline = terms.deadline()
        return sequence

    def _checked_ids(self, at_ids: np.ndarray, rows: int) -> torch.Tensor:
        ids = torch.as_tensor(np.asarray(at_ids, dtype=np.int64))
        if ids.dim() != 2 or ids.shape[0] != rows:
            raise LimitError(f"at_ids has shape {list(ids.shape)} for a prompt of {rows + 1} tokens",
                             f"Give [{rows}, k] ids.")
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < self._vocab_size:
            raise LimitError(f"at_ids holds {int(ids.min())}..{int(ids.max())}; the vocabulary has {self._vocab_size}",
                             "The ids come from another model's tokenizer.")
        return ids

    def check_prompt(self, prompt: Ordered[int], max_tokens: int) -> None:
        limit = self._limits.max_seq_len
        if not prompt:
            raise LimitError("the prompt is empty: 0 tokens", "Give at least one token.")
        if len(prompt) + max_tokens > limit:
            raise LimitError(f"{len(prompt)} prompt tokens + {max_tokens} max_tokens exceed this engine's max_seq_len "
                             f"of {limit}", "Shorten the prompt, lower max_tokens, or build with a larger max_seq_len.")
        if min(prompt) < 0 or max(prompt) >= self._vocab_size:  # (a loop in Python would take a millisecond)
            strange = next(index for index in prompt if not 0 <= index < self._vocab_size)
            raise LimitError(f"token id {strange} is outside the vocabulary of {self._vocab_size}",
                             "The ids come from another model's tokenizer.")

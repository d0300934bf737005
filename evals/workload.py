"""Prompts for measuring: random token ids, seeded, never the same twice.

Identical prompts meet a prefix cache and measure that instead (152 against 96 requests/s has been published so). Each
call of ``Prompts.batch`` gives new ids, so that neither repeats, nor T(1) and T(n), nor neighbours in a batch share a
prefix; the whole series depends on the seed alone. Lengths are exact because ids are handed over, not text: "10,000
input tokens" made from text have turned out to be 5,827.
"""

from __future__ import annotations

import hashlib

import numpy as np

from calib.text import Tokenizer
from evals.errors import MeasureError

#: Words that text prompts are drawn from: enough that prompts are unique, few enough to be found at once.
WORDS = 2000


class Prompts:
    """Unique random prompts over the ordinary tokens of a vocabulary.

    With ``words``, over tokens that are a space and a word: joined, they are encoded to the very same ids, because
    tokenizers part text at spaces. (A BOS that the tokenizer adds is part of the prompt's length.)
    """

    def __init__(self, tokenizer: Tokenizer, seed: int, *, words: bool = False) -> None:
        reserved = set(tokenizer.special_ids) | set(tokenizer.eos_ids)
        ids = [i for i in range(tokenizer.vocab_size) if i not in reserved]
        self._head = [tokenizer.bos_id] if words and tokenizer.adds_bos and tokenizer.bos_id is not None else []
        self._ids = np.array(_words(tokenizer, ids) if words else ids, dtype=np.int64)
        self._seed = seed
        self._used: set[bytes] = set()

    def batch(self, batch_size: int, isl: int, salt: str) -> list[list[int]]:
        """``batch_size`` prompts of exactly ``isl`` ids; ``salt`` names the measurement and decides the ids.

        MeasureError when a prompt is not unique any more (a tiny vocabulary and a short prompt).
        """
        entropy = int.from_bytes(hashlib.sha256(f"{self._seed}\0{salt}".encode()).digest()[:8], "big")
        own = isl - len(self._head)
        if own < 1:
            raise MeasureError(f"a prompt of {isl} tokens has no room behind the BOS", "Measure with longer prompts.")
        rows = np.random.default_rng(entropy).choice(self._ids, size=(batch_size, own))
        for row in rows:
            if row.tobytes() in self._used:
                raise MeasureError(f"a random prompt of {isl} tokens came up twice", "Measure with longer prompts.")
            self._used.add(row.tobytes())
        return [[*self._head, *row] for row in rows.tolist()]


def _words(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    """Up to ``WORDS`` ids that are a space and ASCII letters and stand for themselves in running text."""
    found = []
    for i in ids:
        text = tokenizer.decode([i])
        if text[:1] == " " and text[1:].isascii() and text[1:].isalpha() and (
                tokenizer.encode(text + text, bos=False) == [i, i]):
            found.append(i)
            if len(found) == WORDS:
                break
    if len(found) < 2:
        raise MeasureError("this tokenizer has no tokens that are a space and a word", "Send token ids.")
    return found

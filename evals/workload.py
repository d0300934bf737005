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


class Prompts:
    """Unique random prompts over the ordinary tokens of a vocabulary."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        reserved = set(tokenizer.special_ids) | set(tokenizer.eos_ids)
        self._ids = np.array([i for i in range(tokenizer.vocab_size) if i not in reserved], dtype=np.int64)
        self._seed = seed
        self._used: set[bytes] = set()

    def batch(self, batch_size: int, isl: int, salt: str) -> list[list[int]]:
        """``batch_size`` prompts of exactly ``isl`` ids; ``salt`` names the measurement and decides the ids.

        MeasureError when a prompt is not unique any more (a tiny vocabulary and a short prompt).
        """
        entropy = int.from_bytes(hashlib.sha256(f"{self._seed}\0{salt}".encode()).digest()[:8], "big")
        rows = np.random.default_rng(entropy).choice(self._ids, size=(batch_size, isl))
        for row in rows:
            if row.tobytes() in self._used:
                raise MeasureError(f"a random prompt of {isl} tokens came up twice", "Measure with longer prompts.")
            self._used.add(row.tobytes())
        return rows.tolist()

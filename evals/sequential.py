"""The sequential rule of the gate: look after 200, 400, 800 and 1,600 items and stop as soon as it is clear.

At each look, with ``drop`` the paired loss, ``se`` its standard error and ``m`` the margin::

    PASS   drop + z se < m      the loss is below the margin, with confidence
    FAIL   drop - z se > m      the loss is above the margin, with confidence
    else   draw more items; at the last look (the cap) the point estimate decides, and the verdict says so

Looking several times gives chance several tries, so z is larger than for one look: Pocock's constants for a one-sided
error of 2.5 % over all looks (they assume equally spaced looks; doubling ones are a little less correlated, which
``benchmarks/gate_power.py`` shows to cost nothing that matters). Everything here broadcasts, so the benchmark simulates
the very code that judges.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from evals.statistics import normal_cdf, normal_quantile

#: Pocock's constant by number of looks, one-sided 2.5 % overall.
POCOCK = {1: 1.96, 2: 2.178, 3: 2.289, 4: 2.361, 5: 2.413}

OPEN, PASS, FAIL = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Decision:
    """Per simulated (or real) run: ``code`` OPEN, PASS or FAIL; ``look`` where it was decided (or the last one there
    was); ``by_estimate`` where the cap's point estimate decided. int8, int64, bool [runs]."""

    code: np.ndarray
    look: np.ndarray
    by_estimate: np.ndarray


def corrected_z(looks: int, candidates: int = 1) -> float:
    """z for a number of looks, and (Bonferroni) for several candidates judged at one gate."""
    z = POCOCK[looks]
    return z if candidates == 1 else normal_quantile(1.0 - (1.0 - normal_cdf(z)) / candidates)


def decide(drop: np.ndarray, error: np.ndarray, margin: float, z: float, *, capped: bool) -> Decision:
    """Judge runs from ``drop`` and ``error`` at each look, both [runs, looks]. ``capped``: the last look is the cap.

    ``drop``, ``error`` and ``margin`` share a unit.
    """
    word = np.where(drop - z * error > margin, FAIL, np.where(drop + z * error < margin, PASS, OPEN)).astype(np.int8)
    clear = word != OPEN
    look = np.where(clear.any(axis=1), clear.argmax(axis=1), drop.shape[1] - 1)
    rows = np.arange(len(drop))
    code = word[rows, look]
    by_estimate = (code == OPEN) & capped
    estimate = np.where(drop[:, -1] < margin, PASS, FAIL).astype(np.int8)
    return Decision(np.where(by_estimate, estimate, code), look, by_estimate)

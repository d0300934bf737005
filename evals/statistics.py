"""The statistics of judging, in one place: quantiles, intervals clustered by document, paired flips.

**Clusters.** Tokens of one document are not independent; treating them so makes intervals several times too narrow.
The mean per token is a ratio of two sums over documents, r = sum(D) / sum(T), with D_g the summed difference and T_g
the tokens of document g. Linearised, its variance is G/(G-1) * sum((D_g - r T_g)^2) / (sum T)^2 and the interval takes
Student's t with G-1 degrees of freedom (Miller, "Adding Error Bars to Evals", arXiv 2411.00640).

**Flips.** Over n items that both answered, b are right -> wrong and c wrong -> right. The paired drop is (b - c)/n with
se = sqrt((b + c) - (b - c)^2/n)/n. Half an item is added to b and to c (Agresti-Min) inside se, so that no flips at
all do not pretend to certainty. Only flips make noise: an unpaired comparison carries the variance of both accuracies.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from statistics import NormalDist
from typing import TypeVar

import numpy as np

from evals.report import Estimate

_NORMAL = NormalDist()
#: z that a test with 80 % power needs beyond its own.
POWER_80 = _NORMAL.inv_cdf(0.80)


def _beta_fraction(a: float, b: float, x: float) -> float:
    """Continued fraction of the incomplete beta function (modified Lentz), for x < (a + 1)/(a + b + 2)."""
    tiny = 1e-300
    c, d = 1.0, 1.0 / max(1.0 - (a + b) * x / (a + 1.0), tiny)
    value = d
    for m in range(1, 500):
        for term in (m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
                     -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))):
            d = 1.0 + term * d
            d = 1.0 / (d if abs(d) > tiny else tiny)
            c = 1.0 + term / c
            c = c if abs(c) > tiny else tiny
            value *= d * c
        if abs(d * c - 1.0) < 1e-15:
            break
    return value


def incomplete_beta(a: float, b: float, x: float) -> float:
    """Regularised incomplete beta function I_x(a, b)."""
    if x <= 0.0 or x >= 1.0:
        return 0.0 if x <= 0.0 else 1.0
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x))
    if x < (a + 1.0) / (a + b + 2.0):
        return front * _beta_fraction(a, b, x) / a
    return 1.0 - front * _beta_fraction(b, a, 1.0 - x) / b


@cache
def t_quantile(p: float, df: int) -> float:
    """Student's t quantile for p > 0.5, by bisection on its distribution function."""
    low, high = 0.0, 1.0
    def below(t: float) -> float:
        return 1.0 - 0.5 * incomplete_beta(df / 2.0, 0.5, df / (df + t * t))
    while below(high) < p:
        high *= 2.0
    for _ in range(200):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if below(middle) < p else (low, middle)
    return 0.5 * (low + high)


def normal_cdf(z: float) -> float:
    return _NORMAL.cdf(z)


def normal_quantile(p: float) -> float:
    return _NORMAL.inv_cdf(p)


def t_of_z(z: float, df: int) -> float:
    """The Student quantile with the same tail as ``z``: keeps a small number of clusters honest."""
    return t_quantile(normal_cdf(z), df)


def clustered_ratio(sums: np.ndarray, weights: np.ndarray, clusters: Sequence[str]) -> tuple[float, float, int]:
    """(ratio, standard error, number of clusters) of sum(sums)/sum(weights).

    One value per item: ``sums`` (e.g. summed NLL difference of a text) and ``weights`` (its tokens) float64 [n]. With
    a single cluster the standard error is infinite: nothing is known about the variation between documents.
    """
    _, index = np.unique(np.asarray(clusters), return_inverse=True)
    total = np.bincount(index, weights=sums)
    weight = np.bincount(index, weights=weights)
    ratio = float(total.sum() / weight.sum())
    count = len(total)
    if count < 2:
        return ratio, math.inf, count
    residual = total - ratio * weight
    variance = count / (count - 1) * float(residual @ residual) / float(weight.sum()) ** 2
    return ratio, math.sqrt(variance), count


def clustered_estimate(sums: np.ndarray, weights: np.ndarray, clusters: Sequence[str]) -> Estimate | None:
    """95 % interval of a clustered ratio; None with fewer than two documents (an interval cannot be known)."""
    ratio, error, count = clustered_ratio(sums, weights, clusters)
    if count < 2:
        return None
    reach = t_quantile(0.975, count - 1) * error
    return Estimate(value=ratio, ci_low=ratio - reach, ci_high=ratio + reach, n=count)


def wilson(successes: float, n: int, z: float = 1.959964) -> tuple[float, float]:
    """Wilson score interval of a share."""
    share, z2 = successes / n, z * z
    centre = (share + z2 / (2 * n)) / (1 + z2 / n)
    reach = z / (1 + z2 / n) * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n))
    return centre - reach, centre + reach


Numbers = TypeVar("Numbers", float, np.ndarray)


def paired_drop(to_wrong: Numbers, to_right: Numbers, n: Numbers, half: Numbers | float = 0.5
                ) -> tuple[Numbers, Numbers]:
    """(drop, standard error) as shares of ``n`` paired items: b right -> wrong, c wrong -> right. Arrays broadcast."""
    b, c = to_wrong + half, to_right + half
    return (to_wrong - to_right) / n, np.sqrt((b + c) - (b - c) ** 2 / n) / n


def stratified_drop(strata: Sequence[tuple[int, int, int]]) -> tuple[float, float]:
    """(drop, standard error) over strata of (to_wrong, to_right, n), weighted by their size.

    The half item of Agresti-Min is shared out by size, so one stratum gives exactly ``paired_drop``.
    """
    n = sum(size for _, _, size in strata)
    parts = [paired_drop(float(b), float(c), float(size), 0.5 * size / n) for b, c, size in strata]
    drop = sum(size / n * part[0] for (_, _, size), part in zip(strata, parts, strict=True))
    return drop, math.sqrt(sum((size / n * part[1]) ** 2 for (_, _, size), part in zip(strata, parts, strict=True)))


def mcnemar_p(to_wrong: int, to_right: int) -> float:
    """Exact one-sided p of "no more right -> wrong than wrong -> right" (binomial with p = 1/2 over the flips)."""
    flips = to_wrong + to_right
    return sum(math.comb(flips, k) for k in range(to_wrong, flips + 1)) / 2**flips


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down adjustment, in the given order."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted, running = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(order):
        running = max(running, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = running
    return adjusted

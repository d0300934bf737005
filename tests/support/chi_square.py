"""Is this what the distribution gives? One test of counts for every sampler's tests."""

import math

import torch


def chi_square_p(counts, probabilities):
    """P(chi2 >= seen) by the Wilson-Hilferty normal approximation; cells expected under 5 are pooled."""
    expected = probabilities * counts.sum()
    big = expected >= 5
    cells = torch.cat([counts[big].double(), counts[~big].sum()[None].double()])
    wanted = torch.cat([expected[big].double(), expected[~big].sum()[None].double()])
    assert cells[wanted == 0].eq(0).all(), "a token that must not appear was drawn"
    cells, wanted = cells[wanted > 0], wanted[wanted > 0]
    freedom = max(1, len(cells) - 1)
    chi = float(((cells - wanted) ** 2 / wanted).sum())
    z = ((chi / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    return 0.5 * math.erfc(z / math.sqrt(2))

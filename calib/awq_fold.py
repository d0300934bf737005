"""AWQ with its scales folded away (Lin et al., arXiv 2306.00978): one search for all readers of an input.

Multiplying input column j of every reader by s_j, and dividing what makes that input by s_j, changes nothing in exact
arithmetic, but gives the columns that carry large activations finer steps. s = mean|x|^alpha, centred; alpha is
searched for the least output error summed over the readers,

    sum over readers of tr(E G' E^T),   E = rounded(W s) - W s,   G' = G / (s s^T),   G = mean of x x^T

which needs no further pass over data. Because the scales are folded (a norm's weight, up_proj's rows, v_proj's rows)
nothing is multiplied at run time and every runtime's int4 layout can hold the result; under grouped-query attention a
value channel has one scale for the query heads that share it.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

from calib.layers import Smoothing
from calib.ranges import ranges_of, rounded
from calib.scheme import Grid
from calib.smoothing import centred, divide_source, shared_by_heads

_TINY = 1e-4


def search_and_fold(layer: nn.Module, pair: Smoothing, grid: Grid, gram: torch.Tensor, magnitude: torch.Tensor,
                    step: float) -> tuple[torch.Tensor, float]:
    """Fold the best scales of one pair into ``layer``, in place. Returns (s [in], alpha); alpha 0 leaves all as it was.

    ``gram`` [in, in] = mean of x x^T and ``magnitude`` [in] = mean |x| of the readers' input.
    """
    readers = [cast(torch.Tensor, layer.get_submodule(name).weight) for name in pair.readers]
    weight = torch.cat([reader.detach() for reader in readers])
    seen, spread = shared_by_heads(layer, pair, magnitude)
    best, chosen, factors = float("inf"), 0.0, torch.ones_like(magnitude)
    for count in range(round(1 / step) + 1):
        alpha = min(count * step, 1.0)
        tried = centred(seen.clamp(min=_TINY) ** alpha)[spread]
        loss = _loss(grid, weight * tried, gram / tried[:, None] / tried)
        if loss < best:
            best, chosen, factors = loss, alpha, tried
    if chosen == 0.0:
        return torch.ones_like(magnitude), 0.0
    per_source = torch.empty_like(seen)
    per_source[spread] = factors
    exact = divide_source(layer, pair, per_source)[spread]
    for reader in readers:
        reader.mul_(exact)
    return exact, chosen


def _loss(grid: Grid, weight: torch.Tensor, gram: torch.Tensor) -> float:
    assert grid.granularity.kind == "group"
    grouped = weight.unflatten(1, (-1, grid.granularity.size))
    error = rounded(grid, grouped, ranges_of(grid, grouped)).sub_(grouped).flatten(1)
    return float(torch.sum((error @ gram) * error))

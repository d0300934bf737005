"""The range of each group of an int4 weight: scale (and zero point), searched for the least error that matters.

A group's grid spans amax/7 on both sides (symmetric), or from its smallest to its largest value in 15 steps
(asymmetric; 0 stays inside, so the zero point is a code). A narrower one rounds the many at the price of the few: for
each ratio of the full range the error e = rounded - exact is judged, and the best ratio is kept per group. Judged by

- ``importance`` [in]: sum of e^2 * importance, the output's error were the inputs uncorrelated; or
- ``gram`` [in, in] = mean of x x^T: e^T G e over the group's own inputs, what the layer's output really shows of this
  group (AWQ, arXiv 2306.00978, clips by that error on sampled inputs; the Gram matrix holds all of them).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from calib.scheme import Grid

_BLOCK = 65536
_TINY = 1e-12


class Ranges(NamedTuple):
    """``scale`` f32 [out, in/g]; ``zero`` f32 whole numbers [out, in/g], None on symmetric grids."""

    scale: torch.Tensor
    zero: torch.Tensor | None


def searched_ranges(grid: Grid, weight: torch.Tensor, ratios: Sequence[float], *,
                    importance: torch.Tensor | None = None, gram: torch.Tensor | None = None, half: bool = False
                    ) -> Ranges:
    """Ranges of a grouped int4 weight [out, in]: per group the ratio with the least error; ties go to the earlier.

    ``half``: scales are values of float16, because a layout stores them so. Works through blocks of rows that stay in
    the processor's cache: eight passes per ratio over a whole matrix would wait for memory.
    """
    if grid.granularity.kind != "group" or (importance is None) == (gram is None):
        raise ValueError("ranges are searched for groups, by importance or by a Gram matrix")
    size = grid.granularity.size
    weights = None if importance is None else importance.float().unflatten(0, (-1, size))
    blocks = None if gram is None else _diagonal_blocks(gram.float(), size)
    rows = max(1, _BLOCK // weight.shape[1])
    parts = [_best(grid, part.float().unflatten(1, (-1, size)), ratios, weights, blocks, half)
             for part in weight.detach().split(rows)]
    scale = torch.cat([part.scale for part in parts])
    return Ranges(scale, None if grid.symmetric else torch.cat([part.zero for part in parts if part.zero is not None]))


def _diagonal_blocks(gram: torch.Tensor, size: int) -> torch.Tensor:
    """[in/g, g, g]: each group's inputs with each other."""
    return torch.stack([gram[start:start + size, start:start + size] for start in range(0, gram.shape[0], size)])


def ranges_of(grid: Grid, grouped: torch.Tensor, ratio: float = 1.0, *, half: bool = False) -> Ranges:
    """The ranges of weights [out, groups, g] at one ratio of the full range; a group of zeros has the scale 1."""
    if grid.symmetric:
        return Ranges(_usable(grouped.abs().amax(-1) * (ratio / 7), half), None)
    low, high = grouped.amin(-1).clamp(max=0) * ratio, grouped.amax(-1).clamp(min=0) * ratio
    scale = _usable((high - low) / 15, half)
    return Ranges(scale, (-low / scale).round().clamp(0, 15))


def _usable(scale: torch.Tensor, half: bool) -> torch.Tensor:
    scale = scale.half().float() if half else scale
    return torch.where(scale > _TINY, scale, torch.ones_like(scale))


def rounded(grid: Grid, grouped: torch.Tensor, ranges: Ranges) -> torch.Tensor:
    """Weights [out, groups, g] on their grid, dequantized."""
    scale = ranges.scale[..., None]
    codes = (grouped / scale).round_()
    if ranges.zero is None:
        return codes.clamp_(-8, 7).mul_(scale)
    zero = ranges.zero[..., None]
    return codes.add_(zero).clamp_(0, 15).sub_(zero).mul_(scale)


def _best(grid: Grid, grouped: torch.Tensor, ratios: Sequence[float], weights: torch.Tensor | None,
          blocks: torch.Tensor | None, half: bool) -> Ranges:
    best: torch.Tensor | None = None
    kept = ranges_of(grid, grouped, 1.0, half=half)
    for ratio in ratios:
        tried = ranges_of(grid, grouped, ratio, half=half)
        error = rounded(grid, grouped, tried).sub_(grouped)
        if blocks is not None:
            seen = torch.bmm(error.transpose(0, 1), blocks).transpose(0, 1)
            loss = (seen * error).sum(-1)
        else:
            assert weights is not None
            loss = error.square_().mul_(weights).sum(-1)
        better = torch.ones_like(loss, dtype=torch.bool) if best is None else loss < best
        best = loss if best is None else torch.where(better, loss, best)
        zero = None if kept.zero is None or tried.zero is None else torch.where(better, tried.zero, kept.zero)
        kept = Ranges(torch.where(better, tried.scale, kept.scale), zero)
    return kept

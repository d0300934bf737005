"""What follows AWQ's search: one scale for all readers of an input, and clipped groups.

**Sharing.** awq_lite picks a strength alpha for each linear, but q, k and v (gate and up) read one tensor, so a fused
engine and a folded norm have room for one scale. Averaging scales of *different* strengths, as the export would,
belongs to none of them. Here the readers first agree on a strength: the alpha with the least loss summed over them,
each relative to its own best; only scales of that strength are averaged.

**Clipping.** A group's scale is amax/7; a smaller one rounds the many at the price of the few. For each group the ratio
with the least squared error is taken, each column weighted by the mean square that its input has there (the layer's
output error when columns are independent). Two passes over the weights; no data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from calib.smoothing import smoothing_factors


@dataclass(frozen=True, slots=True)
class Searched:
    """What the search saw of one linear: loss by alpha, mean |input| [in], mean relative |weight| by column [in]."""

    losses: Mapping[float, float]
    activation: torch.Tensor
    weight: torch.Tensor


def shared_alpha(members: Sequence[Searched]) -> float:
    """The alpha with the least loss summed over the members, each loss relative to the member's least."""
    least = [max(min(member.losses.values()), 1e-30) for member in members]
    return min(members[0].losses, key=lambda alpha: sum(
        member.losses[alpha] / best for member, best in zip(members, least, strict=True)))


def shared_scale(members: Sequence[Searched]) -> torch.Tensor:
    """pre_quant_scale [in], bf16-exact f32, for all members: the mean of theirs at the shared alpha."""
    alpha = shared_alpha(members)
    scales = [1 / smoothing_factors(member.activation, member.weight, alpha) for member in members]
    return torch.stack(scales).mean(0).to(torch.bfloat16).float()


def clipped_amax(weight: torch.Tensor, importance: torch.Tensor, group: int, ratios: Sequence[float]) -> torch.Tensor:
    """amax [out, in/group] of an int4 weight [out, in]: per group the ratio of its largest value with the least error.

    ``importance`` [in] weights the columns. Ties go to the earlier ratio.
    """
    grouped = weight.unflatten(1, (-1, group))
    weights = importance.unflatten(0, (-1, group))
    amax = grouped.abs().amax(-1)
    best = torch.full_like(amax, torch.inf)
    chosen = torch.ones_like(amax)
    for ratio in ratios:
        scale = (amax * (ratio / 7)).clamp(min=1e-12)[..., None]
        error = ((grouped / scale).round().clamp(-8, 7).mul_(scale).sub_(grouped).square_() * weights).sum(-1)
        better = error < best
        best = torch.where(better, error, best)
        chosen = torch.where(better, torch.full_like(chosen, ratio), chosen)
    return amax * chosen

"""After AWQ's search: clipping by weighted error."""

import torch

from calib.awq import clipped_amax
from calib.grids import dequantize_weight, quantize_weight
from calib.scheme import Grid, PerGroup


def weighted_error(weight, amax, importance, grid):
    scale = amax / 7
    return ((dequantize_weight(grid, quantize_weight(grid, weight, scale), scale) - weight) ** 2 * importance)


def test_clipping_takes_the_best_ratio_of_each_group():
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(16, 64, generator=generator) ** 3
    importance = torch.rand(64, generator=generator)
    grid, ratios = Grid(dtype="int4", granularity=PerGroup(size=16)), (1.0, 0.9, 0.8, 0.7)
    amax = weight.unflatten(1, (-1, 16)).abs().amax(-1)
    errors = torch.stack([weighted_error(weight, amax * ratio, importance, grid).unflatten(1, (-1, 16)).sum(-1)
                          for ratio in ratios])
    expected = amax * torch.tensor(ratios)[errors.argmin(0)]
    torch.testing.assert_close(clipped_amax(weight, importance, 16, ratios), expected)
    assert errors.amin(0).sum() < errors[0].sum()


def test_a_group_of_zeros_and_an_exact_group_are_not_clipped():
    weight = torch.cat((torch.zeros(1, 8), torch.arange(-7.0, 1.0)[None]))
    amax = clipped_amax(weight, torch.ones(8), 8, (1.0, 0.9))
    assert amax.flatten().tolist() == [0.0, 7.0]

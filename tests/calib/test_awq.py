"""After AWQ's search: agreeing on one strength, and clipping by weighted error."""

import pytest
import torch

from calib.awq import Searched, clipped_amax, shared_alpha, shared_scale
from calib.grids import dequantize_weight, quantize_weight
from calib.scheme import Grid, PerGroup

ONES = torch.ones(4)


def searched(losses, activation=ONES, weight=ONES):
    return Searched(losses, activation, weight)


@pytest.mark.parametrize(("members", "alpha"), [
    ([{0.0: 3.0, 0.5: 2.0, 1.0: 9.0}], 0.5),
    ([{0.0: 1.0, 0.5: 1.2, 1.0: 4.0}, {0.0: 40.0, 0.5: 12.0, 1.0: 10.0}], 0.5),
    ([{0.0: 1.0, 1.0: 1.0}, {0.0: 0.0, 1.0: 0.0}], 0.0)])
def test_the_members_agree_on_the_least_relative_loss(members, alpha):
    assert shared_alpha([searched(losses) for losses in members]) == alpha


def test_the_shared_scale_shrinks_loud_channels_and_fits_bf16():
    loud = torch.tensor([1.0, 1.0, 1.0, 16.0])
    scale = shared_scale([searched({0.0: 2.0, 0.5: 1.0}, activation=loud), searched({0.0: 2.0, 0.5: 1.0}, loud)])
    assert torch.equal(scale, scale.bfloat16().float())
    assert scale[3] < scale[0]
    torch.testing.assert_close(scale[0] / scale[3], torch.tensor(4.0), rtol=0.01, atol=0)


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

"""GPTQ against the textbook, ranges, AWQ's folding: small matrices with the right values."""

import pytest
import torch

from calib.awq_fold import search_and_fold
from calib.errors import CalibError
from calib.gptq import HessianError, gptq
from calib.grids import dequantize_weight, fake_quantize, quantize_weight
from calib.layers import LLAMA
from calib.ranges import ranges_of, rounded, searched_ranges
from calib.scheme import Grid, PerGroup

GRID = Grid(dtype="int4", granularity=PerGroup(size=16))
ASYM = GRID.model_copy(update={"symmetric": False})


def problem(seed=0, rows=12, columns=48, tokens=200):
    """A weight, and inputs of a few correlated, loud channels."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(columns, columns, generator=generator) * 0.4 + torch.eye(columns)
    x = torch.randn(tokens, columns, generator=generator) @ mix
    x[:, ::11] *= 6
    return torch.randn(rows, columns, generator=generator), x.T @ x / tokens


def output_error(grid, weight, gram, found):
    error = dequantize_weight(grid, found.codes, found.scale, found.zero, found.g_idx) - weight
    return float(((error @ gram) * error).sum())


def textbook(weight, hessian, scale, size):
    """Optimal brain surgeon one column at a time: the inverse is updated by elimination, no Cholesky, no blocks."""
    weight, inverse = weight.double().clone(), torch.linalg.inv(hessian.double())
    codes = torch.zeros(weight.shape, dtype=torch.int8)
    for column in range(weight.shape[1]):
        step = scale[:, column // size].double()
        codes[:, column] = (weight[:, column] / step).round().clamp(-8, 7).to(torch.int8)
        error = (weight[:, column] - codes[:, column] * step) / inverse[column, column]
        weight -= error[:, None] * inverse[column]
        inverse -= torch.outer(inverse[:, column], inverse[column]) / inverse[column, column]
    return codes


def rows_that_differ(found, expected):
    """float32 against float64: a value near a tie may round the other way, and its row goes another way from there."""
    return int((found != expected).any(1).sum())


@pytest.mark.parametrize("columns", [48, 320])
def test_codes_are_those_of_the_textbook(columns):
    weight, gram = problem(columns=columns, tokens=4 * columns)
    found = gptq(GRID, weight, gram, damping=0.01, order="none")
    damped = gram + 0.01 * gram.diagonal().mean() * torch.eye(columns)
    expected = textbook(weight, damped, found.scale, 16)
    assert rows_that_differ(found.codes, expected) <= 1


@pytest.mark.parametrize("grid", [GRID, ASYM], ids=str)
@pytest.mark.parametrize("order", ["none", "static", "groups"])
def test_the_output_error_is_far_below_plain_roundings(grid, order):
    weight, gram = problem()
    ranges = searched_ranges(grid, weight, (1.0,), gram=gram)
    codes = quantize_weight(grid, weight, ranges.scale, ranges.zero)
    error = dequantize_weight(grid, codes, ranges.scale, ranges.zero) - weight
    plain = float(((error @ gram) * error).sum())
    found = gptq(grid, weight, gram, damping=0.01, order=order)
    assert output_error(grid, weight, gram, found) < 0.6 * plain
    assert (found.g_idx is not None) == (order == "groups")
    if found.g_idx is not None:
        assert found.g_idx.bincount().tolist() == [16, 16, 16]
        assert found.g_idx[gram.diagonal().argmax()] == 0


def test_groups_wider_than_a_block_see_the_errors_before_them():
    weight, gram = problem(columns=512, tokens=1500)
    wide = Grid(dtype="int4", granularity=PerGroup(size=256))
    found = gptq(wide, weight, gram, damping=0.01)
    damped = gram + 0.01 * gram.diagonal().mean() * torch.eye(512)
    assert rows_that_differ(found.codes, textbook(weight, damped, found.scale, 256)) <= 1
    assert found.scale.shape == (12, 2)


def test_a_singular_hessian_is_damped_more_and_a_hopeless_one_names_the_module():
    weight, gram = problem()
    gram[:] = torch.outer(gram[0], gram[0])  # rank 1
    gram = gram - 1e-3 * gram.diagonal().mean() * torch.eye(48)  # and not even semidefinite
    found = gptq(GRID, weight, gram, damping=1e-4)
    assert found.damping == pytest.approx(1e-2)
    assert torch.isfinite(found.scale).all()
    with pytest.raises(HessianError, match=r"layers\.3\.mlp\.down_proj has no inverse"):
        gptq(GRID, weight, -gram.abs(), damping=1e-6, module="layers.3.mlp.down_proj")
    gram[3, 5] = float("nan")
    with pytest.raises(CalibError, match="inputs of o_proj are not finite"):
        gptq(GRID, weight, gram, damping=0.01, module="o_proj")


def test_inputs_that_never_come_get_weight_zero():
    weight, gram = problem()
    gram[7], gram[:, 7] = 0, 0
    found = gptq(GRID, weight, gram, damping=0.01, order="static")
    assert (found.codes[:, 7] == 0).all()


def test_a_searched_range_is_the_best_of_each_group():
    weight, gram = problem()
    ratios = (1.0, 0.9, 0.8, 0.7, 0.6)
    grouped = weight.unflatten(1, (-1, 16))
    for grid in (GRID, ASYM):
        losses = []
        for ratio in ratios:
            error = rounded(grid, grouped, ranges_of(grid, grouped, ratio)) - grouped
            own = [gram[at:at + 16, at:at + 16] for at in (0, 16, 32)]
            losses.append(torch.stack([((error[:, g] @ own[g]) * error[:, g]).sum(-1) for g in range(3)], 1))
        best = torch.stack(losses).argmin(0)
        found = searched_ranges(grid, weight, ratios, gram=gram)
        expected = torch.stack([ranges_of(grid, grouped, ratio).scale for ratio in ratios]).gather(0, best[None])[0]
        torch.testing.assert_close(found.scale, expected)


def test_an_asymmetric_range_uses_all_codes_and_float16_scales_are_exact():
    weight = torch.linspace(-0.2, 1.3, 16)[None]
    found = searched_ranges(ASYM, weight, (1.0,), importance=torch.ones(16), half=True)
    codes = quantize_weight(ASYM, weight, found.scale, found.zero)
    assert codes.flatten().tolist() == list(range(16))
    assert found.zero.item() == 2
    assert torch.equal(found.scale.half().float(), found.scale)
    zeros = searched_ranges(GRID, torch.zeros(2, 16), (1.0, 0.9), importance=torch.ones(16), half=True)
    assert zeros.scale.flatten().tolist() == [1.0, 1.0]


@pytest.mark.parametrize("pair", LLAMA.smoothings, ids=lambda pair: pair.source)
def test_folding_awqs_scales_changes_nothing_before_rounding(model_folder, pair):
    from calib.model import load_hf
    model, ids = load_hf(model_folder), torch.arange(24)[None]
    layer, reader = model.model.layers[0], pair.readers[0]
    seen = []
    handle = layer.get_submodule(reader).register_forward_pre_hook(lambda _, args: seen.append(args[0].flatten(0, -2)))
    with torch.inference_mode():
        before = model(ids, use_cache=False).logits
        handle.remove()
        x = seen[0]
        factors, alpha = search_and_fold(layer, pair, GRID, x.T @ x / len(x), x.abs().mean(0), 0.25)
        after = model(ids, use_cache=False).logits
    assert alpha > 0
    assert not torch.equal(factors, torch.ones_like(factors))
    assert ((after - before).pow(2).mean() / before.pow(2).mean()).sqrt() < 1e-5


def test_a_last_group_of_an_activation_may_be_smaller():
    grid = Grid(dtype="int8", granularity=PerGroup(size=16), dynamic=True)
    x = torch.randn(3, 40, generator=torch.Generator().manual_seed(5))
    found = fake_quantize(grid, x, None)
    assert found.shape == x.shape
    padded = torch.nn.functional.pad(x[:, 32:], (0, 8))
    torch.testing.assert_close(found[:, 32:], fake_quantize(grid, padded, None)[:, :8])
    assert torch.equal(found[:, :16], fake_quantize(grid, x[:, :16], None))

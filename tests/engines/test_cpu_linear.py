"""CPU linear operators against float64 and int64; the disk form is an exact inverse of itself."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from memory_checkpoint import FP8, INT4, INT8, quantize_weight

from calib.scheme import BF16, Grid, PerChannel, PerGroup
from engines.errors import EngineError
from engines.kernels.cpu.disk import Stored, pack, pack_nibbles, unpack, unpack_nibbles
from engines.kernels.cpu.linear import OPERATORS, choices, half_exponent
from engines.kernels.cpu.rows import Quantized, quantize_fp8_token, quantize_int8_token


@dataclass(frozen=True)
class Case:
    m: int
    n: int
    k: int


CASES = [Case(1, 1, 2), Case(1, 16, 32), Case(2, 96, 64), Case(3, 33, 40), Case(7, 272, 64), Case(8, 48, 160),
         Case(17, 64, 96), Case(40, 128, 1024)]
INTEGER = ["split", "int_mm"]


def int8_stored(codes: torch.Tensor, scale: torch.Tensor):
    return pack(INT8.weight, [{"weight": codes, "weight_scale": scale}], ["w"])


@pytest.mark.parametrize("name", INTEGER)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_int8_sums_are_exact(name: str, case: Case) -> None:
    torch.manual_seed(0)
    weight = torch.randint(-127, 128, (case.n, case.k), dtype=torch.int8)
    rows = torch.randint(-127, 128, (case.m, case.k))
    out = OPERATORS[name].prepare(int8_stored(weight, torch.ones(case.n)))(Quantized(rows.float(), 1.0))
    assert torch.equal(out.double(), (rows @ weight.long().t()).double())


@pytest.mark.parametrize("name", INTEGER)
@pytest.mark.parametrize("k", [64, 576, 1040])
@pytest.mark.parametrize("signs", [(1, 1), (1, -1), (-1, 1), (-1, -1)], ids=str)
def test_int8_sums_are_exact_at_the_extremes(name: str, k: int, signs: tuple[int, int]) -> None:
    """255 * 127 * 2 saturates int16 in fbgemm without VNNI; 127 * 127 * 2 does not."""
    weight = torch.full((40, k), 127 * signs[0], dtype=torch.int8)
    for m in (1, 2, 3, 8, 16):
        rows = torch.full((m, k), 127.0 * signs[1])
        out = OPERATORS[name].prepare(int8_stored(weight, torch.ones(40)))(Quantized(rows, 1.0))
        assert torch.equal(out, torch.full((m, 40), float(127 * 127 * k * signs[0] * signs[1])))


@pytest.mark.parametrize("name", INTEGER)
def test_int8_rows_do_not_depend_on_their_mates(name: str) -> None:
    torch.manual_seed(1)
    run = OPERATORS[name].prepare(int8_stored(torch.randint(-127, 128, (96, 256), dtype=torch.int8), torch.rand(96)))
    rows = torch.randn(33, 256)
    rows[5] *= 1000.0
    whole = run(quantize_int8_token(rows.clone()))
    for row in range(33):
        assert torch.equal(run(quantize_int8_token(rows[row:row + 1].clone())), whole[row:row + 1])


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("scale", [1.0, 1e-6, 1e6])
def test_half_is_as_exact_as_float32_for_bf16_weights(case: Case, scale: float) -> None:
    torch.manual_seed(2)
    weight = (torch.randn(case.n, case.k) * scale).to(torch.bfloat16)
    x = torch.randn(case.m, case.k)
    stored = pack(BF16, [{"weight": weight}], ["w"])
    exact = x.double() @ weight.double().t()
    size = (x.double().abs() @ weight.double().abs().t()).clamp_min(1e-300)
    for name in ("half", "float"):
        error = ((OPERATORS[name].prepare(stored)(x).double() - exact).abs() / size).max()
        assert error < 2e-6, (name, float(error))


def test_half_exponent_lifts_only_what_does_not_fit() -> None:
    assert half_exponent(torch.tensor([[1.0, -2.0]])) == 0
    assert half_exponent(torch.zeros(2, 2)) == 0
    tiny = torch.tensor([[2.0**-20, 1.5 * 2.0**-30]])
    exponent = half_exponent(tiny)
    assert exponent == 34
    assert torch.equal((tiny * 2.0**exponent).half().float() * 2.0**-exponent, tiny)
    assert half_exponent(torch.tensor([[1e6, 1.0]])) < 0


@pytest.mark.parametrize("name", ["float", "half"])
def test_fp8_is_codes_times_scales(name: str) -> None:
    torch.manual_seed(3)
    part = quantize_weight(torch.randn(64, 96), FP8.weight)
    rows = quantize_fp8_token(torch.randn(5, 96))
    out = OPERATORS[name].prepare(pack(FP8.weight, [part], ["w"]))(rows)
    exact = (rows.codes.double() * rows.scale.double()) @ (part["weight"].double() * part["weight_scale"].double()).t()
    assert (out - exact).abs().max() < 1e-5 * exact.abs().max()


@pytest.mark.parametrize(("name", "bound"), [("float", 1e-6), ("half", 5e-4), ("int4pack", 1e-2)])
def test_int4_error_is_within_its_stated_bound(name: str, bound: float) -> None:
    torch.manual_seed(4)
    part = quantize_weight(torch.randn(96, 256), INT4.weight)
    x = torch.randn(9, 256)
    out = OPERATORS[name].prepare(pack(INT4.weight, [part], ["w"]))(x)
    weight = (part["weight"].double().view(96, -1, 32) * part["weight_scale"].double().unsqueeze(-1)).view(96, 256)
    exact = x.double() @ weight.t()
    assert (out - exact).abs().max() < bound * exact.abs().max()


def test_asymmetric_groups_subtract_their_zero_and_follow_g_idx() -> None:
    torch.manual_seed(5)
    grid = Grid(dtype="int4", granularity=PerGroup(size=8), symmetric=False)
    codes, zero = torch.randint(0, 16, (16, 32), dtype=torch.int8), torch.randint(0, 16, (16, 4), dtype=torch.int8)
    scale, group = torch.rand(16, 4), torch.randperm(32) // 8
    stored = pack(grid, [{"weight": codes, "weight_scale": scale, "weight_zero": zero, "g_idx": group}], ["w"])
    x = torch.randn(3, 32)
    weight = (codes.double() - zero.double()[:, group]) * scale.double()[:, group]
    assert torch.allclose(OPERATORS["float"].prepare(stored)(x).double(), x.double() @ weight.t(), atol=1e-5)


@pytest.mark.parametrize("grid", [BF16, FP8.weight, INT8.weight, INT4.weight,
                                  Grid(dtype="fp8_e4m3", granularity=PerChannel())], ids=str)
def test_unpack_is_the_inverse_of_pack(grid: Grid) -> None:
    torch.manual_seed(6)
    parts = []
    for n in (32, 8, 8):
        weight = torch.randn(n, 64)
        part = quantize_weight(weight, grid) if grid.quantized else {"weight": weight.to(torch.bfloat16)}
        parts.append(part | {"bias": torch.randn(n)})
    stored = Stored.of(grid, pack(grid, parts, ["q", "k", "v"]).tensors())
    again = unpack(stored, [32, 8, 8])
    for part, back in zip(parts, again, strict=True):
        assert part.keys() == back.keys()
        for key in part:
            assert torch.equal(part[key].float(), back[key].float()), key


def test_nibbles_round_trip() -> None:
    codes = torch.arange(16, dtype=torch.int8).repeat(2, 3)
    packed = pack_nibbles(codes)
    assert packed.shape == (2, 24)
    assert packed[0, 0] == 0x10  # low nibble first
    assert torch.equal(unpack_nibbles(packed), codes)


def test_broken_weights_are_refused_by_name() -> None:
    good = quantize_weight(torch.randn(8, 32), INT8.weight)
    with pytest.raises(EngineError, match=r"a\.b\.weight_scale holds NaN"):
        pack(INT8.weight, [good | {"weight_scale": torch.full((8,), torch.nan)}], ["a.b"])
    with pytest.raises(EngineError, match="no weight_scale"):
        pack(INT8.weight, [{"weight": good["weight"]}], ["a.b"])
    with pytest.raises(EngineError, match="1 values are not bf16"):
        pack(BF16, [{"weight": torch.tensor([[1.0, 1.0 + 2.0**-12]])}], ["a.b"])


@pytest.mark.parametrize(("scale", "found"), [
    (torch.zeros(8), "is not positive: 8 of 8 scales"), (torch.tensor([-1.0] + [1.0] * 7), "is not positive: 1 of 8"),
    (torch.full((8,), 1e30), "holds 1e\\+30: weights on int8 channel would reach"),
    (torch.ones(8, dtype=torch.int32), "is torch.int32; scales are")])
def test_scales_that_verify_would_not_pass_are_not_packed(scale: torch.Tensor, found: str) -> None:
    good = quantize_weight(torch.randn(8, 32), INT8.weight)
    with pytest.raises(EngineError, match=rf"a\.b\.weight_scale {found}"):
        pack(INT8.weight, [good | {"weight_scale": scale}], ["a.b"])


@pytest.mark.parametrize("wrong", [-1.0, 0.5, 17.0, 1e30])
def test_zero_points_are_codes(wrong: float) -> None:
    grid = Grid(dtype="int4", granularity=PerGroup(size=8), symmetric=False)
    part = quantize_weight(torch.randn(8, 32), grid)
    zero = part["weight_zero"].float()
    zero[0, 0] = wrong
    with pytest.raises(EngineError, match=r"a\.b\.weight_zero holds .*whole numbers from 0 to 16"):
        pack(grid, [part | {"weight_zero": zero}], ["a.b"])


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.int32, torch.bool], ids=str)
def test_codes_are_no_unquantized_weight(dtype: torch.dtype) -> None:
    with pytest.raises(EngineError, match=rf"a\.b\.weight is {dtype}; unquantized weights are"):
        pack(BF16, [{"weight": torch.ones(8, 32).to(dtype)}], ["a.b"])


def test_every_grid_has_an_operator_and_foreign_ones_say_why() -> None:
    assert [operator.name for operator in choices(INT8.weight, INT8.activation, 96, 64)] == [
        "split", "half", "int_mm", "float"]
    assert [operator.name for operator in choices(INT4.weight, None, 96, 64)] == ["half", "int4pack", "float"]
    assert [operator.name for operator in choices(BF16, None, 96, 64)] == ["half", "float"]
    assert "groups of 32" in (OPERATORS["int4pack"].refuses(
        Grid(dtype="int4", granularity=PerGroup(size=24)), None, 96, 48) or "")

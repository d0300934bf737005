"""GEMV for one to four tokens, in each arithmetic, against the fp64 twin."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engines.kernels.impl import KernelConfig
from engines.kernels.linear.gemv import UNIT
from engines.kernels.linear.natural import NaturalLinear
from tests.kernels.linear_cases import HALF, IMPLS, check, problem, run

CASES = [  # m, n, k, BLOCK_N, BLOCK_K (units), LOOP
    (1, 1, 16, 1, 8, 0),
    (1, 5, 64, 4, 64, 0),      # one tile, rows not a multiple of BLOCK_N
    (1, 8, 528, 4, 64, 0),     # a ragged last tile
    (1, 7, 512, 2, 32, 1),     # plain loop
    (1, 6, 336, 4, 32, 3),     # staged loop, ragged
    (2, 9, 512, 4, 64, 0),
    (3, 5, 272, 2, 32, 0),     # three tokens in ROWS = 4
    (4, 6, 256, 2, 64, 1),
]


def _gemv(m: int, block_n: int, block_k: int, loop: int) -> KernelConfig:
    """One warp, so on a GPU a thread holds units of several rows side by side: sums must not leak between them."""
    rows = 1 << (m - 1).bit_length()
    return KernelConfig.of("gemv", num_warps=1, num_stages=max(1, loop), ROWS=rows, BLOCK_N=block_n, BLOCK_K=block_k,
                           LOOP=loop)


@pytest.mark.parametrize("impl", [impl for impl in IMPLS if impl.kind in UNIT], ids=lambda impl: impl.name)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gemv_equals_the_twin(impl: NaturalLinear, case: tuple[int, ...]) -> None:
    m, n, k, block_n, block_k, loop = case
    given = problem(impl, m, n, k)
    if impl.name == "int8_weight_only":  # its GEMV reads pairs of bf16, as bits, which the interpreter can do too
        given = replace(given, x=given.x.to(torch.bfloat16))
    check(given, run(given, _gemv(m, block_n, block_k, loop)))


@pytest.mark.parametrize("impl", IMPLS[:3], ids=lambda impl: impl.name)
def test_bias_static_scale_and_per_tensor_weights(impl: NaturalLinear) -> None:
    given = problem(impl, 2, 9, 256, bias=True, static=True, per_tensor=True)
    check(given, run(given, _gemv(2, 4, 64, 0)))


def test_every_e4m3_code_is_exact() -> None:
    """Each of the 254 finite codes times one, alone in its row: the widening to fp16 must lose nothing."""
    impl = IMPLS[1]
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn)
    finite = codes[~codes.float().isnan()]
    weight = torch.zeros(len(finite), 16, dtype=torch.uint8)
    weight[:, 5] = finite.view(torch.uint8)
    given = problem(impl, 1, 1, 16)
    packed = impl.pack(weight.view(torch.float8_e4m3fn).to(given.x.device), torch.ones((), device=given.x.device))
    x = torch.ones(1, 16, device=given.x.device).to(torch.float8_e4m3fn)
    one = replace(given, x=x, packed=packed, x_scale=torch.ones((), device=given.x.device))
    assert torch.equal(run(one, _gemv(1, 4, 8, 0))[0].float().cpu(), finite.float().to(HALF).float())


def test_rows_do_not_depend_on_their_mates() -> None:
    given = problem(IMPLS[2], 4, 8, 256)
    config = _gemv(4, 4, 64, 0)
    together = run(given, config)
    for i in range(4):
        assert given.x_scale is not None
        alone = replace(given, x=given.x[i:i + 1].clone(), x_scale=given.x_scale[i:i + 1].clone())
        assert torch.equal(run(alone, config)[0], together[i])


@pytest.mark.parametrize("impl", IMPLS[:3], ids=lambda impl: impl.name)
@pytest.mark.parametrize(("m", "inter", "block_n"), [(1, 5, 4), (1, 8, 8), (2, 7, 2), (3, 9, 4)])
def test_gated_output_is_silu_of_gate_times_up(impl: NaturalLinear, m: int, inter: int, block_n: int) -> None:
    given = problem(impl, m, 2 * inter, 272)
    gate, up = impl.twin(given.x, given.packed, x_scale=given.x_scale).chunk(2, 1)
    wanted = torch.nn.functional.silu(gate) * up
    out = torch.full((m, inter), float("nan"), dtype=HALF, device=given.x.device)
    impl.launch_gated(given.x, given.packed, _gemv(m, block_n, 32, 0), out, x_scale=given.x_scale)
    bound = 2e-2 if impl.name == "fp8" else 4e-3  # fp8 sums fp16 products on a GPU, and silu magnifies at some gates
    assert (out.float() - wanted).norm() <= bound * wanted.norm()
    scale = wanted.abs().max() / 448.0
    codes = torch.full((m, inter), float("nan"), device=given.x.device).to(torch.float8_e4m3fn)
    impl.launch_gated(given.x, given.packed, _gemv(m, block_n, 32, 0), codes, x_scale=given.x_scale, out_scale=scale)
    assert (codes.float() * scale - wanted).norm() <= 4e-2 * wanted.norm()


def test_what_cannot_gate_is_refused() -> None:
    given = problem(IMPLS[0], 1, 8, 64)
    mm = KernelConfig.of("mm", BLOCK_M=64, BLOCK_N=64, BLOCK_K=32, GROUP_M=2, EPILOGUE=1, PROGRAMS=2)
    out = torch.empty(1, 4, dtype=HALF, device=given.x.device)
    for config in (KernelConfig.of("torch"), _gemv(1, 1, 32, 0), mm):  # mm: 8 rows are no multiple of 32
        with pytest.raises(ValueError, match="cannot gate"):
            IMPLS[0].launch_gated(given.x, given.packed, config, out)

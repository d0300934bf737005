"""The swapped tensor-core body, its deterministic split-K, and the persistent mm body, against the fp64 twin."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engines.kernels.impl import KernelConfig
from engines.kernels.linear.natural import NaturalLinear
from engines.kernels.linear.split_k import TICKETS, split_k_bytes
from tests.kernels.linear_cases import HALF, IMPLS, ON_GPU, check, problem, run

CASES = [  # m, n, k, BLOCK_M, BLOCK_N, BLOCK_K, SPLIT_K, TMA
    (1, 16, 32, 16, 64, 32, 1, 0),
    (3, 70, 96, 16, 64, 64, 1, 0),     # ragged rows, ragged k
    (16, 64, 128, 16, 64, 64, 2, 0),
    (17, 65, 160, 16, 64, 32, 3, 0),   # two token tiles, five steps over three splits
    (5, 64, 64, 16, 64, 32, 4, 0),     # more splits than steps: some sum nothing
    (9, 80, 128, 16, 64, 64, 1, 1),    # weights by TMA, rows beyond n
    (20, 64, 112, 32, 64, 64, 2, 2),   # both by TMA, ragged k
]
MM_CASES = [  # m, n, k, BLOCK_M, BLOCK_N, BLOCK_K, EPILOGUE, PROGRAMS
    (1, 64, 32, 64, 64, 32, 1, 3),
    (70, 136, 96, 64, 64, 32, 1, 3),
    (130, 72, 80, 64, 64, 32, 2, 2),
    (65, 128, 64, 64, 64, 32, 2, 9),  # more programs than tiles
]


def _dot(case: tuple[int, ...]) -> KernelConfig:
    _, _, _, block_m, block_n, block_k, split_k, tma = case
    return KernelConfig.of("dot", num_warps=4, num_stages=2, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k,
                           SPLIT_K=split_k, TMA=tma, PREFETCH=0)


def _mm(case: tuple[int, ...], flat: int = 0) -> KernelConfig:
    _, _, _, block_m, block_n, block_k, epilogue, programs = case
    return KernelConfig.of("mm", num_warps=4, num_stages=2, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k,
                           GROUP_M=2, EPILOGUE=epilogue, PROGRAMS=programs, FLAT=flat)


@pytest.mark.parametrize("impl", IMPLS, ids=lambda impl: impl.name)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_dot_equals_the_twin(impl: NaturalLinear, case: tuple[int, ...]) -> None:
    given = problem(impl, *case[:3])
    check(given, run(given, _dot(case)))


@pytest.mark.parametrize("impl", IMPLS[:3], ids=lambda impl: impl.name)
@pytest.mark.parametrize("case", MM_CASES, ids=str)
@pytest.mark.parametrize("flat", [0, 1])
def test_mm_equals_the_twin(impl: NaturalLinear, case: tuple[int, ...], flat: int) -> None:
    given = problem(impl, *case[:3])
    check(given, run(given, _mm(case, flat)))


@pytest.mark.parametrize("impl", IMPLS[:3], ids=lambda impl: impl.name)
@pytest.mark.parametrize("case", [(70, 64, 96, 64, 64, 32, 1, 3), (130, 160, 80, 64, 64, 32, 2, 2),
                                  (3, 352, 64, 64, 128, 32, 1, 9), (65, 32, 64, 64, 64, 32, 1, 2)], ids=str)
@pytest.mark.parametrize(("bias", "flat"), [(False, 0), (True, 0), (True, 1)])
def test_gated_mm_is_silu_of_gate_times_up(impl: NaturalLinear, case: tuple[int, ...], bias: bool, flat: int) -> None:
    """``inter`` of no whole tile too: what a tile reads of the up rows beyond the gate's end is not stored."""
    m, n, k = case[:3]
    given = problem(impl, m, n, k, bias=bias)
    gate, up = impl.twin(given.x, given.packed, x_scale=given.x_scale).chunk(2, 1)
    wanted = torch.nn.functional.silu(gate) * up
    out = torch.full((m, n // 2), float("nan"), dtype=HALF, device=given.x.device)
    impl.launch_gated(given.x, given.packed, _mm(case, flat), out, x_scale=given.x_scale)
    assert (out.float() - wanted).norm() <= 4e-3 * wanted.norm()
    scale = wanted.abs().max() / 448.0
    codes = torch.full((m, n // 2), float("nan"), device=given.x.device).to(torch.float8_e4m3fn)
    impl.launch_gated(given.x, given.packed, _mm(case, flat), codes, x_scale=given.x_scale, out_scale=scale)
    assert (codes.float() * scale - wanted).norm() <= 4e-2 * wanted.norm()


@pytest.mark.parametrize("impl", IMPLS, ids=lambda impl: impl.name)
def test_bias_static_scale_and_per_tensor_weights(impl: NaturalLinear) -> None:
    given = problem(impl, 5, 72, 64, bias=True, static=True, per_tensor=True)
    check(given, run(given, _dot((5, 72, 64, 16, 64, 32, 1, 0))))
    check(given, run(given, _dot((5, 72, 64, 16, 64, 32, 2, 0))))
    if impl.mm_tiles:
        check(given, run(given, _mm((5, 72, 64, 64, 64, 32, 2, 2))))


def test_rows_do_not_depend_on_their_mates_or_the_token_tile() -> None:
    """BLOCK_K and SPLIT_K alone fix a row's sum, whatever BLOCK_M is and whoever shares it."""
    given = problem(IMPLS[0], 20, 64, 128)
    together = run(given, _dot((20, 64, 128, 32, 64, 32, 2, 0)))
    alone = replace(given, x=given.x[7:8].clone())
    assert torch.equal(run(alone, _dot((1, 64, 128, 16, 64, 32, 2, 0)))[0], together[7])


def test_split_k_workspace_is_checked() -> None:
    given = problem(IMPLS[0], 4, 64, 128)
    config = _dot((4, 64, 128, 16, 64, 32, 2, 0))
    out = torch.empty(4, 64, dtype=given.x.dtype, device=given.x.device)
    with pytest.raises(ValueError, match="workspace has 0 bytes, this launch needs"):
        given.impl.launch(given.x, given.packed, config, out)
    with pytest.raises(ValueError, match="tiles are split"):
        split_k_bytes(TICKETS + 1, 2, 64)


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs CUDA")
@pytest.mark.parametrize("impl", IMPLS, ids=lambda impl: impl.name)
def test_split_k_repeats_bitwise(impl: NaturalLinear) -> None:
    given = problem(impl, 16, 512, 4096)
    config = _dot((16, 512, 4096, 16, 64, 128, 8, 1))
    first = run(given, config)
    for _ in range(20):
        assert torch.equal(run(given, config), first)

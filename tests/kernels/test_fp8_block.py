"""fp8 with a scale for every 128 x 128 tile and every 128 inputs of a token, against its twin; packing and refusals."""

from __future__ import annotations

import pytest
import torch

from engines.kernels.impl import KernelConfig, LinearShape
from engines.kernels.linear.fp8_block import BLOCK, Fp8BlockLinear
from engines.kernels.linear.natural import TORCH
from tests.kernels.linear_cases import A100, CPU, DEVICE, H200, HALF, L40, ON_GPU, Problem, check, run

IMPL = Fp8BlockLinear()
SHAPES = [(1, 64, 128), (3, 192, 256), (17, 77, 384), (2, 300, 640)]


def problem(m: int, n: int, k: int, bias: bool = False) -> Problem:
    """Loud tiles and loud groups, so that a scale taken from a neighbour is seen."""
    seed = torch.Generator().manual_seed(m + 31 * n + k)
    groups = k // BLOCK
    w, x = torch.randn(n, groups, BLOCK, generator=seed), torch.randn(m, groups, BLOCK, generator=seed)
    loud = 4.0 ** torch.randint(-2, 3, (-(-n // BLOCK), groups), generator=seed)
    w *= loud.repeat_interleave(BLOCK, 0)[:n, :, None]
    x *= 4.0 ** torch.randint(-2, 3, (m, groups, 1), generator=seed)
    tiles = torch.stack([part.abs().amax((0, 2)) for part in w.split(BLOCK)]) / 448
    w_scale, x_scale = tiles.repeat_interleave(BLOCK, 0)[:n], x.abs().amax(-1) / 448
    packed = IMPL.pack((w / w_scale[..., None]).clamp(-448, 448).to(torch.float8_e4m3fn).view(n, k).to(DEVICE),
                       w_scale.to(DEVICE), bias=torch.randn(n, generator=seed).to(HALF).to(DEVICE) if bias else None)
    codes = (x / x_scale[..., None]).clamp(-448, 448).to(torch.float8_e4m3fn).view(m, k)
    return Problem(IMPL, codes.to(DEVICE), packed, x_scale.contiguous().to(DEVICE))


def config(block_m: int, block_n: int, split: int) -> KernelConfig:
    return KernelConfig.of("dot", num_warps=4, num_stages=1, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=BLOCK,
                           SPLIT_K=split, TMA=0, PREFETCH=0)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_dot_equals_its_twin(shape: tuple[int, int, int], bias: bool) -> None:
    given = problem(*shape, bias=bias)
    for split in (1, 2):
        check(given, run(given, config(16, 64, split)))


def test_a_token_does_not_depend_on_its_mates() -> None:
    given = problem(9, 128, 256)
    assert given.x_scale is not None
    together = run(given, config(16, 64, 1))
    for row in (0, 8):
        alone = Problem(IMPL, given.x[row:row + 1].contiguous(), given.packed, given.x_scale[row:row + 1].contiguous())
        assert torch.equal(run(alone, config(16, 64, 1))[0], together[row])


def test_torch_on_a_cpu_and_an_empty_batch() -> None:
    given = problem(5, 96, 256, bias=True)
    if not ON_GPU:
        check(given, run(given, TORCH))
    assert run(problem(0, 96, 256), config(16, 64, 1)).shape == (0, 96)


def test_unpack_gives_back_what_was_packed() -> None:
    weight = torch.randn(40, 256).to(torch.float8_e4m3fn)
    scale = torch.rand(40, 2) + 0.1
    packed = IMPL.pack(weight, scale)
    assert packed.group == BLOCK
    codes, again = IMPL.unpack(packed)
    assert torch.equal(codes.float(), weight.float())
    assert again is not None
    assert torch.equal(again, scale)


def test_what_does_not_fit_is_refused() -> None:
    weight = torch.zeros(8, 256).to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"are \(8, 2\), got \(8,\)"):
        IMPL.pack(weight, torch.ones(8))
    with pytest.raises(ValueError, match="finite and positive"):
        IMPL.pack(weight, torch.zeros(8, 2))
    given = problem(2, 64, 256)
    with pytest.raises(ValueError, match=r"x_scale is contiguous \(2, 2\), got \(2,\)"):
        IMPL.launch(given.x, given.packed, config(16, 64, 1), torch.empty(2, 64, dtype=HALF, device=DEVICE),
                    x_scale=torch.ones(2, device=DEVICE))
    assert "k = 576" in str(IMPL.supports(LinearShape(1, 576, 576, BLOCK), H200))
    assert "not 64" in str(IMPL.supports(LinearShape(1, 64, 256, 64), H200))
    assert "capability 8.9" in str(IMPL.supports(LinearShape(1, 64, 256, BLOCK), A100))
    assert IMPL.supports(LinearShape(1, 64, 256, BLOCK), L40) is None


@pytest.mark.parametrize("device", [H200, L40, CPU], ids=lambda device: device.name)
def test_every_candidate_has_steps_of_one_block(device) -> None:
    for m in (1, 4, 16, 64, 256, 2048):
        for n, k in ((6144, 4096), (4096, 14336), (64, 128)):
            found = IMPL.candidates(LinearShape(m, n, k, BLOCK), device)
            assert found
            assert all(each.kernel == "torch" or each["BLOCK_K"] == BLOCK for each in found)

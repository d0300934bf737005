"""What the linears promise outside the kernels: packing, refusals, candidate lists, the CPU way, the empty batch."""

from __future__ import annotations

import pytest
import torch

from engines.kernels.impl import DeviceFacts, KernelConfig, LinearImpl, LinearShape
from engines.kernels.linear.natural import TORCH, NaturalLinear
from engines.kernels.linear.split_k import scratch_view
from engines.kernels.linear.weight_only import dequantize
from tests.kernels.linear_cases import A100, CPU, DEVICE, H200, HALF, IMPLS, L40, ON_GPU, check, problem, run

MODEL_SHAPES = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096),  # Llama-3.1-8B
                (960, 576), (576, 576), (3072, 576), (576, 1536), (49152, 576),  # SmolLM2-135M
                (77, 130), (1, 8)]  # nothing divides anything
TOKENS = [1, 2, 3, 4, 5, 16, 33, 64, 65, 128, 256, 300, 512, 2048, 16384]
by_impl = pytest.mark.parametrize("impl", IMPLS, ids=lambda impl: impl.name)


@by_impl
def test_it_is_a_linear_impl(impl: NaturalLinear) -> None:
    assert isinstance(impl, LinearImpl)


@by_impl
@pytest.mark.parametrize("per_tensor", [False, True])
def test_unpack_gives_back_what_was_packed(impl: NaturalLinear, per_tensor: bool) -> None:
    weight = torch.arange(-60, 60).reshape(6, 20).to(impl.weight_dtypes[0])
    scale = (torch.tensor(0.25) if per_tensor else torch.rand(6) + 0.1) if impl.scaled else None
    packed = impl.pack(weight, scale)
    back, back_scale = impl.unpack(packed)
    assert torch.equal(back.float(), weight.float())
    assert back.dtype == weight.dtype
    assert (back_scale is None) == (scale is None)
    if scale is not None:
        assert back_scale is not None
        assert back_scale.shape == scale.shape
        assert torch.equal(back_scale, scale)
        assert packed.tensors["weight_scale"].shape == (6,)


@by_impl
def test_bad_weights_and_scales_are_refused(impl: NaturalLinear) -> None:
    weight = torch.zeros(4, 16, dtype=torch.int8).to(impl.weight_dtypes[0])
    with pytest.raises(ValueError, match="packs a matrix"):
        impl.pack(torch.zeros(4, 16), torch.ones(4))
    with pytest.raises(ValueError, match="scales"):
        impl.pack(weight, None if impl.scaled else torch.ones(4))
    with pytest.raises(ValueError, match="bias"):
        impl.pack(weight, torch.ones(4) if impl.scaled else None, bias=torch.zeros(5))
    if impl.scaled:
        for bad in (float("nan"), float("inf"), 0.0, -1.0):
            with pytest.raises(ValueError, match="finite and positive"):
                impl.pack(weight, torch.tensor([1.0, bad, 1.0, 1.0]))
        with pytest.raises(ValueError, match=r"\[\] or \[4\]"):
            impl.pack(weight, torch.ones(4, 2))


@by_impl
def test_bad_launches_are_refused(impl: NaturalLinear) -> None:
    given = problem(impl, 2, 8, 32)
    out = torch.empty(2, 8, dtype=HALF, device=DEVICE)
    with pytest.raises(ValueError, match="does not fill"):
        impl.launch(given.x, given.packed, TORCH, out[:, :4], x_scale=given.x_scale)
    with pytest.raises(ValueError, match="takes x of"):
        impl.launch(given.x.float(), given.packed, TORCH, out, x_scale=given.x_scale)
    with pytest.raises(ValueError, match="x_scale"):
        impl.launch(given.x, given.packed, TORCH, out,
                    x_scale=None if impl.quantized_x else torch.ones(2, device=DEVICE))
    with pytest.raises(ValueError, match="no kernel 'magic'"):
        impl.launch(given.x, given.packed, KernelConfig.of("magic"), out, x_scale=given.x_scale)


@by_impl
def test_an_empty_batch_is_nothing_to_do(impl: NaturalLinear) -> None:
    given = problem(impl, 0, 8, 32)
    for config in (TORCH, KernelConfig.of("gemv", ROWS=1, BLOCK_N=4, BLOCK_K=32, LOOP=0)):
        assert run(given, config).shape == (0, 8)


def test_fp8_is_refused_below_ada_with_the_reason() -> None:
    fp8 = IMPLS[1]
    assert fp8.supports(LinearShape(1, 64, 64), A100) == \
        "fp8 (e4m3) needs compute capability 8.9, NVIDIA A100 has 8.0"
    assert fp8.supports(LinearShape(1, 64, 64), L40) is None
    assert fp8.supports(LinearShape(1, 64, 64), CPU) is None


def test_what_no_kernel_here_does_is_refused() -> None:
    for impl in IMPLS:
        assert "groups of 128" in str(impl.supports(LinearShape(1, 64, 256, group=128), H200))
        assert "T4 has 7.5" in str(impl.supports(LinearShape(1, 64, 64), DeviceFacts("T4", 75, 40, 65536, 4 << 20)))
    assert "overflow" in str(IMPLS[2].supports(LinearShape(1, 64, 140_000), H200))


@by_impl
@pytest.mark.parametrize("device", [H200, L40, A100], ids=lambda device: device.name)
def test_candidate_lists_are_short_distinct_and_fit(impl: NaturalLinear, device: DeviceFacts) -> None:
    for n, k in MODEL_SHAPES:
        for m in TOKENS:
            shape = LinearShape(m, n, k)
            if impl.supports(shape, device):
                continue
            found = list(impl.candidates(shape, device))
            assert 1 <= len(found) <= 25, (impl.name, shape, len(found))
            assert len(set(found)) == len(found)
            for config in found:
                _fits(impl, shape, device, config)


def _fits(impl: NaturalLinear, shape: LinearShape, device: DeviceFacts, config: KernelConfig) -> None:
    assert impl.workspace_bytes(shape, config) >= 0
    if device.capability < 90:
        assert not config.pdl
        assert config.kernel != "mm"
    if config.kernel == "gemv":
        assert shape.m <= config["ROWS"]
        assert config["BLOCK_N"] * config["BLOCK_K"] >= 32 * config.num_warps
    if config.kernel == "dot":
        widths = impl.weight_dtypes[0].itemsize, impl.x_dtypes[0].itemsize
        tile = config["BLOCK_K"] * (config["BLOCK_N"] * widths[0] + config["BLOCK_M"] * widths[1])
        assert tile * config.num_stages < device.shared_bytes
        assert config["TMA"] == 0 or (device.capability >= 90 and shape.k * widths[0] % 16 == 0)


@by_impl
def test_a_cpu_gets_torchs_own_operator(impl: NaturalLinear) -> None:
    assert list(impl.candidates(LinearShape(1, 64, 64), CPU)) == [TORCH]
    given = problem(impl, 18, 32, 64, bias=True)
    check(given, run(given, TORCH))


def test_dequantize_rounds_once() -> None:
    codes = torch.randint(-128, 128, (5, 70), dtype=torch.int8, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    scale = torch.tensor([0.5, 1e-3, 3.0, 0.01, 7e-2], device=DEVICE)
    out = torch.full((5, 70), float("nan"), dtype=HALF, device=DEVICE)
    dequantize(codes, scale, out)
    assert torch.equal(out, (codes.float() * scale[:, None]).to(HALF))


def test_scratch_that_is_too_small_is_an_error() -> None:
    with pytest.raises(ValueError, match="this launch needs 65552"):
        scratch_view(torch.zeros(65536, dtype=torch.uint8), 16)


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs CUDA")
@by_impl
@pytest.mark.parametrize("n_k", [(960, 576), (576, 1536), (4096, 4096)], ids=str)
def test_every_candidate_is_right_on_the_device(impl: NaturalLinear, n_k: tuple[int, int]) -> None:
    p = torch.cuda.get_device_properties(0)
    device = DeviceFacts(p.name, p.major * 10 + p.minor, p.multi_processor_count, 232448 if p.major == 9 else 101376,
                         p.L2_cache_size)
    large = [2300] if n_k == (4096, 4096) else []  # more tiles than multiprocessors
    for m in (1, 2, 3, 17, 64, 200, 600, *large):
        given = problem(impl, m, *n_k)
        for config in impl.candidates(LinearShape(m, *n_k), device):
            check(given, run(given, config))

"""4-bit linears: storage is exactly invertible, every kernel agrees with its torch twin, nothing is left unwritten."""

from __future__ import annotations

import pytest
import torch

from engines.kernels.impl import DeviceFacts, KernelConfig, LinearImpl, LinearShape
from engines.kernels.linear.int4_a8 import Int4A8
from engines.kernels.linear.int4_a16 import Int4A16
from engines.kernels.linear.int4_dot16 import dot16_workspace
from engines.kernels.linear.int4_layout import Geometry, Int4WeightError, Order, dequantize, pack_int4, unpack_int4
from engines.kernels.linear.split_k import TICKETS

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
CPU = DeviceFacts("cpu", 0, 0, 0, 0)
H200 = DeviceFacts("NVIDIA H200", 90, 132, 232448, 60 << 20)
IMPLS = {"int4_a16": Int4A16(), "int4_a8": Int4A8()}
# n, k, group: one tile, odd rows, padded runs, SmolLM2's widths, several runs
ROUNDED = torch.bfloat16 if CUDA else torch.float16  # the interpreter truncates to bf16: too coarse to round in
WEIGHTS = [(16, 128, 32), (1, 32, 32), (33, 576, 64), (50, 1536, 64), (40, 1024, 128), (17, 640, 128), (64, 192, 32)]
TOKENS = [1, 2, 17]


def here() -> DeviceFacts:
    if not CUDA:
        return CPU
    properties = torch.cuda.get_device_properties(0)
    major, minor = torch.cuda.get_device_capability()
    return DeviceFacts(properties.name, 10 * major + minor, properties.multi_processor_count, 0, 0)


def weight(n: int, k: int, group: int, seed: int, exact: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    codes = torch.randint(-8, 8, (n, k), generator=g, dtype=torch.int8)
    scale = torch.rand(n, k // group, generator=g) * 0.02 + 0.005
    return codes, scale.half().float() if exact else scale


def activations(name: str, m: int, k: int, group: int, seed: int,
                dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(m, k, generator=g)
    if name == "int4_a16":
        return x.to(dtype), None
    scale = (x.view(m, k // group, group).abs().amax(2) / 127).clamp_min(1e-12)
    return (x / scale.repeat_interleave(group, 1)).round().to(torch.int8), scale


def judge(out: torch.Tensor, want: torch.Tensor, rms: float, peak: float, what: object) -> None:
    error = out.float() - want
    assert torch.isfinite(out).all(), f"{what}: unwritten or not finite"
    norm = want.square().mean().sqrt()
    assert error.square().mean().sqrt() / norm < rms, f"{what}: rms {error.square().mean().sqrt() / norm:.2e}"
    assert error.abs().max() / norm < peak, f"{what}: worst {error.abs().max() / norm:.2e}"


def run(name: str, config: KernelConfig, case: tuple[int, int, int], m: int, dtype: torch.dtype,
        exact: bool = True, bias: bool = False) -> torch.Tensor:
    n, k, group = case
    impl = IMPLS[name]
    codes, scale = weight(n, k, group, n + k, exact)
    offset = torch.linspace(-2, 2, n).to(dtype).to(DEVICE) if bias else None
    packed = impl.pack(codes.to(DEVICE), scale.to(DEVICE), bias=offset)
    x, x_scale = activations(name, m, k, group, m, dtype)
    x, x_scale = x.to(DEVICE), None if x_scale is None else x_scale.to(DEVICE)
    out = torch.full((m, n), float("nan"), dtype=dtype, device=DEVICE)
    needed = impl.workspace_bytes(LinearShape(m, n, k, group), config)
    workspace = torch.full((needed,), 255, dtype=torch.uint8, device=DEVICE) if needed else None
    if workspace is not None:
        workspace[:4 * TICKETS] = 0
    got = impl.launch(x, packed, config, out, x_scale=x_scale, workspace=workspace)
    assert got is out
    assert workspace is None or not workspace[:4 * TICKETS].any(), "a ticket was left behind"
    rounds = config.kernel == "mm" or (config.kernel in ("dot", "dot16") and dict(config.meta).get("FOLD"))
    rms, peak = (6e-3, 4e-2) if rounds else (2.5e-3, 1.6e-2) if CUDA else (5e-3, 3e-2)  # the interpreter truncates bf16
    judge(out, impl.twin(x, packed, x_scale=x_scale), rms, peak, (name, config, case, m, dtype))
    return out


def test_impls_follow_the_protocol():
    assert all(isinstance(impl, LinearImpl) for impl in IMPLS.values())


@pytest.mark.parametrize("order", list(Order))
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("case", WEIGHTS)
def test_pack_is_exactly_invertible(case, exact, order):
    n, k, group = case
    codes, scale = weight(n, k, group, 3, exact)
    packed = pack_int4(codes, scale, order)
    back, back_scale = unpack_int4(packed, order)
    assert torch.equal(back, codes)
    assert torch.equal(back_scale, scale)
    assert packed.tensors["scales"].dtype == (torch.float16 if exact else torch.float32)
    expected = codes.double() * scale.double().repeat_interleave(group, 1)
    assert torch.allclose(dequantize(packed, order).double(), expected, rtol=1e-6)


@pytest.mark.parametrize("order", list(Order))
def test_words_lie_as_the_docstring_says(order):
    n, k, group = 40, 256, 64
    codes, scale = weight(n, k, group, 5)
    words = pack_int4(codes, scale, order).tensors["words"]
    assert words.shape == (Geometry(n, k, group).tiles, Geometry(n, k, group).chunks, 32, 4)
    for row, col in torch.randint(0, 40, (40, 2), generator=torch.Generator().manual_seed(1)).tolist():
        col = 5 * col
        h, r = row % 16 // 8, row % 8
        if order is Order.A16:
            c, i, place = col % 8 // 2, col % 64 // 16, 4 * (2 * (col % 16 // 8) + h + 4 * (col % 2))
        else:
            c, i, place = col % 32 // 8, col % 64 // 32 * 2 + col % 8 // 4, 4 * (2 * (col % 4) + h)
        word = words[row // 16, col // 64, 4 * r + c, i]
        code = int(word) >> place & 15
        assert (code - 8 if order is Order.A16 else (code + 8) % 16 - 8) == int(codes[row, col])


def test_bfloat16_scales_are_kept_in_two_bytes():
    codes, scale = weight(16, 128, 128, 1)
    scale = (scale * 2.0**-30).bfloat16().float()
    packed = pack_int4(codes, scale, Order.A16)
    assert packed.tensors["scales"].dtype == torch.bfloat16
    assert torch.equal(unpack_int4(packed, Order.A16)[1], scale)


@pytest.mark.parametrize(("spoil", "message"), [
    (lambda w, s: (w + 1, s), "reach"), (lambda w, s: (w, s * 0), "not finite and positive"),
    (lambda w, s: (w, s / 0), "not finite and positive"), (lambda w, s: (w, None), "without scales"),
    (lambda w, s: (w[:, :120], s), "do not give groups"), (lambda w, s: (w.float(), s), "expected int8"),
])
def test_bad_weights_are_refused(spoil, message):
    with pytest.raises(Int4WeightError, match=message):
        pack_int4(*spoil(*weight(16, 128, 64, 2)), Order.A16)


@pytest.mark.parametrize("name", list(IMPLS))
@pytest.mark.parametrize("case", WEIGHTS)
def test_dot_agrees_with_the_twin(case, name):
    for m in TOKENS if case[0] < 40 else (3,):
        config = KernelConfig.of("dot", BLOCK_M=16, BLOCK_N=32, BLOCK_K=case[2], SPLIT_K=1, FOLD=0)
        run(name, config, case, m, torch.float16 if m == 2 else torch.bfloat16, exact=m != 3)


@pytest.mark.parametrize("name", list(IMPLS))
def test_split_k_and_fold_agree_with_the_twin(name):
    for split in (2, 3):
        run(name, KernelConfig.of("dot", BLOCK_M=16, BLOCK_N=64, BLOCK_K=64, SPLIT_K=split, FOLD=0), (70, 576, 64), 5,
            torch.bfloat16)
    if name == "int4_a16":
        for case in ((70, 576, 64), (33, 320, 32), (16, 384, 128)):
            fold = KernelConfig.of("dot", BLOCK_M=16, BLOCK_N=32, BLOCK_K=max(64, case[2]), SPLIT_K=1, FOLD=1)
            run(name, fold, case, 5, ROUNDED)


def dot16(m: int, case: tuple[int, int, int], *, fold: int = 0, split: int = 1, block_n: int = 32,
          kernel: str = "dot16") -> KernelConfig:
    """A ``dot16`` configuration with the token tile that its candidates have for m."""
    block_m = min(128, max(16, 1 << (m - 1).bit_length()))
    return KernelConfig.of(kernel, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=max(64, case[2]) if fold == 1 else case[2],
                           SPLIT_K=split, FOLD=fold)


@pytest.mark.parametrize("case", WEIGHTS)
def test_dot16_agrees_with_the_twin(case):
    for m in (1, 17, 33, 100):
        run("int4_a8", dot16(m, case, block_n=64 if m == 33 else 32), case, m,
            torch.float16 if m == 17 else torch.bfloat16, exact=m != 33, bias=m == 33)


@pytest.mark.parametrize("fold", [0, 1, 2])
@pytest.mark.parametrize("case", [(70, 576, 64), (33, 320, 32), (16, 384, 128)])
def test_dot16_splits_and_folds(case, fold):
    for m, split in ((33, 1), (17, 2), (130, 3)):
        run("int4_a8", dot16(m, case, fold=fold, split=split, block_n=64), case, m, ROUNDED, bias=m == 17)


@pytest.mark.parametrize("split", [1, 3])
def test_dot16_has_the_sums_of_dot(split):
    case = (70, 576, 64)
    wide = run("int4_a8", dot16(33, case, split=split), case, 33, ROUNDED)
    narrow = run("int4_a8", dot16(33, case, split=split, kernel="dot"), case, 33, ROUNDED)
    if CUDA:
        judge(wide, narrow.float(), 1e-4, 1e-2, "dot16 against dot")
    else:
        assert torch.equal(wide, narrow)


@pytest.mark.parametrize(("k", "group"), [(64, 32), (576, 64), (2432, 128)])
def test_widened_activations_lie_as_the_docstring_says(k, group):
    impl, m, n = IMPLS["int4_a8"], 5, 16
    packed = impl.pack(*(t.to(DEVICE) for t in weight(n, k, group, 1)))
    x, scale = activations("int4_a8", m, k, group, 2, torch.bfloat16)
    assert scale is not None
    config, shape = dot16(m, (n, k, group)), LinearShape(m, n, k, group)
    workspace = torch.zeros(dot16_workspace(shape, config), dtype=torch.uint8, device=DEVICE)
    out = torch.empty(m, n, dtype=torch.bfloat16, device=DEVICE)
    impl.launch(x.to(DEVICE), packed, config, out, x_scale=scale.to(DEVICE), workspace=workspace)
    wide = workspace[4 * TICKETS:][:2 * m * k].view(torch.bfloat16).view(m, k).cpu()
    for place in range(k):
        j, i1, e1, c, e0 = place // 32, place // 16 % 2, place // 8 % 2, place // 2 % 4, place % 2
        assert torch.equal(wide[:, place], x[:, 32 * j + 8 * c + 4 * i1 + e1 + 2 * e0].bfloat16()), place
    turned = workspace[4 * TICKETS + -(-2 * m * k // 256) * 256:][:4 * 16 * (k // group)].view(torch.float32)
    assert torch.equal(turned.view(-1, 16)[:, :m].cpu(), scale.t())


@pytest.mark.parametrize("name", list(IMPLS))
@pytest.mark.parametrize("case", WEIGHTS)
def test_mm_agrees_with_the_twin(case, name):
    config = KernelConfig.of("mm", BLOCK_N=32, BLOCK_K=max(64, case[2]), SPLIT_K=1)
    run(name, config, case, 19, ROUNDED)


@pytest.mark.parametrize("name", list(IMPLS))
def test_bias_is_added(name):
    for config in (KernelConfig.of("mm", BLOCK_N=32, BLOCK_K=64, SPLIT_K=1),
                   KernelConfig.of("dot", BLOCK_M=16, BLOCK_N=32, BLOCK_K=64, SPLIT_K=2, FOLD=0),
                   KernelConfig.of("dot", BLOCK_M=16, BLOCK_N=32, BLOCK_K=64, SPLIT_K=1, FOLD=0)):
        run(name, config, (33, 576, 64), 3, ROUNDED, bias=True)
    with pytest.raises(Int4WeightError, match="bias"):
        IMPLS[name].pack(*weight(16, 64, 32, 1), bias=torch.zeros(15))


@pytest.mark.parametrize("name", list(IMPLS))
@pytest.mark.parametrize("m", [5, 33])
def test_candidates_run_here(name, m):
    shape = LinearShape(m, 65, 576, 64)
    configs = IMPLS[name].candidates(shape, here())
    assert 1 <= len(configs) <= 25
    for config in configs if CUDA else configs[:3]:
        run(name, config, (65, 576, 64), m, torch.bfloat16 if config.kernel == "mma" else torch.float16)


@pytest.mark.parametrize("name", list(IMPLS))
@pytest.mark.parametrize(("n", "k", "group"), [
    (6144, 4096, 128), (28672, 4096, 128), (4096, 14336, 128), (576, 576, 64), (49152, 576, 64), (576, 1536, 64),
    (77, 1536, 64)])
def test_candidates_are_few_and_distinct(name, n, k, group):
    for m in (1, 8, 16, 17, 32, 64, 128, 256, 512, 1024, 16384):
        configs = IMPLS[name].candidates(LinearShape(m, n, k, group), H200)
        assert (1 if m > 1024 else 2) <= len(configs) <= 25, (m, len(configs))
        assert len(set(configs)) == len(configs)
        assert all("SPLIT_K" in dict(c.meta) and "BLOCK_K" in dict(c.meta) for c in configs)
        bodies = {c.kernel for c in configs[:6]}
        assert ("dot16" in bodies) == (name == "int4_a8" and 16 < m <= 1024), (m, bodies)
        assert "dot" in bodies or not 16 < m <= 1024, (m, bodies)


@pytest.mark.parametrize("name", list(IMPLS))
def test_empty_batch_launches_nothing(name):
    impl = IMPLS[name]
    packed = impl.pack(*(t.to(DEVICE) for t in weight(16, 64, 32, 1)))
    x, x_scale = activations(name, 0, 64, 32, 1, torch.bfloat16) if name == "int4_a16" else (
        torch.empty(0, 64, dtype=torch.int8), torch.empty(0, 2))
    out = torch.empty(0, 16, dtype=torch.bfloat16, device=DEVICE)
    config = impl.candidates(LinearShape(1, 16, 64, 32), here())[0]
    x_scale = None if x_scale is None else x_scale.to(DEVICE)
    assert impl.launch(x.to(DEVICE), packed, config, out, x_scale=x_scale) is out


def test_wrong_operands_are_refused():
    a16, a8 = IMPLS["int4_a16"], IMPLS["int4_a8"]
    packed = a16.pack(*(t.to(DEVICE) for t in weight(16, 64, 32, 1)))
    config = KernelConfig.of("dot", BLOCK_M=16, BLOCK_N=16, BLOCK_K=32, SPLIT_K=1, FOLD=0)
    x = torch.zeros(2, 64, dtype=torch.bfloat16, device=DEVICE)
    out = torch.zeros(2, 16, dtype=torch.bfloat16, device=DEVICE)
    with pytest.raises(ValueError, match="do not fit"):
        a16.launch(x[:, :32].contiguous(), packed, config, out)
    with pytest.raises(ValueError, match="contiguous"):
        a16.launch(x.t().contiguous().t(), packed, config, out)
    with pytest.raises(ValueError, match="one 16-bit type"):
        a16.launch(x.half(), packed, config, out)
    with pytest.raises(ValueError, match="expected int8"):
        a8.launch(x, packed, config, out)
    with pytest.raises(ValueError, match="has no kernel"):
        a16.launch(x, packed, KernelConfig.of("gemm"), out)
    with pytest.raises(ValueError, match="has no kernel 'dot16'; it has mma, dot, mm"):
        a16.launch(x, packed, dot16(2, (16, 64, 32)), out)
    with pytest.raises(ValueError, match="the workspace has 0 bytes"):
        a8.launch(x.to(torch.int8), packed, dot16(2, (16, 64, 32)), out, x_scale=torch.ones(2, 2, device=DEVICE))
    with pytest.raises(ValueError, match="workspace"):
        a16.launch(x, packed, KernelConfig.of("mm", BLOCK_N=32, BLOCK_K=64, SPLIT_K=1), out)


def test_unsupported_shapes_say_why():
    for shape, word in ((LinearShape(1, 8, 100, 64), "multiple"), (LinearShape(1, 8, 96, 48), "groups"),
                        (LinearShape(1, 2**20, 8192, 128), "2 GiB")):
        assert word in (IMPLS["int4_a16"].supports(shape, H200) or "")
    assert IMPLS["int4_a16"].supports(LinearShape(1, 576, 576, 64), H200) is None
    assert "sm_75" in (IMPLS["int4_a8"].supports(LinearShape(1, 576, 576, 64), DeviceFacts("T4", 75, 40, 0, 0)) or "")


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize("name", list(IMPLS))
@pytest.mark.parametrize("case", [*WEIGHTS, (256, 4096, 128), (48, 14336, 128)])
def test_mma_agrees_with_the_twin(case, name):
    for m, warps, unit, rows, programs, staged in ((1, 8, 2, 1, 0, 1), (3, 4, 4, 2, 0, 8), (8, 8, 2, 1, 2, 0),
                                                   (16, 4, 2, 2, 0, 0), (25, 1, 4, 1, 0, 0)):
        config = KernelConfig.of("mma", num_warps=warps, UNIT=unit, RT=rows, NT=1 if m <= 8 else 2 if m <= 16 else 4,
                                 STAGED=staged, PROGRAMS=programs, BLOCK_K=0, SPLIT_K=1)
        run(name, config, case, m, torch.float16 if m == 3 else torch.bfloat16, exact=m != 8, bias=m == 16)


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize("name", list(IMPLS))
def test_mma_rows_do_not_depend_on_their_batch_mates(name):
    impl, (n, k, group) = IMPLS[name], (512, 4096, 128)
    packed = impl.pack(*(t.to(DEVICE) for t in weight(n, k, group, 7)))
    x, x_scale = activations(name, 32, k, group, 9, torch.bfloat16)
    rows = {}
    for m in (1, 5, 8, 16, 32):
        tiles = 1 if m <= 8 else 2 if m <= 16 else 4
        config = KernelConfig.of("mma", num_warps=8, RT=1, NT=tiles, PROGRAMS=0, UNIT=2,
                                 STAGED=1 if m == 1 else 8 if m <= 8 else 0, BLOCK_K=0, SPLIT_K=1)
        out = torch.empty(m, n, dtype=torch.bfloat16, device=DEVICE)
        scale = None if x_scale is None else x_scale[:m].contiguous().to(DEVICE)
        rows[m] = impl.launch(x[:m].contiguous().to(DEVICE), packed, config, out, x_scale=scale)[0]
    assert all(torch.equal(row, rows[1]) for row in rows.values())

"""Varlen, chunked, paged prefill attention against plain torch."""

from __future__ import annotations

import pytest
import torch

from engines.kernels import attention_prefill
from engines.kernels.impl import KernelConfig
from engines.kernels.jit import ActQuant
from engines.kernels.quantize import dequantize

SMALL = KernelConfig.of("tile", ROWS=32, TILE=16)
WIDE = KernelConfig.of("tile", ROWS=32, TILE=32)  # a tile of keys over several blocks


def problem(new, cached, heads, kv_heads, head_dim, block, dtype, device):
    """q, caches with NaN in every slot nobody owns, table, cu_seqlens, seq_lens; block 0: contiguous K and V."""
    torch.manual_seed(sum(new) * 10 + sum(cached))
    lens = [n + c for n, c in zip(new, cached, strict=True)]
    q = torch.randn(sum(new), heads, head_dim).bfloat16().to(device)
    cu = torch.tensor([0, *torch.tensor(new).cumsum(0).tolist()], dtype=torch.int32, device=device)
    seq_lens = torch.tensor(lens, dtype=torch.int32, device=device)
    if not block:
        k, v = (torch.randn(sum(new), kv_heads, head_dim).bfloat16().to(device) for _ in range(2))
        return (q, k, v, None, cu, seq_lens, max(new)), {}
    blocks = [-(-n // block) for n in lens]
    order = torch.randperm(sum(blocks) + 1)
    coded = dtype in (torch.float8_e4m3fn, torch.int8)
    table = torch.zeros(len(lens), max(blocks) + 1, dtype=torch.int32)
    caches = []
    for turned in (False, coded):
        cache = torch.full((sum(blocks) + 1, kv_heads, block, head_dim), float("nan")
                           if dtype != torch.int8 else -128.0)
        at = 0
        for i, n in enumerate(lens):
            table[i, : blocks[i]] = order[at : at + blocks[i]].int()
            at += blocks[i]
            slot = torch.arange(n)
            values = torch.randn(n, kv_heads, head_dim) * (20 if coded else 1)
            cache[table[i].long()[slot // block], :, slot % block] = values.round() if dtype == torch.int8 else values
        caches.append((cache.mT.contiguous() if turned else cache).to(dtype).to(device))
    scale = torch.tensor(0.05, device=device) if coded else None
    return (q, *caches, table.to(device), cu, seq_lens, max(new)), {"k_scale": scale, "v_scale": scale}


def run_both(args, device, config=SMALL, quant=ActQuant.NONE, **keys):
    q = args[0]
    results = []
    for run in (attention_prefill.launch, attention_prefill.twin):
        out = torch.full((q.shape[0], q.shape[1] * q.shape[2]), float("nan"), device=device)
        if quant is ActQuant.FP8_STATIC:
            out = out.to(torch.float8_e4m3fn)
        run(*args, out, config, sm_scale=q.shape[2] ** -0.5, quant=quant, **keys)
        results.append(dequantize(out, quant, keys.get("input_scale")))
    return results


CASES = [  # new, cached, heads, kv heads, head_dim, block, dtype
    ([1], [0], 2, 1, 64, 16, torch.bfloat16),
    ([5, 33, 1], [0, 20, 70], 8, 2, 64, 16, torch.bfloat16),
    ([40], [0], 3, 1, 96, 16, torch.bfloat16),
    ([17, 0, 3], [40, 0, 0], 4, 4, 64, 32, torch.bfloat16),
    ([9], [23], 10, 2, 128, 64, torch.float8_e4m3fn),
    ([20, 4], [3, 30], 4, 1, 64, 16, torch.int8),
    ([18], [15], 2, 2, 256, 16, torch.bfloat16),
    ([37, 5], [0, 0], 6, 2, 64, 0, torch.bfloat16),
    ([20], [0], 2, 1, 80, 0, torch.bfloat16),
]


@pytest.mark.parametrize(("new", "cached", "heads", "kv_heads", "head_dim", "block", "dtype"), CASES)
def test_cases(device, judge, new, cached, heads, kv_heads, head_dim, block, dtype):
    args, scales = problem(new, cached, heads, kv_heads, head_dim, block, dtype, device)
    found, wanted = run_both(args, device, SMALL if block != 16 else WIDE, **scales)
    judge(found, wanted, 4e-2, 6e-3)


@pytest.mark.parametrize(("window", "softcap"), [(0, 10.0), (1, 0.0), (20, 5.0), (500, 0.0)])
@pytest.mark.parametrize("block", [0, 16])
def test_window_and_softcap(device, judge, window, softcap, block):
    args, _ = problem([41, 3], [0, 0] if not block else [10, 50], 4, 2, 64, block, torch.bfloat16, device)
    found, wanted = run_both(args, device, window=window, softcap=softcap)
    judge(found, wanted, 4e-2, 6e-3)


@pytest.mark.parametrize(("new", "heads", "kv_heads", "head_dim", "tile"), [
    ([1], 2, 1, 64, 16), ([37, 5], 6, 2, 64, 16), ([64, 0, 70], 4, 1, 64, 32), ([33], 4, 4, 128, 32)])
@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (20, 5.0)])
def test_rows_by_bulk_copy(device, judge, new, heads, kv_heads, head_dim, tile, window, softcap):
    """K and V are followed by rows of nobody, which hold NaN, within reach of the last tile."""
    (q, k, v, *rest), _ = problem(new, [0] * len(new), heads, kv_heads, head_dim, 0, torch.bfloat16, device)
    k, v = (torch.cat([x, torch.full_like(x, float("nan"))])[:x.shape[0]] for x in (k, v))
    config = KernelConfig.of("rows", ROWS=32, TILE=tile, REGISTERS=128)
    found, wanted = run_both((q, k, v, *rest), device, config, window=window, softcap=softcap)
    judge(found, wanted, 4e-2, 6e-3)


def test_rows_of_a_neighbour_may_hold_anything(device):
    """A tile reaches into the next sequence's rows: nothing of them counts, not even NaN."""
    (q, k, v, _, cu, lens, most), _ = problem([10, 30], [0, 0], 2, 1, 64, 0, torch.bfloat16, device)
    out = torch.full((40, 128), float("nan"), device=device)
    config = KernelConfig.of("rows", ROWS=32, TILE=32, REGISTERS=0)
    k[10:], v[10:] = float("nan"), float("nan")
    attention_prefill.launch(q, k, v, None, cu, lens, most, out, config, sm_scale=0.125)
    assert out[:10].isfinite().all()


def test_fp8_output(device, judge):
    args, _ = problem([21], [10], 4, 2, 64, 16, torch.bfloat16, device)
    pre = torch.rand(256, device=device) + 0.5
    found, wanted = run_both(args, device, quant=ActQuant.FP8_STATIC, input_scale=torch.tensor(0.01, device=device),
                             pre_quant_scale=pre)
    judge(found, wanted, 0.5, 3e-2)


def test_candidates_fit_and_agree(device, facts, judge):
    args, _ = problem([33], [8], 4, 1, 64, 16, torch.bfloat16, device)
    configs = attention_prefill.candidates(64, 4, 2, facts)
    assert len(configs) > 2
    for config in {c["ROWS"]: c for c in configs}.values():
        found, wanted = run_both(args, device, config)
        judge(found, wanted, 4e-2, 6e-3)


def test_misfits_are_errors(device):
    args, _ = problem([5], [0], 4, 1, 64, 16, torch.bfloat16, device)
    out = torch.empty(5, 256, device=device)
    with pytest.raises(ValueError, match=r"quantize\.launch"):
        attention_prefill.launch(*args, out, SMALL, sm_scale=1.0, quant=ActQuant.INT8_TOKEN)
    with pytest.raises(ValueError, match="q heads of a kv head"):
        attention_prefill.launch(*args, out, KernelConfig.of("tile", ROWS=2, TILE=16), sm_scale=1.0)
    with pytest.raises(ValueError, match="kernel 'rows' takes contiguous"):
        attention_prefill.launch(*args, out, KernelConfig.of("rows", ROWS=32, TILE=16, REGISTERS=0), sm_scale=1.0)
    with pytest.raises(ValueError, match="contiguous K and V"):
        attention_prefill.launch(args[0], args[1], args[2], None, *args[4:], out, SMALL, sm_scale=1.0)

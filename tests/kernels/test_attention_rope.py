"""Decode attention that rotates and stores its own token, against the two kernels' twins one after the other."""

from __future__ import annotations

import pytest
import torch

from engines.kernels import attention_plan, attention_rope, norm, quantize
from engines.kernels.jit import ActQuant
from engines.kernels.read_ahead import ReadAhead
from tests.kernels.attention_cases import BALANCED, FIXED, MANY, WIDE, problem

LENS = [1, 0, 16, 17, 2, 70, 33, 0, 128, 15]


def run_both(config, device, *, heads=8, kv_heads=2, head_dim=64, block=16, dtype=torch.bfloat16, lens=LENS, window=0,
             quant=ActQuant.NONE, group=0, early=False, **keys):
    """(found, wanted) outputs as float32, and both cache pairs. Every unwritten output is NaN."""
    _, k, v, table, kv_scales = problem(lens, heads, kv_heads, head_dim, block, dtype, device)
    torch.manual_seed(7)
    qkv = torch.randn(len(lens), (heads + 2 * kv_heads) * head_dim).bfloat16().to(device)
    angles = torch.rand(max(lens) + 3, head_dim // 2) * 6.3
    cos_sin = torch.cat([angles.cos(), angles.sin()], -1).to(device)
    seq_lens = torch.tensor(lens, dtype=torch.int32, device=device)
    work = attention_plan.workspace(len(lens), max(lens), heads, kv_heads, head_dim, config, device, window=window)
    work.acc.fill_(float("nan"))
    attention_plan.make_plan(seq_lens, work, kv_heads, config)
    common = {"sm_scale": head_dim**-0.5, "quant": quant, "group": group, **kv_scales, **keys}
    found = []
    for fused in (True, False):
        shape = (len(lens), heads * head_dim)
        scales = torch.full((shape[0], shape[1] // group), float("nan"), device=device) if group else None
        out = torch.full(shape, float("nan"), device=device)
        out = out.nan_to_num(-128.0).to(torch.int8) if group else out
        out = out.to(torch.float8_e4m3fn) if quant is ActQuant.FP8_STATIC else out
        caches = (k.clone(), v.clone())
        if fused:
            attention_rope.launch(qkv, cos_sin, *caches, table, work, out, config, scales=scales, early=early, **common)
        else:
            attention_rope.twin(qkv, cos_sin, *caches, table, seq_lens, out, window=window, scales=scales, **common)
        found.append((quantize.dequantize(out, quant, keys.get("input_scale"), scales), caches))
    assert work.counters.eq(0).all()
    return found


def same_caches(found, wanted, step):
    """Equal but for one step of rounding where a rotation's last bit differs; NaN where nobody wrote."""
    for ours, theirs in zip(found, wanted, strict=True):
        ours, theirs = ours.float().cpu(), theirs.float().cpu()
        assert torch.equal(ours.isnan(), theirs.isnan()), "another slot was written"
        assert (ours.nan_to_num() - theirs.nan_to_num()).abs().le(step * theirs.nan_to_num().abs() + 1e-2).all()


@pytest.mark.parametrize("config", [BALANCED, MANY, WIDE, FIXED],
                         ids=["balanced", "many", "wide", "fixed"])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(8, 2, 64), (3, 3, 32), (8, 1, 96), (9, 3, 128)])
def test_every_length_in_one_batch(config, heads, kv_heads, head_dim, device, judge):
    (ours, caches), (wanted, theirs) = run_both(config, device, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    judge(ours, wanted, 0.05, 6e-3)
    same_caches(caches, theirs, 2**-7)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_quantized_cache(dtype, device, judge):
    (ours, caches), (wanted, theirs) = run_both(BALANCED, device, dtype=dtype, head_dim=64)
    judge(ours, wanted, 0.08, 1e-2)
    same_caches(caches, theirs, 2**-3)


def test_window_and_softcap(device, judge):
    (ours, _), (wanted, _) = run_both(BALANCED, device, window=20, softcap=5.0)
    judge(ours, wanted, 0.05, 6e-3)


@pytest.mark.parametrize(("quant", "group"), [(ActQuant.FP8_STATIC, 0), (ActQuant.INT8_GROUP, 32)])
def test_quantized_output(quant, group, device, judge):
    keys = {"input_scale": torch.tensor(0.01, device=device)} if quant is ActQuant.FP8_STATIC else {}
    factor = torch.rand(512, device=device) + 0.5
    (ours, _), (wanted, _) = run_both(BALANCED, device, quant=quant, group=group, pre_quant_scale=factor, **keys)
    judge(ours, wanted, 0.2, 4e-2)


def test_misfits_are_refused(device):
    with pytest.raises(ValueError, match="whole row"):
        run_both(BALANCED, device, quant=ActQuant.INT8_TOKEN)
    with pytest.raises(ValueError, match="qkv must be"):
        run_both(BALANCED, device, heads=3, kv_heads=2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_early_reads_in_a_captured_chain(device, judge):
    """A fence (norm), then attention with early reads, replayed while lengths move."""
    config = attention_rope.attention_decode.candidates(128, 16, 2, _facts())[0]
    heads, kv_heads, dim, batch = 32, 8, 128, 3
    _, k, v, table, _ = problem([600, 600, 600], heads, kv_heads, dim, 16, torch.bfloat16, device)
    k.nan_to_num_(0.0), v.nan_to_num_(0.0)
    torch.manual_seed(3)
    width = (heads + 2 * kv_heads) * dim
    x, weight = torch.randn(batch, width, device=device).bfloat16(), torch.ones(width, device=device).bfloat16()
    qkv, out = torch.empty_like(x), torch.empty(batch, heads * dim, device=device, dtype=torch.bfloat16)
    angles = torch.rand(700, dim // 2) * 6.3
    cos_sin = torch.cat([angles.cos(), angles.sin()], -1).to(device)
    seq_lens = torch.ones(batch, dtype=torch.int32, device=device)
    work = attention_plan.workspace(batch, 700, heads, kv_heads, dim, config, device)
    row = norm.candidates(width, _facts())[0]
    ahead = ReadAhead([torch.ones(5 << 20, device=device), torch.ones(9 << 20, device=device)], 30 << 20)

    def chain():
        attention_plan.make_plan(seq_lens, work, kv_heads, config)
        norm.launch(x, weight, qkv, row, eps=1e-6, fence=True)
        attention_rope.launch(qkv, cos_sin, k, v, table, work, out, config, sm_scale=dim**-0.5, early=True,
                              ahead=ahead)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        chain()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        chain()
        graph.capture_end()
        for length in range(100, 140):
            seq_lens.copy_(torch.tensor([length, 3 * length, length // 2], dtype=torch.int32))
            graph.replay()
    stream.synchronize()
    twin_k, twin_v = k.clone(), v.clone()
    wanted = torch.empty_like(out, dtype=torch.float32)
    attention_rope.twin(qkv, cos_sin, twin_k, twin_v, table, seq_lens, wanted, sm_scale=dim**-0.5)
    judge(out.float(), wanted, 0.05, 6e-3)


def _facts():
    from engines.kernels.impl import DeviceFacts

    found = torch.cuda.get_device_properties(0)
    return DeviceFacts(found.name, found.major * 10 + found.minor, found.multi_processor_count, 232448, 1 << 20)

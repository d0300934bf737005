"""Paged split-KV decode attention against plain torch: every length is a case in one batch."""

from __future__ import annotations

import pytest
import torch

from engines.kernels import attention_decode, attention_plan, quantize
from engines.kernels.attention_decode import candidates
from engines.kernels.attention_plan import item_capacity
from engines.kernels.attention_walk import padded_rows, walk_options
from engines.kernels.impl import DeviceFacts, KernelConfig
from engines.kernels.jit import ActQuant
from tests.kernels.attention_cases import BALANCED, FIXED, MANY, TAILED, WIDE, problem


def run_both(lens, heads, kv_heads, head_dim, block, dtype, device, config, *, query_len=1, window=0,
             quant=ActQuant.NONE,
             group=0, repeat=False, **keys):
    q, k, v, table, scales_kv = problem(lens, heads, kv_heads, head_dim, block, dtype, device, query_len)
    seq_lens = torch.tensor(lens, dtype=torch.int32, device=device)
    work = attention_plan.workspace(len(lens), max(lens), heads, kv_heads, head_dim, config, device,
                                    query_len=query_len,
                                    window=window)
    work.acc.fill_(float("nan"))
    attention_plan.make_plan(seq_lens, work, kv_heads, config)
    common = {"sm_scale": head_dim**-0.5, "quant": quant, "group": group, **scales_kv, **keys}
    results = []
    for which in ("launch", "twin", "launch")[: 3 if repeat else 2]:
        shape = (q.shape[0], heads * head_dim)
        out = torch.full(shape, float("nan"), device=device)
        scales = torch.full((shape[0], shape[1] // group), float("nan"), device=device) if group else None
        if quant is ActQuant.INT8_GROUP:
            out = torch.full(shape, -128, dtype=torch.int8, device=device)
        elif quant.fp8:
            out = out.to(torch.float8_e4m3fn)
        if which == "launch":
            attention_decode.launch(q, k, v, table, work, out, config, scales=scales, **common)
        else:
            attention_decode.twin(q, k, v, table, seq_lens, out, window=window, query_len=query_len, scales=scales,
                                  **common)
        results.append(quantize.dequantize(out, quant, keys.get("input_scale"), scales))
    if repeat:
        assert torch.equal(results[0], results[2]), "a second launch gives other bits (counters or plan not restored)"
    assert work.counters.eq(0).all()
    return results[0], results[1], work


@pytest.mark.parametrize("config", [BALANCED, MANY, WIDE, TAILED, FIXED],
                         ids=["balanced", "many", "wide", "tailed", "fixed"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int8])
def test_mixed_lengths(device, judge, config, dtype):
    found, wanted, work = run_both([1, 0, 90, 17], 8, 2, 64, 16, dtype, device, config, repeat=True)
    judge(found, wanted, 3e-2, 5e-3)
    assert found[1].eq(0).all()
    assert int(work.plan[0, 0]) > 4, "nothing was split: the case tests less than it says"


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "block"), [
    (1, 1, 64, 16), (3, 1, 96, 16), (10, 2, 128, 32), (8, 1, 256, 16), (17, 1, 64, 64), (9, 3, 80, 16)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_shapes(device, judge, heads, kv_heads, head_dim, block, dtype):
    """8-bit caches walk by whole blocks, or parts of one (64 keys here, tiles of 16), and pad rows to 8."""
    found, wanted, _ = run_both([5, 70], heads, kv_heads, head_dim, block, dtype, device, BALANCED)
    judge(found, wanted, 3e-2, 5e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_more_items_than_eight_meet_in_two_steps(device, judge, dtype):
    found, wanted, work = run_both([300, 40, 128, 145], 4, 2, 64, 16, dtype, device, MANY, repeat=True)
    judge(found, wanted, 3e-2, 5e-3)
    splits = work.plan[1 : 1 + int(work.plan[0, 0]), 5]
    assert splits.max() > 16
    assert splits.min() <= 8


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_drafted_tokens_of_a_wide_group(device, judge, dtype):
    found, wanted, _ = run_both([60, 7], 10, 2, 64, 16, dtype, device, TAILED, query_len=5)
    judge(found, wanted, 3e-2, 5e-3)


def test_wide_rows_take_more_warps():
    """A warp holds 16 x 128 sums in registers: five drafted tokens of four heads are 32 rows."""
    cache, codes = torch.empty(1, dtype=torch.bfloat16), torch.empty(1, dtype=torch.int8)

    def warps(live, cache, block_d):
        return walk_options(BALANCED, padded_rows(live, cache), block_d)["num_warps"]

    assert warps(4, cache, 128) == 1
    assert warps(20, cache, 128) == 2
    assert warps(4, cache, 256) == 2
    assert warps(4, codes, 256) == 1


@pytest.mark.parametrize("config", [BALANCED, FIXED], ids=["balanced", "fixed"])
@pytest.mark.parametrize("query_len", [1, 3])
@pytest.mark.parametrize(("window", "softcap"), [(0, 20.0), (24, 0.0), (1, 5.0)])
def test_window_softcap_and_several_queries(device, judge, config, query_len, window, softcap):
    found, wanted, _ = run_both([60, 3, 0], 4, 2, 64, 16, torch.bfloat16, device, config, query_len=query_len,
                                window=window, softcap=softcap)
    judge(found, wanted, 3e-2, 5e-3)


@pytest.mark.parametrize("config", [BALANCED, MANY], ids=["balanced", "many"])
@pytest.mark.parametrize(("quant", "group"), [(ActQuant.FP8_STATIC, 0), (ActQuant.INT8_GROUP, 64),
                                              (ActQuant.INT8_GROUP, 32), (ActQuant.FP8_GROUP, 64)])
def test_quantized_output(device, judge, config, quant, group):
    keys = {"input_scale": torch.tensor(0.01, device=device)} if quant is ActQuant.FP8_STATIC else {}
    pre = torch.rand(6 * 64, device=device) + 0.5
    found, wanted, _ = run_both([90, 0, 7], 6, 2, 64, 16, torch.bfloat16, device, config, quant=quant, group=group,
                                pre_quant_scale=pre, **keys)
    judge(found, wanted, 0.5, 2e-2)


def test_fixed_splits_do_not_depend_on_batch_mates(device):
    alone, _, _ = run_both([90], 4, 2, 64, 16, torch.bfloat16, device, FIXED)
    q, k, v, table, _ = problem([90], 4, 2, 64, 16, torch.bfloat16, device)
    work = attention_plan.workspace(4, 200, 4, 2, 64, FIXED, device)
    lens = torch.tensor([33, 90, 0, 48], dtype=torch.int32, device=device)
    attention_plan.make_plan(lens, work, 2, FIXED)
    mixed = torch.full((4, 256), float("nan"), device=device)
    attention_decode.launch(q.repeat(4, 1, 1), k, v, table.repeat(4, 1), work, mixed, FIXED, sm_scale=64**-0.5)
    assert torch.equal(mixed[1], alone[0])


def test_plan_covers_every_token_once(device):
    torch.manual_seed(3)
    for config in (BALANCED, FIXED, KernelConfig.of("split", TILE=32, SPLIT=0, TARGET=300, MIN_SPLIT=64),
                   KernelConfig.of("split", TILE=16, SPLIT=0, TARGET=24, MIN_SPLIT=16, FUSED=1)):
        for batch in (1, 7, 19):
            lens = torch.randint(0, 700, (batch,), dtype=torch.int32, device=device)
            work = attention_plan.workspace(batch, 700, 2, 1, 16, config, device)
            attention_plan.make_plan(lens, work, 1, config, chunk=8)
            plan = work.plan.cpu()
            items = plan[1 : 1 + int(plan[0, 0])]
            assert len(items) <= work.capacity
            for b, n in enumerate(lens.tolist()):
                own = items[items[:, 0] == b]
                splits = len(own)
                assert own[:, 5].eq(splits).all()
                assert own[:, 4].tolist() == list(range(splits))
                assert own[0, 1] == 0
                assert own[-1, 2] == n
                assert own[1:, 1].equal(own[:-1, 2])
            if config["SPLIT"] == 0:
                tile, whole = config["TILE"], int((-(-lens // config["TILE"])).sum())
                target = config["TARGET"] - (batch - 1 if config.get("FUSED") else 0)
                longest = max(-(-whole // target) * tile, 2 * config["MIN_SPLIT"] - 1)
                assert int((items[:, 2] - items[:, 1]).max()) <= longest


def test_programs_that_fill_a_multiprocessor_are_one_wave(device):
    """A seventeenth item would wait for one of sixteen."""
    for fused, items in ((1, 15), (0, 17)):
        config = KernelConfig.of("split", TILE=128, SPLIT=0, TARGET=16, MIN_SPLIT=256, FUSED=fused)
        lens = torch.tensor([95 * 128, 65 * 128], dtype=torch.int32, device=device)
        work = attention_plan.workspace(2, 16384, 2, 1, 16, config, device)
        attention_plan.make_plan(lens, work, 1, config)
        assert int(work.plan[0, 0]) == items


def test_contexts_of_nearly_one_length_are_cut_alike(device):
    """A step takes as long as its longest item."""
    config = KernelConfig.of("split", TILE=32, SPLIT=0, TARGET=64, MIN_SPLIT=64)
    lens = torch.tensor([32768 + 4 * i for i in range(16)], dtype=torch.int32, device=device)
    work = attention_plan.workspace(16, 33024, 2, 1, 16, config, device)
    attention_plan.make_plan(lens, work, 1, config)
    items = work.plan.cpu()[1 : 1 + int(work.plan[0, 0])]
    assert int((items[:, 2] - items[:, 1]).max()) <= 8224
    assert 64 <= len(items) <= 80


@pytest.mark.parametrize("device_kb", [(80, 163), (89, 99), (90, 227), (100, 227)])
@pytest.mark.parametrize("kv_bytes", [1, 2])
def test_every_device_has_a_tile_for_every_head(device_kb, kv_bytes):
    capability, kib = device_kb
    facts = DeviceFacts("gpu", capability, 132, kib << 10, 40 << 20)
    for head_dim in (64, 96, 128, 256):
        for batch in (1, 8, 32, 128):
            for fixed in (False, True):
                found = candidates(head_dim, 16, kv_bytes, facts, batch=batch, deterministic=fixed)
                assert found
                for config in found:
                    tile = 2 * config["TILE"] * max(1, config.num_stages - 1) * (1 << (head_dim - 1).bit_length())
                    assert tile * kv_bytes <= kib << 10


def test_one_long_context_is_one_wave_of_programs():
    config = candidates(128, 16, 2, DeviceFacts("H200", 90, 132, 227 << 10, 50 << 20), batch=1)[0]
    assert item_capacity(1, 131072, 8, config) * 8 <= 132 + 8


def test_who_rotates_its_own_token():
    """Few sequences: the fused kernel with warps that share wide tiles. Many: one warp a program. Never fused where a
    head is 256 wide, and never where a row's bits must not depend on its batch."""
    facts = DeviceFacts("H200", 90, 132, 227 << 10, 50 << 20)

    def kinds(**keys):
        found = candidates(**({"head_dim": 128, "block_size": 16, "kv_bytes": 2, "device": facts} | keys))
        assert all(config["FUSED"] or config.num_warps == 1 for config in found)
        return {config["FUSED"] for config in found}

    assert kinds(batch=1) == {1}
    assert kinds(batch=8) == {0}
    assert kinds(batch=1, head_dim=256) == {0}
    assert kinds(batch=1, deterministic=True) == {0}
    assert kinds(batch=1, fused=False) == {0}


def test_misfits_are_errors(device):
    q, k, v, table, _ = problem([5], 2, 1, 64, 16, torch.bfloat16, device)
    work = attention_plan.workspace(1, 16, 2, 1, 64, BALANCED, device)
    out = torch.empty(1, 128, device=device)
    with pytest.raises(ValueError, match=r"quantize\.launch"):
        attention_decode.launch(q, k, v, table, work, out, BALANCED, sm_scale=1.0, quant=ActQuant.INT8_TOKEN)
    with pytest.raises(ValueError, match="seq_lens"):
        attention_plan.make_plan(torch.tensor([5], device=device), work, 1, BALANCED)
    with pytest.raises(ValueError, match="block_table"):
        attention_decode.launch(q, k, v, table.long(), work, out, BALANCED, sm_scale=1.0)
    with pytest.raises(ValueError, match="multiples of TILE"):
        attention_plan.make_plan(torch.tensor([5], dtype=torch.int32, device=device), work, 1,
                                 KernelConfig.of("split", TILE=32, SPLIT=48, TARGET=1, MIN_SPLIT=32))

"""The hot small kernels compile for every target without spills, with the instructions they were written for."""

from __future__ import annotations

import pytest

from engines.kernels import attention_decode, attention_prefill, attention_rope, norm, rope_kv, sample, silu_mul
from engines.kernels.jit import next_pow2
from engines.kernels.offline import CompileJob, compile_jobs
from tests.kernels.linear_cases import H200

POINTERS = {"q_ptr": "*bf16", "table_ptr": "*i32", "plan_ptr": "*i32", "acc_ptr": "*fp32", "stats_ptr": "*fp32",
            "counter_ptr": "*i32", "cu_q_ptr": "*i32", "seq_lens_ptr": "*i32", "k_scale_ptr": "*fp32",
            "v_scale_ptr": "*fp32", "x_ptr": "*bf16", "residual_ptr": "*bf16", "residual_out_ptr": "*bf16",
            "weight_ptr": "*bf16", "scales_ptr": "*fp32", "input_scale_ptr": "*fp32", "qkv_ptr": "*bf16",
            "next_ptr": "*i8", "after_ptr": "*i8",
            "cos_sin_ptr": "*fp32", "positions_ptr": "*i64", "slots_ptr": "*i32", "logits_ptr": "*bf16",
            "temperature_ptr": "*fp32", "top_k_ptr": "*i32", "top_p_ptr": "*fp32", "min_p_ptr": "*fp32",
            "seeds_ptr": "*i64", "index_ptr": "*i32", "token_ptr": "*i64", "logprob_ptr": "*fp32", "sm_scale": "fp32",
            "eps": "fp32"}


def job(kernel, capability, constexprs, *, num_warps=4, num_stages=1, registers=0, **types):
    """A job whose unnamed pointers have their usual types and whose unnamed numbers are aligned int32."""
    constexprs = constexprs | {"PDL": capability >= 90}
    names = [n for n in kernel.arg_names if n not in constexprs]
    signature = {n: types.get(n, POINTERS.get(n, "i32")) for n in names}
    sizes = {"n", "inter", "vocab", "head_dim", "rotary_half", "block_size"}
    aligned = [n for n in names if n in sizes or (n.endswith("stride") and n != "table_stride")]
    return CompileJob.of(kernel, signature, constexprs, capability=capability, aligned=aligned, num_warps=num_warps,
                         num_stages=num_stages, pdl=capability >= 90, registers=registers)


HEAD = {"GQA": 4, "HEAD_DIM": 128, "BLOCK_D": 128, "BLOCK_SIZE": 16, "TILE": 64, "WINDOW": 0, "SOFTCAP": 0.0,
        "QUANT": 0,
        "EXACT": False, "pre_quant_ptr": None, "input_scale_ptr": None}
AHEAD = {"AHEAD": 1, "THREADS": 32, "DELAY": 500}
DECODE = HEAD | AHEAD | {"TAIL": False, "QUERY_LEN": 1, "ROWS": 16, "LIVE2": 4, "CHUNK": 8, "GATHER": 8,
                         "TOGETHER": False, "GROUP": 0, "scales_ptr": None, "TILE": 32}
CODES = {"TAIL": True, "ROWS": 8}
UNSCALED = {"k_scale_ptr": None, "v_scale_ptr": None}
NO_ROWS = {"k_desc": None, "v_desc": None}
ROW = {"pre_quant_ptr": None, "rows_ptr": None, "BLOCK": 4096, "FENCE": True}
ROPE = {name: value for name, value in DECODE.items() if name != "TAIL"} | {"EARLY": True, "GATHER": 16, "CHUNK": 16,
                                                                            "TOGETHER": True, "THREADS": 256}
LONE = {"num_warps": 1, "out_ptr": "*bf16"}
FP8 = {"k_ptr": "*fp8e4nv", "v_ptr": "*fp8e4nv"}
JOBS = {
    "decode bf16": job(attention_decode.decode_kernel, 90, DECODE | UNSCALED, **LONE, num_stages=3, k_ptr="*bf16",
                       v_ptr="*bf16"),
    "decode bf16, one block": job(attention_decode.decode_kernel, 90, DECODE | UNSCALED | {"TILE": 16}, **LONE,
                                  num_stages=4, k_ptr="*bf16", v_ptr="*bf16"),
    "decode bf16, last tile apart": job(attention_decode.decode_kernel, 90, DECODE | UNSCALED | {
        "TAIL": True, "TILE": 16}, **LONE, num_stages=4, k_ptr="*bf16", v_ptr="*bf16"),
    "decode bf16 sm_80": job(attention_decode.decode_kernel, 80, DECODE | UNSCALED | {"AHEAD": 0}, **LONE,
                             num_stages=3, k_ptr="*bf16", v_ptr="*bf16"),
    "decode fp8": job(attention_decode.decode_kernel, 90, DECODE | CODES, **LONE, num_stages=4, **FP8),
    "decode fp8, wide tile": job(attention_decode.decode_kernel, 90, DECODE | CODES | {"TILE": 64}, **LONE,
                                 num_stages=3, **FP8),
    "decode int8": job(attention_decode.decode_kernel, 90, DECODE | CODES, **LONE, num_stages=4, k_ptr="*i8",
                       v_ptr="*i8"),
    "decode fp8, eight heads": job(attention_decode.decode_kernel, 90, DECODE | CODES | {
        "GQA": 8, "LIVE2": 8, "CHUNK": 4}, **LONE, num_stages=4, **FP8),
    "rope decode bf16, eight heads": job(attention_rope.rope_decode_kernel, 90, ROPE | UNSCALED | {
        "GQA": 8, "LIVE2": 8, "TILE": 256}, num_warps=8, num_stages=2, k_ptr="*bf16", v_ptr="*bf16", out_ptr="*bf16"),
    "decode fp8, drafted": job(attention_decode.decode_kernel, 90, DECODE | CODES | {"QUERY_LEN": 5, "ROWS": 32,
                               "LIVE2": 32, "CHUNK": 1, "TOGETHER": True}, out_ptr="*bf16", num_warps=2, num_stages=4,
                               **FP8),
    "rope decode bf16": job(attention_rope.rope_decode_kernel, 90, ROPE | UNSCALED | {"TILE": 128}, num_stages=3,
                            k_ptr="*bf16", v_ptr="*bf16", out_ptr="*bf16"),
    "rope decode bf16, one wide tile": job(attention_rope.rope_decode_kernel, 90, ROPE | UNSCALED | {"TILE": 256},
                                           num_warps=8, num_stages=2, k_ptr="*bf16", v_ptr="*bf16", out_ptr="*bf16"),
    "rope decode bf16, two tiles ahead": job(attention_rope.rope_decode_kernel, 90, ROPE | UNSCALED | {"TILE": 128},
                                             num_warps=8, num_stages=3, k_ptr="*bf16", v_ptr="*bf16", out_ptr="*bf16"),
    "rope decode fp8": job(attention_rope.rope_decode_kernel, 90, ROPE | {"TILE": 128}, num_warps=8, num_stages=3,
                           out_ptr="*bf16", **FP8),
    "rope decode fp8, one wide tile": job(attention_rope.rope_decode_kernel, 90, ROPE | {"TILE": 256}, num_warps=8,
                                          num_stages=3, out_ptr="*bf16", **FP8),
    "prefill bf16": job(attention_prefill.prefill_kernel, 90, HEAD | UNSCALED | NO_ROWS | {"ROWS": 128}, num_warps=8,
                        num_stages=3, k_ptr="*bf16", v_ptr="*bf16", out_ptr="*bf16"),
    "prefill rows": job(attention_prefill.prefill_kernel, 90, HEAD | UNSCALED | {
        "ROWS": 128, "BLOCK_SIZE": 0, "table_ptr": None}, num_warps=8, num_stages=2, registers=128, k_ptr="*bf16",
        v_ptr="*bf16", out_ptr="*bf16", k_desc="tensordesc<bf16[64,128]>", v_desc="tensordesc<bf16[64,128]>"),
    "norm int8 group": job(norm.norm_kernel, 100, ROW | {"QUANT": 4, "GROUP": 128, "input_scale_ptr": None},
                           num_warps=16,
                           out_ptr="*i8"),
    "norm fp8 sm_89": job(norm.norm_kernel, 89, ROW | {"QUANT": 1, "GROUP": 0, "scales_ptr": None}, num_warps=16,
                          out_ptr="*fp8e4nv"),
    "norm fp8": job(norm.norm_kernel, 90, ROW | {"QUANT": 1, "GROUP": 0, "scales_ptr": None}, num_warps=16,
                    out_ptr="*fp8e4nv"),
    "norm int8 token": job(norm.norm_kernel, 90, ROW | {"QUANT": 3, "GROUP": 0, "input_scale_ptr": None}, num_warps=16,
                           out_ptr="*i8"),
    "silu int8 group": job(silu_mul.silu_mul_kernel, 90, {"pre_quant_ptr": None, "input_scale_ptr": None, "ACT": 0,
                                                          "QUANT": 4, "GROUP": 128, "BLOCK": 1024}, out_ptr="*i8"),
    "silu int8 token": job(silu_mul.silu_mul_kernel, 90, {"pre_quant_ptr": None, "input_scale_ptr": None, "ACT": 0,
                                                          "QUANT": 3, "GROUP": 0, "BLOCK": 16384}, num_warps=16,
                           out_ptr="*i8"),
    "rope fp8 cache": job(rope_kv.rope_kv_kernel, 90, {"bias_ptr": None, "q_norm_ptr": None, "k_norm_ptr": None,
                                                       "k_out_ptr": None, "v_out_ptr": None,
                                                       "HEADS": 1,
                                                       "HALF": 64, "REST": 0}, num_warps=1, k_ptr="*fp8e4nv",
                          v_ptr="*fp8e4nv"),
    "sample partial": job(sample.partial_kernel, 90, {"PART": 8192}, num_warps=8),
    "sample choose": job(sample.choose_kernel, 90, {"PART": 8192, "PARTS": 16}, num_warps=16),
}


@pytest.fixture(scope="module")
def compiled():
    return dict(zip(JOBS, compile_jobs(list(JOBS.values())), strict=True))


@pytest.mark.parametrize("name", JOBS)
def test_no_spills(compiled, name):
    facts = compiled[name]
    assert not isinstance(facts, str), facts
    if name == "sample choose":  # only its rounds of re-drawing hold much; 16 warps measured faster than 8 without
        assert facts.spills <= 40
    else:
        assert facts.spills == 0
        assert facts.stack == 0
    assert bool(facts.count("ACQBULK")) == (facts.capability >= 90)
    assert not facts.overwritten


def test_instructions(compiled):
    for name in ("decode bf16", "decode bf16, one block", "decode fp8", "rope decode fp8, one wide tile"):
        assert compiled[name].count("LDGSTS.E.BYPASS.128") >= 16, "KV tiles must travel in 16-byte copies"
        assert not compiled[name].count("LDS.U8"), "V's codes must not be fetched byte by byte"
    assert compiled["decode fp8"].registers <= 168, "twelve programs must fit on a multiprocessor"
    assert compiled["prefill bf16"].count("HGMMA") >= 16, "Hopper's prefill must use the warpgroup matrix unit"
    rows = compiled["prefill rows"]
    assert rows.registers <= 128, "two programs must fit on a multiprocessor"
    assert rows.shared <= 227 * 1024 // 2
    assert rows.count("UTMALDG") >= 8
    assert compiled["norm int8 group"].count("LDG.E.128") >= 2


def test_a_row_costs_one_reduction(compiled):
    """At one token a norm's time is its barriers and its latest read."""
    for name, barriers in (("norm fp8", 2), ("norm int8 token", 2), ("norm int8 group", 4), ("silu int8 group", 2)):
        assert compiled[name].count("BAR") <= barriers, name
        assert "L" not in compiled[name].order.partition("B")[2], name


def test_no_prefill_overwrites_an_operand_that_is_read():
    """Probabilities, and an 8-bit cache's keys, are operands in registers: every tile of every kind of cache."""
    jobs = {}
    for kind, element in (("bf16", 2), ("fp8e4nv", 1), ("i8", 1)):
        for head_dim in (64, 128, 256):
            for config in attention_prefill.candidates(head_dim, 4, element, H200):
                scales = UNSCALED if element == 2 else {}
                sizes = {"HEAD_DIM": head_dim, "BLOCK_D": head_dim, "ROWS": config["ROWS"], "TILE": config["TILE"]}
                jobs[f"{kind} {head_dim} {config}"] = job(
                    attention_prefill.prefill_kernel, 90, HEAD | NO_ROWS | scales | sizes, num_warps=config.num_warps,
                    num_stages=config.num_stages, k_ptr=f"*{kind}", v_ptr=f"*{kind}", out_ptr="*bf16")
    found = dict(zip(jobs, compile_jobs(list(jobs.values()), workers=2), strict=True))
    assert {name: facts for name, facts in found.items() if isinstance(facts, str)} == {}
    assert {name: facts.overwritten for name, facts in found.items() if facts.overwritten} == {}
    assert sum(facts.count("HGMMA") > 0 for facts in found.values()) > len(found) // 2


def decode_jobs(head_dim, gqa, *, first=False):
    """Every config that an engine may take for decode attention (or the ``first`` of each list), by what it is."""
    jobs, live = {}, next_pow2(gqa)
    for kind, element in (("bf16", 2), ("fp8e4nv", 1)):
        lists = [attention_decode.candidates(head_dim, 16, element, H200, batch=batch) for batch in (1, 8)]
        lists.append(attention_decode.long_candidates(head_dim, element, H200))
        configs = [config for candidates in lists for config in candidates[:1 if first else None]]
        for config in configs:
            warps, fused = config.num_warps, bool(config["FUSED"])
            sizes = {"HEAD_DIM": head_dim, "BLOCK_D": next_pow2(head_dim), "GQA": gqa, "LIVE2": live,
                     "TILE": config["TILE"], "THREADS": 32 * warps,
                     **attention_decode.merge_options(gqa, next_pow2(head_dim), warps)}
            sizes |= {"ROWS": max(16, live)} if fused else {"ROWS": max(8 if element == 1 else 16, live),
                                                            "TAIL": element == 1 or bool(config["TAIL"])}
            jobs[f"{kind} {head_dim} {gqa} {config}"] = job(
                attention_rope.rope_decode_kernel if fused else attention_decode.decode_kernel, 90,
                (ROPE if fused else DECODE) | sizes | (UNSCALED if element == 2 else {}), num_warps=warps,
                num_stages=config.num_stages, k_ptr=f"*{kind}", v_ptr=f"*{kind}", out_ptr="*bf16")
    return jobs


def test_no_decode_config_spills():
    """All of the commonest shape, and what is taken untimed of others (tuning drops what is slow)."""
    jobs = decode_jobs(128, 4)
    for head_dim, gqa in ((64, 1), (64, 3), (128, 2), (128, 8)):
        jobs |= decode_jobs(head_dim, gqa, first=True)
    found = dict(zip(jobs, compile_jobs(list(jobs.values()), workers=2), strict=True))
    assert {name: facts for name, facts in found.items() if isinstance(facts, str)} == {}
    assert {name: (facts.spills, facts.stack) for name, facts in found.items() if facts.spills or facts.stack} == {}
    assert {name: facts.overwritten for name, facts in found.items() if facts.overwritten} == {}

"""What the compiler makes of the 4-bit kernels, with no GPU: 16-byte loads, matrix instructions, no spills when hot."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engines.kernels.linear.int4_dot import int4_dot
from engines.kernels.linear.int4_dot16 import int8_group_widen
from engines.kernels.linear.int4_mma import int4_mma
from engines.kernels.offline import CompileJob, KernelFacts, compile_jobs


def mma_job(capability: int, *, a8: bool, warps: int = 8, **meta: Any) -> CompileJob:
    constants: dict[str, Any] = {"K": 4096, "GROUP": 128, "UNIT": 4, "RT": 1, "NT": 1, "STAGED": 1, "FP16": False,
                                 "SCALE": 1, "LOOP": False, "HAS_BIAS": False, **meta, "A8": a8, "NUM_WARPS": warps,
                                 "PDL": capability >= 90}
    x = "i8" if a8 else "fp16" if constants["FP16"] else "bf16"
    types = {"x_ptr": f"*{x}", "xs_ptr": "*fp32", "w_ptr": "*i32", "s_ptr": "*fp16", "bias_ptr": "*bf16",
             "y_ptr": "*bf16", "m": "i32", "n": "i32", "programs": "i32"}
    return CompileJob.of(int4_mma, types, constants, capability=capability, num_warps=warps, pdl=capability >= 90)


def dot_job(capability: int, *, a8: bool = False, fold: bool = False, flip: bool = False, x_scales: bool = False,
            block_m: int = 64, split: int = 2) -> CompileJob:
    constants = {"K": 4096, "GROUP": 128, "BLOCK_M": block_m, "BLOCK_N": 128, "BLOCK_K": 128, "SPLIT_K": split,
                 "FOLD": fold, "STAGES": 3, "PER_LOAD": 4, "A8": a8, "FLIP": flip, "X_SCALES": x_scales, "WIDE": False,
                 "HAS_BIAS": False, "PDL": capability >= 90}
    types = {"x_ptr": "*i8" if a8 else "*bf16", "xs_ptr": "*fp32", "w_ptr": "*i32", "s_ptr": "*fp16",
             "bias_ptr": "*bf16", "y_ptr": "*bf16", "partial_ptr": "*fp32", "ticket_ptr": "*i32", "m": "i32",
             "n": "i32"}
    return CompileJob.of(int4_dot, types, constants, capability=capability, aligned=("n",), num_warps=8, num_stages=3,
                         pdl=capability >= 90)


def dot16_job(capability: int, fold: int = 0) -> CompileJob:
    """``int4_dot`` as ``int4_dot16`` launches it, with the tile for 128 tokens."""
    return dot_job(capability, fold=fold == 1, flip=True, x_scales=fold == 0, block_m=128, split=1)


def widen_job(capability: int, fold: bool) -> CompileJob:
    constants = {"K": 4096, "GROUP": 128, "BLOCK": 2048, "FOLD": fold, "PDL": capability >= 90}
    types = {"x_ptr": "*i8", "xs_ptr": "*fp32", "wide_ptr": "*bf16", "scales_ptr": "*fp32", "stride": "i32"}
    return CompileJob.of(int8_group_widen, types, constants, capability=capability, pdl=capability >= 90)


JOBS = {
    "a16": mma_job(90, a8=False), "a8": mma_job(90, a8=True), "a16 down": mma_job(90, a8=False, UNIT=2, K=14336),
    "a16 two token tiles": mma_job(90, a8=False, NT=2, STAGED=0), "a16 fp16 sm_80": mma_job(80, a8=False, FP16=True),
    "a8 sm_89": mma_job(89, a8=True), "a16 sm_100": mma_job(100, a8=False),
    "a8 group 64": mma_job(90, a8=True, GROUP=64),
    "dot a16": dot_job(90, a8=False), "dot a8": dot_job(90, a8=True), "dot fold": dot_job(90, a8=False, fold=True),
    "dot a16 128": dot_job(90, block_m=128, split=1), "dot a8 128": dot_job(90, a8=True, block_m=128, split=1),
    **{f"dot16 sm_{c}": dot16_job(c) for c in (80, 89, 90, 100)}, "dot16 both": dot16_job(90, 1),
    "dot16 x": dot16_job(90, 2), "widen": widen_job(90, False), "widen x": widen_job(90, True),
}


_LAUNCHES = """
import torch
from engines.kernels.compile_ahead import collect
from engines.kernels.impl import DeviceFacts, LinearShape
from engines.kernels.linear.int4_a8 import Int4A8
from engines.kernels.offline import compile_only

impl, h200 = Int4A8(), DeviceFacts("NVIDIA H200", 90, 132, 232448, 60 << 20)
for n, k, group in ((48, 576, 64), (4096, 4096, 128)):
    packed = impl.pack(torch.zeros(n, k, dtype=torch.int8), torch.ones(n, k // group))
    for config in impl.candidates(LinearShape(128, n, k, group), h200):
        workspace = torch.zeros(impl.workspace_bytes(LinearShape(128, n, k, group), config) + 16, dtype=torch.uint8)
        with compile_only(90), collect() as found:
            for m in (1, 16, 17, 64, 65, 100, 112, 128):
                impl.launch(torch.zeros(m, k, dtype=torch.int8), packed, config, torch.empty(m, n).bfloat16(),
                            x_scale=torch.ones(m, k // group), workspace=workspace)
        assert len(found) == (2 if config.kernel == "dot16" else 1), (config, sorted(found))
print("all alike")
"""


def test_no_number_of_tokens_brings_a_variant_of_its_own():
    root = Path(__file__).parents[2]
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(root), *filter(None, [environment.get("PYTHONPATH")])])
    done = subprocess.run([sys.executable, "-c", _LAUNCHES], capture_output=True, text=True, env=environment,
                          check=False)
    assert done.stdout == "all alike\n", done.stderr[-2000:]


@pytest.fixture(scope="module")
def facts() -> dict[str, KernelFacts]:
    answers = compile_jobs(list(JOBS.values()))
    failed = [answer for answer in answers if isinstance(answer, str)]
    assert not failed, failed
    return {name: answer for name, answer in zip(JOBS, answers, strict=True) if not isinstance(answer, str)}


def test_hot_kernels_do_not_spill(facts):
    # ptxas parks one address of the A8 kernel in local memory to stay at 80 registers: stored once, loaded once
    assert {name: f.spills for name, f in facts.items() if f.spills > (2 if name.startswith("a8") else 0)} == {}


def test_no_operand_is_overwritten_while_it_is_read(facts):
    assert {name: f.overwritten for name, f in facts.items() if f.overwritten} == {}


def test_weights_come_in_sixteen_byte_loads(facts):
    for name, per_run in (("a16", 8), ("a8", 8), ("a16 sm_100", 8), ("a16 fp16 sm_80", 8), ("a8 group 64", 8)):
        assert facts[name].count("LDG.E.128.STRONG.GPU") == per_run, (name, facts[name].opcodes)

def test_activations_are_staged_not_gathered(facts):
    # 256 threads bring in 4096 inputs: two 16-byte loads each (A8: one, and one for the scales); the rest is shared
    for name, loads in (("a16", 2), ("a8", 2)):
        total = facts[name].count("LDG.E")
        assert total <= facts[name].count("LDG.E.128.STRONG.GPU") + 1 + loads, (name, facts[name].opcodes)
        assert facts[name].count("LDS") + facts[name].count("LDSM") >= 8, name



def test_widening_takes_few_instructions(facts):
    words = 4 * 8
    widen = sum(facts["a16"].count(op) for op in ("SHF", "LOP3", "HFMA2"))
    assert widen <= 13 * words, facts["a16"].opcodes
    widen = sum(facts["a8"].count(op) for op in ("SHF", "LOP3", "IMAD.SHL"))
    assert widen <= 5 * words, facts["a8"].opcodes


def test_matrix_instructions_are_the_fast_ones(facts):
    assert facts["a16"].count("HMMA.16816.F32.BF16") == 32
    assert facts["a8"].count("IMMA.16832.S8.S8") == 16
    assert facts["a16 two token tiles"].count("HMMA.16816.F32.BF16") == 64
    assert facts["dot a16"].count("HGMMA") > 0
    # weights go from their words into the registers of the instruction: only the end (split-K, and turning the result)
    # stores to shared memory
    assert facts["dot a16"].count("STS") <= 21
    assert facts["dot fold"].count("HGMMA") > 0
    assert facts["dot a8"].count("IGMMA") > 0


def test_widened_weights_stay_in_registers(facts):
    """No program stores to shared memory but for the result's change of layout, which all have alike."""
    stores = {name: (facts[name].count("STS"), facts[name].count("STSM")) for name in facts
              if name in ("dot a16 128", "dot a8 128", "dot16 sm_90", "dot16 both", "dot16 x")}
    assert len(stores) == 5
    assert set(stores.values()) == {(0, facts["dot a16 128"].count("STSM"))}, stores
    assert all(facts[name].count("HGMMA") == 8 for name in ("dot16 sm_90", "dot16 both", "dot16 x"))
    assert facts["dot16 sm_80"].count("HMMA.16816.F32.BF16") == facts["dot16 sm_89"].count("HMMA.16816.F32.BF16") == 128


def test_token_scales_are_copied_once_a_thread(facts):
    """Two copies before the loop and one in it; a thread that copied all its columns' had 96."""
    for name in ("dot a8", "dot a8 128", "dot16 sm_90"):
        assert facts[name].opcodes["LDGSTS.E"] == 3, (name, facts[name].opcodes)
    assert "LDGSTS.E" not in facts["dot16 x"].opcodes


def test_results_leave_in_sixteen_byte_stores(facts):
    """As far as the compiler knows that rows of the output begin at multiples of 16 bytes: n must tell it."""
    for name in ("dot a16", "dot a16 128", "dot a8 128", "dot16 sm_90", "dot16 x", "dot fold"):
        assert facts[name].count("STG.E.U16") == 0, (name, facts[name].opcodes)
        assert facts[name].count("STG.E.128") >= 4, name


def test_widened_activations_leave_in_sixteen_byte_stores(facts):
    for name in ("widen", "widen x"):
        assert facts[name].count("STG.E.128") == 2, (name, facts[name].opcodes)
        assert facts[name].count("STS") == 0, name


def test_dependent_launch_is_compiled_in_on_hopper_only(facts):
    assert facts["a16"].count("ACQBULK") == facts["a16"].count("PREEXIT") == 1
    assert facts["a8 sm_89"].count("ACQBULK") == 0
    assert facts["widen"].count("ACQBULK") == facts["dot16 sm_90"].count("ACQBULK") == 1

"""The hot linear kernels compiled for GPUs that are not here: the instructions meant, no spills, no narrow loads."""

from __future__ import annotations

import pytest

from engines.kernels.impl import KernelConfig, LinearShape
from engines.kernels.linear.bf16 import Bf16Linear
from engines.kernels.linear.fp8 import Fp8Linear
from engines.kernels.linear.fp8_block import BLOCK, Fp8BlockLinear
from engines.kernels.linear.int8 import Int8Linear
from engines.kernels.linear.natural import NaturalLinear
from engines.kernels.linear.weight_only import Fp8WeightOnlyLinear, Int8WeightOnlyLinear
from engines.kernels.offline import KernelFacts, compile_jobs
from tests.kernels.linear_cases import A100, H200, L40
from tests.kernels.linear_jobs import job

BF16, FP8, INT8, WEIGHT_ONLY = Bf16Linear(), Fp8Linear(), Int8Linear(), Int8WeightOnlyLinear()
FP8_WEIGHT, FP8_BLOCK = Fp8WeightOnlyLinear(), Fp8BlockLinear()
DEVICES = {80: A100, 89: L40, 90: H200}


def _first(impl: NaturalLinear, kernel: str, m: int, capability: int) -> KernelConfig:
    group = BLOCK if impl is FP8_BLOCK else 0
    found = impl.candidates(LinearShape(m, 4096, 4096, group), DEVICES[min(capability, 90)])
    name, _, flat = kernel.partition(", ")
    return next(config for config in found if config.kernel == name and config.get("FLAT") == bool(flat))


VARIANTS = {  # name -> (impl, kernel, tokens, capability)
    "gemv bf16": (BF16, "gemv", 1, 90),
    "gemv fp8": (FP8, "gemv", 1, 90),
    "gemv int8": (INT8, "gemv", 1, 90),
    "gemv bf16 gated": (BF16, "gemv", 1, 90),
    "gemv fp8 gated": (FP8, "gemv", 1, 90),
    "gemv int8 gated": (INT8, "gemv", 1, 90),
    "gemv int8 weight": (WEIGHT_ONLY, "gemv", 1, 90),
    "dot bf16": (BF16, "dot", 16, 90),
    "dot fp8": (FP8, "dot", 16, 90),
    "dot int8": (INT8, "dot", 64, 90),
    "dot int8 weight": (WEIGHT_ONLY, "dot", 16, 90),
    "dot fp8 weight": (FP8_WEIGHT, "dot", 16, 90),
    "dot fp8 block": (FP8_BLOCK, "dot", 16, 90),
    "dot fp8 block, 256 tokens": (FP8_BLOCK, "dot", 256, 90),
    "dot fp8 block sm_89": (FP8_BLOCK, "dot", 16, 89),
    "dot fp8 block sm_100": (FP8_BLOCK, "dot", 64, 100),
    "mm int8": (INT8, "mm", 2048, 90),
    "mm int8 gated": (INT8, "mm", 2048, 90),
    "mm fp8 gated": (FP8, "mm", 2048, 90),
    "mm bf16 gated": (BF16, "mm", 2048, 90),
    "mm int8 flat": (INT8, "mm, flat", 2048, 90),
    "mm fp8 flat, gated": (FP8, "mm, flat", 2048, 90),
    "mm bf16 flat, gated": (BF16, "mm, flat", 2048, 90),
    "gemv int8 sm_80": (INT8, "gemv", 1, 80),
    "dot bf16 sm_80": (BF16, "dot", 16, 80),
    "gemv fp8 sm_89": (FP8, "gemv", 1, 89),
    "gemv bf16 sm_100": (BF16, "gemv", 1, 100),
    "mm int8 sm_100": (INT8, "mm", 2048, 100),
}


@pytest.fixture(scope="module")
def compiled() -> dict[str, KernelFacts]:
    jobs = [job(impl, _first(impl, kernel, m, capability), capability, gated=name.endswith("gated"),
                out="fp8e4nv" if "fp8" in name and name.endswith("gated") else "bf16")
            for name, (impl, kernel, m, capability) in VARIANTS.items()]
    found = compile_jobs(jobs)
    for name, facts in zip(VARIANTS, found, strict=True):
        assert isinstance(facts, KernelFacts), f"{name}: {facts}"
    return {name: facts for name, facts in zip(VARIANTS, found, strict=True) if isinstance(facts, KernelFacts)}


def test_nothing_spills(compiled: dict[str, KernelFacts]) -> None:
    assert {name: facts.spills for name, facts in compiled.items() if facts.spills} == {}
    assert {name: facts.stack for name, facts in compiled.items() if facts.stack} == {}


def test_no_operand_is_overwritten_while_it_is_read(compiled: dict[str, KernelFacts]) -> None:
    """All candidates that widen codes in registers, and the representatives of the others."""
    shape = {m: LinearShape(m, 4096, 4096) for m in (16, 64, 256)}
    jobs = {f"{impl.name} {config}": job(impl, config) for impl in (WEIGHT_ONLY, FP8_WEIGHT) for m in shape
            for config in impl.candidates(shape[m], H200) if config.kernel == "dot"}
    found = dict(zip(jobs, compile_jobs(list(jobs.values())), strict=True))
    assert not [facts for facts in found.values() if isinstance(facts, str)]
    both = {name: facts.overwritten for name, facts in {**found, **compiled}.items() if isinstance(facts, KernelFacts)}
    assert {name: its for name, its in both.items() if its} == {}


def test_gemv_loads_sixteen_bytes_and_multiplies_as_meant(compiled: dict[str, KernelFacts]) -> None:
    for name, facts in compiled.items():
        if name.startswith("gemv"):
            assert facts.count("LDG.E.128") >= 3, name
            assert facts.count("LDG.E.64") == 0, name
            assert facts.registers <= 136, name
    assert compiled["gemv int8"].count("IDP") > 0
    assert compiled["gemv int8 sm_80"].count("IDP") > 0
    assert compiled["gemv fp8"].count("HFMA2") > 0
    assert compiled["gemv int8 weight"].count("I2F") == 0


def test_dot_and_mm_use_warpgroup_instructions_and_tma(compiled: dict[str, KernelFacts]) -> None:
    for name, instruction in (("dot bf16", "HGMMA"), ("dot fp8", "QGMMA"), ("dot int8", "IGMMA"),
                              ("dot fp8 weight", "HGMMA"), ("dot fp8 block", "QGMMA"),
                              ("dot fp8 block, 256 tokens", "QGMMA"),
                              ("dot int8 weight", "HGMMA"), ("mm int8", "IGMMA")):
        assert compiled[name].count(instruction) > 0, name
        assert compiled[name].count("UTMALDG") > 0, name
    assert compiled["mm int8"].count("UTMASTG") > 0
    for name, instruction in (("mm int8 gated", "IGMMA"), ("mm fp8 gated", "QGMMA"), ("mm bf16 gated", "HGMMA")):
        assert compiled[name].count("UTMALDG.3D") > 0, name  # gate and up rows by one copy, for the same wide product
        assert compiled[name].count(instruction) <= compiled["mm int8"].count("IGMMA"), name
    assert compiled["dot bf16 sm_80"].count("HMMA") > 0


def test_scales_are_on_their_way_before_the_sums_are_done(compiled: dict[str, KernelFacts]) -> None:
    """Read where they are used, at the end, they come from memory while nothing else happens."""
    for name, facts in compiled.items():
        if name.startswith("gemv") and name != "gemv int8 weight":  # (that one's loop has barriers)
            assert "L" not in facts.order.partition("B")[2], name
        elif name.startswith("dot") and _first(*VARIANTS[name])["SPLIT_K"] == 1:  # (others read their partial sums)
            assert "L" not in facts.order.rpartition("M")[2], name
            assert "L" in facts.order.partition("W")[0] or VARIANTS[name][0] in (BF16, FP8_BLOCK), name


def test_programmatic_launch_is_in_the_code_on_hopper_only(compiled: dict[str, KernelFacts]) -> None:
    for name, facts in compiled.items():
        assert (facts.count("ACQBULK") > 0) == (VARIANTS[name][3] >= 90), name


def test_a_failure_is_told_per_variant() -> None:
    bad = job(FP8, _first(FP8, "dot", 16, 89), 80)
    good = job(INT8, _first(INT8, "gemv", 1, 80), 80)
    first, second = compile_jobs([bad, good])
    assert isinstance(first, str)
    assert "fp8e4nv" in first
    assert isinstance(second, KernelFacts)
    assert second.capability == 80

"""Parts that families need: compiled tanh and its kin, unfused programs, what rewrites make of them, rope tables."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from numba import njit

from benchmarks.family_logits import engine_logits
from benchmarks.tiny_families import FAMILIES, ORIGINAL, make, prompts
from calib.checkpoint import QuantizedCheckpoint
from engines.build.builder import plan_for
from engines.build.fuse import fuse
from engines.build.weights import Weights, write_weights
from engines.kernels.cpu.native import norms
from engines.models.decoder import decoder_program
from engines.models.rope import RopeFacts, cosines_and_sines, frequencies
from engines.plan import EngineSpec, KernelChoice, Plan, linear_shape
from engines.program import AddNorm, Attention, HeadNorm, Program, RMSNorm, RopeKV, SoftCap, Split
from engines.runtime.cpu import CpuBackend


@njit
def _tanh_all(x, y):
    for i in range(x.size):
        y[i] = norms.tanh(x[i])


def test_compiled_tanh() -> None:
    x = np.concatenate([np.linspace(-12, 12, 40001), np.geomspace(1e-30, 1, 2000), [0.0, -0.0]]).astype(np.float32)
    y = np.empty_like(x)
    _tanh_all(x, y)
    exact = np.tanh(x.astype(np.float64))
    assert np.abs(y - exact).max() < 1e-7
    inside = np.abs(x) > 0
    assert np.abs(y[inside] / exact[inside] - 1).max() < 4e-7
    _tanh_all(np.array([np.nan, -np.inf, np.inf], np.float32), y)
    assert np.isnan(y[0])
    assert (y[1], y[2]) == (-1.0, 1.0)


def test_compiled_gelu_and_softcap_equal_torch() -> None:
    x = torch.randn(2, 777, generator=torch.Generator().manual_seed(0)) * 4
    y = np.empty(777, np.float32)
    norms.gelu_row(x[0].numpy(), x[1].numpy(), y)
    wanted = torch.nn.functional.gelu(x[0], approximate="tanh") * x[1]
    assert np.abs(y - wanted.numpy()).max() < 2e-6 * float(wanted.abs().max())
    norms.cap_row(x[0].numpy(), 3.0, y)
    assert np.abs(y - (3 * torch.tanh(x[0] / 3)).numpy()).max() < 1e-6


def unfused(folder: Path) -> tuple[Plan, Program]:
    """A folder's plan, and its program before any rewrite."""
    plan, _ = plan_for(QuantizedCheckpoint.open(folder), EngineSpec(tune="none", block_size=4))
    return plan, decoder_program(plan.model, {}, {})


@pytest.mark.parametrize("name", ["Qwen3", "Gemma 2", "Gemma 3", "Phi-4-mini"])
def test_unfused_programs_give_the_same_logits(tmp_path: Path, name: str) -> None:
    folder = make(tmp_path / "model", FAMILIES[name], seed=2)
    plan, program = unfused(folder)
    checkpoint = QuantizedCheckpoint.open(folder)
    texts, following = prompts([2, 40, 70], seed=3), prompts([3] * 3, seed=4)
    found = []
    for index, chosen in enumerate((program, plan.program)):
        kernels = [KernelChoice(op="linear", shape=linear_shape(op), max_tokens=64, impl="float").model_dump()
                   for op in chosen.linears()]
        work = tmp_path / str(index)
        write_weights(checkpoint.tensors(), chosen, plan.kv, work)
        backend = CpuBackend(Plan.model_validate(plan.model_dump() | {"program": chosen.model_dump(),
                                                                      "kernels": kernels}),
                             Weights(sorted(work.glob("*.safetensors"))))
        found.append(engine_logits(backend, texts, following, 1000))
    assert (found[0] - found[1]).abs().max() < 2e-5 * found[0].abs().max()


def test_rewrites_take_in_what_families_add(tmp_path: Path) -> None:
    def kinds(name: str) -> tuple[Program, Program]:
        _, program = unfused(make(tmp_path / name, FAMILIES[name]))
        return program, fuse(program)[0]

    def count(program: Program, kind: type) -> int:
        return sum(isinstance(op, kind) for op in program.ops)

    before, after = kinds("Gemma 3")
    assert (count(before, HeadNorm), count(before, RMSNorm)) == (8, 4 * 4 + 1)
    assert (count(after, HeadNorm), count(after, RopeKV), count(after, AddNorm)) == (0, 4, 2 * 4 - 1)
    ropes = [op for op in after.ops if isinstance(op, RopeKV)]
    assert [op.local for op in ropes] == [True, True, False, True]
    assert all(op.norms is not None and op.norms.offset == 1.0 for op in ropes)
    windows = [op.window for op in after.ops if isinstance(op, Attention)]
    assert windows == [24, 24, 0, 24]
    assert isinstance(after.ops[-1], SoftCap)
    phi, fused = kinds("Phi-3")
    assert count(phi, Split) == 8
    assert count(fused, Split) == 0
    assert [len(op.parts) for op in fused.linears()] == [1] * len(fused.linears())


def test_rope_tables() -> None:
    """The short set up to the original context, the long one beyond; the last position of a text for dynamic."""
    long = RopeFacts(kind="longrope", theta=1e4, original=ORIGINAL, factor=4.0, attention_factor=1.5,
                     short_factor=(1.0, 1.0), long_factor=(2.0, 4.0))
    assert torch.equal(frequencies(long, 4, ORIGINAL), torch.tensor([1.0, 0.01]))
    assert torch.allclose(frequencies(long, 4, ORIGINAL + 1), torch.tensor([0.5, 0.0025]))
    cos, sin = cosines_and_sines(long, 4, 8)
    assert torch.allclose(cos.square() + sin.square(), torch.full((8, 2), 2.25))
    dynamic = RopeFacts(kind="dynamic", theta=1e4, factor=2.0, original=ORIGINAL)
    rows = frequencies(dynamic, 8, ORIGINAL + 2)
    assert (rows[:ORIGINAL] == rows[0]).all()
    assert (rows[ORIGINAL, 1:] < rows[0, 1:]).all()
    assert (rows[ORIGINAL + 1, 1:] < rows[ORIGINAL, 1:]).all()
    assert (dynamic.longest(ORIGINAL), long.longest(256)) == (2 * ORIGINAL, 256)

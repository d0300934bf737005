"""Each rewrite gives the same logits, bit for bit, and does what it says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from memory_checkpoint import FP8, INT4, INT8, MemoryCheckpoint
from tiny_models import tiny_llama

from calib.scheme import BF16, Scheme
from engines.build.builder import plan_for
from engines.build.fuse import (
    REWRITES,
    fuse,
    fuse_add_norm,
    fuse_quantize,
    fuse_rope_kv,
    fuse_silu,
    stack_linears,
)
from engines.build.weights import Weights, activation_keys, write_weights
from engines.models.decoder import decoder_program
from engines.models.families import model_facts
from engines.plan import EngineSpec, KernelChoice, Plan, linear_shape
from engines.program import AddNorm, GatedSilu, Linear, Program, Quantize, RopeKV, Split
from engines.runtime.batch import Batch
from engines.runtime.cpu import CpuBackend

SCHEMES = {"bf16": Scheme(), "int8": INT8, "fp8": FP8, "int4": INT4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("fuse") / "model", attention_bias=True)


def unfused(checkpoint: MemoryCheckpoint) -> Program:
    keys = activation_keys(checkpoint.tensors(), checkpoint.schemes)
    return decoder_program(model_facts(checkpoint.config), checkpoint.schemes, keys)


def logits(checkpoint: MemoryCheckpoint, program: Program, folder: Path) -> torch.Tensor:
    """Logits of a prefill of 9 tokens and a decode step after it, by the program as given."""
    base, _ = plan_for(checkpoint, EngineSpec(tune="none"))  # type: ignore[arg-type]
    kernels = tuple(KernelChoice(op="linear", shape=linear_shape(op), max_tokens=64, impl="float")
                    for op in program.linears())
    plan = Plan.model_validate(base.model_dump() | {"program": program.model_dump(),
                                                    "kernels": [kernel.model_dump() for kernel in kernels]})
    write_weights(checkpoint.tensors(), program, checkpoint.kv, folder)
    with torch.inference_mode():
        backend = CpuBackend(plan, Weights(sorted(folder.glob("*.safetensors"))))
        out = []
        for first, count in ((0, 9), (9, 1)):
            at = torch.arange(first, first + count)
            context = backend.context(Batch(at + 3, at, at, None, [[0]], [first + count], [count]))
            out.append(backend.head(backend.body(context), context))
    return torch.cat(out)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_every_rewrite_keeps_the_logits(folder: Path, tmp_path: Path, scheme: str) -> None:
    checkpoint = MemoryCheckpoint.of(folder, SCHEMES[scheme]) if scheme != "bf16" else MemoryCheckpoint.of(
        folder, Scheme())
    if scheme == "bf16":
        checkpoint.schemes.clear()
    program = unfused(checkpoint)
    expected = logits(checkpoint, program, tmp_path / "unfused")
    assert torch.isfinite(expected).all()
    for rewrite in REWRITES:
        program = rewrite(program)
        program.check()
        found = logits(checkpoint, program, tmp_path / rewrite.__name__)
        # a stacked matmul may block its sums otherwise; everything else is the same arithmetic
        assert torch.allclose(found, expected, rtol=0, atol=2e-5 * float(expected.abs().max())), rewrite.__name__


def count(program: Program, kind: type) -> int:
    return sum(isinstance(op, kind) for op in program.ops)


def test_rewrites_do_what_their_names_say(folder: Path) -> None:
    program = unfused(MemoryCheckpoint.of(folder, INT8))
    assert (count(program, Linear), count(program, Quantize)) == (3 * 7 + 1, 3 * 4)
    stacked = stack_linears(program)
    assert (count(stacked, Linear), count(stacked, Split)) == (3 * 4 + 1, 3 * 2)
    roped = fuse_rope_kv(stacked)
    assert (count(roped, RopeKV), count(roped, Split)) == (3, 3)
    gated = fuse_silu(roped)
    assert (count(gated, GatedSilu), count(gated, Split)) == (3, 0)
    added = fuse_add_norm(gated)
    assert count(added, AddNorm) == 3 * 2 - 1  # the first norm has no residual; the last waits for row selection
    assert count(fuse_quantize(added), Quantize) == 3  # attention's rows only


def test_fuse_reports_each_step(folder: Path) -> None:
    program, steps = fuse(unfused(MemoryCheckpoint.of(folder, INT8)))
    assert [step.rewrite for step in steps] == [rewrite.__name__ for rewrite in REWRITES]
    assert all(step.ops_after < step.ops_before for step in steps)
    assert steps[-1].ops_after == len(program.ops)
    assert len(program.ops) == 10 * 3 + 5


def test_different_activation_scales_never_stack(folder: Path) -> None:
    name = "model.layers.1.self_attn.k_proj.input_scale"
    checkpoint = MemoryCheckpoint.of(folder, FP8, extra={name: torch.tensor(0.5)})
    parts = [op.parts for op in stack_linears(unfused(checkpoint)).linears()]
    base = "model.layers.{}.self_attn.{}_proj"
    assert tuple(base.format(0, part) for part in "qkv") in parts
    assert (base.format(1, "k"),) in parts


@pytest.mark.parametrize("rewrite", REWRITES, ids=lambda rewrite: rewrite.__name__)
def test_rewrites_leave_a_rewritten_program_alone(folder: Path, rewrite: Callable[[Program], Program]) -> None:
    program, _ = fuse(unfused(MemoryCheckpoint.of(folder, INT8)))
    assert rewrite(program) == program


def test_a_program_that_reads_too_early_is_refused() -> None:
    with pytest.raises(ValueError, match="before it is written"):
        Program(ops=(Linear(x="nothing", parts=("a",), rows=(4,), k=4, weight=BF16, out="y"),)).check()

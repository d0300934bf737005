"""build: a QuantizedCheckpoint and an EngineSpec become an Engine on disk.

    facts and schemes -> Program -> fuse -> tune (which operator) -> Plan -> weights (renamed, fused, packed) -> Engine

Everything that can be refused is refused before the first weight is read; and since config.json and schemes are enough
for it, also before a checkpoint is there: ``check_runs`` says what no limits can mend, ``foresee`` what a build with
these limits on this device would say.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from pydantic import Field

from calib.artifact_writer import ArtifactWriter
from calib.head import check_tied
from calib.progress import Progress, Report, silent
from calib.scheme import Frozen, Grid, Scheme
from calib.text import Tokenizer, check_vocabulary
from engines.build.impls import check_schemes
from engines.build.room import check_room
from engines.build.weights import Pack, activation_keys, pack_portable, write_weights
from engines.device import Device, detect
from engines.engine import FORMAT, KIND, TIMINGS, TOKENIZER, Engine, EngineRecord
from engines.models.decoder import ActivationKeys
from engines.models.families import model_facts
from engines.parallel.mesh import Mesh
from engines.plan import EngineSpec, Plan, check_spec, check_step, fused_program, make_plan
from engines.program import Program


class Described(Protocol):
    """What a plan needs to know of a checkpoint, weights aside."""

    @property
    def schemes(self) -> dict[str, Scheme]: ...
    @property
    def kv(self) -> Grid: ...
    @property
    def config(self) -> dict[str, Any]: ...
    def tokenizer(self) -> Tokenizer: ...


class Source(Described, Protocol):
    """What a build needs of a checkpoint (``QuantizedCheckpoint`` has it)."""

    @property
    def recipe(self) -> str: ...
    @property
    def source_grid(self) -> str | None: ...
    @property
    def digest(self) -> str: ...
    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]: ...


class BuildEvidence(Frozen):
    """What was measured while building: kept beside the plan, outside the digest."""

    seconds: float
    tuning: tuple[Frozen, ...] = Field(description="Timing (CPU) or GpuTiming records")
    prepared: str | None = Field(default=None, description="digest of the prepared engine that it was finished from")

    def to_json(self) -> dict[str, Any]:
        origin = {} if self.prepared is None else {"prepared": self.prepared}
        return {"seconds": self.seconds, "tuning": [timing.model_dump(mode="json") for timing in self.tuning]} | origin


def is_emulated(schemes: dict[str, Scheme], kv: Grid, device: Device) -> bool:
    """fp8 has no arithmetic on a CPU: its codes are widened to float32."""
    if device.kind == "cuda":
        return False
    grids = [kv, *(scheme.weight for scheme in schemes.values()),
             *(scheme.activation for scheme in schemes.values() if scheme.activation)]
    return any(grid.dtype == "fp8_e4m3" for grid in grids)


def check_runs(config: Mapping[str, Any], schemes: Mapping[str, Scheme], kv: Grid, device: Device) -> None:
    """EngineError where no engine on a device of that kind runs a model in these schemes, whatever its limits."""
    check_schemes(schemes, kv, "cuda" if device.runs_triton else "cpu")
    program = fused_program(config, schemes, activation_keys((), schemes))[2]
    if device.runs_triton:
        from engines.build.plan_gpu import check_linears  # Triton is an optional dependency

        check_linears(program, device)


def foresee(checkpoint: Described, spec: EngineSpec) -> None:
    """Whatever ``build`` would refuse here, of a checkpoint whose weights need not be there yet.

    Static activation scales, which nobody knows yet, are taken as equal: they decide what is stacked, not what runs.
    """
    device = detect(spec.device)
    check_runs(checkpoint.config, checkpoint.schemes, checkpoint.kv, device)
    plan_on(device, checkpoint, activation_keys((), checkpoint.schemes), spec.model_copy(update={"tune": "none"}))


def plan_for(checkpoint: Source, spec: EngineSpec, tuning: Path | None = None, report: Report = silent
             ) -> tuple[Plan, tuple[Frozen, ...]]:
    """The Plan of a checkpoint for this machine, and the timings behind it. Nothing is written but the tuning cache."""
    device = detect(spec.device)
    check_runs(checkpoint.config, checkpoint.schemes, checkpoint.kv, device)
    return plan_on(device, checkpoint, activation_keys(checkpoint.tensors(), checkpoint.schemes), spec, tuning, report)


def plan_on(device: Device, checkpoint: Described, keys: ActivationKeys, spec: EngineSpec, tuning: Path | None = None,
            report: Report = silent) -> tuple[Plan, tuple[Frozen, ...]]:
    """The Plan for a device that is here, of a checkpoint whose ``keys`` (``weights.activation_keys``) are known."""
    program = checked_program(checkpoint, keys, spec)
    check_room(spec, model_facts(checkpoint.config), checkpoint.kv, device, program)
    if device.runs_triton:
        # Here and below: Triton and Numba are each imported where their device is asked for; neither is needed for the
        # other, and a GPU machine may have no Numba.
        from engines.build.choose_gpu import choose_gpu

        return choose_gpu(checkpoint.config, checkpoint.schemes, checkpoint.kv, spec, device, keys, tuning, report)
    from engines.build.tune import tune

    check_spec(spec)
    kernels, timings = tune(program, device, spec.tune, spec.max_num_tokens, tuning, report, spec.deterministic)
    plan = make_plan(checkpoint.config, checkpoint.schemes, checkpoint.kv, spec, device, keys, kernels)
    return plan, tuple(timings)


def checked_program(checkpoint: Described, keys: ActivationKeys, spec: EngineSpec) -> Program:
    """The fused program; refused when the tokenizer or the spec's lengths do not go with the model."""
    facts, _, program, _ = fused_program(checkpoint.config, checkpoint.schemes, keys)
    check_vocabulary(checkpoint.tokenizer(), facts.vocab_size)
    check_step(spec, facts)
    return program


def packer_of(device: Device) -> Pack:
    """How a linear's parts become what that kind of device reads."""
    if not device.runs_triton:
        return pack_portable
    from engines.build.pack_gpu import pack_gpu

    return pack_gpu


def compile_kernels(plan: Plan, weights: Path, report: Report) -> None:
    """On a GPU: every kernel variant that the engine will reach."""
    if plan.device.runs_triton:
        from engines.runtime.cuda.warm import compile_plan

        report(Progress("compile", 0, 1, "kernels"))
        count = compile_plan(plan, weights)
        report(Progress("compile", 1, 1, "kernels", f"{count} variants"))


def build(checkpoint: Source, spec: EngineSpec, out: Path | str, report: Report = silent, *,
          tuning: Path | None = None) -> Engine:
    """Build an engine for this machine at ``out``. ``tuning`` is the folder of tuning caches (None: no cache).

    EngineError, ArtifactError or CalibError says what cannot be done; nothing half-written is left.
    """
    started = time.monotonic()
    place = ArtifactWriter(out, KIND, FORMAT, [checkpoint.digest])
    place.refuse_place()
    check_tied(checkpoint.config, checkpoint.tensors())
    plan, timings = plan_for(checkpoint, spec, tuning, report)
    record = EngineRecord(plan=plan, recipe=checkpoint.recipe, source_grid=checkpoint.source_grid,
                          emulated=is_emulated(checkpoint.schemes, checkpoint.kv, plan.device), spec=spec)
    with place as writer:
        writer.record = record.model_dump(mode="json")
        report(Progress("pack weights", 0, 1, "model"))
        write_weights(checkpoint.tensors(), plan.program, plan.kv,
                      writer.folder / Mesh.single(plan.tp, plan.pp).folder, packer_of(plan.device))
        report(Progress("pack weights", 1, 1, "model"))
        compile_kernels(plan, writer.folder / Mesh.single(plan.tp, plan.pp).folder, report)
        (writer.folder / TOKENIZER).mkdir()
        checkpoint.tokenizer().save(writer.folder / TOKENIZER)
        evidence = BuildEvidence(seconds=time.monotonic() - started, tuning=timings)
        writer.evidence(TIMINGS).write_text(json.dumps(evidence.to_json(), indent=1))
    return Engine.open(out)

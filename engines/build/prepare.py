"""Preparing an engine for a device that is not here: its weights now, its kernels there.

What a build does falls in two. Fusing, stacking and packing follow from the checkpoint and the kind of device alone (an
Impl's layout is the same on all cards), and they need the checkpoint; choosing kernels needs the device itself. So

    prepare   anywhere   refusals for the target, fused program, packed weights, tokenizer -> a ``prepared-engine``
    finish    there      tune, plan, compile; the weights are taken as they are            -> an ``engine``

What the digests cover. A prepared engine's: checkpoint, target, spec, fused program and every byte of weights and
tokenizer; all of them are hashed again before anything is finished. The finished engine's: what an engine's always
covers, and nothing of how it came about, so ``build`` there, of the same checkpoint and with the same kernels chosen,
has the same digest. It is that digest which verdicts, approvals and signatures name; a prepared engine has none of them
and cannot be released. Which one an engine was finished from is said in its evidence (``timings.json``).

The finished engine's weights are hard links to the prepared ones where the file system has them: they take their room
once. Finishing writes a folder beside its place and renames it last; killed before that, it is done again.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import model_validator

from calib.artifact import Artifact
from calib.artifact_writer import ArtifactWriter
from calib.head import check_tied
from calib.progress import Progress, Report, silent
from calib.scheme import Frozen, Grid, Scheme
from calib.text import Tokenizer
from engines.build.builder import (
    BuildEvidence,
    Described,
    Source,
    check_runs,
    checked_program,
    compile_kernels,
    is_emulated,
    packer_of,
    plan_on,
)
from engines.build.room import check_room
from engines.build.weights import activation_keys, write_weights
from engines.device import Device, NoDeviceError, detect, nominal
from engines.engine import FORMAT as ENGINE_FORMAT
from engines.engine import KIND as ENGINE_KIND
from engines.engine import TIMINGS, TOKENIZER, Engine, EngineRecord, record_of
from engines.errors import EngineError, EngineMismatchError
from engines.models.decoder import ActivationKeys
from engines.models.families import model_facts
from engines.parallel.mesh import Mesh
from engines.plan import EngineSpec, check_spec
from engines.program import Program

KIND = "prepared-engine"
FORMAT = ENGINE_FORMAT  # weights lie as in an engine, so they are readable as long as an engine's are


class PreparedRecord(Frozen):
    """All that a build knows before it sees its device. ``target``: cpu, a GPU's sm_80, sm_90, ..., or interpreter
    (tests only: Triton's, as in ``engines/device.py``)."""

    target: str
    spec: EngineSpec
    program: Program
    config: dict[str, Any]
    schemes: dict[str, Scheme]
    kv: Grid
    activation_keys: dict[str, str]
    recipe: str
    source_grid: str | None

    @model_validator(mode="after")
    def _of_one_device(self) -> PreparedRecord:
        if self.spec.device != ("cuda" if self.target.startswith("sm_") else self.target):
            raise ValueError(f"it was prepared for {self.target}, and its spec is for {self.spec.device}")
        return self


@dataclass(frozen=True, slots=True)
class Prepared:
    """An opened prepared engine. It is what ``builder.plan_on`` wants to know of a checkpoint, too."""

    artifact: Artifact
    record: PreparedRecord

    @classmethod
    def open(cls, path: Path | str) -> Prepared:
        """ArtifactError for a damaged folder, EngineError for a record that cannot be read."""
        artifact = Artifact.open(path, KIND, FORMAT)
        return cls(artifact, record_of(artifact, PreparedRecord, "Prepare it again."))

    @property
    def schemes(self) -> dict[str, Scheme]:
        return self.record.schemes

    @property
    def kv(self) -> Grid:
        return self.record.kv

    @property
    def config(self) -> dict[str, Any]:
        return self.record.config

    def tokenizer(self) -> Tokenizer:
        return Tokenizer.open(self.artifact.path / TOKENIZER)


def _target_program(checkpoint: Described, keys: ActivationKeys, spec: EngineSpec, device: Device) -> Program:
    """The fused program; refused where such a device cannot take it."""
    program = checked_program(checkpoint, keys, spec)
    if device.runs_triton:
        from engines.build.plan_gpu import check_gpu, check_linears  # Triton is an optional dependency

        check_gpu(spec, checkpoint.schemes, checkpoint.kv, device)
        check_linears(program, device)
    else:
        check_spec(spec)
    check_room(spec, model_facts(checkpoint.config), checkpoint.kv, device, program, here=False)
    return program


def foresee(checkpoint: Described, spec: EngineSpec, target: str) -> None:
    """Whatever ``prepare`` would refuse, of a checkpoint whose weights need not be there yet."""
    device = nominal(target)
    check_runs(checkpoint.config, checkpoint.schemes, checkpoint.kv, device)
    _target_program(checkpoint, activation_keys((), checkpoint.schemes),
                    spec.model_copy(update={"device": device.kind}), device)


def prepare(checkpoint: Source, spec: EngineSpec, target: str, out: Path | str, report: Report = silent) -> Prepared:
    """Pack a checkpoint for ``target`` at ``out``. EngineError says what no such device can do; nothing is timed."""
    device = nominal(target)
    place = ArtifactWriter(out, KIND, FORMAT, [checkpoint.digest])
    place.refuse_place()
    spec = spec.model_copy(update={"device": device.kind})
    check_runs(checkpoint.config, checkpoint.schemes, checkpoint.kv, device)
    check_tied(checkpoint.config, checkpoint.tensors())
    keys = activation_keys(checkpoint.tensors(), checkpoint.schemes)
    program = _target_program(checkpoint, keys, spec, device)
    record = PreparedRecord(target=target, spec=spec, program=program, config=checkpoint.config,
                            schemes=checkpoint.schemes, kv=checkpoint.kv, activation_keys=keys,
                            recipe=checkpoint.recipe, source_grid=checkpoint.source_grid)
    with place as writer:
        writer.record = record.model_dump(mode="json")
        report(Progress("pack weights", 0, 1, "model"))
        write_weights(checkpoint.tensors(), program, checkpoint.kv,
                      writer.folder / Mesh.single(spec.tp, spec.pp).folder, packer_of(device))
        report(Progress("pack weights", 1, 1, "model"))
        (writer.folder / TOKENIZER).mkdir()
        checkpoint.tokenizer().save(writer.folder / TOKENIZER)
    return Prepared.open(out)


def device_here(prepared: Prepared) -> Device:
    """This machine's device of the prepared kind; EngineMismatchError in one sentence when it is another one."""
    target, path = prepared.record.target, prepared.artifact.path
    checkpoint = prepared.artifact.parents[0][:12]
    try:
        here = detect(prepared.record.spec.device)
    except NoDeviceError as error:
        raise EngineMismatchError(f"{path} was prepared for {target}, and {error.message}",
                                  f"Open it there, or build for this device: toolkit build {checkpoint} --out DIR"
                                  ) from error
    if here.kind == "cuda" and here.isa != target:
        raise EngineMismatchError(f"{path} was prepared for {target}, and this is {here}",
                                  f"Prepare it for this one: toolkit build {checkpoint} --target {here.isa} --out DIR")
    return here


def finish(prepared: Prepared, out: Path | str, report: Report = silent, *, tuning: Path | None = None) -> Engine:
    """Tune and plan a prepared engine for this machine's device, and write the engine at ``out``.

    EngineMismatchError where it was not prepared for, ArtifactError for changed files, EngineError as for ``build``.
    """
    started = time.monotonic()
    record, device = prepared.record, device_here(prepared)
    place = ArtifactWriter(out, ENGINE_KIND, ENGINE_FORMAT, prepared.artifact.parents)
    place.refuse_place()
    if changed := prepared.artifact.verify():
        raise EngineError(f"{prepared.artifact.path / changed[0]} was changed after it was made", "Prepare it again.")
    plan, timings = plan_on(device, prepared, record.activation_keys, record.spec, tuning, report)
    if plan.program != record.program:
        raise EngineError(f"{prepared.artifact.path} was packed for another fused program than this version's",
                          "Prepare it again with this version of the toolkit.")
    with place as writer:
        writer.record = EngineRecord(plan=plan, recipe=record.recipe, source_grid=record.source_grid, spec=record.spec,
                                     emulated=is_emulated(record.schemes, record.kv, device)).model_dump(mode="json")
        for name in prepared.artifact.manifest.files:
            _place(prepared.artifact.file(name), writer.folder / name)
        compile_kernels(plan, writer.folder / Mesh.single(plan.tp, plan.pp).folder, report)
        evidence = BuildEvidence(seconds=time.monotonic() - started, tuning=timings, prepared=prepared.artifact.digest)
        writer.evidence(TIMINGS).write_text(json.dumps(evidence.to_json(), indent=1))
    return Engine.open(out)


def _place(source: Path, place: Path) -> None:
    """A hard link, or a copy on another file system."""
    place.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, place)
    except OSError:
        shutil.copyfile(source, place)

"""Engine: the artifact that is built for one device. Opened elsewhere it refuses in one sentence.

    manifest.json          kind engine; record = EngineRecord (plan, recipe, spec); parents = [checkpoint digest]
    weights/rank0/*.safetensors   packed once at build time, one file a layer; opening maps them
    tokenizer/             the tokenizer's files
    timings.json           evidence: what tuning measured
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from calib.artifact import Artifact
from calib.scheme import Frozen, Grid
from calib.text import Tokenizer
from engines.build.weights import Weights
from engines.device import detect
from engines.errors import EngineError, EngineMismatchError
from engines.parallel.mesh import Mesh
from engines.plan import EngineSpec, Plan

KIND = "engine"
FORMAT = 2
TOKENIZER = "tokenizer"
TIMINGS = "timings.json"


class EngineRecord(Frozen):
    """The engine's own content in its manifest."""

    plan: Plan
    spec: EngineSpec
    recipe: str
    source_grid: str | None
    emulated: bool


Record = TypeVar("Record", bound=Frozen)


def record_of(artifact: Artifact, form: type[Record], hint: str) -> Record:
    """An artifact's own content. EngineError, with ``hint``, when it names no parent or cannot be read."""
    if not artifact.parents:
        raise EngineError(f"{artifact.path} does not say which checkpoint it was made from", hint)
    try:
        return form.model_validate(artifact.record)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise EngineError(f"{artifact.path} has a record that cannot be read: {place}: {first['msg']}", hint) from error


@dataclass(frozen=True, slots=True)
class Engine:
    """An opened engine. Opening checks the manifest, the device, torch's version and the files; it reads no weight."""

    artifact: Artifact
    record: EngineRecord

    @classmethod
    def open(cls, path: Path | str) -> Engine:
        """ArtifactError for a damaged folder; EngineMismatchError where it was not built for."""
        artifact = Artifact.open(path, KIND, FORMAT)
        engine = cls(artifact, record_of(artifact, EngineRecord, "Build it again."))
        engine._check_program()
        engine._check_device()
        return engine

    def _check_program(self) -> None:
        """A plan of parts that do not belong together would be an index out of range somewhere in a step."""
        layers = {op.layer for op in self.plan.program.ops if op.op == "attention"}
        if layers != set(range(self.plan.model.num_layers)):
            raise EngineError(f"{self.path} has a plan for {self.plan.model.num_layers} layers whose program has "
                              f"{len(layers)}", "Build it again.")

    def _check_device(self) -> None:
        built, here = self.plan.device, detect(self.plan.device.kind)
        if built != here:
            raise EngineMismatchError(
                f"{self.path} was built for {built}, and this is {here}",
                f"Rebuild it here: toolkit build {self.checkpoint_digest[:12]} --out DIR")

    @property
    def path(self) -> Path:
        return self.artifact.path

    @property
    def digest(self) -> str:
        return self.artifact.digest

    @property
    def plan(self) -> Plan:
        return self.record.plan

    @property
    def recipe(self) -> str:
        return self.record.recipe

    @property
    def kv(self) -> Grid:
        return self.plan.kv

    @property
    def device(self) -> str:
        """The device's name, as rows and reports print it."""
        return self.plan.device.name if self.plan.device.kind != "cpu" else f"cpu {self.plan.device.name}"

    @property
    def emulated(self) -> bool:
        """Whether the codes have no arithmetic of their own here (fp8 on a CPU)."""
        return self.record.emulated

    @property
    def checkpoint_digest(self) -> str:
        return self.artifact.parents[0]

    @property
    def source_grid(self) -> str | None:
        return self.record.source_grid

    @property
    def size_bytes(self) -> int:
        return self.artifact.size_bytes

    def timings(self) -> dict[str, Any]:
        """Evidence: seconds of the build and what tuning measured."""
        return json.loads(self.artifact.file(TIMINGS).read_text())

    def tokenizer(self) -> Tokenizer:
        """ArtifactError when a file of it was changed after the build."""
        self.artifact.check(self._files_of(TOKENIZER))
        return Tokenizer.open(self.path / TOKENIZER)

    def weights(self) -> Weights:
        """This rank's mapped weights, hashed before: ArtifactError when a byte was changed after the build."""
        names = self._files_of(Mesh.single(self.plan.tp, self.plan.pp).folder)
        self.artifact.check(names)
        return Weights(self.path / name for name in names)

    def _files_of(self, folder: str) -> list[str]:
        return [name for name in self.artifact.manifest.files if name.startswith(f"{folder}/")]

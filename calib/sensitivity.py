"""What each layer costs in each format: one layer at a time, as data for a heat map.

Two figures, from the unquantized model in float32 on the same packed texts:

    delta NLL, KL    decoder layer i alone is rounded to a format (weights and activations by the recipe's grids), the
                     rest stays: nats per token above the unquantized model, and KL(unquantized || rounded)
    SQNR             10 log10(|y|^2 / |y - y'|^2) of an output y on its real inputs, y' with weights and inputs
                     rounded, for each linear and for each layer as a whole (its place in the residual stream): how much
                     signal is left, before the rest of the model forgives or amplifies it

Layer i's inputs are those of the unquantized model, so a measurement starts at layer i and runs to the end: half the
work on average. Scales are amax/max: no smoothing, no AWQ, no clipping. So these figures *rank* layers; what a recipe
makes of them is measured by ``evals``. A static activation scale is the amax of the very texts that are measured.

The record lies in an artifact's manifest (kind ``sensitivity``). Rows of text are journalled: a killed run goes on.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import Field, ValidationError

from calib.artifact import Artifact, canonical_json, installed_versions, sha256_hex
from calib.artifact_writer import ArtifactWriter
from calib.checkpoint import QuantizedCheckpoint
from calib.dataset import pack_texts
from calib.errors import ArtifactError, CalibError
from calib.kept import read_kept, write_kept
from calib.model import load_hf
from calib.plan import make_plan
from calib.progress import Report, silent
from calib.recipe import load_recipe
from calib.scheme import Frozen
from calib.sensitivity_probe import Probe
from calib.source import resolve_model

KIND, FORMAT = "sensitivity", 1


class LayerLoss(Frozen):
    """One decoder layer in one format. Nats per token; SQNR of the layer's output in dB (None: no noise at all)."""

    layer: int = Field(ge=0)
    format: str
    delta_nll: float
    kl: float
    sqnr_db: float | None


class LayerFacts(Frozen):
    """``amax``: the largest magnitude that enters a linear of the layer; ``parameters``: of its linears."""

    layer: int = Field(ge=0)
    amax: float
    parameters: int = Field(ge=1)


class ModuleNoise(Frozen):
    """One linear in one format: signal to quantization noise of its output, in dB (None: no noise at all)."""

    layer: int = Field(ge=0)
    module: str
    format: str
    sqnr_db: float | None


class Sensitivity(Frozen):
    """``losses``: layers x formats; ``modules``: linears x formats; ``nll`` of the unquantized model, nats a token."""

    model: str
    source: str
    formats: tuple[str, ...]
    layers: int
    tokens: int
    texts_sha256: str
    nll: float
    losses: tuple[LayerLoss, ...]
    facts: tuple[LayerFacts, ...]
    modules: tuple[ModuleNoise, ...]


def measure(model: str | Path, texts: Sequence[str], out: Path, *, formats: Sequence[str] = ("fp8", "int8", "int4_awq"),
            rows: int = 4, length: int = 256, report: Report = silent, offline: bool = False) -> Sensitivity:
    """Measure ``rows`` x ``length`` tokens of ``texts`` and write the artifact at ``out``.

    ``formats`` are recipes. CalibError for one that quantizes nothing, or texts that do not fill a row.
    """
    folder = resolve_model(model, offline=offline)
    source = QuantizedCheckpoint.open(folder)
    schemes = {name: make_plan(folder, load_recipe(name), length=length).schemes for name in formats}
    if empty := [name for name, found in schemes.items() if not found]:
        raise CalibError(f"recipe {empty[0]} quantizes nothing", "Ask for formats that do.")
    tokens = pack_texts(texts, source.tokenizer(), length, rows)
    work = out.absolute().with_name(f".{out.name}.work")
    digest = sha256_hex(canonical_json(list(texts)))
    key = sha256_hex(canonical_json({"source": source.digest, "texts": digest, "rows": tokens.tolist(), "schemes": {
        name: {module: scheme.model_dump(mode="json") for module, scheme in found.items()}
        for name, found in schemes.items()}, "versions": installed_versions()}))
    probe = Probe(load_hf(folder), folder, source.config, schemes)
    sums = _Sums.load(work / "sums.json", key)
    for row in range(sums.rows, len(tokens)):
        sums = sums.plus(probe.row(tokens[row:row + 1], row, len(tokens), report))
        sums.save(work / "sums.json", key)
    record = _record(str(folder.name), source.digest, tuple(formats), probe, sums, digest)
    with ArtifactWriter(out, KIND, FORMAT, [source.digest]) as writer:
        writer.record = record.model_dump(mode="json")
    shutil.rmtree(work, ignore_errors=True)
    return record


def open_sensitivity(path: Path | str) -> Sensitivity:
    """ArtifactError when the folder holds none."""
    artifact = Artifact.open(path, KIND, FORMAT)
    try:
        return Sensitivity.model_validate(artifact.record)
    except ValidationError as error:
        raise ArtifactError(f"{path} does not hold a sensitivity record: {error.errors()[0]['msg']}",
                            "Measure it again with this version.") from error


class _Sums:
    """Sums over finished rows by name: ``loss <layer> <format>``, ``kl ...``, ``signal|noise <module or layer>
    <format>``; of ``amax <layer>`` the largest."""

    def __init__(self, rows: int = 0, values: Mapping[str, float] | None = None) -> None:
        self.rows, self.values = rows, dict(values or {})

    @classmethod
    def load(cls, path: Path, key: str) -> _Sums:
        held = read_kept(path, key)
        return cls(held["rows"], held["sums"]) if held else cls()

    def save(self, path: Path, key: str) -> None:
        write_kept(path, key, {"rows": self.rows, "sums": self.values})

    def plus(self, found: Mapping[str, float]) -> _Sums:
        added = {name: max(self.values.get(name, 0.0), value) if name.startswith("amax ") else
                 self.values.get(name, 0.0) + value for name, value in found.items()}
        return _Sums(self.rows + 1, added)


def _record(model: str, source: str, formats: tuple[str, ...], probe: Probe, sums: _Sums, texts: str
            ) -> Sensitivity:
    values, tokens = sums.values, int(sums.values["tokens"])
    losses = [LayerLoss(layer=layer, format=form, delta_nll=values[f"loss {layer} {form}"] / tokens,
                        kl=values[f"kl {layer} {form}"] / tokens,
                        sqnr_db=sqnr_db(values[f"signal {layer} {form}"], values[f"noise {layer} {form}"]))
              for layer in range(len(probe.layers)) for form in formats]
    facts = [LayerFacts(layer=layer, amax=values[f"amax {layer}"],
                        parameters=sum(probe.weight(name).numel() for name in names))
             for layer, names in enumerate(probe.linears)]
    modules = [ModuleNoise(layer=layer, module=name, format=form, sqnr_db=sqnr_db(
        values[f"signal {name} {form}"], values[f"noise {name} {form}"]))
        for layer, names in enumerate(probe.linears) for name in names for form in formats
        if f"signal {name} {form}" in values]
    if not all(math.isfinite(loss.delta_nll) and math.isfinite(loss.kl) for loss in losses):
        raise CalibError("a loss is not finite", "The model gives NaN on these texts; verify its weights.")
    return Sensitivity(model=model, source=source, formats=formats, layers=len(probe.layers), tokens=tokens,
                       texts_sha256=texts, nll=values["loss"] / tokens, losses=tuple(losses),
                       facts=tuple(facts), modules=tuple(modules))


def sqnr_db(signal: float, noise: float) -> float | None:
    """10 log10(signal / noise) of summed squares; None without noise (or without a signal)."""
    return 10.0 * math.log10(signal / noise) if noise > 0.0 and signal > 0.0 else None

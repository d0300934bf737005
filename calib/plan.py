"""The dry run: everything that can be known before a single weight is touched.

Which modules are matched and which are left and why; whether the group size divides; tied embeddings; the memory, disk
and time it will take; and which runtimes will load the result. Late failure is the field's most frequent complaint:
most of it is visible in config.json and the safetensors headers, which is all that is read here.
"""

from __future__ import annotations

import fnmatch
import math
from pathlib import Path
from typing import Any, Literal

from calib.checkpoint import QuantizedCheckpoint
from calib.errors import ENVIRONMENT, CalibError
from calib.estimates import MIB, Loader, free_bytes, loaders, memory_bytes, seconds
from calib.formats.hf import MissingWeightsError
from calib.layers import Family, attention_modules, family_of, planned_linears, scale_shape
from calib.model import resolve_model, source_grid_of
from calib.recipe import LayoutName, Recipe
from calib.scheme import BF16, BITS, Frozen, Grid, Scheme
from calib.text import Tokenizer, check_vocabulary

KvChoice = Literal["bf16", "fp8"]
KV_GRIDS: dict[str, Grid] = {"bf16": BF16, "fp8": Grid(dtype="fp8_e4m3")}
#: Modules that no recipe touches, and why.
_LEFT = {"lm_head": "output head: few runtimes load it quantized, and its error goes straight into the logits",
         "model.embed_tokens": "embedding: a lookup, nothing is multiplied",
         "model.norm": "norm"}


class DiskSpaceError(CalibError):
    """The result would not fit on the disk."""

    code = "disk_space"
    exit_code = ENVIRONMENT


class ModulePlan(Frozen):
    """One weight matrix: its shape [out, in], and the scheme it gets, or the reason it is left in bf16."""

    name: str
    shape: tuple[int, int]
    scheme: Scheme | None
    reason: str = ""


class CalibrationPlan(Frozen):
    """What ``quantize`` is going to do. Bytes and seconds are estimates; the rest is exact."""

    model: str
    architecture: str
    recipe: Recipe
    kv: Grid
    group_size: int | None
    num_layers: int
    modules: tuple[ModulePlan, ...]
    attentions: tuple[str, ...]
    tied_embeddings: bool
    parameters: int
    source_grid: str | None
    layout: LayoutName
    size_bytes: int
    bf16_bytes: int
    memory_bytes: int
    disk_free_bytes: int | None
    seconds: float
    loaders: tuple[Loader, ...]
    warnings: tuple[str, ...]

    @property
    def schemes(self) -> dict[str, Scheme]:
        """Module name -> Scheme of every matched module."""
        return {module.name: module.scheme for module in self.modules if module.scheme is not None}

    @property
    def left(self) -> dict[str, str]:
        """Module name -> why it stays in bf16."""
        return {module.name: module.reason for module in self.modules if module.scheme is None}


def make_plan(model: str | Path, recipe: Recipe, kv_cache: KvChoice = "bf16", *, out: Path | None = None,
              length: int = 256, offline: bool = False) -> CalibrationPlan:
    """Plan ``recipe`` for a model. Nothing is written; no weight is read.

    CalibError: an unsupported architecture (with the supported ones), a group size that fits nothing (with the module),
    a pattern of ``keep`` that matches nothing, weights that are missing or already quantized, another model's
    tokenizer. ``out`` adds the free disk space; ``length`` is the calibration rows' length in tokens.
    """
    folder = resolve_model(model, offline=offline)
    source = QuantizedCheckpoint.open(folder)
    if source.schemes:
        raise CalibError(f"{folder} is already quantized ({source.recipe})", "Give the unquantized model.")
    config = source.config
    family = family_of(config, str(folder))
    check_vocabulary(Tokenizer.open(folder), config["vocab_size"])
    shapes = _linear_shapes(source, family)
    group = _group_size(recipe, shapes)
    kv = _kv_grid(kv_cache)
    modules = (*_matched(recipe, shapes, group, kv), *_others(source, config))
    _check_fused(family, modules, config["num_hidden_layers"])
    layout: LayoutName = "compressed-tensors" if recipe.method == "none" and kv.quantized else recipe.layout
    tied = bool(config.get("tie_word_embeddings", False))
    size = _result_bytes(source, modules, tied)
    parameters = sum(math.prod(meta.shape) for meta in source.shards.values())
    grid = source_grid_of(folder)
    return CalibrationPlan(
        model=str(model), architecture=config["architectures"][0], recipe=recipe, kv=kv, group_size=group,
        num_layers=config["num_hidden_layers"], modules=modules, tied_embeddings=tied, parameters=parameters,
        attentions=tuple(attention_modules(family, config["num_hidden_layers"])), source_grid=grid, layout=layout,
        size_bytes=size, bf16_bytes=2 * parameters, disk_free_bytes=None if out is None else free_bytes(out),
        memory_bytes=memory_bytes(config, parameters, recipe, length),
        loaders=loaders(layout, next((module.scheme.weight.dtype for module in modules if module.scheme), "bf16")),
        seconds=seconds(shapes, parameters, recipe, kv, length, config["num_hidden_layers"]),
        warnings=_warnings(recipe, group, grid))


def check_disk(plan: CalibrationPlan) -> None:
    """DiskSpaceError when the result would not fit (a hundredth is added for headers and rounding)."""
    needed = int(plan.size_bytes * 1.01) + 16 * MIB
    if plan.disk_free_bytes is not None and plan.disk_free_bytes < needed:
        raise DiskSpaceError(f"the checkpoint needs {needed // MIB} MiB, {plan.disk_free_bytes // MIB} MiB are free",
                             "Free disk space or choose another folder.")


def _kv_grid(choice: str) -> Grid:
    if choice not in KV_GRIDS:
        raise CalibError(f"unknown KV cache {choice!r}", f"Known: {', '.join(KV_GRIDS)}.")
    return KV_GRIDS[choice]


def _linear_shapes(source: QuantizedCheckpoint, family: Family) -> dict[str, tuple[int, int]]:
    shapes = {}
    for name in planned_linears(family, source.config["num_hidden_layers"]):
        meta = source.shards.get(f"{name}.weight")
        if meta is None:
            raise MissingWeightsError(f"{source.path} has no tensor {name}.weight", "The checkpoint is incomplete.")
        shapes[name] = (meta.shape[0], meta.shape[1])
    return shapes


def _kept(recipe: Recipe, names: list[str]) -> dict[str, str]:
    """Module -> the pattern of ``keep`` that matched it. A pattern without effect is an error."""
    kept: dict[str, str] = {}
    for pattern in recipe.keep:
        hits = fnmatch.filter(names, pattern)
        if not hits:
            raise CalibError(f"recipe {recipe.name}: keep pattern {pattern!r} matches no module",
                             f"Modules are named like {names[0]}.")
        kept |= dict.fromkeys(hits, pattern)
    return kept


def _group_size(recipe: Recipe, shapes: dict[str, tuple[int, int]]) -> int | None:
    """The first group size that divides every matched module's input."""
    if not recipe.group_sizes:
        return None
    kept = _kept(recipe, list(shapes))
    matched = {name: shape for name, shape in shapes.items() if name not in kept}
    for size in recipe.group_sizes:
        if all(columns % size == 0 for _, columns in matched.values()):
            return size
    name, (_, columns) = next(item for item in matched.items() if item[1][1] % recipe.group_sizes[-1])
    raise CalibError(f"no group size of {', '.join(map(str, recipe.group_sizes))} divides every input: {name} has "
                     f"{columns} inputs", "Add a smaller size to group_sizes, or put the module on keep.")


def _matched(recipe: Recipe, shapes: dict[str, tuple[int, int]], group: int | None, kv: Grid) -> list[ModulePlan]:
    kept = _kept(recipe, list(shapes))
    if len(kept) == len(shapes):
        raise CalibError(f"recipe {recipe.name} keeps every module in bf16", "Use the recipe bf16 for that.")
    plans = []
    for name, shape in shapes.items():
        if recipe.method == "none":
            plans.append(ModulePlan(name=name, shape=shape, scheme=None, reason=f"recipe {recipe.name} leaves weights"))
        elif name in kept:
            plans.append(ModulePlan(name=name, shape=shape, scheme=None, reason=f"keep pattern {kept[name]!r}"))
        else:
            folded = recipe.method != "awq_lite" or not name.endswith(("o_proj", "down_proj"))
            plans.append(ModulePlan(name=name, shape=shape, scheme=Scheme(
                weight=recipe.weight_grid(group), activation=recipe.activation, kv=kv, pre_quant_scale=not folded)))
    odd = next((plan for plan in plans if plan.scheme and plan.shape[0] % 2), None)
    if odd is not None and recipe.weight.dtype == "int4":
        raise CalibError(f"{odd.name} has {odd.shape[0]} outputs; int4 codes are packed in pairs of outputs",
                         "Put the module on keep.")
    return plans


def _check_fused(family: Family, modules: tuple[ModulePlan, ...], num_layers: int) -> None:
    """Readers of one input (q, k, v; gate, up) become one matrix in an engine, so they share a fate."""
    schemes = {module.name: module.scheme is None for module in modules}
    for layer in range(num_layers):
        for names in family.fused:
            members = [f"{family.layers}.{layer}.{name}" for name in names]
            if len({schemes[member] for member in members}) > 1:
                left = next(member for member in members if schemes[member])
                raise CalibError(f"{left} is kept in bf16, the others that read its input are not",
                                 f"Keep all of {', '.join(names)} or none.")


def _others(source: QuantizedCheckpoint, config: dict[str, Any]) -> list[ModulePlan]:
    """Matrices outside the decoder layers."""
    found = []
    for name in source.shards:
        module = name.removesuffix(".weight")
        if module in _LEFT and len(source.shards[name].shape) == 2:
            shape = source.shards[name].shape
            found.append(ModulePlan(name=module, shape=(shape[0], shape[1]), scheme=None, reason=_LEFT[module]))
    if config.get("tie_word_embeddings") and not any(module.name == "lm_head" for module in found):
        shape = (config["vocab_size"], config["hidden_size"])
        found.append(ModulePlan(name="lm_head", shape=shape, scheme=None, reason="tied: it is the embedding's matrix"))
    return found


def _result_bytes(source: QuantizedCheckpoint, modules: tuple[ModulePlan, ...], tied: bool) -> int:
    schemes = {module.name: module for module in modules if module.scheme is not None}
    total = 0
    for name, meta in source.shards.items():
        module = schemes.get(name.removesuffix(".weight"))
        if name == "lm_head.weight" and tied:
            continue
        if module is None or module.scheme is None:
            total += 2 * math.prod(meta.shape)
            continue
        grid = module.scheme.weight
        total += math.prod(meta.shape) * BITS[grid.dtype] // 8 + 4 * math.prod(scale_shape(grid, module.shape))
        total += 2 * module.shape[1] if module.scheme.pre_quant_scale else 0
    return total


def _warnings(recipe: Recipe, group: int | None, source_grid: str | None) -> tuple[str, ...]:
    found = []
    if group is not None and group != recipe.group_sizes[0]:
        found.append(f"group size {group} instead of {recipe.group_sizes[0]}: it divides every input")
    if source_grid is not None:
        found.append(f"the weights were dequantized from {source_grid}: a grid like that one costs nothing on them, "
                     "so low-bit figures flatter")
    return tuple(found)

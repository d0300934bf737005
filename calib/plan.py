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
from calib.hardware import obstacle
from calib.head import HEAD
from calib.layers import Family, attention_modules, family_of, planned_linears
from calib.model import resolve_model, source_grid_of
from calib.recipe import LayoutName, Recipe
from calib.scheme import BF16, Frozen, Grid, Scheme
from calib.sizes import module_bytes
from calib.text import Tokenizer, check_vocabulary

KvChoice = Literal["bf16", "fp8", "int8"]
KV_GRIDS: dict[str, Grid] = {"bf16": BF16, "fp8": Grid(dtype="fp8_e4m3"), "int8": Grid(dtype="int8")}
#: Modules that no recipe touches, and why.
_LEFT = {HEAD: "output head: few runtimes load it quantized, and its error goes straight into the logits",
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
    def layer_schemes(self) -> dict[str, Scheme]:
        """``schemes`` without the output head, which no method but its own touches (``calib.head``)."""
        return {name: scheme for name, scheme in self.schemes.items() if name != HEAD}

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
    modules = (*_matched(recipe, shapes, group, kv), *_others(source, config, recipe, kv))
    _check_fused(family, modules, config["num_hidden_layers"])
    layout = _layout(recipe, kv)
    tied = bool(config.get("tie_word_embeddings", False))
    size = _result_bytes(source, modules, tied, layout)
    parameters = sum(math.prod(meta.shape) for meta in source.shards.values())
    grid = source_grid_of(folder)
    return CalibrationPlan(
        model=str(model), architecture=config["architectures"][0], recipe=recipe, kv=kv, group_size=group,
        num_layers=config["num_hidden_layers"], modules=modules, tied_embeddings=tied, parameters=parameters,
        attentions=tuple(attention_modules(family, config["num_hidden_layers"])), source_grid=grid, layout=layout,
        size_bytes=size, bf16_bytes=2 * parameters, disk_free_bytes=None if out is None else free_bytes(out),
        memory_bytes=memory_bytes(config, parameters, recipe, length),
        loaders=loaders(layout, next((module.scheme.weight.dtype for module in modules if module.scheme), "bf16"),
                        recipe.activation_grid(group)),
        seconds=seconds(shapes, parameters, recipe, kv, length, config["num_hidden_layers"]),
        warnings=_warnings(recipe, group, grid, modules, tied))


def check_disk(plan: CalibrationPlan) -> None:
    """DiskSpaceError when the result would not fit (a hundredth is added for headers and rounding)."""
    needed = int(plan.size_bytes * 1.01) + 16 * MIB
    if plan.disk_free_bytes is not None and plan.disk_free_bytes < needed:
        raise DiskSpaceError(f"the checkpoint needs {needed // MIB} MiB, {plan.disk_free_bytes // MIB} MiB are free",
                             "Free disk space or choose another folder.")


def _layout(recipe: Recipe, kv: Grid) -> LayoutName:
    """Layouts that have no word for a KV cache give way to compressed-tensors, which has."""
    return "compressed-tensors" if kv.quantized and recipe.layout in ("hf", "awq", "gptq") else recipe.layout


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


def _result_bytes(source: QuantizedCheckpoint, modules: tuple[ModulePlan, ...], tied: bool, layout: str) -> int:
    """A tied head has no tensor of its own, unless it is quantized: then there are two matrices."""
    schemes = {module.name: module for module in modules if module.scheme is not None}
    plain = sum(2 * math.prod(meta.shape) for name, meta in source.shards.items()
                if name.removesuffix(".weight") not in schemes and not (name == f"{HEAD}.weight" and tied))
    return plain + sum(module_bytes(layout, module.scheme, module.shape) for module in schemes.values()
                       if module.scheme is not None)


def _warnings(recipe: Recipe, group: int | None, source_grid: str | None, modules: tuple[ModulePlan, ...],
              tied: bool) -> tuple[str, ...]:
    found = []
    if reason := obstacle(recipe):
        found.append(f"it will be refused here: {reason}")
    head = next((module for module in modules if module.name == HEAD and module.scheme is not None), None)
    if head is not None and head.scheme is not None and tied:
        extra = module_bytes("compressed-tensors", head.scheme, head.shape)
        found.append(f"the head is untied from the embedding: the checkpoint grows by {extra / 1e6:.1f} MB, "
                     f"a decode step reads {2 * math.prod(head.shape) / 1e6 - extra / 1e6:.1f} MB less")
    if recipe.weight.granularity.kind == "block" and (odd := _not_whole_tiles(recipe, modules)):
        found.append(f"{odd} is not made of whole tiles: vLLM and SGLang refuse that, this toolkit loads it")
    if group is not None and group != recipe.group_sizes[0]:
        found.append(f"group size {group} instead of {recipe.group_sizes[0]}: it divides every input")
    if source_grid is not None:
        found.append(f"the weights were dequantized from {source_grid}: a grid like that one costs nothing on them, "
                     "so low-bit figures flatter")
    return tuple(found)


def _not_whole_tiles(recipe: Recipe, modules: tuple[ModulePlan, ...]) -> str:
    """The first module whose sides the blocks do not divide, with its shape; empty when there is none."""
    block = recipe.weight.granularity
    if block.kind != "block":
        return ""
    odd = next((module for module in modules if module.scheme is not None and module.name != HEAD and (
        module.shape[0] % block.rows or module.shape[1] % block.cols)), None)
    return "" if odd is None else f"{odd.name} {list(odd.shape)}"

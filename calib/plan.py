"""The dry run: everything that can be known before a single weight is touched.

Which modules are matched and which are left and why; whether groups divide, also over several devices; tied embeddings;
the bytes of the result, exactly; memory, and whether calibration goes layer by layer; and which runtimes will load the
result. Late failure is the field's most frequent complaint: most of it is visible in config.json and the safetensors
headers, which is all that is read here (config.json alone will do). Time is measured, by ``calib/rehearsal.py``.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal

from calib.choices import KvChoice
from calib.config import positions
from calib.coverage import ModulePlan, check_fused, check_protect, group_size_of, matched_modules, other_modules
from calib.dataset import check_row_length
from calib.errors import ENVIRONMENT, CalibError
from calib.estimates import MIB, Sizes, free_bytes, memory_bound, working_bytes
from calib.formats.hf import MissingWeightsError
from calib.hardware import obstacle
from calib.head import HEAD
from calib.layers import Family, attention_modules, family_of, is_tied, planned_linears
from calib.loaders import Loader, loaders
from calib.outline import Outline, outline_of
from calib.parallel import check_heads, check_modules
from calib.recipe import LayoutName, Recipe
from calib.scheme import BF16, Frozen, Grid, Scheme
from calib.sizes import files_bytes, module_bytes, stored_tensors
from calib.source import resolve_model, source_grid_of
from calib.text import Tokenizer, check_vocabulary

LayerwiseChoice = Literal["auto", "on", "off"]
#: Tokens of a calibration row where nothing else is said.
LENGTH = 256
KV_GRIDS: dict[str, Grid] = {"bf16": BF16, "fp8": Grid(dtype="fp8_e4m3"), "int8": Grid(dtype="int8")}


class DiskSpaceError(CalibError):
    """The result would not fit on the disk."""

    code = "disk_space"
    exit_code = ENVIRONMENT


class CalibrationPlan(Frozen):
    """What ``quantize`` is going to do.

    ``size_bytes`` is that of the weight files, exact (with ``protect`` the least: what stays in 16 bits comes on top);
    ``work_bytes`` what a layerwise run keeps beside them meanwhile. ``memory_bytes`` is the peak of anonymous memory
    without the libraries' own, and ``seconds`` is None, until a rehearsal has measured this machine. ``tp``: devices
    that the result is to be cut over.
    """

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
    tp: int
    weights_here: bool
    sizes: Sizes
    size_bytes: int
    work_bytes: int
    bf16_bytes: int
    layerwise: bool
    layerwise_reason: str
    memory_bytes: int
    memory_bound_bytes: int | None
    disk_free_bytes: int | None
    seconds: float | None
    loaders: tuple[Loader, ...]
    warnings: tuple[str, ...]

    @property
    def basis(self) -> str:
        """What the plan was made from."""
        return "config.json and the headers of the weight files" if self.weights_here else (
            "config.json alone: there are no weights here, and nothing says that there should be")

    @property
    def schemes(self) -> dict[str, Scheme]:
        """Module name -> Scheme of every matched module."""
        return {module.name: module.scheme for module in self.modules if module.scheme is not None}

    @property
    def layer_schemes(self) -> dict[str, Scheme]:
        """What the recipe's method rounds: ``schemes`` without the output head (``calib.head``) and raised modules."""
        return {name: scheme for name, scheme in self.schemes.items() if name not in (HEAD, *self.raised_schemes)}

    @property
    def raised_schemes(self) -> dict[str, Scheme]:
        """Modules with eight bits where the others have four, which no method touches (``calib.apart``)."""
        return {name: scheme for name, scheme in self.schemes.items()
                if self.recipe.raised and name != HEAD and scheme.weight.dtype != self.recipe.weight.dtype}

    @property
    def left(self) -> dict[str, str]:
        """Module name -> why it stays in bf16."""
        return {module.name: module.reason for module in self.modules if module.scheme is None}


def make_plan(model: str | Path, recipe: Recipe, kv_cache: KvChoice = "bf16", *, out: Path | None = None,
              length: int | None = None, offline: bool = False, tp: int = 1, layerwise: LayerwiseChoice = "auto",
              memory: int | None = None) -> CalibrationPlan:
    """Plan ``recipe`` for a model folder, with or without its weights. Nothing is written; no weight is read.

    ``out`` adds the free disk space; ``length`` is the calibration rows' length in tokens (by default 256, or all that
    the model has positions for); ``tp`` chooses a group size that can be cut over so many devices; above ``memory``
    bytes (by default a share of what is free) calibration goes layer by layer, unless ``layerwise`` says "on" or "off".
    CalibError: an unsupported architecture (with the supported ones), a group size that fits nothing (with the module),
    a pattern of ``keep`` that matches nothing, weights that are missing or already quantized, another model's
    tokenizer, a cut through a group (ShardingError), a recipe that cannot go layer by layer and was asked to, rows that
    are longer than the model has positions, ``protect`` that leaves no layer, ``rows`` or ``seed`` where nothing is
    calibrated on text.
    """
    _check_effect(recipe, kv_cache)
    folder = resolve_model(model, offline=offline)
    outline = outline_of(folder)
    config, layers = outline.config, int(outline.config["num_hidden_layers"])
    family = family_of(config, str(folder))
    if outline.weights:
        check_vocabulary(Tokenizer.open(folder), config["vocab_size"])
    check_heads(config, tp)
    shapes = _linear_shapes(outline, family)
    known = positions(config)
    if length is not None and recipe.needs_data(kv_cache):  # one that reads no text has no rows
        check_row_length(length, known)
    length = length or min(LENGTH, known or LENGTH)
    group, kv = group_size_of(recipe, shapes, tp), _kv_grid(kv_cache)
    modules = (*matched_modules(recipe, shapes, group, kv), *other_modules(outline.shapes, config, recipe, kv))
    check_protect(recipe, family, modules, layers)
    check_fused(family, modules, layers)
    check_modules(((one.name, one.shape, one.scheme) for one in modules if one.name in shapes), tp)
    layout, tied = _layout(recipe, kv), is_tied(config)
    attentions = tuple(attention_modules(family, layers))
    sizes = _sizes(outline, family, shapes, _result_bytes(outline, modules, tied, layout, attentions, kv))
    bound = memory_bound(memory)
    by_layer, reason = _by_layer(layerwise, recipe, kv, bound, working_bytes(sizes, recipe, length, layerwise=False))
    grid = source_grid_of(folder)
    return CalibrationPlan(
        model=str(model), architecture=config["architectures"][0], recipe=recipe, kv=kv, group_size=group,
        num_layers=layers, modules=modules, tied_embeddings=tied, parameters=sizes.parameters, attentions=attentions,
        source_grid=grid, layout=layout, tp=tp, weights_here=outline.weights, sizes=sizes,
        size_bytes=sizes.result_bytes, bf16_bytes=2 * sizes.parameters, layerwise=by_layer, layerwise_reason=reason,
        work_bytes=_work_bytes(sizes, recipe, length) if by_layer else 0,
        memory_bytes=working_bytes(sizes, recipe, length, layerwise=by_layer), memory_bound_bytes=bound,
        disk_free_bytes=None if out is None else free_bytes(out), seconds=None,
        loaders=loaders(layout, next((one.scheme for one in modules if one.scheme and one.name != HEAD and (
            one.scheme.weight.dtype == recipe.weight.dtype)), None), raised=bool(recipe.raised)),
        warnings=_warnings(recipe, group, grid, modules, tied))


def check_disk(plan: CalibrationPlan) -> None:
    """DiskSpaceError when the result, or what lies beside it meanwhile, would not fit (16 MiB are left over)."""
    needed = plan.size_bytes + plan.work_bytes + 16 * MIB
    if plan.disk_free_bytes is not None and plan.disk_free_bytes < needed:
        raise DiskSpaceError(f"the checkpoint needs {needed // MIB} MiB, {plan.disk_free_bytes // MIB} MiB are free",
                             "Free disk space or choose another folder.")


def layerwise_obstacle(recipe: Recipe) -> str:
    """Why a recipe cannot be calibrated layer by layer; empty where it can."""
    if recipe.protect:
        return "protect measures the whole model's loss once for each layer"
    return "a quantized lm_head lies in no layer" if recipe.lm_head else ""


def _check_effect(recipe: Recipe, kv_cache: KvChoice) -> None:
    """Here, not in the recipe's own rules: a KV cache of eight bits has scales that are measured on text."""
    for key in () if recipe.needs_data(kv_cache) else ("rows", "seed"):
        value, usual = getattr(recipe, key), Recipe.model_fields[key].default
        if value != usual:
            raise CalibError(f"{key} {value} of recipe {recipe.name} would have no effect: with a {kv_cache} KV cache "
                             "it is calibrated on no text", f"Leave {key} out of the recipe (or write `{key}: {usual}` "
                             "over what it extends), or choose a KV cache of eight bits.")


def _by_layer(wanted: str, recipe: Recipe, kv: Grid, bound: int | None, whole: int) -> tuple[bool, str]:
    """Whether calibration goes layer by layer, and why."""
    if wanted not in ("auto", "on", "off"):
        raise CalibError(f"layerwise is auto, on or off, not {wanted!r}", "Leave it out for auto.")
    if recipe.method == "none" and not kv.quantized:
        if wanted == "on":
            raise CalibError(f"recipe {recipe.name} calibrates nothing: its weights are copied one by one anyway",
                             "Leave --layerwise out.")
        return False, "nothing is calibrated: weights are copied one by one"
    hindrance = layerwise_obstacle(recipe)
    if wanted == "on" and hindrance:
        raise CalibError(f"recipe {recipe.name} cannot be calibrated layer by layer: {hindrance}",
                         "Use --layerwise off, or another recipe.")
    how = "; the smoothing strength is chosen by sending the choose text through all layers once per candidate" \
        if len(recipe.alphas) > 1 else ""
    if wanted != "auto":
        return wanted == "on", f"asked for{how if wanted == 'on' else ''}"
    said = "no bound is known" if bound is None else f"the whole pass works in {whole / 1e9:.1f} GB, the bound is " \
                                                     f"{bound / 1e9:.1f} GB"
    if bound is None or whole <= bound:
        return False, said
    return (False, f"{said}, but {hindrance}") if hindrance else (True, said + how)


def _layout(recipe: Recipe, kv: Grid) -> LayoutName:
    """Layouts that have no word for a KV cache give way to compressed-tensors, which has."""
    return "compressed-tensors" if kv.quantized and recipe.layout in ("hf", "awq", "gptq") else recipe.layout


def _kv_grid(choice: str) -> Grid:
    if choice not in KV_GRIDS:
        raise CalibError(f"unknown KV cache {choice!r}", f"Known: {', '.join(KV_GRIDS)}.")
    return KV_GRIDS[choice]


def _linear_shapes(outline: Outline, family: Family) -> dict[str, tuple[int, int]]:
    shapes = {}
    for name in planned_linears(family, outline.config["num_hidden_layers"]):
        shape = outline.shapes.get(f"{name}.weight")
        if shape is None:
            raise MissingWeightsError(f"{outline.folder} has no tensor {name}.weight", "The checkpoint is incomplete.")
        shapes[name] = (shape[0], shape[1])
    return shapes


def _sizes(outline: Outline, family: Family, linears: dict[str, tuple[int, int]], result_bytes: int) -> Sizes:
    config, first = outline.config, f"{family.layers}.0."
    tied = is_tied(config)
    counts = {name: math.prod(shape) for name, shape in outline.shapes.items()
              if not (tied and name == f"{HEAD}.weight")}
    return Sizes(parameters=sum(counts.values()), result_bytes=result_bytes,
                 layer_parameters=sum(count for name, count in counts.items() if name.startswith(first)),
                 largest=max(rows * columns for rows, columns in linears.values()), hidden=config["hidden_size"],
                 inter=config["intermediate_size"], vocab=config["vocab_size"], layers=config["num_hidden_layers"])


def _result_bytes(outline: Outline, modules: tuple[ModulePlan, ...], tied: bool, layout: str,
                  attentions: tuple[str, ...], kv: Grid) -> int:
    """A tied head has no tensor of its own, unless it is quantized: then there are two matrices."""
    schemes = {one.name: (one.scheme, *one.shape) for one in modules if one.scheme is not None}
    plain = {name: shape for name, shape in outline.shapes.items() if name.removesuffix(".weight") not in schemes
             and not (name == f"{HEAD}.weight" and tied)}
    return files_bytes(stored_tensors(layout, plain, schemes, attentions, kv))


def _work_bytes(sizes: Sizes, recipe: Recipe, length: int) -> int:
    """Layers' files, and hidden states of two layers for each stream of the data."""
    states = 4 * sizes.hidden * (recipe.rows * length * 2 + len(recipe.alphas) * recipe.choose_tokens)
    return sizes.result_bytes + 2 * states


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
        found.append(f"{odd} is not made of whole tiles: vLLM and SGLang refuse that")
    if group is not None and group != recipe.group_sizes[0]:
        found.append(f"group size {group} instead of {recipe.group_sizes[0]}: it divides every input")
    if source_grid is not None:
        found.append(f"the weights were dequantized from {source_grid}: a grid like that one costs nothing on them, "
                     "so low-bit figures look too good")
    return tuple(found)


def _not_whole_tiles(recipe: Recipe, modules: tuple[ModulePlan, ...]) -> str:
    """The first module whose sides the blocks do not divide, with its shape; empty when there is none."""
    block = recipe.weight.granularity
    if block.kind != "block":
        return ""
    odd = next((module for module in modules if module.scheme is not None and module.name != HEAD and (
        module.shape[0] % block.rows or module.shape[1] % block.cols)), None)
    return "" if odd is None else f"{odd.name} {list(odd.shape)}"

"""Which module gets which scheme, and which are left and why: coverage, decided from names and shapes alone."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Mapping
from typing import Any

from calib.errors import CalibError
from calib.head import HEAD
from calib.layers import Family, is_tied
from calib.parallel import shard_columns
from calib.recipe import EIGHT_BITS, Recipe
from calib.scheme import Frozen, Grid, Scheme

#: Modules that no recipe touches, and why.
_LEFT = {HEAD: "output head: few runtimes load it quantized, and its error goes straight into the logits",
         "model.embed_tokens": "embedding: a lookup, nothing is multiplied",
         "model.norm": "norm"}


class ModulePlan(Frozen):
    """One weight matrix: its shape [out, in], and the scheme it gets, or the reason it is left in bf16."""

    name: str
    shape: tuple[int, int]
    scheme: Scheme | None
    reason: str = ""


def _matched(recipe: Recipe, key: str, patterns: tuple[str, ...], names: list[str]) -> dict[str, str]:
    """Module -> the pattern of ``key`` that matched it. A pattern without effect is an error."""
    found: dict[str, str] = {}
    for pattern in patterns:
        hits = fnmatch.filter(names, pattern)
        if not hits:
            raise CalibError(f"recipe {recipe.name}: {key} pattern {pattern!r} matches no module",
                             _names_hint(pattern, names))
        found |= dict.fromkeys(hits, pattern)
    return found


def _names_hint(pattern: str, names: list[str]) -> str:
    """What a pattern can name, the nearest first: a module where its last part is one's, else what ends so."""
    bare, ends = pattern.replace("*", "").strip("."), list(dict.fromkeys(name.rpartition(".")[2] for name in names))
    leaf = bare.rpartition(".")[2]
    near = difflib.get_close_matches(bare, names, n=1) if leaf in ends else [
        f"*.{end}" for end in difflib.get_close_matches(leaf, ends, n=1)]
    meant = f"Did you mean {near[0]!r}? " if near else ""
    return f"{meant}Modules are named like {names[0]}, and end in {', '.join(ends)}."


def _kept(recipe: Recipe, names: list[str]) -> dict[str, str]:
    return _matched(recipe, "keep", recipe.keep, names)


def _raised(recipe: Recipe, names: list[str]) -> dict[str, Grid]:
    """Module -> the grid that it is raised to. A module that two keys claim is an error."""
    claimed = dict.fromkeys(_kept(recipe, names), "keep")
    found: dict[str, Grid] = {}
    for name, patterns in recipe.raised.items():
        for module in _matched(recipe, f"raised {name}", patterns, names):
            if module in claimed:
                raise CalibError(f"recipe {recipe.name}: {module} is named by {claimed[module]} and by raised {name}",
                                 "A module has one format; take it out of one of them.")
            claimed[module], found[module] = f"raised {name}", EIGHT_BITS[name]
    return found


def group_size_of(recipe: Recipe, shapes: dict[str, tuple[int, int]], tp: int = 1) -> int | None:
    """The first group size that divides every matched module's input, as it lies on one of ``tp`` devices."""
    if not recipe.group_sizes:
        return None
    apart = {**_kept(recipe, list(shapes)), **_raised(recipe, list(shapes))}
    matched = {name: shape for name, shape in shapes.items() if name not in apart}
    for size in recipe.group_sizes:
        if all(shard_columns(name, columns, tp) % size == 0 for name, (_, columns) in matched.items()):
            return size
    name, columns = next((name, columns) for name, (_, columns) in matched.items()
                         if shard_columns(name, columns, tp) % recipe.group_sizes[-1])
    each = "" if tp == 1 else f", {shard_columns(name, columns, tp)} on each of {tp} devices"
    raise CalibError(f"no group size of {', '.join(map(str, recipe.group_sizes))} divides every input: {name} has "
                     f"{columns} inputs{each}", "Add a smaller size to group_sizes, or put the module on keep.")


def matched_modules(recipe: Recipe, shapes: dict[str, tuple[int, int]], group: int | None, kv: Grid
                    ) -> list[ModulePlan]:
    """The decoder layers' linears. CalibError for a keep pattern without effect, or a shape that cannot be packed."""
    kept, raised = _kept(recipe, list(shapes)), _raised(recipe, list(shapes))
    if len(kept) == len(shapes):
        raise CalibError(f"recipe {recipe.name} keeps every module in bf16", "Use the recipe bf16 for that.")
    if raised and len(kept) + len(raised) == len(shapes):
        raise CalibError(f"recipe {recipe.name} raises every module that it does not keep: none is left in "
                         f"{recipe.weight.dtype}", "Use int8_weight_only or fp8_weight_only for that.")
    plans = []
    for name, shape in shapes.items():
        if recipe.method == "none":
            plans.append(ModulePlan(name=name, shape=shape, scheme=None, reason=f"recipe {recipe.name} leaves weights"))
        elif name in kept:
            plans.append(ModulePlan(name=name, shape=shape, scheme=None, reason=f"keep pattern {kept[name]!r}"))
        elif name in raised:
            plans.append(ModulePlan(name=name, shape=shape, scheme=Scheme(weight=raised[name], kv=kv)))
        else:
            folded = recipe.method != "awq_lite" or not name.endswith(("o_proj", "down_proj"))
            plans.append(ModulePlan(name=name, shape=shape, scheme=Scheme(
                weight=recipe.weight_grid(group), activation=recipe.activation_grid(group), kv=kv,
                pre_quant_scale=not folded, act_order=recipe.act_order == "groups")))
    odd = next((plan for plan in plans if plan.scheme and plan.scheme.weight.dtype == "int4" and plan.shape[0] % 2),
               None)
    if odd is not None:
        raise CalibError(f"{odd.name} has {odd.shape[0]} outputs; int4 codes are packed in pairs of outputs",
                         "Put the module on keep.")
    return plans


def check_protect(recipe: Recipe, family: Family, modules: tuple[ModulePlan, ...], layers: int) -> None:
    """CalibError where ``protect`` takes every layer of which ``keep`` leaves something to quantize."""
    prefix = f"{family.layers}."
    rounded = len({one.name.removeprefix(prefix).partition(".")[0] for one in modules
                   if one.scheme is not None and one.name.startswith(prefix)})
    if recipe.protect and rounded < layers and recipe.protect >= rounded:
        raise CalibError(f"recipe {recipe.name} protects {recipe.protect} layers, and keep leaves something to "
                         f"quantize in {rounded} of the model's {layers}: none is left to quantize",
                         f"Keep less, or {'leave protect out' if rounded == 1 else f'protect at most {rounded - 1}'}.")
    if recipe.protect >= layers:
        raise CalibError(f"recipe {recipe.name} protects {recipe.protect} layers, and the model has {layers}: none is "
                         "left to quantize", "Leave protect out." if layers == 1 else
                         f"Protect at most {layers - 1}, or use the recipe bf16.")


def check_fused(family: Family, modules: tuple[ModulePlan, ...], num_layers: int) -> None:
    """Readers of one input (q, k, v; gate, up) become one matrix in an engine, so they share a fate."""
    grids = {module.name: None if module.scheme is None else module.scheme.weight for module in modules}
    for layer in range(num_layers):
        for names in family.fused:
            members = [f"{family.layers}.{layer}.{name}" for name in names]
            if len(set(map(str, found := [grids[member] for member in members]))) > 1:
                raise CalibError(*_torn(members, found, names))


def _torn(members: list[str], grids: list[Grid | None], names: tuple[str, ...]) -> tuple[str, str]:
    """Message and hint where readers of one input have different formats."""
    if None in grids:
        return (f"{members[grids.index(None)]} is kept in bf16, the others that read its input are not",
                f"Keep all of {', '.join(names)} or none.")
    odd = next(index for index, grid in enumerate(grids) if grid != grids[0])
    return (f"{members[odd]} is {grids[odd]}, {members[0]}, which reads the same input, is {grids[0]}",
            f"Raise all of {', '.join(names)} or none.")


def other_modules(shapes: Mapping[str, tuple[int, ...]], config: dict[str, Any], recipe: Recipe, kv: Grid
                  ) -> list[ModulePlan]:
    """Matrices outside the decoder layers. The head may have a scheme of its own."""
    head = None if recipe.head_grid is None else Scheme(weight=recipe.head_grid, kv=kv)
    found = []
    for name, shape in shapes.items():
        module = name.removesuffix(".weight")
        if module in _LEFT and len(shape) == 2:
            scheme = head if module == HEAD else None
            found.append(ModulePlan(name=module, shape=(shape[0], shape[1]), scheme=scheme,
                                    reason="" if scheme else _LEFT[module]))
    if is_tied(config) and not any(module.name == HEAD for module in found):
        found.append(ModulePlan(name=HEAD, shape=(config["vocab_size"], config["hidden_size"]), scheme=head,
                                reason="" if head else "tied: it is the embedding's matrix"))
    return found

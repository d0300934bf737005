"""Recipe: how a model is quantized, as a short YAML with no hidden defaults from elsewhere.

A recipe names the weight and activation grids, the method that finds the scales, and what is left alone. ``extends``
starts from another recipe, or from several of which the later win, so a variant is the lines that differ; ``explain``
says which file each value comes from. A variant never goes by the name of what it extends: without a ``name`` it is
called by its file, and the name of a built-in recipe is refused where the values are others. Unknown keys are refused;
settings that would have no effect with the chosen method are refused too. What each recipe costs is measured in
``docs/recipes.md``.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, ValidationError, model_validator

from calib.choices import KvChoice
from calib.errors import CalibError, UnknownNameError, name_hint, shown
from calib.faults import fault_words
from calib.recipe_rules import CHOOSE_TOKENS, check_layout, check_method, raises
from calib.recipe_words import WRITTEN, first_fault, hint_of, name_of_file, place_of, words_of
from calib.scheme import BF16, FIXED_GROUPS, MAX_GROUP, Frozen, Grid, PerChannel, PerGroup
from calib.yaml_text import read_yaml

RECIPES = Path(__file__).parent / "recipes"
Method = Literal["none", "max", "smooth", "awq_lite", "awq", "gptq"]
LayoutName = Literal["hf", "modelopt", "compressed-tensors", "awq", "gptq"]
EightBits = Literal["fp8", "int8"]
Number = Annotated[float, Field(strict=True)]  # YAML's ``yes`` and ``'0.5'`` are none
DEFAULT = "default"
_ENDINGS = (".yaml", ".yml")
_OWN = "A recipe of your own is a file that ends in .yaml."
#: Eight-bit weights beside a recipe's own: one scale per channel.
EIGHT_BITS: dict[str, Grid] = {"fp8": Grid(dtype="fp8_e4m3", granularity=PerChannel()),
                               "int8": Grid(dtype="int8", granularity=PerChannel())}


class Recipe(Frozen):
    """One way to quantize.

    ``method``: "none" (weights stay), "max" (scale = largest magnitude), "smooth" (SmoothQuant folded into the previous
    layers, its strength chosen by measured loss among ``alphas``; 0 is no smoothing, then max), "awq_lite"
    (activation-aware scaling searched per linear in steps of ``alpha_step``, then each group clipped to the best of
    ``clip_ratios`` of its largest value), "awq" (the scaling searched for all readers of an input together and folded
    into what makes the input, clipping by the error of the layer's output; with ``damping`` it rounds like gptq),
    "gptq" (rounding errors passed on to the columns that are still to be rounded; ``damping`` of the mean diagonal is
    added to the Hessian, ``act_order`` takes loud columns first, with groups where they are, "static", or formed in
    that order, "groups"; ``clip_ratios`` are tried for each group's range).
    ``group_sizes``: for grouped weights, in order of preference; the first that divides every matched input is taken.
    A grouped activation beside grouped weights has their groups. ``keep``: fnmatch patterns of modules left in bf16.
    ``protect``: that many decoder layers are left in bf16 too, chosen by measured loss. ``raised``: "int8" or "fp8" ->
    fnmatch patterns of modules whose weights get eight bits where the others get four, weight only, one scale per
    channel, no search (``calib.apart``). ``lm_head``: quantize the output head too, in the same way; a tied head is
    untied. ``rows``: calibration sequences used at
    most, drawn by ``seed`` plus a command's ``--seed``. ``choose_tokens``: of ``choose`` text for measured choices.
    """

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_.-]{0,63}$")
    summary: str
    method: Method
    layout: LayoutName
    weight: Grid = BF16
    activation: Grid | None = None
    group_sizes: tuple[Annotated[int, Field(ge=1, le=MAX_GROUP, strict=True)], ...] = ()
    alphas: tuple[Number, ...] = ()
    alpha_step: Number | None = Field(default=None, gt=0.0, le=1.0)
    clip_ratios: tuple[Number, ...] = ()
    damping: Number | None = Field(default=None, gt=0.0, le=1.0)
    act_order: Literal["none", "static", "groups"] = "none"
    keep: tuple[str, ...] = ()
    protect: int = Field(default=0, ge=0, le=4096, strict=True)
    raised: dict[EightBits, tuple[str, ...]] = Field(default={}, exclude_if=lambda raised: not raised)
    lm_head: EightBits | None = None
    rows: int = Field(default=16, gt=0, lt=2**31, strict=True)
    choose_tokens: int = Field(default=CHOOSE_TOKENS, ge=64, lt=2**31, strict=True)
    seed: int = Field(default=0, ge=0, lt=2**63, strict=True)

    @model_validator(mode="after")
    def _consistent(self) -> Recipe:
        check_method(self)
        check_layout(self)
        return self

    def weight_grid(self, group_size: int | None) -> Grid:
        """The weight grid with the group size that a plan has chosen."""
        if group_size is None:
            return self.weight
        return self.weight.model_copy(update={"granularity": PerGroup(size=group_size)})

    def activation_grid(self, group_size: int | None) -> Grid | None:
        """The activation grid; its groups are those of grouped weights."""
        grid = self.activation
        if grid is None or group_size is None or grid.granularity.kind != "group":
            return grid
        return grid.model_copy(update={"granularity": PerGroup(size=group_size)})

    @property
    def head_grid(self) -> Grid | None:
        """The output head's weight grid, None where the head stays in bf16."""
        return None if self.lm_head is None else EIGHT_BITS[self.lm_head]

    @property
    def raises(self) -> tuple[str, ...]:
        """What single modules of this recipe may be raised to."""
        return raises(self.weight, self.layout)

    @property
    def calibrates_activations(self) -> bool:
        """Whether data must pass through the model to find its scales."""
        static = self.activation is not None and not self.activation.dynamic
        return self.method in ("smooth", "awq_lite", "awq", "gptq") or static

    def needs_data(self, kv_cache: KvChoice = "bf16") -> bool:
        """Whether calibration or choose text is needed: for scales, for a quantized KV cache, for measured choices."""
        return self.calibrates_activations or kv_cache != "bf16" or bool(self.protect)

    @property
    def solved(self) -> bool:
        """Whether calib.solve finds the codes, layer by layer, because modelopt has no such method.

        Its GPTQ and AWQ write no layout that vLLM takes, and it pads 128 x 128 tiles at the near edge.
        """
        return self.method in ("awq", "gptq") or self.weight.granularity.kind == "block"

    @property
    def needs_hardware(self) -> bool:
        """Whether the weights are in a format that only some chips multiply, see calib.hardware."""
        return self.weight.dtype in FIXED_GROUPS


class Setting(NamedTuple):
    """One value of a recipe and the file that it comes from (``default`` where no file says it)."""

    key: str
    value: Any
    origin: str


@cache
def recipe_names() -> tuple[str, ...]:
    """Names of the built-in recipes."""
    return tuple(sorted(path.stem for path in RECIPES.glob("*.yaml")))


@cache
def ordinary_recipes() -> tuple[str, ...]:
    """Names of the built-in recipes that need no particular chip (see calib.hardware)."""
    return tuple(name for name in recipe_names() if not load_recipe(name).needs_hardware)


def load_recipe(name_or_path: str | Path) -> Recipe:
    """A built-in recipe by name, or one from a YAML file.

    UnknownNameError names the nearest recipe; CalibError names the key that is wrong.
    """
    path = _path_of(name_or_path)
    composed = _composed(path, ())
    recipe = _validated(path, composed)
    _check_name(path, recipe, composed)
    return recipe


def explain(name_or_path: str | Path) -> list[Setting]:
    """Every value of a recipe, in the order of its fields, with the file it was taken from. Errors of load_recipe."""
    path = _path_of(name_or_path)
    composed = _composed(path, ())
    recipe = _validated(path, composed)
    _check_name(path, recipe, composed)
    dumped = recipe.model_dump(mode="json")  # without ``raised`` where nothing is: such recipes keep their digests
    values = {key: dumped.get(key, getattr(recipe, key)) for key in Recipe.model_fields}
    return [Setting(key, value, composed[key].origin if key in composed else DEFAULT) for key, value in values.items()]


def _path_of(name_or_path: str | Path) -> Path:
    path = Path(name_or_path)
    if path.suffix in _ENDINGS:
        if not path.is_file():
            raise CalibError(f"there is no recipe file {path}",
                             f"Check the path, or name a built-in recipe: {', '.join(recipe_names())}.")
        return path
    if str(name_or_path) not in recipe_names():
        raise UnknownNameError("recipe", str(name_or_path), recipe_names(), _OWN)
    return RECIPES / f"{name_or_path}.yaml"


def _validated(path: Path, composed: dict[str, Setting]) -> Recipe:
    try:
        return Recipe.model_validate(_values(composed))
    except ValidationError as error:
        first = first_fault(error.errors())
        place = place_of(first)
        if not place and (pair := _clash(path)) and pair[2] == fault_words(first):
            raise CalibError(f"recipe {path.name} extends {pair[0]} and {pair[1]}, which do not combine: {pair[2]}",
                             f"Extend one of them and write out what you want of the other, or overrule in {path.name} "
                             "the lines that do not fit.") from error
        source = composed[place[0]].origin if place and place[0] in composed else ""
        origin = f" (from {source})" if source not in ("", path.name) else ""
        where = f"{'.'.join(place)}: " if place else ""
        words = words_of(first)
        hint = hint_of(first, Recipe.model_fields) if place else _rule_hint(words, composed)
        raise CalibError(f"recipe {path.name}: {where}{words}{origin}", hint) from error


def _values(composed: dict[str, Setting]) -> dict[str, Any]:
    return {key: setting.value for key, setting in composed.items()}


def _rule_hint(rule: str, composed: dict[str, Setting]) -> str:
    """What to do about a rule that is broken: the keys that it names, with their files."""
    named = [setting for key, setting in composed.items() if re.search(rf"\b{key}\b", rule)]
    if not named:
        return "Compare it with a recipe that goes: `toolkit plan MODEL --recipe int8 --explain` shows one."
    said = " or ".join(f"{setting.key} (in {setting.origin})" for setting in named)
    return f"Change {said}; written like {', '.join(f'`{one.key}: {WRITTEN[one.key]}`' for one in named)}."


def _clash(path: Path) -> tuple[str, str, str] | None:
    """The first two that a recipe, or one that it extends, puts together against a rule: both names, and the rule."""
    bases = _bases(path)
    for later, second in enumerate(bases):
        for first in bases[:later]:
            one, other = _composed(first, ()), _composed(second, ())
            if (rule := _broken_rule(one | other)) and not _broken_rule(one) and not _broken_rule(other):
                return _named(first, one), _named(second, other), rule
    return next((found for base in bases if (found := _clash(base))), None)


def _named(path: Path, composed: dict[str, Setting]) -> str:
    method = composed.get("method")
    return (path.stem if path.parent == RECIPES else path.name) + (f" (method {method.value!r})" if method else "")


def _broken_rule(composed: dict[str, Setting]) -> str:
    """The rule that settings break although each of them is right; empty where there is none."""
    try:
        Recipe.model_validate(_values(composed))
    except ValidationError as error:
        return next((fault_words(fault) for fault in error.errors() if not fault["loc"]), "")
    return ""


def _read(path: Path) -> dict[Any, Any]:
    return read_yaml(path, CalibError, "A recipe file holds keys and values; see the built-in recipes.")


def _bases(path: Path) -> list[Path]:
    """The files that a recipe extends, in order. CalibError names an entry that is none."""
    content = _read(path)
    if "extends" not in content:
        return []
    said = content["extends"]
    entries = said if isinstance(said, list) else [said]
    wrong = next((entry for entry in entries if not isinstance(entry, str)), None if entries else said)
    if not entries or wrong is not None or None in entries:
        raise CalibError(f"recipe {path.name}: extends: must name recipes, not {shown(wrong)}",
                         "Write it like `extends: int8`, or for several, of which the later win, "
                         "`extends: [int8, mine.yaml]`.")
    return [_base(path, entry) for entry in entries]


def _base(path: Path, entry: str) -> Path:
    place = RECIPES / f"{entry}.yaml" if entry in recipe_names() else path.parent / entry
    if not place.is_file():
        several = "Several are a list, like `extends: [int8, mine.yaml]`. " if "," in entry or " " in entry else ""
        what = f"there is no file {place}" if place.suffix in _ENDINGS else "no recipe has that name"
        raise CalibError(f"recipe {path.name}: extends: {shown(entry)} is unknown: {what}",
                         several + name_hint(entry, recipe_names(), _OWN))
    return place


def _composed(path: Path, seen: tuple[Path, ...]) -> dict[str, Setting]:
    """The YAML's settings over those of what it extends; keys of the file itself win, then later bases."""
    if path in seen:
        raise CalibError(f"recipe {path.name} extends itself", "Break the circle of extends.")
    composed: dict[str, Setting] = {}
    for below in _bases(path):
        composed |= _composed(below, (*seen, path))
    own = {str(key): value for key, value in _read(path).items() if key != "extends"}
    if composed and (called := name_of_file(path)):
        own.setdefault("name", called)
    return composed | {key: Setting(key, value, path.name) for key, value in own.items()}


def _check_name(path: Path, recipe: Recipe, composed: dict[str, Setting]) -> None:
    """CalibError when a file goes by a built-in recipe's name and is not that recipe.

    The name is what tables, stores and reports show, and what figures of the built-in recipe are known under.
    """
    if path.parent == RECIPES or recipe.name not in recipe_names():
        return
    ours, theirs = (one.model_dump(mode="json") for one in (recipe, load_recipe(recipe.name)))
    odd = [key for key in Recipe.model_fields if key != "summary" and ours.get(key) != theirs.get(key)]
    if odd:
        origin = composed[odd[0]].origin if odd[0] in composed else DEFAULT
        raise CalibError(f"recipe {path.name} has the built-in recipe's name {recipe.name!r} and another {odd[0]}: "
                         f"{shown(ours.get(odd[0]))} (from {origin}), not {shown(theirs.get(odd[0]))}",
                         f"Give it a name of its own, like `name: my-{recipe.name}`.")

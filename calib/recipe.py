"""Recipe: how a model is quantized, as a short YAML with no hidden defaults from elsewhere.

A recipe names the weight and activation grids, the method that finds the scales, and what is left alone. ``extends``
starts from another recipe, so a variant is the lines that differ. Unknown keys are refused; settings that would have no
effect with the chosen method are refused too.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, ValidationError, model_validator

from calib.errors import CalibError, UnknownNameError
from calib.scheme import BF16, Frozen, Grid, PerGroup

RECIPES = Path(__file__).parent / "recipes"
Method = Literal["none", "max", "smooth", "awq_lite"]
LayoutName = Literal["hf", "modelopt", "compressed-tensors"]


class Recipe(Frozen):
    """One way to quantize.

    ``method``: "none" (weights stay), "max" (scale = largest magnitude), "smooth" (SmoothQuant folded into the previous
    layers, its strength chosen by measured loss among ``alphas``; 0 is no smoothing, then max), "awq_lite"
    (activation-aware scaling searched per linear in steps of ``alpha_step``, then each group clipped to the best of
    ``clip_ratios`` of its largest value).
    ``group_sizes``: for grouped weights, in order of preference; the first that divides every matched input is taken.
    ``keep``: fnmatch patterns of modules left in bf16. ``protect``: that many decoder layers are left in bf16 too,
    chosen by measured loss. ``rows``: calibration sequences used at most. ``choose_tokens``: tokens of ``choose`` text
    for measured choices.
    """

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_.-]*$")
    summary: str
    method: Method
    layout: LayoutName
    weight: Grid = BF16
    activation: Grid | None = None
    group_sizes: tuple[int, ...] = ()
    alphas: tuple[float, ...] = ()
    alpha_step: float | None = Field(default=None, gt=0.0, le=1.0)
    clip_ratios: tuple[float, ...] = ()
    keep: tuple[str, ...] = ()
    protect: int = Field(default=0, ge=0)
    rows: int = Field(default=16, gt=0)
    choose_tokens: int = Field(default=2048, ge=64)

    @model_validator(mode="after")
    def _consistent(self) -> Recipe:
        if (self.method == "none") != (not self.weight.quantized):
            raise ValueError(f"method {self.method!r} does not go with {self.weight} weights")
        if (self.method == "smooth") != bool(self.alphas):
            raise ValueError("alphas belong to method 'smooth', and it needs them")
        if (self.method == "awq_lite") != (self.alpha_step is not None):
            raise ValueError("alpha_step belongs to method 'awq_lite', and it needs it")
        unfit = any(not 0.0 < ratio <= 1.0 for ratio in self.clip_ratios)
        if unfit or (self.clip_ratios and self.method != "awq_lite"):
            raise ValueError("clip_ratios lie in (0, 1] and belong to method 'awq_lite'")
        if any(not 0.0 <= alpha <= 1.0 for alpha in self.alphas) or len(set(self.alphas)) != len(self.alphas):
            raise ValueError(f"alphas are distinct and between 0 and 1, not {self.alphas}")
        if (self.weight.granularity.kind == "group") != bool(self.group_sizes):
            raise ValueError("group_sizes belong to group-wise weights, and they need them")
        if self.method == "none" and (self.activation or self.protect or self.keep):
            raise ValueError("activation, keep and protect have no effect when weights are not quantized")
        self._check_support()
        return self

    def _check_support(self) -> None:
        """Only what a method can do and a layout can hold."""
        activation, weight = self.activation, self.weight
        if (self.layout == "hf") != (self.method == "none"):
            raise ValueError(f"layout {self.layout!r} does not go with method {self.method!r}")
        if not weight.symmetric or weight.granularity.kind == "block":
            raise ValueError(f"weights {weight}: calibration makes symmetric tensor, channel or group grids")
        if self.method == "smooth" and (activation is None or not activation.dynamic):
            raise ValueError("method 'smooth' needs dynamic activations: their scales follow the smoothed values")
        if self.method == "awq_lite" and (activation is not None or weight.dtype != "int4"):
            raise ValueError("method 'awq_lite' makes int4 weights with unquantized activations")
        fp8 = weight == Grid(dtype="fp8_e4m3") and activation == Grid(dtype="fp8_e4m3")
        if self.layout == "modelopt" and not fp8 and self.method != "awq_lite":
            raise ValueError("layout 'modelopt' holds static per-tensor fp8 or awq_lite int4; write compressed-tensors")
        if self.layout == "compressed-tensors" and self.method == "awq_lite":
            raise ValueError("awq_lite leaves a pre_quant_scale, which compressed-tensors cannot hold")

    def weight_grid(self, group_size: int | None) -> Grid:
        """The weight grid with the group size that a plan has chosen."""
        if group_size is None:
            return self.weight
        return self.weight.model_copy(update={"granularity": PerGroup(size=group_size)})

    @property
    def calibrates_activations(self) -> bool:
        """Whether data must pass through the model to find its scales."""
        return self.method in ("smooth", "awq_lite") or (self.activation is not None and not self.activation.dynamic)


@cache
def recipe_names() -> tuple[str, ...]:
    """Names of the built-in recipes."""
    return tuple(sorted(path.stem for path in RECIPES.glob("*.yaml")))


def load_recipe(name_or_path: str | Path) -> Recipe:
    """A built-in recipe by name, or one from a YAML file.

    UnknownNameError names the nearest recipe; CalibError names the key that is wrong.
    """
    path = Path(name_or_path)
    if path.suffix not in (".yaml", ".yml"):
        if str(name_or_path) not in recipe_names():
            raise UnknownNameError("recipe", str(name_or_path), recipe_names())
        path = RECIPES / f"{name_or_path}.yaml"
    try:
        return Recipe.model_validate(_composed(path, ()))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise CalibError(f"recipe {path.name}: {where + ': ' if where else ''}{first['msg']}",
                         f"Known keys: {', '.join(Recipe.model_fields)}.") from error


def _composed(path: Path, seen: tuple[Path, ...]) -> dict[str, Any]:
    """The YAML with what it extends below it; keys of the file itself win."""
    if path in seen:
        raise CalibError(f"recipe {path.name} extends itself", "Break the circle of extends.")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CalibError(f"recipe file {path}: {error.strerror}", "Check the path.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise CalibError(f"recipe file {path} is not YAML: {error}", "Repair the file.") from error
    if not isinstance(content, dict):
        raise CalibError(f"recipe file {path} holds no mapping", "A recipe is a list of keys and values.")
    base = content.pop("extends", None)
    if base is None:
        return content
    below = RECIPES / f"{base}.yaml" if base in recipe_names() else path.parent / str(base)
    return _composed(below, (*seen, path)) | content

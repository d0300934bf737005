"""Options that ``plan`` and ``quantize`` share: what is planned with them is what is then done with them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from calib.choices import KvChoice
from toolkit.errors import UsageError
from toolkit.options import parse_bytes

if TYPE_CHECKING:
    from calib.recipe import Recipe, Setting

Layerwise = Literal["auto", "on", "off"]
LayerwiseOption = Annotated[Layerwise, typer.Option("--layerwise", help="Calibrate one layer at a time: the same "
                            "checkpoint in the memory of a layer. auto: where the whole pass would exceed --memory.")]
BoundOption = Annotated[str | None, typer.Option("--memory", show_default=False, help="Bound on calibration's memory, "
                                                 "like 8GB [default: 60 % of what is free].")]
TpOption = Annotated[int, typer.Option("--tp", min=1, help="Devices that the result will be cut over: groups must "
                                       "still divide.")]
ROWS, LENGTH = 16, 256
RowsOption = Annotated[int | None, typer.Option("--rows", min=1, show_default=False, help="Rows of calibration text to "
                                                "calibrate on [default: the recipe's].")]
LengthOption = Annotated[int | None, typer.Option("--length", min=8, show_default=False,
                                                  help=f"Tokens of a row [default: {LENGTH}].")]


def bound_of(memory: str | None) -> int | None:
    """Bytes of ``--memory``; UsageError when it is no size, or none."""
    bound = None if memory is None else parse_bytes(memory)
    if bound == 0:
        raise UsageError(f"--memory {memory} leaves nothing to calibrate in", "Give a size such as 16GB.")
    return bound


def with_rows(recipe: Recipe, rows: int | None) -> Recipe:
    """The recipe on as many rows as ``--rows`` says: what is said on the command line is what is done."""
    return recipe if rows is None else recipe.model_copy(update={"rows": rows})


def explain(name: str, recipe: Recipe, seed: int = 0) -> list[Setting]:
    """Every value of the recipe ``name`` with its origin; ``recipe`` is what ``with_rows`` made of it, ``seed`` what
    ``--seed`` adds to the recipe's own: rows are drawn by the sum."""
    from calib.recipe import Setting
    from calib.recipe import explain as values

    def said(setting: Setting) -> Setting:
        if setting.key == "rows" and setting.value != recipe.rows:
            return Setting("rows", recipe.rows, "--rows")
        if setting.key == "seed" and seed:
            return Setting("seed", setting.value + seed, f"{setting.value} ({setting.origin}) + --seed {seed}")
        return setting
    return [said(setting) for setting in values(name)]


def text_size(recipe: Recipe, kv_cache: KvChoice, rows: int | None, length: int | None, **others: str | int | None
              ) -> tuple[int, int]:
    """Rows of calibration text and tokens of one. UsageError where they, or ``others`` (options by name), are asked for
    by a recipe that reads no text."""
    for option, value in {"rows": rows, "length": length, **others}.items():
        if value is not None and value is not False and not recipe.needs_data(kv_cache):
            said = f"--{option}" if value is True else f"--{option} {value}"
            raise UsageError(f"{said} would have no effect: recipe {recipe.name} with a {kv_cache} KV cache is "
                             "calibrated on no text", f"Leave --{option} out, or choose a recipe that needs data.")
    return rows or max(ROWS, recipe.rows), length or LENGTH

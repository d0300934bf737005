"""Layer sensitivity in a terminal: a heat map of layers x formats, and the linears with the least signal left."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from toolkit.report import words

if TYPE_CHECKING:
    from calib.sensitivity import Sensitivity

#: From cold to hot; a format's hottest layer is the last.
_COLOURS = ("green", "green", "yellow", "yellow", "red")
_WORST = 8


def heat_parts(found: Sensitivity) -> list[RenderableType]:
    """ΔNLL of each layer in each format (its share of the format's hottest as a bar), then the noisiest linears."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    table.add_column("layer", justify="right")
    for form in found.formats:
        table.add_column(f"{form}: ΔNLL", justify="right")
        table.add_column("")
    value = {(loss.layer, loss.format): loss.delta_nll for loss in found.losses}
    top = {form: max(max(loss.delta_nll for loss in found.losses if loss.format == form), 1e-9)
           for form in found.formats}
    for layer in range(found.layers):
        cells: list[str | Text] = []
        for form in found.formats:
            share = max(value[layer, form], 0.0) / top[form]
            cells += [words.nats(value[layer, form]),
                      Text("█" * round(10 * share), style=_COLOURS[min(4, int(5 * share))])]
        table.add_row(f"{layer}", *cells)
    table.caption = f"one layer rounded at a time; {found.tokens} tokens, NLL {found.nll:.4f} unquantized"
    table.caption_justify = "left"
    return [table, _noisiest(found)]


def _noisiest(found: Sensitivity) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for name in ("least signal left", "format", "SQNR dB"):
        table.add_column(name, justify="right" if name == "SQNR dB" else "left")
    known = [(noise.sqnr_db, noise) for noise in found.modules if noise.sqnr_db is not None]
    for ratio, noise in sorted(known, key=lambda pair: pair[0])[:_WORST]:
        table.add_row(Text(noise.module), noise.format, f"{ratio:.1f}")
    return table

"""Rows as figures: DataFrame in, plotly figure out. Pure; the same figures stand on the page and in the HTML report.

The tradeoff: what a precision costs in quality (up or down) against what it buys (left or right), with 95 % intervals
as error bars and the frontier as a line through the engines that no other beats on both axes. Reading direction is
said in words on the axes ("lower is better"), since a reader should not need to know each metric.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import plotly.graph_objects as go

from evals.report import Row
from evals.tradeoff import label
from toolkit.report import words
from toolkit.report.axes import COST, QUALITY, Axis
from toolkit.report.choice import Standing
from toolkit.report.style import FONT, LIGHT, SIGNS, Palette, marker

if TYPE_CHECKING:
    import pandas


def layout(palette: Palette, height: int) -> dict[str, Any]:
    axis = {"gridcolor": palette.line, "zerolinecolor": palette.line, "linecolor": palette.line,
            "tickfont": {"color": palette.muted, "size": 12}, "automargin": True,
            "title": {"font": {"color": palette.muted, "size": 13}, "standoff": 14}}
    return {"template": "none", "height": height, "paper_bgcolor": "rgba(0,0,0,0)", "plot_bgcolor": "rgba(0,0,0,0)",
            "font": {"family": FONT, "size": 13, "color": palette.text}, "margin": {"l": 12, "r": 24, "t": 24, "b": 12},
            "xaxis": axis, "yaxis": axis, "showlegend": False, "hovermode": "closest",
            "hoverlabel": {"bgcolor": palette.surface, "bordercolor": palette.line,
                           "font": {"family": FONT, "size": 13, "color": palette.text}}}


def tradeoff(table: pandas.DataFrame, x: Axis, y: Axis, standings: Mapping[str, Standing], palette: Palette = LIGHT,
             margin: float | None = None, height: int = 440) -> go.Figure:
    """Scatter of engines. ``standings`` by engine digest; ``margin``: the policy's bound on ΔNLL, if any.

    Each point's customdata is its engine digest: a selection is read by it, never by an index.
    """
    figure = go.Figure()
    shown = table[table[x.key].notna() & table[y.key].notna()]
    best = [digest for digest, standing in standings.items() if standing.state == "frontier"]
    if len(best) > 1:
        line = shown[shown["engine_digest"].isin(best)].sort_values(x.key)
        figure.add_scatter(x=line[x.key] * x.scale, y=line[y.key] * y.scale, mode="lines", hoverinfo="skip",
                           line={"color": palette.muted, "width": 1.5, "dash": "dot"}, name="frontier")
    for position, (_, row) in enumerate(shown.iterrows()):
        figure.add_trace(_point(row, position, x, y, palette, _label_place(shown, row, x, y),
                                standings.get(row["engine_digest"])))
    figure.update_layout(**layout(palette, height))
    if margin is not None and y.key == "delta_nll":
        figure.add_hline(y=margin, line={"color": palette.verdict["FAIL"], "width": 1, "dash": "dash"},
                         annotation={"text": f"allowed: {words.nats(margin)}", "font": {
                             "size": 12, "color": palette.verdict["FAIL"]}}, annotation_position="top right")
    figure.update_xaxes(title_text=x.heading, rangemode="tozero" if x.lower_is_better else "normal")
    figure.update_yaxes(title_text=y.heading)
    return figure


def _point(row: Any, position: int, x: Axis, y: Axis, palette: Palette, place: str, standing: Standing | None
           ) -> go.Scatter:
    color = palette.of(row["recipe"], position)
    verdict = row["verdict"] or "not judged"
    return go.Scatter(
        x=[row[x.key] * x.scale], y=[row[y.key] * y.scale], mode="markers+text", name=row["engine"],
        text=[f"<b>{row['engine']}</b>"], textposition=place, textfont={"color": color, "size": 13},
        error_x=_bar(row, x, color), error_y=_bar(row, y, color), customdata=[row["engine_digest"]],
        marker={"color": color, "size": 13, "symbol": marker(row["recipe"], row["kv_cache"], position),
                "line": {"width": 2, "color": color}},
        hovertemplate=f"<b>{row['engine']}</b>  {SIGNS.get(verdict, '')} {verdict}<br>{_hover(row, y)}<br>"
                      f"{_hover(row, x)}{f'<br>{standing.words}' if standing else ''}<extra></extra>")


def _label_place(shown: pandas.DataFrame, row: Any, x: Axis, y: Axis) -> str:
    """Towards the side with room; among close neighbours the lowest is labelled below, the highest above."""
    span_x = (shown[x.key].max() - shown[x.key].min()) or 1.0
    span_y = (shown[y.key].max() - shown[y.key].min()) or 1.0
    right = "left" if row[x.key] > shown[x.key].min() + 0.8 * span_x else "right"
    near = shown[((shown[x.key] - row[x.key]).abs() < 0.2 * span_x)
                 & ((shown[y.key] - row[y.key]).abs() < 0.15 * span_y)]
    if len(near) > 1 and row[y.key] <= near[y.key].min():
        return f"bottom {right}"
    return f"{'top' if row[y.key] >= near[y.key].max() else 'middle'} {right}"


def _bar(row: Any, axis: Axis, color: str) -> dict[str, Any] | None:
    low, high = row.get(f"{axis.key}_low"), row.get(f"{axis.key}_high")
    if low is None or low != low:
        return None
    return {"type": "data", "symmetric": False, "array": [(high - row[axis.key]) * axis.scale],
            "arrayminus": [(row[axis.key] - low) * axis.scale], "color": color, "thickness": 1.5, "width": 5}


def _hover(row: Any, axis: Axis) -> str:
    value = words.number(row[axis.key] * axis.scale, axis.digits, signed=axis.key == "delta_nll")
    low, high = row.get(f"{axis.key}_low"), row.get(f"{axis.key}_high")
    interval = ""
    if low is not None and low == low:
        interval = (f" [{words.number(low * axis.scale, axis.digits)}, "
                    f"{words.number(high * axis.scale, axis.digits)}]")
    return f"{axis.title}: {value}{interval} {axis.unit}"


def agreement(pairs: Sequence[words.Agreement], palette: Palette = LIGHT) -> go.Figure:
    """Delta NLL of each engine beside its in-memory fake-quantized model: two points with their intervals a line."""
    figure = go.Figure()
    names = [pair.label for pair in pairs]
    for title, symbol, color, shift, values in (
            ("fake-quantized model in memory", "circle-open", palette.muted, 0.14, [pair.model for pair in pairs]),
            ("engine", "circle", palette.accent, -0.14, [pair.engine for pair in pairs])):
        figure.add_scatter(
            x=[value.value for value in values], y=[position + shift for position in range(len(names))],
            mode="markers", name=title, marker={"symbol": symbol, "size": 11, "color": color,
                                                          "line": {"width": 2, "color": color}},
            error_x={"type": "data", "symmetric": False, "color": color, "thickness": 1.5, "width": 5,
                     "array": [value.ci_high - value.value for value in values],
                     "arrayminus": [value.value - value.ci_low for value in values]},
            hovertemplate="%{x:.4f} nats/token<extra>" + title + "</extra>")
    figure.update_layout(**{**layout(palette, 120 + 54 * len(names)), "showlegend": True}, legend={
        "orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0, "font": {"color": palette.muted}})
    figure.update_yaxes(tickmode="array", tickvals=list(range(len(names))), ticktext=names, autorange="reversed",
                        showgrid=False, zeroline=False)
    figure.update_xaxes(title_text=QUALITY["delta_nll"].heading)
    return figure


def latency(rows: Sequence[Row], key: str, palette: Palette = LIGHT, height: int = 320) -> go.Figure:
    """``tpot_ms`` or ``out_tok_s`` over batch size, one line per engine and (ISL, OSL); invalid cells are left out."""
    axis = COST[key]
    figure = go.Figure()
    for position, row in enumerate(rows):
        shapes = sorted({(cell.isl, cell.osl) for cell in row.cells})
        for isl, osl in shapes:
            cells = sorted((cell for cell in row.cells if (cell.isl, cell.osl) == (isl, osl) and cell.invalid is None
                            and getattr(cell, key) is not None), key=lambda cell: cell.batch_size)
            color = palette.of(row.recipe, position)
            figure.add_scatter(
                x=[str(cell.batch_size) for cell in cells], y=[getattr(cell, key) for cell in cells],
                mode="lines+markers", name=label(row) + (f" · {isl}/{osl}" if len(shapes) > 1 else ""),
                line={"color": color, "width": 2, "dash": "solid" if row.kv_cache == "bf16" else "dot"},
                marker={"symbol": marker(row.recipe, row.kv_cache, position), "size": 10, "color": color,
                        "line": {"width": 2, "color": color}},
                hovertemplate="batch %{x}: %{y:.1f} " + axis.unit + f"<extra>{label(row)}</extra>")
    figure.update_layout(**{**layout(palette, height), "showlegend": True}, legend={
        "orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0, "font": {"color": palette.muted}})
    figure.update_xaxes(title_text="Sequences in the batch", type="category")
    figure.update_yaxes(title_text=axis.heading, rangemode="tozero")
    return figure

"""Rows as figures: DataFrame in, plotly figure out. Pure; the same figures stand on the page and in the HTML report.

The tradeoff: what a precision costs in quality (up or down) against what it buys (left or right), with 95 % intervals
as error bars and the frontier as a line through the engines that no other beats on both axes. Reading direction is
said in words on the axes ("lower is better"), since a reader should not need to know each metric.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import plotly.graph_objects as go

from evals.report import Cell, LatencySweep, Row
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
            "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": palette.muted, "activecolor": palette.text},
            "hoverlabel": {"bgcolor": palette.surface, "bordercolor": palette.line,
                           "font": {"family": FONT, "size": 13, "color": palette.text}}}


def tradeoff(table: pandas.DataFrame, x: Axis, y: Axis, standings: Mapping[str, Standing], palette: Palette = LIGHT,
             margin: float | None = None, height: int = 440, chosen: str | None = None) -> go.Figure:
    """Scatter of engines. ``standings`` by engine digest; ``margin``: the policy's bound on ΔNLL, if any; ``chosen``:
    the recommended engine's digest, which gets a ring. What is clearly dominated is drawn paler.

    Each point's customdata is its engine digest: a selection is read by it, never by an index.
    """
    figure = go.Figure()
    shown = table[table[x.key].notna() & table[y.key].notna()]
    best = [digest for digest, standing in standings.items() if standing.state == "frontier"]
    if len(best) > 1:
        line = shown[shown["engine_digest"].isin(best)].sort_values(x.key)
        figure.add_scatter(x=line[x.key] * x.scale, y=line[y.key] * y.scale, mode="lines", hoverinfo="skip",
                           line={"color": palette.muted, "width": 1.5, "dash": "dot"}, name="frontier")
    places = _label_places(shown, x, y)
    for _, row in shown[shown["engine_digest"] == chosen].iterrows():
        figure.add_scatter(x=[row[x.key] * x.scale], y=[row[y.key] * y.scale], mode="markers", hoverinfo="skip",
                           name="recommended", marker={"symbol": "circle-open", "size": 28, "color": palette.accent,
                                                       "line": {"width": 2, "color": palette.accent}})
    for position, (_, row) in enumerate(shown.iterrows()):
        figure.add_trace(_point(row, position, x, y, palette, places[row["engine_digest"]],
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
        opacity=0.5 if standing is not None and standing.state == "dominated" else 1.0,
        text=[f"<b>{row['engine']}</b>"], textposition=place, cliponaxis=False, textfont={"color": color, "size": 13},
        error_x=_bar(row, x, color), error_y=_bar(row, y, color), customdata=[row["engine_digest"]],
        marker={"color": color, "size": 13, "symbol": marker(row["recipe"], row["kv_cache"], position),
                "line": {"width": 2, "color": color}},
        hovertemplate=f"<b>{row['engine']}</b>  {SIGNS.get(verdict, '')} {verdict}<br>{_hover(row, y)}<br>"
                      f"{_hover(row, x)}{f'<br>{standing.words}' if standing else ''}<extra></extra>")


#: Where a label may stand, the best first, as (plotly's word, horizontal and vertical direction).
_PLACES = (("top right", 1, 1), ("bottom right", 1, -1), ("top left", -1, 1), ("bottom left", -1, -1),
           ("top center", 0, 1), ("bottom center", 0, -1))
#: Size of a letter (on a desk, on a phone) with what it counts, of a line and of the gap to the point, as shares of the
#: plot's width and height. The server does not know how wide the plot will be drawn, so a place has to do for both.
_LETTERS, _LINE, _GAP = {0.0125: 1.0, 0.028: 0.2}, 0.055, 0.03


def _label_places(shown: pandas.DataFrame, x: Axis, y: Axis) -> dict[str, str]:
    """A place for every label so that none covers another label or a point, where there is one; by engine digest."""
    left = min(0.0, shown[x.key].min()) if x.lower_is_better else shown[x.key].min()
    width = (shown[x.key].max() - left) or 1.0
    height = (shown[y.key].max() - shown[y.key].min()) or 1.0
    points = {row["engine_digest"]: ((row[x.key] - left) / width, (row[y.key] - shown[y.key].min()) / height)
              for _, row in shown.iterrows()}
    fixed = [(px - 0.025, px + 0.025, py - 0.06, py + 0.06) for px, py in points.values()]  # the ring included
    for _, row in shown.iterrows():
        px, py = points[row["engine_digest"]]
        if (low := row.get(f"{x.key}_low")) is not None and low == low:
            fixed.append(((low - left) / width, (row[f"{x.key}_high"] - left) / width, py - 0.01, py + 0.01))
        if (low := row.get(f"{y.key}_low")) is not None and low == low:
            low, high = ((row[f"{y.key}_{end}"] - shown[y.key].min()) / height for end in ("low", "high"))
            fixed.append((px - 0.008, px + 0.008, low, high))
    taken = {letter: list(fixed) for letter in _LETTERS}
    found = {}
    for _, row in shown.iterrows():
        px, py = points[row["engine_digest"]]
        costs = {}
        for place, across, up in _PLACES:
            boxes = {letter: _box(px, py, across, up, len(row["engine"]) * letter) for letter in _LETTERS}
            costs[place] = (sum(weight * (sum(_overlap(boxes[letter], other, letter) for other in taken[letter])
                                          + _outside(boxes[letter])) for letter, weight in _LETTERS.items()), boxes)
        place = min(costs, key=lambda one: costs[one][0])
        for letter, box in costs[place][1].items():
            taken[letter].append(box)
        found[row["engine_digest"]] = place
    return found


def _box(px: float, py: float, across: int, up: int, width: float) -> tuple[float, float, float, float]:
    low = px - width / 2 + across * (width / 2 + 0.008)
    bottom = py - _LINE / 2 + up * (_LINE / 2 + _GAP)
    return low, low + width, bottom, bottom + _LINE


def _overlap(one: tuple[float, float, float, float], other: tuple[float, float, float, float], letter: float) -> float:
    """Shared area over that of a label of ten letters."""
    across = min(one[1], other[1]) - max(one[0], other[0])
    up = min(one[3], other[3]) - max(one[2], other[2])
    return max(0.0, across) * max(0.0, up) / (10 * letter * _LINE)


def _outside(box: tuple[float, float, float, float]) -> float:
    """How far a label leaves the plot to the left, or to the right, where the margin holds a little."""
    return 3 * (max(0.0, box[1] - 1.085) + max(0.0, -0.02 - box[0]))


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


#: What cells can be laid out over, and what tells their lines apart.
OVER = {"batch_size": "Requests at a time", "isl": "Input tokens", "osl": "Output tokens"}


def latency(rows: Sequence[Row], key: str, palette: Palette = LIGHT, height: int = 320, over: str = "batch_size",
            endpoints: Sequence[LatencySweep] = (), legend: bool = True) -> go.Figure:
    """A figure of the cells over batch size or length, one line per engine and whatever else differs.

    Bars are the range of the repeats; invalid cells are left out. ``endpoints`` stand beside the engines, open markers.
    """
    axis = COST[key]
    figure = go.Figure()
    for position, row in enumerate(rows):
        color = palette.of(row.recipe, position)
        style = {"line": {"color": color, "width": 2, "dash": "solid" if row.kv_cache == "bf16" else "dot"},
                 "marker": {"symbol": marker(row.recipe, row.kv_cache, position), "size": 10, "color": color,
                            "line": {"width": 2, "color": color}}}
        _lines(figure, row.cells, label(row), key, over, axis, style)
    for position, sweep in enumerate(endpoints):
        color = palette.other[position % len(palette.other)]
        style = {"line": {"color": color, "width": 2, "dash": "dash"},
                 "marker": {"symbol": "circle-open", "size": 10, "color": color, "line": {"width": 2, "color": color}}}
        _lines(figure, sweep.cells, sweep.target.name, key, over, axis, style)
    figure.update_layout(**{**layout(palette, height), "showlegend": legend}, legend={
        "orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0, "font": {"color": palette.muted}})
    figure.update_xaxes(title_text=OVER[over], type="category", categoryorder="array", categoryarray=_ticks(
        [cell for row in rows for cell in row.cells] + [cell for sweep in endpoints for cell in sweep.cells], over))
    figure.update_yaxes(title_text=axis.heading if legend else None, rangemode="tozero")
    return figure


def _ticks(cells: Sequence[Cell], over: str) -> list[str]:
    return [str(value) for value in sorted({getattr(cell, over) for cell in cells})]


def _lines(figure: go.Figure, cells: Sequence[Cell], name: str, key: str, over: str, axis: Axis,
           style: dict[str, Any]) -> None:
    """One line for each combination of what is not on the x axis."""
    others = [field for field in OVER if field != over]
    groups = sorted({tuple(getattr(cell, field) for field in others) for cell in cells})
    for group in groups:
        shown = sorted((cell for cell in cells if tuple(getattr(cell, field) for field in others) == group
                        and cell.invalid is None and getattr(cell, key) is not None),
                       key=lambda cell: int(getattr(cell, over)))
        half = [(getattr(cell, f"{key}_spread", None) or 0.0) / 2 for cell in shown]
        extra = " · " + "/".join(map(str, group)) if len(groups) > 1 else ""
        figure.add_scatter(
            x=[str(getattr(cell, over)) for cell in shown], y=[getattr(cell, key) for cell in shown],
            mode="lines+markers", name=f"{name}{extra}", **style,
            error_y={"type": "data", "array": half, "thickness": 1, "width": 4} if any(half) else None,
            hovertemplate="%{x}: %{y:.1f} " + axis.unit + f"<extra>{name}{extra}</extra>")

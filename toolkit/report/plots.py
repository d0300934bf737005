"""More figures, pure like ``charts``: intervals, losses by document, percentiles, a memory map, a heat map.

All carry the same type, colours and quiet axes. A mark that a reader may click has its own name as customdata.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

from evals.report import Estimate, LatencySweep
from toolkit.report import words
from toolkit.report.answers import DocumentLine
from toolkit.report.charts import layout
from toolkit.report.speed import PARTS, by_load
from toolkit.report.style import LIGHT, Palette


def _sized(palette: Palette, height: int, **changes: Any) -> dict[str, Any]:
    return {**layout(palette, height), **changes}


def intervals(lines: Sequence[tuple[str, Estimate, str]], title: str, palette: Palette = LIGHT, scale: float = 100.0,
              digits: int = 1, unit: str = "points") -> go.Figure:
    """One dot with its interval a line: (name, estimate, colour). A vertical line marks no difference."""
    names = [name for name, _, _ in lines]
    figure = go.Figure()
    for position, (name, estimate, color) in enumerate(lines):
        value = estimate.value * scale
        figure.add_scatter(
            x=[value], y=[position], mode="markers", marker={"size": 11, "color": color}, showlegend=False,
            error_x={"type": "data", "symmetric": False, "array": [estimate.ci_high * scale - value],
                     "arrayminus": [value - estimate.ci_low * scale], "color": color, "thickness": 1.5, "width": 5},
            hovertemplate=f"{name}: {words.number(value, digits, signed=True)} {unit} "
                          f"[{words.number(estimate.ci_low * scale, digits)}, "
                          f"{words.number(estimate.ci_high * scale, digits)}], n {estimate.n}<extra></extra>")
    figure.update_layout(**_sized(palette, 96 + 40 * len(names)))
    figure.add_vline(x=0, line={"color": palette.muted, "width": 1})
    figure.update_yaxes(tickmode="array", tickvals=list(range(len(names))), ticktext=names, showgrid=False,
                        zeroline=False, range=[len(names) - 0.4, -0.6])
    figure.update_xaxes(title_text=title)
    return figure


def by_document(lines: Sequence[DocumentLine], palette: Palette = LIGHT, color: str | None = None) -> go.Figure:
    """Delta NLL of every document, sorted; the area of a dot is its share of the tokens."""
    figure = go.Figure()
    most = max((line.tokens for line in lines), default=1)
    figure.add_scatter(
        x=list(range(1, len(lines) + 1)), y=[line.delta for line in lines], mode="markers",
        marker={"size": [6 + 14 * (line.tokens / most) ** 0.5 for line in lines], "color": color or palette.accent,
                "opacity": 0.75, "line": {"width": 0}},
        customdata=[[line.document, line.tokens] for line in lines],
        hovertemplate="%{customdata[0]}<br>%{y:+.4f} nats/token, %{customdata[1]} tokens<extra></extra>")
    figure.update_layout(**_sized(palette, 300))
    figure.add_hline(y=0, line={"color": palette.muted, "width": 1})
    figure.update_xaxes(title_text="Documents, the one that lost most first", showticklabels=False, showgrid=False,
                        zeroline=False)
    figure.update_yaxes(title_text="ΔNLL, nats/token")
    return figure


_DASHES = {"p50": "solid", "p90": "dash", "p99": "dot"}


def percentiles(endpoints: Sequence[LatencySweep], figure_name: str, unit: str, palette: Palette = LIGHT) -> go.Figure:
    """p50, p90 and p99 over the requests of each load, one colour an endpoint, one dash a percentile."""
    figure = go.Figure()
    order: list[str] = []
    for position, sweep in enumerate(endpoints):
        color, loads = palette.other[position % len(palette.other)], by_load(sweep, figure_name)
        order += [name for name, _ in loads if name not in order]
        for part in PARTS:
            shown = [(name, value) for name, values in loads if (value := values[part]) is not None]
            if shown:
                figure.add_scatter(
                    x=[name for name, _ in shown], y=[value for _, value in shown], mode="lines+markers",
                    name=f"{sweep.target.name} {part}", showlegend=False,
                    line={"color": color, "width": 2, "dash": _DASHES[part]},
                    marker={"symbol": "circle-open", "size": 8, "color": color, "line": {"width": 2, "color": color}},
                    hovertemplate=f"%{{x}}: %{{y:.1f}} {unit}<extra>{sweep.target.name} {part}</extra>")
    figure.update_layout(**_sized(palette, 270))
    figure.update_xaxes(type="category", categoryorder="array", categoryarray=order)
    figure.update_yaxes(title_text=unit, rangemode="tozero")
    return figure


def memory_map(engines: Sequence[tuple[str, Sequence[tuple[str, int]]]], palette: Palette = LIGHT) -> go.Figure:
    """Stacked bars, one an engine: where its memory goes. Tints of one colour, from dark to pale as in the legend."""
    parts = list(dict.fromkeys(part for _, memory in engines for part, _ in memory))
    figure = go.Figure()
    for number, part in enumerate(parts):
        sizes = [dict(memory).get(part, 0) for _, memory in engines]
        figure.add_bar(y=[name for name, _ in engines], x=[size / 1e6 for size in sizes], name=part, orientation="h",
                       marker={"color": palette.tint((1.0, 0.6, 0.35, 0.2)[number % 4]), "line": {"width": 0}},
                       customdata=[words.size(size) for size in sizes], hovertemplate="%{customdata}<extra>" + part
                       + "</extra>")
    figure.update_layout(**_sized(palette, 110 + 34 * len(engines), showlegend=True), barmode="stack", bargap=0.45,
                         legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0, "traceorder": "normal",
                                 "font": {"color": palette.muted}})
    figure.update_yaxes(autorange="reversed", showgrid=False)
    figure.update_xaxes(title_text="MB")
    return figure


def heat_map(layers: Sequence[str], formats: Sequence[str], values: Sequence[Sequence[float | None]], title: str,
             palette: Palette = LIGHT, marked: Sequence[tuple[str, str]] = (), raised: Sequence[tuple[str, str]] = ()
             ) -> go.Figure:
    """Layer x format. One hue from the page's surface to the accent, so dark means much in light mode and bright in
    dark; with values on both sides of zero two hues that the colour-blind tell apart, zero being the surface.
    ``marked`` cells (layer, format) carry a ring, ``raised`` ones a triangle."""
    known = [value for row in values for value in row if value is not None]
    both = bool(known) and min(known) < 0 < max(known)
    reach = max((abs(value) for value in known), default=1.0)
    scale = ([[0, palette.accent], [0.5, palette.surface], [1, palette.series["int4_awq"]]] if both else
             [[0, palette.surface], [1, palette.accent]])
    figure = go.Figure(go.Heatmap(
        z=[list(row) for row in values], x=list(formats), y=list(layers), xgap=2, ygap=2, colorscale=scale,
        zmin=-reach if both else None, zmax=reach if both else None, hoverongaps=False,
        colorbar={"title": {"text": f"{title}<br>", "side": "top", "font": {"size": 12, "color": palette.muted}},
                  "thickness": 10, "outlinewidth": 0, "tickfont": {"color": palette.muted, "size": 11}},
        hovertemplate="%{y}, %{x}: %{z:.4g}<extra></extra>"))
    for symbol, cells in (("circle-open", marked), ("triangle-up-open", raised)):
        if cells:
            figure.add_scatter(x=[place for _, place in cells], y=[layer for layer, _ in cells], mode="markers",
                               marker={"symbol": symbol, "size": 11, "color": palette.text, "line": {"width": 2}},
                               hoverinfo="skip", showlegend=False)
    figure.update_layout(**_sized(palette, 130 + 19 * len(layers)))
    figure.update_yaxes(range=[len(layers) - 0.5, -0.5], showgrid=False, type="category", ticks="", linewidth=0)
    figure.update_xaxes(range=[-0.5, len(formats) - 0.5], showgrid=False, side="top", type="category", ticks="",
                        linewidth=0)
    return figure

"""The static report: one HTML file that opens without a network, years later, in light and dark.

plotly.js is written into the file (about 5 MB) and a content security policy forbids every outside address, so what was
measured cannot be followed home. Every text is escaped; figures travel as JSON and are drawn in the reader's colours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from importlib import resources
from typing import Any

import plotly.graph_objects as go

from evals.report import Estimate, Reason, Row
from evals.tradeoff import label
from toolkit.report import axes, charts, tables, words
from toolkit.report.choice import standings
from toolkit.report.style import DARK, LIGHT, SIGNS, Palette


@dataclass(frozen=True, slots=True)
class Page:
    """All that the report says. ``facts`` are (name, value) pairs."""

    title: str
    run: str
    finished: str
    rows: Sequence[Row]
    model_deltas: Sequence[Estimate | None]
    recommendation: str
    facts: Sequence[tuple[str, str]]
    definitions: Sequence[tuple[str, str, str]]
    margin: float | None = None
    reasons: dict[str, Sequence[Reason]] = field(default_factory=dict)


def render(page: Page) -> str:
    """The whole document."""
    from plotly.offline import get_plotlyjs

    figures = _figures(page)
    body = "\n".join([_head(page), _tradeoffs(page, figures), _table(page), _verdicts(page), _agreement(page),
                      _latency(figures), _provenance(page), _definitions(page)])
    return (f"<!doctype html>\n<html lang=en><head><meta charset=utf-8><title>{escape(page.title)}</title>\n"
            "<meta name=viewport content='width=device-width, initial-scale=1'>\n"
            "<meta http-equiv=Content-Security-Policy content=\"default-src 'none'; style-src 'unsafe-inline'; "
            "script-src 'unsafe-inline'; img-src data: blob:\">\n"
            f"<style>{table_css()}</style></head>\n<body><main>\n{body}\n</main>\n<script>{get_plotlyjs()}</script>\n"
            f"<script>{_script(figures)}</script></body></html>\n")


def table_css() -> str:
    """The report's style for a document that holds one table."""
    css = resources.files("toolkit.report").joinpath("report.css").read_text(encoding="utf-8")
    return f"{_colors(':root', LIGHT)}\n@media (prefers-color-scheme: dark) {{{_colors(':root', DARK)}}}\n{css}"


def _colors(selector: str, palette: Palette) -> str:
    named = {"background": palette.background, "surface": palette.surface, "text": palette.text,
             "muted": palette.muted, "line": palette.line, "accent": palette.accent,
             **{word.lower(): color for word, color in palette.verdict.items()}}
    return f"{selector}{{" + "".join(f"--{name}:{value};" for name, value in named.items()) + "}"


def _figures(page: Page) -> dict[str, tuple[go.Figure, go.Figure]]:
    """Each figure in both modes, by the id of the element it is drawn in."""
    if not page.rows:
        return {}
    table = tables.frame(page.rows)
    found: dict[str, tuple[go.Figure, go.Figure]] = {}

    def add(name: str, draw: Any) -> None:
        found[name] = (draw(LIGHT), draw(DARK))

    quality = axes.usable(table, axes.QUALITY)
    for axis in axes.usable(table, axes.COST):
        if quality and axis.key in ("tpot_ms", "size_bytes"):
            add(f"tradeoff-{axis.key}", lambda palette, axis=axis: charts.tradeoff(
                table, axis, quality[0], standings(page.rows, axis, quality[0]), palette, page.margin))
    pairs = _pairs(page)
    if pairs:
        add("agreement", lambda palette: charts.agreement(pairs, palette))
    if any(row.cells for row in page.rows):
        for key in ("tpot_ms", "out_tok_s"):
            add(f"latency-{key}", lambda palette, key=key: charts.latency(page.rows, key, palette))
    return found


def _pairs(page: Page) -> list[words.Agreement]:
    found = [words.agreement(row, delta) for row, delta in zip(page.rows, page.model_deltas, strict=True)]
    return [pair for pair in found if pair]


def _head(page: Page) -> str:
    return (f"<header><p class=eyebrow>Precision and latency</p><h1>{escape(page.title)}</h1>"
            f"<p class=meta>run <code>{escape(page.run)}</code> · {escape(page.finished)}</p>"
            f"<p class=recommendation>{escape(page.recommendation)}</p></header>")


def _tradeoffs(page: Page, figures: dict[str, tuple[go.Figure, go.Figure]]) -> str:
    names = [name for name in figures if name.startswith("tradeoff")]
    if not names:
        return "<section><h2>Tradeoff</h2><p class=empty>No engine has both a quality and a cost figure.</p></section>"
    titles = {"tradeoff-tpot_ms": "Quality against latency", "tradeoff-size_bytes": "Quality against size"}
    boxes = "".join(f"<figure><figcaption>{titles[name]}</figcaption><div class=plot id={name}></div></figure>"
                    for name in names)
    return (f"<section><h2>Tradeoff</h2><div class=pair>{boxes}</div><p class=note>Bars are 95 % intervals (quality) "
            "and the range of the repeats (time). The dotted line joins the engines that no other beats on both "
            "axes.</p></section>")


def _badge(word: str | None) -> str:
    if word is None:
        return f"<span class=badge>{words.MISSING}</span>"
    return f"<span class='badge {word.lower()}'>{SIGNS[word]} {word}</span>"


def _table(page: Page) -> str:
    def heading(column: tables.Column) -> str:
        side = " class=left" if column.left else ""
        unit = f"<small>{escape(column.unit)}</small>" if column.unit else ""
        return f"<th scope=col{side}>{escape(column.title)}{unit}</th>"

    def cell(column: tables.Column, row: Row) -> str:
        if column.title == "verdict":
            return f"<td class=left>{_badge(row.verdict)}</td>"
        if column.title == "engine":
            return f"<th scope=row class=left>{escape(column.write(row))}</th>"
        text, _, interval = column.write(row).partition(" [")
        small = f"<small>[{escape(interval)}</small>" if interval else ""
        return f"<td>{escape(text)}{small}</td>"

    heads = "".join(heading(column) for column in tables.COLUMNS)
    lines = "".join(f"<tr>{''.join(cell(column, row) for column in tables.COLUMNS)}</tr>" for row in page.rows)
    notes = "".join(f"<li>{escape(line)}</li>" for line in tables.caption(page.rows))
    return (f"<section><h2>Engines</h2><div class=scroll><table><thead><tr>{heads}</tr></thead><tbody>{lines}</tbody>"
            f"</table></div><ul class=note>{notes}</ul></section>")


def _verdicts(page: Page) -> str:
    parts = []
    for row in page.rows:
        if row.verdict is None:
            continue
        checks = "".join(f"<tr><td class=left>{escape(reason.check)}</td><td class=left>{_badge(reason.word)}</td>"
                         f"<td>{escape(reason.found)}</td><td>{escape(reason.allowed)}</td></tr>"
                         for reason in page.reasons.get(row.engine_digest, ()))
        table = ("<div class=scroll><table><thead><tr><th class=left>check<th class=left>verdict<th>found<th>allowed"
                 f"</tr></thead><tbody>{checks}</tbody></table></div>") if checks else ""
        parts.append(f"<details><summary>{_badge(row.verdict)} <b>{escape(label(row))}</b> "
                     f"{escape(row.verdict_reason or '')}</summary>{table}</details>")
    return f"<section><h2>Verdicts</h2>{''.join(parts)}</section>" if parts else ""


def _agreement(page: Page) -> str:
    pairs = _pairs(page)
    if not pairs:
        return ""
    lines = "".join(
        f"<tr><th scope=row class=left>{escape(pair.label)}</th><td>{words.nats_interval(pair.model)}</td>"
        f"<td>{words.nats_interval(pair.engine)}</td><td>{words.nats(pair.added)}</td>"
        f"<td class=left>{'within the interval' if pair.agrees else 'outside the interval'}</td></tr>"
        for pair in pairs)
    verdict = ("Every engine's loss equals its in-memory model's within the interval: building it added none of its "
               "own." if all(pair.agrees for pair in pairs) else
               "At least one engine's loss differs from its in-memory model's by more than the interval.")
    return ("<section><h2>Does the engine add loss of its own?</h2><p>ΔNLL of the fake-quantized model in memory "
            f"beside that of the engine built from its checkpoint, on the same texts. {verdict}</p>"
            "<div class=plot id=agreement></div><div class=scroll><table><thead><tr><th class=left>engine"
            "<th>model in memory<small>nats/token [95 %]</small><th>engine<small>nats/token [95 %]</small>"
            f"<th>added<small>nats/token</small><th class=left>agreement</tr></thead><tbody>{lines}</tbody></table>"
            "</div></section>")


def _latency(figures: dict[str, tuple[go.Figure, go.Figure]]) -> str:
    names = [name for name in figures if name.startswith("latency")]
    if not names:
        return ""
    titles = {"latency-tpot_ms": "Time per output token", "latency-out_tok_s": "Output tokens per second"}
    boxes = "".join(f"<figure><figcaption>{titles[name]}</figcaption><div class=plot id={name}></div></figure>"
                    for name in names)
    return f"<section><h2>Latency over batch size</h2><div class=pair>{boxes}</div></section>"


def _provenance(page: Page) -> str:
    facts = "".join(f"<tr><th scope=row class=left>{escape(name)}</th><td class=left>{escape(value)}</td></tr>"
                    for name, value in page.facts)
    chain = "".join(f"<tr><th scope=row class=left>{escape(label(row))}</th><td class=left><code>"
                    f"{escape(row.checkpoint_digest)}</code></td><td class=left><code>{escape(row.engine_digest)}"
                    "</code></td></tr>" for row in page.rows)
    return ("<section><h2>Provenance</h2><div class=scroll><table><tbody>" + facts + "</tbody></table></div>"
            "<div class=scroll><table><thead><tr><th class=left>engine<th class=left>checkpoint digest"
            f"<th class=left>engine digest</tr></thead><tbody>{chain}</tbody></table></div></section>")


def _definitions(page: Page) -> str:
    lines = "".join(f"<dt>{escape(name)} <small>{escape(unit)}</small></dt><dd>{escape(formula)}</dd>"
                    for name, unit, formula in page.definitions)
    return f"<section><h2>What the figures mean</h2><dl>{lines}</dl></section>" if lines else ""


def _script(figures: dict[str, tuple[go.Figure, go.Figure]]) -> str:
    drawn = ",".join(f'"{name}":[{light.to_json()},{dark.to_json()}]' for name, (light, dark) in figures.items())
    return ("const figures={" + drawn.replace("</", "<\\/") + "};\n"
            "const dark=matchMedia('(prefers-color-scheme: dark)');\n"
            "function draw(){for(const[name,pair]of Object.entries(figures)){const figure=pair[dark.matches?1:0];"
            "Plotly.react(name,figure.data,figure.layout,{displayModeBar:false,responsive:true});}}\n"
            "draw();dark.addEventListener('change',draw);")

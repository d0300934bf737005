"""A stored run as a page view, and as a file: HTML, CSV, Markdown, JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from typing import Any

from toolkit.report import html, tables, words
from toolkit.report.choice import definitions, recommendation
from toolkit.store import Run, RunStore

_FACTS = {"model": "Model", "model_digest": "Model digest", "device": "Device", "evaluation": "Evaluation data",
          "evaluation_digest": "Evaluation digest", "calibration": "Calibration data", "licences": "Licences",
          "policy": "Policy", "policy_sha256": "Policy sha256", "seed": "Seed", "versions": "Versions"}


def page_of(store: RunStore, run: Run) -> html.Page:
    """All that the page and the HTML report say about a run."""
    stored = store.rows(run.id)
    rows = [one.row for one in stored]
    verdicts = {row.engine_digest: store.verdict_of(row.engine_digest, run.facts.get("policy_sha256")) for row in rows}
    return html.Page(
        title=run.job, run=run.id, finished=(run.finished or "").replace("T", " "), rows=rows,
        model_deltas=[one.model_delta for one in stored],
        recommendation=recommendation(rows) if rows else "No engine has been judged yet.",
        facts=[(title, _text(run.facts[name])) for name, title in _FACTS.items() if run.facts.get(name) is not None],
        definitions=definitions(), margin=run.facts.get("margin"),
        reasons={digest: found.verdict.reasons for digest, found in verdicts.items() if found})


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {content}" for name, content in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def render(store: RunStore, run: Run, format: str) -> str:
    """The run as text of one format: html, csv, md or json."""
    if format == "html":
        return html.render(page_of(store, run))
    stored = store.rows(run.id)
    rows = [one.row for one in stored]
    if format == "csv":
        return tables.csv(rows)
    if format == "md":
        notes = "\n".join(f"- {tables.escape_markdown(line)}" for line in tables.caption(rows))
        return f"{tables.markdown(rows)}\n{notes}\n\n{tables.escape_markdown(recommendation(rows))}\n"
    pairs = [words.agreement(one.row, one.model_delta) for one in stored]
    return json.dumps({"run": run.id, "job": run.job, "finished": run.finished, "facts": run.facts,
                       "rows": [row.model_dump() for row in rows],
                       "agreement": [{"engine": pair.label, "model_delta_nll": pair.model.model_dump(),
                                      "engine_delta_nll": pair.engine.model_dump(), "added": pair.added,
                                      "agrees": pair.agrees} for pair in pairs if pair]},
                      ensure_ascii=False, indent=2) + "\n"


def lines_as(lines: Sequence[dict[str, Any]], format: str, title: str = "") -> str:
    """Any table of plain values as csv, md or html; every cell is escaped, and no spreadsheet runs one."""
    heads = list(dict.fromkeys(name for line in lines for name in line))
    if format == "csv":
        import pandas

        table = pandas.DataFrame([{name: tables.defused(line.get(name)) for name in heads} for line in lines],
                                 columns=heads)
        return str(table.to_csv(index=False))
    cells = [["" if line.get(name) is None else str(line[name]) for name in heads] for line in lines]
    if format == "md":
        rows = [heads, [":--"] * len(heads), *cells]
        safe = [[cell if number == 1 else tables.escape_markdown(cell) for cell in row]
                for number, row in enumerate(rows)]
        return "\n".join("| " + " | ".join(row) + " |" for row in safe) + "\n"
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in cells)
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    return (f"<!doctype html>\n<html lang=en><head><meta charset=utf-8><title>{escape(title)}</title>"
            f"<style>{html.table_css()}</style></head><body><main><h1>{escape(title)}</h1>"
            f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></main></body></html>\n")

"""The model card of a release: what it is, what was measured, under which policy it passed, and where it came from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from evals.report import Row, Verdict
from evals.tradeoff import label
from toolkit.report import tables

if TYPE_CHECKING:
    from toolkit.release import ReleaseRecord

_safe = tables.escape_markdown


def render(record: ReleaseRecord, baseline: Row | None, limits: Sequence[tuple[str, str]], alias: str,
           versions: Mapping[str, str], calibration: str | None = None) -> str:
    """The card as Markdown. ``limits`` and ``versions`` are facts of the engine; every text is escaped."""
    row = record.row
    shown = [row] if baseline is None or baseline.engine_digest == row.engine_digest else [baseline, row]
    notes = "\n".join(f"- {_safe(line)}" for line in tables.caption(shown))
    return "\n".join([
        _head(record), "## Measured", "", tables.markdown(shown), notes, "", _verdict(record.verdict),
        _use(record, alias), _list("Limits", limits),
        _list("Data and licences", [*([("calibration", calibration)] if calibration else []),
                                    *record.licences.items()]),
        _provenance(record, versions)])


def _head(record: ReleaseRecord) -> str:
    row, approval = record.row, record.approval
    mark = (f"\n> **Released without a passing verdict.** {_safe(approval.who)} overrode the gate: "
            f"{_safe(approval.override)}\n") if approval.override else ""
    return f"""---
library_name: llm-quant-toolkit
tags: [quantized, {row.recipe}]
---

# {_safe(record.name)}, {_safe(label(row))}
{mark}
An inference engine for {_safe(row.device)}, built from calibrated weights and released with the evidence beside it.
Approved by {_safe(approval.who)} on {approval.at[:10]}: {_safe(approval.reason)}
"""


def _verdict(verdict: Verdict | None) -> str:
    if verdict is None:
        return "## Verdict: not judged\n\nNo gate has judged this engine.\n"
    checks = "\n".join(f"| {_safe(reason.check)} | {reason.word} | {_safe(reason.found)} | {_safe(reason.allowed)} |"
                       for reason in verdict.reasons)
    return f"""## Verdict: {verdict.word}

{_safe(verdict.reason)} (policy {_safe(verdict.policy)}, sha256 `{verdict.policy_sha256[:16]}`)

| check | verdict | found | allowed |
|:--|:--|--:|--:|
{checks}
"""


def _use(record: ReleaseRecord, alias: str) -> str:
    if "engine" in record.parts:
        lines, note = [f'toolkit generate alias:{alias} -p "Hello"', f"toolkit serve alias:{alias}"], (
            "The engine opens only on the device it was built for; elsewhere it says what it needs and how to rebuild "
            "it.")
    else:
        lines, note = [f"toolkit releases pull {alias} --to TARGET --out DIR",
                       "toolkit build DIR/checkpoint --out ENGINE"], (
            "The checkpoint is portable; the engine is built from it on the device that will run it.")
    return "\n".join(["## Use", "", "```", *lines, "```", "", note, ""])


def _list(title: str, facts: Sequence[tuple[str, str]]) -> str:
    lines = [f"- {_safe(what)}: {_safe(value)}" for what, value in facts] or ["- none recorded"]
    return "\n".join([f"## {title}", "", *lines, ""])


def _provenance(record: ReleaseRecord, versions: Mapping[str, str]) -> str:
    row, verdict = record.row, record.verdict
    built = ", ".join(f"{_safe(package)} {_safe(version)}" for package, version in versions.items())
    return f"""## Provenance

- engine `{row.engine_digest}`
- checkpoint `{row.checkpoint_digest}`
- baseline of the verdict `{verdict.baseline_digest if verdict else "none"}`
- weights before quantization: {_safe(row.source_grid) if row.source_grid else "as published by the model's authors"}
- built with {built}

`provenance.json` names every file by sha256; `toolkit releases verify` checks all of it.
"""

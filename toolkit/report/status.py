"""Small tables for the terminal: runs, checks, data, releases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from evals.report import Row
from evals.tradeoff import label
from toolkit.console import duration, stdout, verdict_text
from toolkit.report import tables, words
from toolkit.store import Run, StoredRow

if TYPE_CHECKING:
    from evals.data import EvalData
    from toolkit.approving import Approved
    from toolkit.audit import AuditEntry
    from toolkit.health import Check
    from toolkit.history import Move
    from toolkit.jobs import Work
    from toolkit.release import Release

_STATES = {"ok": Text("✓", style="green"), "missing": Text("✕", style="red"), "note": Text("·", style="yellow")}
_STATUS = {"finished": "green", "running": "cyan", "stopped": "yellow", "waiting": "dim",
           "failed": "red", "killed": "red", "cancelled": "yellow"}


def _table(*columns: str, right: Sequence[str] = ()) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for name in columns:
        table.add_column(name, justify="right" if name in right else "left", overflow="fold")
    return table


def health_table(checks: Sequence[Check]) -> Table:
    table = _table("", "what", "found", "to do")
    for check in checks:
        table.add_row(_STATES[check.state], check.name, Text(check.found), Text(check.mend))
    return table


def data_table(parts: Mapping[str, EvalData]) -> Table:
    table = _table("data", "texts", "questions", "licences", "folder", right=("texts",))
    for name, data in parts.items():
        tasks = ", ".join(f"{task} {len(data.task(task))}" for task in data.tasks) or words.MISSING
        table.add_row(name, f"{len(data.texts)}", tasks, ", ".join(sorted(set(data.licences.values()))),
                      Text(str(data.path)))
    return table


def runs_table(runs: Sequence[Run]) -> Table:
    table = _table("run", "job", "status", "finished", "model")
    for run in runs:
        table.add_row(run.id, Text(run.job), Text(run.status, style=_STATUS.get(run.status, "")),
                      (run.finished or words.MISSING)[:19].replace("T", " "),
                      Text(str(run.facts.get("model", words.MISSING))))
    return table


def run_parts(run: Run, rows: Sequence[StoredRow]) -> list[RenderableType]:
    """A run as it is printed: heading, table, what to know, recommendation, verdicts, agreement, report."""
    from toolkit.report.choice import recommendation

    plain = [stored.row for stored in rows]
    parts: list[RenderableType] = [Text.assemble((run.job, "bold"), f"  run {run.id}  ",
                                                 (run.status, _STATUS.get(run.status, "")))]
    if not rows:
        return [*parts, Text("The table is written when every engine has been judged; `toolkit jobs ls` shows how far "
                             "it is. A run that was stopped or killed goes on when its job is run again.", style="dim")]
    parts += [tables.terminal(plain, stdout().width), Text("\n".join(tables.caption(plain)), style="dim"), Text("")]
    parts += _verdict_lines(plain)
    pairs = [pair for stored in rows if (pair := words.agreement(stored.row, stored.model_delta))]
    if pairs:
        parts += [Text(""), Text("What the engine itself adds to the loss (nats per token)", style="bold"),
                  agreement_table(pairs)]
    parts += [Text(recommendation(plain), style="bold")]
    return [*parts, Text(f"report {run.report}", style="dim")] if run.report else parts


def _verdict_lines(rows: Sequence[Row]) -> list[RenderableType]:
    width = max(len(label(row)) for row in rows)
    lines: list[RenderableType] = [
        Text.assemble(label(row).ljust(width + 2), verdict_text(row.verdict), " " * (14 - len(row.verdict)),
                      (row.verdict_reason or "", "dim")) for row in rows if row.verdict]
    if any(row.verdict not in (None, "BASELINE") for row in rows):
        lines.append(Text(words.WIDER, style="dim"))
    return lines


def agreement_table(pairs: Sequence[words.Agreement]) -> Table:
    table = _table("engine", "model in memory", "engine built from it", "added", "interval", right=(
        "model in memory", "engine built from it", "added"))
    for pair in pairs:
        table.add_row(pair.label, words.nats_interval(pair.model), words.nats_interval(pair.engine),
                      words.nats(pair.added), "within" if pair.agrees else "outside")
    return table


def releases_table(releases: Sequence[Release]) -> Table:
    table = _table("release", "alias", "what", "verdict", "engine", "size", "created", right=("size",))
    for release in releases:
        word = release.record.verdict.word if release.record.verdict else None
        mark = Text(" override", style="bold red") if release.record.approval.override else Text()
        table.add_row(release.digest[:12], ", ".join(release.aliases) or words.MISSING, Text(release.record.name),
                      verdict_text(word) + mark, release.record.engine_digest[:12], words.size(release.size_bytes),
                      release.created[:19].replace("T", " "))
    return table


def log_table(entries: Sequence[AuditEntry]) -> Table:
    table = _table("when", "what", "subject", "detail")
    for entry in entries:
        detail = ", ".join(f"{name} {value[:12] if len(value) == 64 else value}"
                           for name, value in entry.detail.items())
        table.add_row(entry.at[:19].replace("T", " "), entry.action,
                      entry.subject[:12] if len(entry.subject) == 64 else Text(entry.subject), Text(detail))
    return table


def held_table(held: Mapping[str, Move]) -> Table:
    table = _table("alias", "release", "since", "who", "why")
    for name, move in held.items():
        table.add_row(name, move.digest[:12], move.at[:19].replace("T", " "), Text(move.who), Text(move.reason))
    return table


def approvals_table(held: Mapping[str, Approved]) -> Table:
    table = _table("engine", "verdict", "policy", "approved", "who", "why")
    for engine, one in held.items():
        mark = Text(" override", style="bold red") if one.override else Text()
        table.add_row(engine[:12], Text(one.word) + mark, Text(one.policy or words.MISSING),
                      one.at[:19].replace("T", " "), Text(one.who), Text(one.reason))
    return table


def jobs_table(found: Sequence[Work]) -> Table:
    table = _table("job", "what", "state", "stage", "", "left", "asked", right=("", "left"))
    for work in found:
        share = f"{100 * work.share:.0f} %" if work.share is not None and not work.over else ""
        left = duration(work.eta_s) if work.eta_s is not None else ""
        table.add_row(work.id, Text(" ".join([work.verb, *work.arguments])), Text(work.state, style=_STATUS.get(
            work.state, "")), Text(work.stage), share, left, work.asked[:19].replace("T", " "))
    return table

"""What single verbs print: a calibration plan, a sweep, an eval report, a verdict."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from evals.report import EvalReport, LatencySweep, Verdict
from toolkit.console import verdict_text
from toolkit.report import words

if TYPE_CHECKING:
    from calib.plan import CalibrationPlan


def _table(*columns: str, right: tuple[str, ...] = ()) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for name in columns:
        table.add_column(name, justify="right" if name in right else "left", overflow="fold")
    return table


def sweep_table(sweep: LatencySweep) -> Table:
    """One line a cell, medians with their spread (max - min)."""
    numbers = ("batch", "in", "out", "TTFT ms", "± range", "TPOT ms", "± range ", "out tok/s", "repeats")
    table = _table(*numbers, "", right=numbers)
    for cell in sweep.cells:
        table.add_row(f"{cell.batch_size}", f"{cell.isl}", f"{cell.osl}", words.milliseconds(cell.ttft_ms),
                      words.milliseconds(cell.ttft_ms_spread), words.number(cell.tpot_ms, 2),
                      words.number(cell.tpot_ms_spread, 2), words.rate(cell.out_tok_s), f"{cell.n}",
                      Text(f"invalid: {cell.invalid}" if cell.invalid else "", style="red"))
    table.caption = f"peak memory {words.size(sweep.peak_memory_bytes)} on {sweep.device}"
    table.caption_justify = "left"
    return table


def report_parts(report: EvalReport) -> list[RenderableType]:
    """The figures of a report, each with its interval and n."""
    facts: list[tuple[str, str]] = []
    if report.accuracy:
        facts.append((f"accuracy ({', '.join(report.accuracy.tasks)})",
                      f"{words.percent_interval(report.accuracy)}, {report.accuracy.n} questions"))
    if report.delta_nll:
        facts.append(("ΔNLL, nats/token", f"{words.nats_interval(report.delta_nll)}, {report.delta_nll.n} documents"))
    elif report.texts:
        tokens = sum(text.tokens for text in report.texts)
        mean = sum(text.nll for text in report.texts) / tokens
        facts.append(("NLL, nats/token", f"{words.number(mean, 4)}, {tokens} tokens (give --baseline for ΔNLL)"))
    for name, value in (("KL, nats/token", words.number(report.kl_mean, 4)),
                        ("same top-1", words.percent(report.same_top1)), ("flips", words.percent(report.flips))):
        if value != words.MISSING:
            facts.append((name, value))
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column()
    for name, value in facts:
        table.add_row(name, value)
    return [Text(f"{report.target.name}  {report.target.digest[:12]}  ({report.target.numerics})"), table,
            *[Text(f"fault: {fault}", style="red") for fault in report.faults]]


def verdict_parts(verdict: Verdict) -> list[RenderableType]:
    table = _table("check", "verdict", "found", "allowed")
    for reason in verdict.reasons:
        table.add_row(reason.check, verdict_text(reason.word), reason.found, reason.allowed)
    parts: list[RenderableType] = [Text.assemble(verdict_text(verdict.word), "  ", verdict.reason), table]
    if verdict.detectable is not None:
        parts.append(Text(f"smallest loss that the first check sees with 80 % power here: {verdict.detectable:.4g}",
                          style="dim"))
    return parts + [Text(f"look at: {warning}", style="yellow") for warning in verdict.warnings]


def plan_parts(plan: CalibrationPlan) -> list[RenderableType]:
    """The dry run, field by field; lists of modules as counts with their reasons."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True, vertical="top")
    table.add_column(overflow="fold")
    for name, value in plan.model_dump(mode="json").items():
        table.add_row(name.replace("_", " "), Text(_written(name, value)))
    return [table]


def _written(name: str, value: Any) -> str:
    if value is None:
        return words.MISSING
    if name.endswith("_bytes") or name in ("memory", "disk"):
        return words.size(value) if isinstance(value, int) else str(value)
    if isinstance(value, dict):
        return "\n".join(f"{key}: {_written(key, inner)}" for key, inner in value.items())
    if isinstance(value, list):
        return "\n".join(_written(name, inner) for inner in value[:12]) + (
            f"\n... {len(value) - 12} more" if len(value) > 12 else "") or "none"
    return str(value)

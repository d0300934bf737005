"""What single verbs print: a calibration plan, a sweep, an eval report, a verdict."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from evals.cpu_state import busy_note
from evals.report import EvalReport, LatencySweep, Verdict
from toolkit.console import duration, verdict_text
from toolkit.report import words

if TYPE_CHECKING:
    from calib.plan import CalibrationPlan
    from calib.recipe import Recipe, Setting
    from evals.reference import Reference


def _table(*columns: str, right: tuple[str, ...] = ()) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for name in columns:
        table.add_column(name, justify="right" if name in right else "left", overflow="fold")
    return table


def sweep_table(sweep: LatencySweep) -> Table:
    """One line a cell, medians with their spread (max - min)."""
    numbers = ["batch", "in", "out", "TTFT ms", "± range", "TPOT ms", "± range ", "out tok/s", "repeats"]
    powered = any(cell.gpu is not None and cell.gpu.joules_per_token is not None for cell in sweep.cells)
    numbers += ["J/token"] if powered else []
    table = _table(*numbers, "", right=tuple(numbers))
    for cell in sweep.cells:
        energy = [words.number(cell.gpu.joules_per_token if cell.gpu else None, 3)] if powered else []
        table.add_row(f"{cell.batch_size}", *words.lengths(cell), words.milliseconds(cell.ttft_ms),
                      words.milliseconds(cell.ttft_ms_spread), words.number(cell.tpot_ms, 2),
                      words.number(cell.tpot_ms_spread, 2), words.rate(cell.out_tok_s), f"{cell.n}", *energy,
                      Text(f"invalid: {cell.invalid}" if cell.invalid else "", style="red"))
    busy = busy_note([cell.waited for cell in sweep.cells])
    table.caption = "\n".join([f"peak memory {words.size(sweep.peak_memory_bytes)} on {sweep.device}",
                               *([busy] if busy else [])])
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
    kl = words.number(report.kl_mean, 4)
    kl += f", 99 % of tokens below {words.number(report.kl_p99, 3)}" if report.kl_p99 is not None else ""
    flips = words.percent(report.flips)
    flips += (f" ({report.flips_to_wrong} right to wrong, {report.flips_to_right} wrong to right)"
              if report.flips is not None else "")
    for name, value in (("KL, nats/token", kl), ("same top-1", words.percent(report.same_top1)), ("flips", flips),
                        ("answers that could not be read", words.percent(report.unparsed))):
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


def flips_parts(flips: Sequence[Mapping[str, Any]]) -> list[RenderableType]:
    """The worst answers that went from right to wrong: both answers, and by how much each was preferred."""
    if not flips:
        return []
    table = _table("worst flips", "question", "baseline", "margin", "candidate", "margin ", right=("margin", "margin "))
    for flip in flips:
        cells = [Text(flip["task"]), Text(flip["question"] or flip["id"][:12])]
        for side in ("baseline", "candidate"):
            answer, margin = flip[side]["answer"], flip[side]["margin"]
            cells += [Text("no answer" if answer is None else answer), Text(words.number(margin, 3, signed=True))]
        table.add_row(*cells)
    return [table]


def reference_parts(old: Reference | None, new: Reference) -> list[RenderableType]:
    """Old and new interval side by side."""
    table = _table("", "date", "commit", "NLL, nats/token", "accuracy", "seed")
    for name, one in (("old", old), ("new", new)):
        if one is not None:
            nll = "–" if one.nll is None else (f"{one.nll.value:.4f} [{one.nll.ci_low:.4f}, {one.nll.ci_high:.4f}], "
                                               f"n {one.nll.n}")
            accuracy = f"{words.percent_interval(one.accuracy)}, n {one.n_items}"
            table.add_row(name, one.date, one.commit[:12], nll, accuracy, f"{one.asked.seed}")
    return [table, Text(f"reason: {new.reason}")]


def recipe_parts(settings: Sequence[Setting]) -> list[RenderableType]:
    """Each value of a recipe with its origin."""
    table = _table("key", "value", "from")
    for setting in settings:
        table.add_row(setting.key, Text(str(setting.value)), Text(setting.origin))
    return [table]


def plan_parts(plan: CalibrationPlan, rehearsed: bool = False) -> list[RenderableType]:
    """The dry run: facts, modules (layers folded into one line), who loads the result, warnings."""
    facts = [("model", f"{plan.model}  {plan.architecture}, {plan.parameters / 1e6:,.0f} M parameters, "
              f"{plan.num_layers} layers"),
             ("recipe", f"{plan.recipe.name}: {plan.recipe.summary}"), ("KV cache", str(plan.kv)),
             ("group size", str(plan.group_size) if plan.group_size else "none: scales are not grouped"),
             ("embeddings", "tied to the output head" if plan.tied_embeddings else "apart from the output head"),
             ("weights from", plan.source_grid or "the model's own precision"),
             ("size", f"{words.size(plan.size_bytes)} of {words.size(plan.bf16_bytes)} in bf16 ({plan.layout} layout)"),
             ("layer by layer", f"{'yes' if plan.layerwise else 'no'}: {plan.layerwise_reason}"),
             ("memory", f"about {words.size(plan.memory_bytes)}{'' if rehearsed else ' beside the libraries'}"),
             ("time", f"about {duration(plan.seconds)}, measured on small models here" if plan.seconds is not None else
              _unsaid_time(plan.recipe))]
    if plan.recipe.protect:
        facts.append(("protected", f"{plan.recipe.protect} of {plan.num_layers} layers stay in 16 bits; which ones is "
                                   "measured by quantize, so each is listed here as if it were rounded"))
    if plan.tp > 1:
        facts.append(("devices", f"groups and heads divide over {plan.tp}"))
    if plan.work_bytes:
        facts.append(("work", f"{words.size(plan.work_bytes)} on disk meanwhile"))
    if plan.disk_free_bytes is not None:
        facts.append(("disk", f"{words.size(plan.disk_free_bytes)} free"))
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts:
        table.add_row(name, Text(value))
    loaders = _table("runtime", "loads it", "from", "note", "by")
    for loader in plan.loaders:
        loaders.add_row(loader.runtime, "yes" if loader.loads else "no", loader.since, Text(loader.note),
                        Text(loader.source, style="dim"))
    return [table, _modules(plan), loaders, *[Text(f"look at: {line}", style="yellow") for line in plan.warnings]]


def _unsaid_time(recipe: Recipe) -> str:
    """Why no time stands there, and whether --rehearse would say one."""
    from calib.hardware import obstacle

    if recipe.protect:
        return "not said: with protect it grows with the square of the layers, which no rehearsal measures"
    return "not said: it cannot be rehearsed here" if obstacle(recipe) else "not said: ask with --rehearse"


def _modules(plan: CalibrationPlan) -> Table:
    """Modules that differ only in their layer's number are one line with a count."""
    groups: Counter[tuple[str, str, str]] = Counter()
    for module in plan.modules:
        name = re.sub(r"\.\d+\.", ".*.", module.name)
        groups[name, "x".join(map(str, module.shape)), str(module.scheme) if module.scheme else
               f"left: {module.reason}"] += 1
    table = _table("module", "count", "shape", "becomes", right=("count", "shape"))
    for (name, shape, becomes), count in groups.items():
        table.add_row(name, f"{count}", shape, Text(becomes, style="dim" if becomes.startswith("left") else ""))
    return table

"""Judgements item by item: accuracy per task with paired differences, flips in words, delta NLL by document.

Two engines answer the same questions, so what counts is the pairs in which they differ: the interval of a paired
difference is several times narrower than that of either accuracy. Statistics are ``evals.statistics``'.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from evals.items import Asked, Question
from evals.report import Estimate, EvalReport, Item
from evals.statistics import holm, mcnemar_p, paired_drop, wilson

_Z = 1.959964


@dataclass(frozen=True, slots=True)
class TaskLine:
    """One task of one engine. ``loss``: paired drop against the baseline, as a share; ``p``: Holm-adjusted McNemar."""

    task: str
    accuracy: Estimate
    baseline: float | None
    loss: Estimate | None
    to_wrong: int
    to_right: int
    p: float | None


@dataclass(frozen=True, slots=True)
class Flip:
    """A question that exactly one of baseline and engine answered right, in words."""

    id: str
    task: str
    question: str
    right: str
    baseline: str
    engine: str
    to_wrong: bool
    baseline_margin: float | None
    engine_margin: float | None

    @property
    def harm(self) -> float:
        """By how much the right answer lost ground: sorts flips, the worst first."""
        return (self.baseline_margin or 0.0) - (self.engine_margin or 0.0)


@dataclass(frozen=True, slots=True)
class DocumentLine:
    """What one document lost, in nats per token."""

    document: str
    delta: float
    tokens: int
    same_top1: float | None


def paired(report: EvalReport, baseline: EvalReport) -> list[tuple[Item, Item]]:
    """(baseline's item, this one's) for every question that both answered."""
    there = {(item.task, item.id): item for item in baseline.items}
    return [(there[key], item) for item in report.items if (key := (item.task, item.id)) in there]


def loss_of(report: EvalReport, baseline: EvalReport) -> Estimate | None:
    """Paired loss of accuracy over all tasks, as a share with its 95 % interval; None without a common question."""
    return _loss(paired(report, baseline))


def _loss(pairs: list[tuple[Item, Item]]) -> Estimate | None:
    if not pairs:
        return None
    to_wrong, to_right = _flips(pairs)
    drop, error = paired_drop(float(to_wrong), float(to_right), float(len(pairs)))
    return Estimate(value=float(drop), ci_low=float(drop - _Z * error), ci_high=float(drop + _Z * error), n=len(pairs))


def _flips(pairs: list[tuple[Item, Item]]) -> tuple[int, int]:
    return (sum(old.correct and not new.correct for old, new in pairs),
            sum(new.correct and not old.correct for old, new in pairs))


def task_lines(report: EvalReport, baseline: EvalReport | None) -> list[TaskLine]:
    """Every task, and with several of them "all" first."""
    groups: dict[str, list[Item]] = defaultdict(list)
    for item in report.items:
        groups[item.task].append(item)
    pairs: dict[str, list[tuple[Item, Item]]] = defaultdict(list)
    for old, new in paired(report, baseline) if baseline else ():
        pairs[new.task].append((old, new))
    names = sorted(groups)
    p_values = dict(zip(names, holm([mcnemar_p(*_flips(pairs[name])) for name in names]), strict=True))
    lines = [_task_line(name, groups[name], pairs[name], p_values[name] if pairs[name] else None) for name in names]
    if len(names) > 1:
        everything = [pair for name in names for pair in pairs[name]]
        lines.insert(0, _task_line("all tasks", report.items, everything, None))
    return lines


def _task_line(name: str, items: list[Item], pairs: list[tuple[Item, Item]], p: float | None) -> TaskLine:
    right = sum(item.correct for item in items)
    low, high = wilson(right, len(items))
    to_wrong, to_right = _flips(pairs)
    return TaskLine(name, Estimate(value=right / len(items), ci_low=low, ci_high=high, n=len(items)),
                    sum(old.correct for old, _ in pairs) / len(pairs) if pairs else None, _loss(pairs), to_wrong,
                    to_right, p)


def flips(report: EvalReport, baseline: EvalReport, questions: Mapping[str, Asked]) -> list[Flip]:
    """All flips, the most harmful first."""
    found = [_in_words(old, new, questions.get(new.id)) for old, new in paired(report, baseline)
             if old.correct != new.correct]
    return sorted(found, key=lambda flip: (not flip.to_wrong, -flip.harm, flip.id))


def _in_words(old: Item, new: Item, question: Asked | None) -> Flip:
    choices = question.choices if isinstance(question, Question) else ()

    def said(item: Item) -> str:
        return item.answer or (choices[item.choice] if choices and item.choice is not None else "nothing readable")
    right = (said(old if old.correct else new) if question is None else
             question.choices[question.answer] if isinstance(question, Question) else question.answer)
    return Flip(new.id, new.task, question.question if question else "(the question is not in this home any more)",
                right, said(old), said(new), old.correct, old.margin, new.margin)


def documents(report: EvalReport, baseline: EvalReport) -> list[DocumentLine]:
    """Delta NLL of each document, the worst first."""
    there = {text.id: text for text in baseline.texts}
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0, 0.0])
    for text in report.texts:
        if text.id in there:
            entry = sums[text.document or text.id[:12]]
            entry[0] += text.nll - there[text.id].nll
            entry[1] += text.tokens
            entry[2] += text.same_top1 or 0
            entry[3] += text.tokens if text.same_top1 is not None else 0
    lines = [DocumentLine(name, delta / tokens, int(tokens), same / known if known else None)
             for name, (delta, tokens, same, known) in sums.items()]
    return sorted(lines, key=lambda line: -line.delta)

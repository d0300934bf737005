"""May this engine replace that one? Paired, one-sided non-inferiority, with three honest answers and a refusal.

Every gate in use compares two accuracies as if other questions had been asked; so it either goes red on no loss or
sleeps through 2-4 points. Here the same questions are compared, only answers that flip make noise, and the verdict says
which of three things is known:

    PASS          the loss is below the margin, with confidence (or, at the cap, by the point estimate, and said so)
    FAIL          the loss is above it; or a figure the policy asks for is missing; or the target is faulty
    INCONCLUSIVE  there are too few items to know; the reason says how many would do
    ANOMALOUS     better than plausible: the candidate beats the unquantized model by more than the margin, with
                  confidence; something else than quantization differs

Reports that answered other prompts are refused (ComparisonError): no figure is computed. The worst word of all checks
is the verdict, FAIL before ANOMALOUS before INCONCLUSIVE. Pure functions over records.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from evals.compare import refuse_incomparable
from evals.errors import ComparisonError, PolicyError
from evals.length import judge_length
from evals.policy import AccuracyRule, NllRule, Policy, SpeedRule, load_policy
from evals.report import EvalReport, Item, LatencySweep, Reason, Verdict, VerdictWord
from evals.sampling import in_turn
from evals.sequential import FAIL, OPEN, corrected_z, decide
from evals.statistics import POWER_80, clustered_ratio, holm, mcnemar_p, stratified_drop, t_of_z, wilson

__all__ = ["EXIT_CODES", "Policy", "able_to_gate", "judge", "load_policy", "worst_flips"]

EXIT_CODES: dict[VerdictWord, int] = {"PASS": 0, "BASELINE": 0, "FAIL": 1, "INCONCLUSIVE": 3, "ANOMALOUS": 3}
_WORST: tuple[VerdictWord, ...] = ("FAIL", "ANOMALOUS", "INCONCLUSIVE", "PASS")

#: Delta NLL is judged on all documents there are; four times more may be drawn, so z is that of four looks.
NLL_LOOKS = 4
DELTA_NLL, ACCURACY = "delta NLL", "accuracy"


def judge(candidate: EvalReport, baseline: EvalReport | None, policy: Policy, sweep: LatencySweep | None = None, *,
          candidates: int = 1) -> Verdict:
    """The verdict on one candidate. ``candidates``: how many are judged at this gate (corrects z for them all).

    ComparisonError (exit 2) when the reports, or the sweep, are not about the same thing; PolicyError when the margin
    lies within the noise of the same engine run twice.
    """
    if candidates < 1:
        raise PolicyError(f"{candidates} candidates cannot be judged", "Give the number of engines at this gate.")
    if baseline is not None:
        refuse_incomparable(baseline, candidate)
    if sweep is not None and sweep.target.digest != candidate.target.digest:
        raise ComparisonError(f"the sweep measured {sweep.target.digest[:12]}, the report judged "
                              f"{candidate.target.digest[:12]}", "Sweep the engine that is gated.")
    reasons = _faults(candidate)
    detectable: list[float] = []
    if policy.delta_nll is not None:
        reasons.append(_nll(candidate, baseline, policy.delta_nll, candidates, detectable))
    if policy.accuracy is not None:
        reasons += _accuracy(candidate, baseline, policy.accuracy, candidates, detectable)
    if policy.length is not None:
        reasons.append(judge_length(candidate, baseline, policy.length, candidates))
    reasons += [_speed(rule, sweep) for rule in policy.speed]
    word = min((reason.word for reason in reasons), key=_WORST.index)
    decisive = [reason for reason in reasons if reason.word == word]
    return Verdict(word=word, reason="; ".join(f"{r.check}: {r.found} ({r.allowed})" for r in decisive),
                   reasons=reasons, candidate_digest=candidate.target.digest,
                   baseline_digest=baseline.target.digest if baseline else "", policy=policy.name,
                   policy_sha256=policy.sha256, detectable=detectable[0] if detectable else None,
                   warnings=_warnings(candidate, policy))


def _faults(candidate: EvalReport) -> list[Reason]:
    if not candidate.faults:
        return []
    return [Reason(check="sanity", word="FAIL", allowed="no faults",
                   found=f"{candidate.faults[0]} ({len(candidate.faults)} faults in all)")]


def _missing(check: str, what: str, allowed: str) -> Reason:
    return Reason(check=check, word="FAIL", found=f"not measured: {what}", allowed=allowed)


def _nll(candidate: EvalReport, baseline: EvalReport | None, rule: NllRule, candidates: int,
         detectable: list[float]) -> Reason:
    allowed = f"loss below {rule.margin:g} nats/token"
    if baseline is None or not candidate.texts or len(candidate.texts) != len(baseline.texts):
        return _missing(DELTA_NLL, "no baseline" if baseline is None else "texts are missing", allowed)
    paired = {text.id: text.nll for text in baseline.texts}
    value, error, documents = clustered_ratio(
        np.array([text.nll - paired[text.id] for text in candidate.texts]),
        np.array([float(text.tokens) for text in candidate.texts]),
        [text.document or text.id for text in candidate.texts])
    if documents < rule.min_documents:
        return Reason(check=DELTA_NLL, word="INCONCLUSIVE", allowed=allowed,
                      found=f"{value:+.4f} over {documents} documents, {rule.min_documents} are needed")
    reach = t_of_z(corrected_z(NLL_LOOKS, candidates), documents - 1)
    detectable.append((reach + POWER_80) * error)
    low, high = value - reach * error, value + reach * error
    found = f"{value:+.4f} [{low:+.4f}, {high:+.4f}] over {documents} documents"
    word: VerdictWord = ("FAIL" if low > rule.margin else "ANOMALOUS" if high < -rule.margin else
                         "PASS" if high < rule.margin else "INCONCLUSIVE")
    if word == "INCONCLUSIVE":
        needed = items_needed(documents, reach * error, abs(rule.margin - value))
        found += f"; about {needed:,} documents would decide"
    return Reason(check=DELTA_NLL, word=word, found=found, allowed=allowed)


def chance_of(items: Sequence[Item]) -> float:
    """Accuracy of a blind guess; an item without choices (an exact match) has none."""
    return sum(1.0 / item.n_choices if item.n_choices else 0.0 for item in items) / len(items)


def able_to_gate(items: Sequence[Item]) -> bool:
    """The baseline answers these clearly better than chance (its 95 % Wilson interval lies above)."""
    return bool(items) and wilson(sum(item.correct for item in items), len(items))[0] > chance_of(items)


def _judged(baseline: EvalReport, rule: AccuracyRule) -> dict[str, list[Item]]:
    """The baseline's items of each task that a rule names, in order of name; an empty list where it has none."""
    wanted = sorted({item.task for item in baseline.items} if rule.tasks is None else set(rule.tasks))
    return {task: [item for item in baseline.items if item.task == task] for task in wanted}


def able_tasks(baseline: EvalReport, rule: AccuracyRule) -> list[str]:
    """The tasks that a rule judges and the baseline can do."""
    return [task for task, items in _judged(baseline, rule).items() if able_to_gate(items)]


def _accuracy(candidate: EvalReport, baseline: EvalReport | None, rule: AccuracyRule, candidates: int,
              detectable: list[float]) -> list[Reason]:
    allowed = f"paired loss below {rule.margin:g} points"
    if baseline is None:
        return [_missing(ACCURACY, "no baseline", allowed)]
    by_task = _judged(baseline, rule)
    if not by_task or not all(by_task.values()):
        lost = ", ".join(task for task, items in by_task.items() if not items) or "no questions at all"
        return [_missing(ACCURACY, lost, allowed)]
    able = able_tasks(baseline, rule)
    if not able:
        count = sum(map(len, by_task.values()))
        return [Reason(check=ACCURACY, word="INCONCLUSIVE", allowed=allowed, found=(
            f"the baseline is not clearly above chance on {', '.join(by_task)} over {count} items, so no loss could be "
            "seen there"))]
    right = {(item.task, item.id): item.correct for item in baseline.items}
    pairs = [(item, right[item.task, item.id]) for item in in_turn(candidate.items, candidate.seed)
             if item.task in able]
    reasons = [_pooled(pairs, rule, candidates, detectable)]
    return reasons + (_single_tasks(pairs, able, rule, candidates) if len(able) > 1 else [])


Pairs = Sequence[tuple[Item, bool]]


def flip_counts(pairs: Pairs) -> tuple[int, int]:
    """(right -> wrong, wrong -> right) of (candidate's item, baseline was right)."""
    counts = Counter((before, item.correct) for item, before in pairs)
    return counts[True, False], counts[False, True]


def loss_of(pairs: Pairs) -> tuple[float, float]:
    """(drop, standard error) as shares, stratified by task; clustered where items share documents, if that is wider."""
    tasks = sorted({item.task for item, _ in pairs})
    groups = [[pair for pair in pairs if pair[0].task == task] for task in tasks]
    drop, error = stratified_drop([(*flip_counts(group), len(group)) for group in groups])
    documents = [item.document or f"{item.task}\0{item.id}" for item, _ in pairs]
    if len(set(documents)) < len(documents):
        lost = np.array([float(before) - float(item.correct) for item, before in pairs])
        error = max(error, clustered_ratio(lost, np.ones(len(lost)), documents)[1])
    return drop, error


def _pooled(pairs: Pairs, rule: AccuracyRule, candidates: int, detectable: list[float]) -> Reason:
    allowed, n = f"paired loss below {rule.margin:g} points", len(pairs)
    z, margin = corrected_z(len(rule.looks), candidates), rule.margin / 100
    _refuse_noise(rule, min(n, rule.looks[-1]))
    looks = [look for look in rule.looks if look <= n]
    if not looks:
        drop, error = loss_of(pairs)
        detectable.append((z + POWER_80) * error * 100)
        needed = required_items((sum(flip_counts(pairs)) + 1) / n, rule.margin)
        return Reason(check=ACCURACY, word="INCONCLUSIVE", allowed=allowed, found=(
            f"{100 * drop:+.2f} points over {n} items; the first look is at {rule.looks[0]}, and at this flip rate "
            f"about {needed} items decide"))
    losses = [loss_of(pairs[:look]) for look in looks]
    decision = decide(np.array([[drop for drop, _ in losses]]), np.array([[error for _, error in losses]]), margin, z,
                      capped=looks[-1] == rule.looks[-1])
    at = int(decision.look[0])
    drop, error = losses[at]
    detectable.append((z + POWER_80) * error * 100)
    b, c = flip_counts(pairs[:looks[at]])
    found = (f"{100 * drop:+.2f} points [{100 * (drop - z * error):+.2f}, {100 * (drop + z * error):+.2f}] over "
             f"{looks[at]} items, {b} right to wrong and {c} wrong to right, detectable {detectable[-1]:.2f}")
    if decision.code[0] == OPEN:
        needed = items_needed(looks[at], z * error, abs(margin - drop))
        coming = next((look for look in rule.looks if look >= needed), rule.looks[-1])
        return Reason(check=ACCURACY, word="INCONCLUSIVE", allowed=allowed,
                      found=f"{found}; items ran out, {coming} should decide")
    if decision.by_estimate[0]:
        found += "; the cap was reached and the point estimate decides"
    whole, whole_error = loss_of(pairs[:rule.looks[-1]])
    if whole + z * whole_error < -margin:
        return Reason(check=ACCURACY, word="ANOMALOUS", found=found, allowed=f"no gain above {rule.margin:g} points")
    return Reason(check=ACCURACY, word="FAIL" if decision.code[0] == FAIL else "PASS", found=found, allowed=allowed)


def _refuse_noise(rule: AccuracyRule, n: int) -> None:
    if rule.aa_flips is None:
        return
    floor = noise_margin(rule.aa_flips, n)
    if rule.margin < floor:
        raise PolicyError(f"a margin of {rule.margin:g} points lies within the noise of the same engine run twice "
                          f"({floor:.2f} points at {100 * rule.aa_flips:g} % flips over {n} items)",
                          "Raise the margin, judge more items, or make the engine deterministic.")


def noise_margin(aa_flips: float, n: int) -> float:
    """The smallest margin (points) that answers changing by themselves (a share ``aa_flips``) leave usable."""
    return 250 * math.sqrt(aa_flips / n)


def _single_tasks(pairs: Pairs, tasks: Sequence[str], rule: AccuracyRule, candidates: int) -> list[Reason]:
    """Each task's own line: it fails only by twice the margin, corrected for the number of tasks."""
    groups = {task: [pair for pair in pairs if pair[0].task == task] for task in tasks}
    p_values = holm([mcnemar_p(*flip_counts(groups[task])) for task in tasks])
    z, reasons = corrected_z(len(rule.looks), candidates * len(tasks)), []
    for task, p in zip(tasks, p_values, strict=True):
        drop, error = loss_of(groups[task])
        failed = drop - z * error > 2 * rule.margin / 100
        reasons.append(Reason(
            check=f"accuracy of {task}", word="FAIL" if failed else "PASS",
            allowed=f"loss not clearly above {2 * rule.margin:g} points",
            found=f"{100 * drop:+.2f} points over {len(groups[task])} items, p {p:.3f} (Holm) for any loss"))
    return reasons


def items_needed(n: int, reach: float, gap: float) -> int:
    """Items at which an interval of half width ``reach`` over ``n`` items shrinks to ``gap``, at most a million."""
    return min(1_000_000, math.ceil(n * (reach / gap) ** 2)) if gap > 0 else 1_000_000


def _speed(rule: SpeedRule, sweep: LatencySweep | None) -> Reason:
    place = "" if rule.batch_size is None else f" at batch={rule.batch_size} isl={rule.isl} osl={rule.osl}"
    check = f"{rule.figure}{place}"
    allowed = f"at most {rule.max:g}" if rule.max is not None else f"at least {rule.min:g}"
    if sweep is None:
        return _missing(check, "no sweep", allowed)
    if rule.figure == "peak_memory_bytes":
        value: float | None = sweep.peak_memory_bytes
    else:
        cells = [cell for cell in sweep.cells if (cell.batch_size, cell.isl, cell.osl) ==
                 (rule.batch_size, rule.isl, rule.osl)]
        if not cells or cells[0].invalid:
            return _missing(check, cells[0].invalid or "invalid" if cells else "no such cell", allowed)
        value = getattr(cells[0], rule.figure)
    if value is None:
        return _missing(check, "no figure", allowed)
    good = value <= rule.max if rule.max is not None else value >= (rule.min or 0.0)
    return Reason(check=check, word="PASS" if good else "FAIL", found=f"{value:g}", allowed=allowed)


def _warnings(candidate: EvalReport, policy: Policy) -> list[str]:
    found = []
    for name, value in (("kl_mean", candidate.kl_mean), ("flips", candidate.flips)):
        limit = getattr(policy.warn, name)
        if limit is not None and value is not None and value > limit:
            found.append(f"{name} {value:.4g} is above {limit:g}")
    limit = policy.warn.same_top1
    if limit is not None and candidate.same_top1 is not None and candidate.same_top1 < limit:
        found.append(f"same_top1 {candidate.same_top1:.4g} is below {limit:g}")
    return found


def worst_flips(baseline: EvalReport, candidate: EvalReport, count: int = 10) -> list[tuple[Item, Item]]:
    """(baseline's item, candidate's item) pairs that went right -> wrong, the largest loss of margin first."""
    before = {(item.task, item.id): item for item in baseline.items}
    lost = [(before[item.task, item.id], item) for item in candidate.items
            if (item.task, item.id) in before and before[item.task, item.id].correct and not item.correct]
    def change(pair: tuple[Item, Item]) -> float:
        base, new = pair[0].margin, pair[1].margin
        return -math.inf if base is None or new is None else new - base
    return sorted(lost, key=change)[:count]


def required_items(flips: float, margin: float) -> int:
    """Items that decide a margin (points) in one look when a share ``flips`` of answers changes: f (2.5/m)^2."""
    return math.ceil(flips * (250.0 / margin) ** 2)

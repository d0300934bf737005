"""How much more to ask when a gate is open: the next look of the sequential rule.

A gate that is INCONCLUSIVE wants more items, not another threshold. What it may draw is fixed beforehand, or looking
again would be a way to get lucky: accuracy goes on at the next of the policy's looks (200, 400, 800, 1,600 items in
all), delta NLL doubles its texts up to three times, and both z were chosen for exactly that many looks. Samples nest
(``evals.sampling``), so everything that was answered stays and only the difference is asked.

Output length is judged once, over a fixed number of continuations, and draws nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from evals.gate import ACCURACY, DELTA_NLL, NLL_LOOKS, able_tasks
from evals.policy import Policy
from evals.report import EvalReport, Verdict

#: The checks that more items can decide.
DRAWN = (DELTA_NLL, ACCURACY)


@dataclass(frozen=True, slots=True)
class Draw:
    """Settings of the next look: ``texts`` in all, ``items`` of each task at most; ``why`` says what is open.

    ``added``: items that nobody has answered yet, texts and questions together.
    """

    texts: int
    items: int
    added: int
    why: str


def next_draw(verdict: Verdict, baseline: EvalReport, policy: Policy, *, texts: int, items: int, first_texts: int,
              texts_there: int, sizes: Mapping[str, int]) -> Draw | None:
    """The next look of an INCONCLUSIVE verdict; None where it is another word, or where the data cannot reach a look.

    ``texts`` and ``items`` (of each task) were judged, ``first_texts`` at the first look; the data holds
    ``texts_there`` texts and ``sizes`` questions of each judged task.
    """
    if verdict.word != "INCONCLUSIVE":
        return None
    still = {reason.check for reason in verdict.reasons if reason.word == "INCONCLUSIVE"}
    texts = min(texts, texts_there)
    more_texts, more_items, why = texts, items, []
    if DELTA_NLL in still and policy.delta_nll is not None:
        wider = min(texts_there, 2 * texts, first_texts * 2 ** (NLL_LOOKS - 1))
        if wider > texts:
            more_texts = wider
            why.append(f"ΔNLL is open after {texts} texts: {wider - texts} more")
    if ACCURACY in still and policy.accuracy is not None:
        able = able_tasks(baseline, policy.accuracy)
        tasks = able or [task for task in sizes if task in (policy.accuracy.tasks or sizes)]
        now, looks = _pooled(sizes, tasks, items), policy.accuracy.looks
        look = next((look for look in looks if look > now), None)
        hopeful = bool(able) or now < looks[0]  # whether a baseline is above chance is not known before the first look
        if hopeful and look is not None and (wider := _limit(sizes, tasks, look)) is not None:
            more_items = wider
            why.append(f"accuracy is open after {now} questions: the next look is at {look}")
    if not why:
        return None
    added = more_texts - texts + _pooled(sizes, sizes, more_items) - _pooled(sizes, sizes, items)
    return Draw(more_texts, more_items, added, "; ".join(why))


def _pooled(sizes: Mapping[str, int], tasks: Collection[str], limit: int) -> int:
    return sum(min(sizes[task], limit) for task in tasks)


def _limit(sizes: Mapping[str, int], tasks: Collection[str], look: int) -> int | None:
    """The smallest limit a task at which the tasks together give ``look`` questions; None when they have fewer."""
    left = look
    for count, size in zip(range(len(tasks), 0, -1), sorted(sizes[task] for task in tasks), strict=True):
        if left <= size * count:
            return -(-left // count)
        left -= size
    return None

"""What an open gate draws next: the policy's looks and nothing else, nested, and only where the data reaches."""

import pytest

from evals.draw import _limit, next_draw
from evals.gate import judge
from evals.items import Exact
from evals.policy import Policy
from evals.report import EvalReport, Item, Target, TextScore
from evals.sampling import in_turn

BASE = Target(name="b", digest="b" * 64, numerics="n", tokenizer_digest="t", template_sha256="s", bos=True)
NEW = BASE.model_copy(update={"name": "c", "digest": "c" * 64})


def report(target, items=0, wrong=0, texts=0, shift=0.0):
    """``items`` questions of two tasks, the first ``wrong`` answered wrong; every other text shifts."""
    judged = [Item(id=f"{n:05d}", task="ab"[n % 2], prompt_sha256="p", correct=n >= wrong, n_choices=4)
              for n in range(items)]
    scored = [TextScore(id=f"t{n}", tokens=10, nll=20.0 + shift * (n % 2)) for n in range(texts)]
    return EvalReport(target=target, baseline_digest=None, data_digest="d", harness={}, seed=0, texts=scored,
                      items=judged, accuracy=None, delta_nll=None, kl_mean=None, same_top1=None, flips=None)


def drawn(policy, *, items=0, wrong=0, texts=0, shift=0.0, there=10_000, sizes=None, first=None, looks_at=None,
          base_wrong=0):
    base, new = report(BASE, items, base_wrong, texts), report(NEW, items, wrong, texts, shift)
    return next_draw(judge(new, base, policy), base, policy, texts=texts, items=looks_at or items // 2,
                     first_texts=first or texts, texts_there=there,
                     sizes=sizes or {"a": 1000, "b": 1000})


POINTS = Policy(name="p", accuracy={"margin": 2})
NATS = Policy(name="n", delta_nll={"margin": 0.2})


@pytest.mark.parametrize(("items", "sizes", "expected"), [
    (60, None, 100), (200, None, 200), (210, None, 200), (400, None, 400), (800, None, 800),
    (60, {"a": 50, "b": 1000}, 150), (200, {"a": 100, "b": 299}, None), (60, {"a": 90, "b": 60}, None)])
def test_the_next_look(items, sizes, expected):
    """From n questions of two tasks: how many of each reach the next of 200, 400, 800 and 1,600."""
    found = drawn(POINTS, items=items, wrong=items // 60, sizes=sizes)
    assert (found and found.items) == expected
    if found:
        assert found.added == sum(min(size, expected) - min(size, items // 2)
                                  for size in (sizes or {"a": 1000, "b": 1000}).values())


def test_nothing_is_drawn_once_it_is_decided():
    assert drawn(POINTS, items=200, wrong=0) is None
    assert drawn(POINTS, items=200, wrong=60) is None
    assert drawn(POINTS, items=1600, wrong=30) is None


def test_a_baseline_at_chance_over_few_questions_is_asked_up_to_the_first_look():
    """30 questions cannot show that a model beats chance; 200 that do not show it either end the search."""
    found = drawn(POINTS, items=30, wrong=20, base_wrong=20)
    assert (found.items, "the next look is at 200" in found.why) == (100, True)
    assert drawn(POINTS, items=200, wrong=150, base_wrong=150) is None
    assert drawn(Policy(name="p", accuracy={"margin": 2, "tasks": ["a"]}), items=30, wrong=20, base_wrong=20
                 ).items == 200


def test_texts_double_three_times_at_most():
    shift = 4.0  # half the texts lose .4 nats a token: the mean lies on the margin
    assert [drawn(NATS, texts=n, shift=shift, first=40).texts for n in (40, 80, 160)] == [80, 160, 320]
    assert drawn(NATS, texts=320, shift=shift, first=40) is None
    assert drawn(NATS, texts=40, shift=shift, there=55).texts == 55
    assert drawn(NATS, texts=55, shift=shift, there=55, first=40) is None
    assert drawn(NATS, texts=10, shift=0.0).texts == 20, "too few documents is open too"


def test_a_check_that_is_decided_draws_nothing():
    both = Policy(name="p", accuracy={"margin": 2}, delta_nll={"margin": 0.2})
    found = drawn(both, items=200, wrong=0, texts=40, shift=4.0)
    assert (found.texts, found.items, found.added) == (80, 100, 40)
    assert "accuracy" not in found.why
    found = drawn(both, items=200, wrong=3, texts=40)
    assert (found.texts, found.items, found.added) == (40, 200, 200)


def test_the_smallest_limit_is_the_smallest():
    sizes = {"a": 7, "b": 30, "c": 100}
    for look in range(1, 138):
        limit = _limit(sizes, list(sizes), look)
        assert sum(min(size, limit) for size in sizes.values()) >= look
        assert sum(min(size, limit - 1) for size in sizes.values()) < look
    assert _limit(sizes, list(sizes), 138) is None


def test_a_look_keeps_its_items_when_more_are_drawn():
    items = [Exact(id=f"{n}", task="ab"[n % 2], question="q", answer="1") for n in range(600)]
    whole = in_turn(items, 5)
    for limit in (20, 50, 100, 200):
        few = [item for task in "ab" for item in [one for one in whole if one.task == task][:limit]]
        assert in_turn(few, 5) == whole[:2 * limit]


def test_a_prefix_holds_every_task_by_its_share():
    items = [Exact(id=f"{n}", task="ab"[n % 10 == 0], question="q", answer="1") for n in range(500)]
    for n in (10, 100, 250):
        assert sum(item.task == "b" for item in in_turn(items, 1)[:n]) == n // 10

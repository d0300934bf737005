"""Verdicts: PASS, FAIL, INCONCLUSIVE, ANOMALOUS and refusals, each for its reason."""

import numpy as np
import pytest
import yaml

from evals.compare import refuse_incomparable
from evals.errors import ComparisonError, PolicyError
from evals.gate import EXIT_CODES, able_to_gate, judge, required_items, worst_flips
from evals.policy import Policy, load_policy
from evals.records import load_record, save_record
from evals.report import Cell, EvalReport, Item, LatencySweep, Target, TextScore, Verdict
from evals.sampling import shuffled

BASE = Target(name="base", digest="b" * 64, numerics="cpu fp32", tokenizer_digest="t" * 64, template_sha256="c" * 64,
              bos=False)
NEW = BASE.model_copy(update={"name": "new", "digest": "n" * 64})
NLL = Policy(name="nll", delta_nll={"margin": 0.05})
POINTS = Policy(name="points", accuracy={"margin": 2.0})


def report(target=BASE, *, right=(), texts=(), task="quiz", **fields):
    """A report of items (right or wrong) and texts (summed nll over 100 tokens each)."""
    items = [Item(id=f"{i:064d}", task=task if isinstance(task, str) else task[i % len(task)],
                  prompt_sha256=f"p{i}", choice=0, target=0 if good else 1, correct=bool(good),
                  margin=1.0 if good else -1.0 - i, n_choices=4) for i, good in enumerate(right)]
    scores = [TextScore(id=f"t{i}", tokens=100, nll=nll, document=f"d{i // 2}") for i, nll in enumerate(texts)]
    plain = EvalReport(target=target, baseline_digest=None, data_digest="d" * 64, harness={"window": "512"}, seed=0,
                       texts=scores, items=items, accuracy=None, delta_nll=None, kl_mean=None, same_top1=None,
                       flips=None)
    return plain.model_copy(update=fields)


def answers(n, flips=0, loss=0, seed=0, share=0.7):
    """(baseline, candidate) right/wrong with exactly (flips + loss)/2 losses and (flips - loss)/2 gains, spread out."""
    base = np.arange(n) < share * n
    rng = np.random.default_rng(seed)
    rng.shuffle(base)
    new = base.copy()
    new[rng.choice(np.flatnonzero(base), (flips + loss) // 2, replace=False)] = False
    new[rng.choice(np.flatnonzero(~base), (flips - loss) // 2, replace=False)] = True
    return base, new


def judged(policy, base, new, **fields):
    return judge(report(NEW, right=new, **fields), report(right=base, **fields), policy)


def nll_pair(delta, noise=0.5, n=80, seed=0):
    base = 300 + 20 * np.random.default_rng(seed).normal(size=n)
    return base, base + 100 * delta + noise * np.random.default_rng(seed + 1).normal(size=n)


def test_the_same_engine_twice_passes_at_the_first_look():
    base, new = answers(1600)
    verdict = judged(POINTS, base, new)
    assert verdict.word == "PASS"
    assert "over 200 items, 0 right to wrong" in verdict.reason
    assert (verdict.candidate_digest, verdict.baseline_digest) == (NEW.digest, BASE.digest)
    texts = nll_pair(0)[0]
    verdict = judge(report(NEW, texts=texts), report(texts=texts), NLL)
    assert verdict.word == "PASS"
    assert verdict.reason.startswith("delta NLL: +0.0000")


def test_a_loss_of_five_points_fails_and_thirty_items_are_inconclusive():
    base, new = answers(1600, flips=160, loss=96)
    verdict = judged(POINTS, base, new)
    assert verdict.word == "FAIL"
    assert verdict.detectable > 0
    few = judged(POINTS, *answers(30, flips=2))
    assert few.word == "INCONCLUSIVE"
    assert "first look is at 200" in few.reason
    assert [EXIT_CODES[word] for word in ("PASS", "FAIL", "INCONCLUSIVE", "ANOMALOUS", "BASELINE")] == [0, 1, 3, 3, 0]


def test_items_that_run_out_are_inconclusive_and_the_cap_decides_by_the_estimate():
    base, new = answers(900, flips=80, loss=18)
    verdict = judged(POINTS, base, new)
    assert verdict.word == "INCONCLUSIVE"
    assert "over 800 items" in verdict.reason
    assert "items ran out, 1600 should decide" in verdict.reason
    for loss, word in ((26, "PASS"), (40, "FAIL")):
        verdict = judged(POINTS, *answers(1600, flips=170, loss=loss))
        assert verdict.word == word
        assert "point estimate decides" in verdict.reason


def test_better_than_plausible_is_anomalous():
    verdict = judged(POINTS, *answers(1600, flips=120, loss=-100))
    assert verdict.word == "ANOMALOUS"
    base, new = nll_pair(-0.2)
    assert judge(report(NEW, texts=new), report(texts=base), NLL).word == "ANOMALOUS"


@pytest.mark.parametrize(("delta", "noise", "word"), [
    (0.00, 0.5, "PASS"), (0.03, 0.5, "PASS"), (0.08, 0.5, "FAIL"), (0.05, 3.0, "INCONCLUSIVE"), (0.2, 3.0, "FAIL")])
def test_delta_nll_is_judged_by_its_interval(delta, noise, word):
    base, new = nll_pair(delta, noise)
    verdict = judge(report(NEW, texts=new), report(texts=base), NLL)
    assert verdict.word == word
    assert 0 < verdict.detectable < 0.05
    assert "over 40 documents" in verdict.reason
    if word == "INCONCLUSIVE":
        assert "would decide" in verdict.reason


def test_too_few_documents_are_inconclusive():
    base, new = nll_pair(0.0, n=30)
    verdict = judge(report(NEW, texts=new), report(texts=base), NLL)
    assert verdict.word == "INCONCLUSIVE"
    assert "15 documents, 20 are needed" in verdict.reason


def test_missing_figures_and_faults_fail():
    base, new = nll_pair(0.0)
    both = Policy(name="both", delta_nll={"margin": 0.05}, accuracy={"margin": 2.0},
                  speed=[{"figure": "tpot_ms", "max": 50, "batch_size": 1, "isl": 64, "osl": 8}])
    verdict = judge(report(NEW, texts=new), report(texts=base), both)
    assert verdict.word == "FAIL"
    assert "accuracy: not measured: no questions at all" in verdict.reason
    assert "no sweep" in verdict.reason
    assert judge(report(NEW, texts=new), None, NLL).word == "FAIL"
    broken = judge(report(NEW, texts=new[:50], faults=["text t50: 3 log-probabilities are not finite"]),
                   report(texts=base), NLL)
    assert broken.word == "FAIL"
    assert "not finite (1 faults in all)" in broken.reason
    unknown = Policy(name="p", accuracy={"margin": 2.0, "tasks": ["quiz", "other"]})
    verdict = judged(unknown, *answers(1600))
    assert verdict.word == "FAIL"
    assert "not measured: other" in verdict.reason


def test_a_task_at_chance_may_not_gate():
    base, new = answers(400, flips=40, loss=40, share=0.27)
    assert not able_to_gate(report(right=base).items)
    verdict = judged(POINTS, base, new)
    assert verdict.word == "INCONCLUSIVE"
    assert "not clearly above chance on quiz over" in verdict.reason
    assert able_to_gate(report(right=answers(400, share=0.4)[0]).items)


def test_a_task_at_chance_beside_an_able_one_is_left_out():
    base = np.array([i % 2 == 0 or i % 8 == 1 for i in range(1600)])
    new = base.copy()
    new[np.flatnonzero(base)[::40]] = False
    verdict = judged(POINTS, base, new, task=("able", "guess"))
    assert "over 800 items, 25 right to wrong" in verdict.reason
    assert all("guess" not in reason.check for reason in verdict.reasons)


def test_a_single_task_fails_only_by_twice_the_margin():
    rng = np.random.default_rng(3)
    base = rng.random(3000) < 0.8
    new = base.copy()
    lost = [i for i in np.flatnonzero(base) if i % 10 == 0][:60]
    new[lost] = False
    tasks = tuple("small" if i == 0 else "large" for i in range(10))
    wide = Policy(name="p", accuracy={"margin": 4.0})
    verdict = judged(wide, base, new, task=tasks)
    assert verdict.word == "FAIL"
    assert [(r.check, r.word) for r in verdict.reasons] == [
        ("accuracy", "PASS"), ("accuracy of large", "PASS"), ("accuracy of small", "FAIL")]
    assert "p 1.000 (Holm)" in verdict.reasons[1].found


def test_shared_passages_widen_the_interval():
    base = np.ones(400, bool)
    new = base.copy()
    new[:12] = False
    def made(target, right):
        plain = report(target, right=right)
        return plain.model_copy(update={"items": [item.model_copy(update={"document": f"passage {i // 12}"})
                                                  for i, item in enumerate(plain.items)]})
    one_look = Policy(name="p", accuracy={"margin": 5.0, "looks": [400]})
    alone = judge(report(NEW, right=new), report(right=base), one_look)
    shared = judge(made(NEW, new), made(BASE, base), one_look)
    assert shared.detectable > 1.5 * alone.detectable


@pytest.mark.parametrize(("change", "words"), [
    ({"data_digest": "e" * 64}, "data: dddddddddddd against eeeeeeeeeeee"),
    ({"seed": 1}, "seed: 0 against 1"),
    ({"harness": {"window": "256"}}, "harness window: 512 against 256"),
    ({"target": NEW.model_copy(update={"template_sha256": "e" * 64})}, "chat template"),
    ({"target": NEW.model_copy(update={"bos": True})}, "BOS rule: False against True"),
])
def test_reports_about_something_else_are_refused(change, words):
    base, new = answers(400)
    with pytest.raises(ComparisonError, match=words) as refusal:
        judge(report(NEW, right=new).model_copy(update=change), report(right=base), POINTS)
    assert refusal.value.exit_code == 2


def test_other_items_prompts_or_token_counts_are_refused():
    base, new = answers(400)
    with pytest.raises(ComparisonError, match="questions: 400 questions against 399"):
        judge(report(NEW, right=new[:399]), report(right=base), POINTS)
    other = report(NEW, right=new)
    items = [other.items[0].model_copy(update={"prompt_sha256": "another"}), *other.items[1:]]
    with pytest.raises(ComparisonError, match="prompts of 1 questions"):
        judge(other.model_copy(update={"items": items}), report(right=base), POINTS)
    texts = report(texts=[1.0, 2.0])
    longer = texts.model_copy(update={"texts": [texts.texts[0].model_copy(update={"tokens": 7}), texts.texts[1]]})
    with pytest.raises(ComparisonError, match="tokens of the same texts"):
        refuse_incomparable(texts, longer)
    with pytest.raises(ComparisonError, match="texts: 2 texts against 1"):
        refuse_incomparable(texts, report(texts=[1.0]))
    refuse_incomparable(texts, report(texts=[1.0], faults=["text t1: NaN"]))


def sweep(**cell):
    plain = Cell(batch_size=1, isl=64, osl=8, n=3, ttft_ms=10.0, ttft_ms_spread=1.0, tpot_ms=5.0, tpot_ms_spread=0.5,
                 e2e_ms=45.0, out_tok_s=177.0, total_tok_s=1600.0)
    return LatencySweep(target=NEW, device="cpu", cells=[plain.model_copy(update=cell)], peak_memory_bytes=1000,
                        warmup=1, repeats=3)


@pytest.mark.parametrize(("rule", "cell", "word", "found"), [
    ({"figure": "tpot_ms", "max": 6}, {}, "PASS", "5"),
    ({"figure": "tpot_ms", "max": 4}, {}, "FAIL", "5"),
    ({"figure": "out_tok_s", "min": 100}, {}, "PASS", "177"),
    ({"figure": "out_tok_s", "min": 200}, {}, "FAIL", "177"),
    ({"figure": "tpot_ms", "max": 6}, {"invalid": "clock jumped"}, "FAIL", "not measured: clock jumped"),
    ({"figure": "tpot_ms", "max": 6}, {"osl": 9}, "FAIL", "not measured: no such cell"),
    ({"figure": "tpot_ms", "max": 6}, {"tpot_ms": None}, "FAIL", "not measured: no figure"),
])
def test_speed_rules(rule, cell, word, found):
    base, new = nll_pair(0.0)
    policy = Policy(name="p", delta_nll={"margin": 0.05}, speed=[{**rule, "batch_size": 1, "isl": 64, "osl": 8}])
    verdict = judge(report(NEW, texts=new), report(texts=base), policy, sweep(**cell))
    assert verdict.word == word
    assert verdict.reasons[-1].found == found


def test_a_sweep_of_another_engine_is_refused_and_memory_belongs_to_the_sweep():
    base, new = nll_pair(0.0)
    policy = Policy(name="p", delta_nll={"margin": 0.05}, speed=[{"figure": "peak_memory_bytes", "max": 2000}])
    pair = report(NEW, texts=new), report(texts=base)
    assert judge(*pair, policy, sweep()).word == "PASS"
    other = sweep().model_copy(update={"target": BASE})
    with pytest.raises(ComparisonError, match="sweep measured"):
        judge(*pair, policy, other)


def test_several_candidates_and_noise_floor():
    base, new = nll_pair(0.045, noise=2.0)
    pair = report(NEW, texts=new), report(texts=base)
    assert judge(*pair, NLL, candidates=8).detectable > judge(*pair, NLL).detectable
    with pytest.raises(PolicyError, match="0 candidates"):
        judge(*pair, NLL, candidates=0)
    noisy = Policy(name="p", accuracy={"margin": 1.0, "aa_flips": 0.01})
    with pytest.raises(PolicyError, match="noise of the same engine"):
        judged(noisy, *answers(400))
    assert judged(noisy, *answers(1600)).word == "PASS"


def test_warnings_do_not_decide():
    base, new = nll_pair(0.0)
    policy = Policy(name="p", delta_nll={"margin": 0.05}, warn={"kl_mean": 0.01, "flips": 0.1, "same_top1": 0.95})
    verdict = judge(report(NEW, texts=new, kl_mean=0.02, flips=0.05, same_top1=0.9), report(texts=base), policy)
    assert verdict.word == "PASS"
    assert verdict.warnings == ["kl_mean 0.02 is above 0.01", "same_top1 0.9 is below 0.95"]


def test_worst_flips_come_with_both_answers_largest_loss_first():
    base, new = answers(200, flips=20, loss=10)
    worst = worst_flips(report(right=base), report(NEW, right=new), 5)
    assert len(worst) == 5
    assert all(old.correct and not item.correct and old.id == item.id for old, item in worst)
    losses = [item.margin - old.margin for old, item in worst]
    assert losses == sorted(losses)


def test_looks_use_the_seeded_order_and_not_the_order_of_the_report():
    base, new = answers(1600)
    candidate = report(NEW, right=new)
    first = {item.id for item in shuffled(candidate.items, 0)[:200]}
    spoiled = [item.model_copy(update={"correct": False}) if item.id in first else item for item in candidate.items]
    verdict = judge(candidate.model_copy(update={"items": spoiled}), report(right=base), POINTS)
    assert verdict.word == "FAIL"
    assert "over 200 items" in verdict.reason


def test_required_items():
    assert [required_items(*pair) for pair in ((0.02, 2), (0.05, 2), (0.05, 3), (0.02, 1))] == [313, 782, 348, 1250]


def test_policy_files(tmp_path):
    def load(content):
        path = tmp_path / "policy.yaml"
        path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
        return load_policy(path)
    good = load({"name": "p", "delta_nll": {"margin": 0.05}})
    assert good.delta_nll.margin == 0.05
    assert good.sha256 == load("# a comment\nname: p\ndelta_nll: {margin: 5.0e-2}\n").sha256
    assert good.sha256 != load({"name": "p", "delta_nll": {"margin": 0.06}}).sha256
    for content, words in (
            ({"name": "p", "delta_nll": {"margin": -1}}, "margin"), ({"name": "p"}, "must judge"),
            ({"name": "p", "delta_nll": {"margin": 1}, "speeed": []}, "speeed"),
            ("- a", "not a mapping"), ("a: [", "YAML"),
            ({"name": "p", "accuracy": {"margin": 2, "looks": [400, 200]}}, "ascending"),
            ({"name": "p", "accuracy": {"margin": 2, "looks": [10]}}, "ascending"),
            ({"name": "p", "delta_nll": {"margin": 1}, "speed": [{"figure": "tpot_ms", "max": 1}]}, "needs batch_size"),
            ({"name": "p", "delta_nll": {"margin": 1}, "speed": [{"figure": "ttft_ms"}]}, "either max or min"),
    ):
        with pytest.raises(PolicyError, match=words):
            load(content)
    with pytest.raises(PolicyError, match="cannot read"):
        load_policy(tmp_path / "absent.yaml")


def test_verdicts_are_artifacts(tmp_path):
    base, new = nll_pair(0.0)
    verdict = judge(report(NEW, texts=new), report(texts=base), NLL)
    save_record(verdict, tmp_path / "v", [NEW.digest, BASE.digest])
    assert load_record(tmp_path / "v", Verdict) == verdict

"""Fidelity against a cached baseline, on real modules: figures against closed forms, faults, resuming, refusals."""

import copy
import math

import numpy as np
import pytest
import torch

from calib.artifact import Artifact
from calib.errors import ArtifactError
from engines.request import CompletionOutput, PromptScore, RequestOutput
from evals.adapters import RecordedAnswers, answer_requests
from evals.data import Source, write_folder
from evals.errors import ComparisonError, EvalError
from evals.fidelity import Baseline, EvalSettings, evaluate, make_baseline, record_requests
from evals.module import ModuleScorer
from evals.records import load_record
from evals.report import EvalReport, Sample
from evals.sanity import looping, sample_faults
from evals.target import describe
from evals.texts import coarse_kl, windows

SETTINGS = EvalSettings(tasks=("facts",), limit_items=8, window=24, top_k=32, batch=3)


@pytest.fixture(scope="module")
def baseline(scorer, tokenizer, target, data, tmp_path_factory):
    return make_baseline(scorer, tokenizer, target, data, tmp_path_factory.mktemp("baseline") / "b", settings=SETTINGS)


@pytest.fixture(scope="module")
def near(near_scorer, tokenizer, data, baseline, tmp_path_factory):
    out = tmp_path_factory.mktemp("near") / "report"
    target = describe("near", "c" * 64, "cpu fp32 torch", tokenizer)
    return evaluate(near_scorer, tokenizer, target, data, baseline, out, settings=SETTINGS), out


def full_logprobs(model, ids):
    with torch.inference_mode():
        return torch.log_softmax(model(torch.tensor([ids])).logits[0, :-1].double(), -1)


def test_nll_and_delta_are_those_of_the_full_distributions(baseline, near, scorer, near_scorer, tokenizer, data):
    report, _ = near
    texts = {text.id: text for text in data.texts}
    sums, tokens = [], 0
    for score in report.texts:
        parts = windows(tokenizer, texts[score.id], SETTINGS.window)
        both = []
        for side in (scorer, near_scorer):
            rows = [full_logprobs(side._model, part) for part in parts]
            both.append(sum(-float(row[range(len(part) - 1), part[1:]].sum())
                            for row, part in zip(rows, parts, strict=True)))
        assert score.nll == pytest.approx(both[1], abs=1e-3)
        assert score.tokens == sum(len(part) - 1 for part in parts)
        sums.append(both[1] - both[0])
        tokens += score.tokens
    assert report.delta_nll.value == pytest.approx(sum(sums) / tokens, abs=1e-5)
    assert report.delta_nll.n == 10
    assert report.delta_nll.ci_low < report.delta_nll.value < report.delta_nll.ci_high


def test_coarse_kl_is_below_the_true_divergence_and_near_it(near, scorer, near_scorer, tokenizer, data):
    report, out = near
    texts = {text.id: text for text in data.texts}
    true = same = tokens = 0
    for score in report.texts:
        for part in windows(tokenizer, texts[score.id], SETTINGS.window):
            p, q = (full_logprobs(side._model, part) for side in (scorer, near_scorer))
            true += float((p.exp() * (p - q)).sum())
            same += int((p.argmax(-1) == q.argmax(-1)).sum())
            tokens += len(part) - 1
    assert 0.3 * true < report.kl_mean * tokens <= true
    assert report.same_top1 == pytest.approx(same / tokens, abs=2 / tokens)
    assert report.kl_p99 > report.kl_mean > 0
    assert Artifact.open(out, "eval-report").verify() == []


def test_coarse_kl_closed_forms():
    p, q = np.array([0.5, 0.25, 0.2, 0.05]), np.array([0.4, 0.3, 0.1, 0.2])
    whole = coarse_kl(np.log(p)[None], np.log(q)[None])
    assert whole == pytest.approx((p * np.log(p / q)).sum())
    half = coarse_kl(np.log(p[:2])[None], np.log(q[:2])[None])
    assert half == pytest.approx((p[:2] * np.log(p[:2] / q[:2])).sum() + 0.25 * math.log(0.25 / 0.3))
    assert coarse_kl(np.log(p[:2])[None], np.log(p[:2])[None]) == pytest.approx(0.0, abs=1e-12)
    gone = coarse_kl(np.log(p[:2])[None], np.log(np.array([[0.6, 0.4]])))
    assert np.isfinite(gone)
    assert gone > 1.0


def test_the_same_target_twice_shows_nothing(baseline, scorer, tokenizer, target, data, tmp_path):
    report = evaluate(scorer, tokenizer, target, data, baseline, tmp_path / "again", settings=SETTINGS)
    assert (report.delta_nll.value, report.flips, report.same_top1) == (0.0, 0.0, 1.0)
    assert report.kl_mean == pytest.approx(0.0, abs=1e-6)
    assert report.baseline_digest == baseline.digest
    assert load_record(tmp_path / "again", EvalReport) == report
    assert not (tmp_path / ".again.work").exists()
    with pytest.raises(ArtifactError, match="is a eval-report, not a latency-sweep"):
        Artifact.open(tmp_path / "again", "latency-sweep")


class Failing:
    """Dies after some calls, like a killed process."""

    def __init__(self, scorer, calls):
        self.scorer, self.calls, self.asked = scorer, calls, 0

    def count(self, asked):
        if self.calls == 0:
            raise KeyboardInterrupt
        self.calls -= 1
        self.asked += asked

    def loglikelihood(self, prompts, *, top_k=0, at_ids=None):
        self.count(len(prompts))
        return self.scorer.loglikelihood(prompts, top_k=top_k, at_ids=at_ids)

    def score_choices(self, questions):
        self.count(sum(len(each) for _, each in questions))
        return self.scorer.score_choices(questions)

    def generate(self, prompts, params):
        return self.scorer.generate(prompts, params)


@pytest.mark.parametrize("calls", [3, 8])
def test_killed_and_started_again_ends_with_the_same_digest(baseline, near_scorer, near, tokenizer, data, tmp_path,
                                                            calls):
    target = describe("near", "c" * 64, "cpu fp32 torch", tokenizer)
    whole = Failing(near_scorer, -1)
    evaluate(whole, tokenizer, target, data, baseline, tmp_path / "whole", settings=SETTINGS)
    with pytest.raises(KeyboardInterrupt):
        evaluate(Failing(near_scorer, calls), tokenizer, target, data, baseline, tmp_path / "out", settings=SETTINGS)
    assert not (tmp_path / "out").exists()
    journal = tmp_path / ".out.work" / "texts.jsonl"
    journal.write_bytes(journal.read_bytes() + b'{"values": {"torn')
    second = Failing(near_scorer, -1)
    evaluate(second, tokenizer, target, data, baseline, tmp_path / "out", settings=SETTINGS)
    assert 0 < second.asked < whole.asked
    assert Artifact.open(tmp_path / "out").digest == Artifact.open(near[1]).digest


def test_baseline_is_keyed_reopened_and_reproducible(baseline, scorer, tokenizer, target, data, tmp_path):
    again = make_baseline(scorer, tokenizer, target, data, tmp_path / "b", settings=SETTINGS)
    opened = Baseline.open(tmp_path / "b")
    assert again.digest == opened.digest == baseline.digest
    assert opened.key == baseline.key
    assert opened.report == baseline.report
    other = make_baseline(scorer, tokenizer, target.model_copy(update={"numerics": "cpu bf16"}), data, tmp_path / "n",
                          settings=SETTINGS)
    assert other.key != baseline.key
    ids, logprobs = opened.top_k(opened.report.texts[0].id)
    assert ids.shape == logprobs.shape == (opened.report.texts[0].tokens, 32)
    assert (np.diff(logprobs, axis=1) <= 0).all()


def test_other_tokenizer_template_window_data_or_items_are_refused(baseline, scorer, tokenizer, bos_tokenizer, target,
                                                                   data, tmp_path):
    def judged(data=data, settings=SETTINGS, **changes):
        evaluate(scorer, tokenizer, target.model_copy(update=changes), data, baseline, tmp_path / "x",
                 settings=settings)
    with pytest.raises(ComparisonError, match="chat template") as refusal:
        judged(template_sha256="d" * 64)
    assert refusal.value.exit_code == 2
    with pytest.raises(ComparisonError, match="tokenizer"):
        judged(tokenizer_digest=bos_tokenizer.digest)
    with pytest.raises(ComparisonError, match="BOS"):
        judged(bos=True)
    with pytest.raises(ComparisonError, match="window: 24 against 32"):
        judged(settings=SETTINGS.model_copy(update={"window": 32}))
    with pytest.raises(ComparisonError, match="seed"):
        judged(settings=SETTINGS.model_copy(update={"seed": 1}))
    with pytest.raises(EvalError, match="judged 28 items and these settings choose 29"):
        judged(settings=SETTINGS.model_copy(update={"limit_items": 9}))
    other = write_folder(tmp_path / "other", {"facts": Source([{"question": "q", "choices": ["a", "b"], "answer": 0}],
                                                              "made here", "CC0-1.0")})
    with pytest.raises(ComparisonError, match="data"):
        judged(data=other, settings=SETTINGS.model_copy(update={"limit_items": None}))
    assert not (tmp_path / "x").exists()


def test_nan_is_a_fault_of_the_candidate_and_an_error_of_the_baseline(baseline, model, tokenizer, data, target,
                                                                      tmp_path):
    broken = copy.deepcopy(model)
    with torch.no_grad():
        broken.model.layers[1].mlp.down_proj.weight[0, 0] = float("nan")
    scorer = ModuleScorer(broken, tokenizer)
    report = evaluate(scorer, tokenizer, describe("broken", "e" * 64, "cpu", tokenizer), data, baseline,
                      tmp_path / "broken", settings=SETTINGS)
    assert (report.delta_nll, report.kl_mean, report.texts) == (None, None, [])
    assert sum("not finite" in fault for fault in report.faults) == 28
    assert len(report.faults) == 32
    assert all("the continuation" in fault for fault in report.faults[28:])
    with pytest.raises(EvalError, match="baseline tiny is faulty"):
        make_baseline(scorer, tokenizer, target, data, tmp_path / "bad", settings=SETTINGS)


def test_scores_of_another_shape_are_an_error(scorer, tokenizer, target, data, baseline, tmp_path):
    class Lazy:
        def loglikelihood(self, prompts, *, top_k=0, at_ids=None):
            return [PromptScore(s.logprobs, s.greedy) for s in scorer.loglikelihood(prompts)]
    with pytest.raises(EvalError, match="top_ids"):
        evaluate(Lazy(), tokenizer, target, data, baseline, tmp_path / "x", settings=SETTINGS)


def test_requests_travel_as_files(near, near_scorer, baseline, tokenizer, data, tmp_path):
    requests, responses = tmp_path / "requests.jsonl", tmp_path / "responses.jsonl"
    speaking = record_requests(tokenizer, data, baseline, requests, tmp_path / "scratch", settings=SETTINGS)
    with pytest.raises(EvalError, match="written answers, and OnlyScores only scores"):
        answer_requests(requests, OnlyScores(near_scorer), responses, key="mute")
    silent = SETTINGS.model_copy(update={"samples": 0})
    asked = record_requests(tokenizer, data, baseline, requests, tmp_path / "scratch", settings=silent)
    assert asked == speaking - SETTINGS.samples
    assert answer_requests(requests, near_scorer, responses, key="near", batch=7) == asked
    recorded = RecordedAnswers(responses)
    assert recorded.key == "near"
    with pytest.raises(EvalError, match="answered by 'near', not by 'other'"):
        RecordedAnswers(responses, "other")
    target = describe("near", "c" * 64, "cpu fp32 torch", tokenizer)
    report = evaluate(recorded, tokenizer, target, data, baseline, tmp_path / "out", settings=silent)
    assert report.samples == []
    assert report.delta_nll.value == pytest.approx(near[0].delta_nll.value, abs=1e-6)
    assert report.kl_mean == pytest.approx(near[0].kl_mean, rel=1e-3)
    assert [item.choice for item in report.items] == [item.choice for item in near[0].items]
    record_requests(tokenizer, data, baseline, requests, tmp_path / "scratch", settings=SETTINGS)
    assert answer_requests(requests, near_scorer, responses, key="near", batch=7) == speaking
    report = evaluate(RecordedAnswers(responses), tokenizer, target, data, baseline, tmp_path / "spoken",
                      settings=SETTINGS)
    assert report.samples == near[0].samples
    with pytest.raises(EvalError, match="have no response"):
        evaluate(recorded, tokenizer, target, data, None, tmp_path / "other",
                 settings=silent.model_copy(update={"window": 48}))


def test_module_scores_do_not_depend_on_batch_mates(scorer, tokenizer, data):
    prompts = [tokenizer.encode(text.text)[:n] for text, n in zip(data.texts[:5], (2, 30, 7, 19, 30), strict=True)]
    for prompt, score in zip(prompts, scorer.loglikelihood(prompts, top_k=3), strict=True):
        alone = scorer.loglikelihood([prompt], top_k=3)[0]
        np.testing.assert_allclose(score.logprobs, alone.logprobs, atol=2e-5)
        assert score.top_ids.dtype == np.int32
        assert (score.greedy == (score.top_ids[:, 0] == prompt[1:])).all()
    with pytest.raises(EvalError, match="1 tokens"):
        scorer.loglikelihood([[3]])


class OnlyScores:
    def __init__(self, scorer):
        self.loglikelihood = scorer.loglikelihood


class Speaker:
    """A scorer that can also speak: continues every prompt with the given tokens."""

    def __init__(self, scorer, tokenizer, tokens):
        self.scorer, self.tokenizer, self.tokens = scorer, tokenizer, tokens

    def loglikelihood(self, prompts, *, top_k=0, at_ids=None):
        return self.scorer.loglikelihood(prompts, top_k=top_k, at_ids=at_ids)

    def generate(self, prompts, params=None):
        tokens = self.tokens[:params.max_tokens]
        text = self.tokenizer.decode(tokens)
        return [RequestOutput(list(p), [CompletionOutput(0, text, tokens, None, "length")]) for p in prompts]


def test_empty_and_looping_continuations_are_faults_unless_the_baseline_has_them(scorer, tokenizer, target, data,
                                                                                 tmp_path):
    words = tokenizer.encode("the river counts seven lamps and then a small engine measures the longest road 12345678")
    loop = tokenizer.encode("the river") + [words[0], words[1]] * 16
    few = SETTINGS.model_copy(update={"tasks": (), "limit_texts": 4})
    spoken = make_baseline(Speaker(scorer, tokenizer, words), tokenizer, target, data, tmp_path / "b", settings=few)
    assert len(spoken.report.samples) == 4
    for tokens, word in ((loop, "loops"), ([], "empty")):
        report = evaluate(Speaker(scorer, tokenizer, tokens), tokenizer, target, data, spoken, tmp_path / word,
                          settings=few)
        assert len(report.faults) == 4
        assert word in report.faults[0]
    assert [looping(tokens) for tokens in (words, loop, loop[-8:])] == [False, True, False]
    sample = Sample(id="a", prompt="p", text="x x", token_ids=loop)
    assert sample_faults([sample], [sample]) == []
    with pytest.raises(EvalError, match="faulty"):
        make_baseline(Speaker(scorer, tokenizer, loop), tokenizer, target, data, tmp_path / "bb", settings=few)

"""Real lm-eval over local data and a real module: what is asked, who decides, what survives a kill."""

import socket
import sys

import numpy as np
import pytest

from engines.request import PromptScore
from evals.accuracy import DELIMITER, answer, pooled_accuracy, split_tokens
from evals.errors import EvalError
from evals.module import ModuleScorer
from evals.report import Item


@pytest.fixture
def no_network(monkeypatch):
    def refuse(self, address):
        raise AssertionError(f"the network was asked for: {address}")
    monkeypatch.setattr(socket.socket, "connect", refuse)


def by_hand(scorer, tokenizer, question, per_character):
    context, sums = f"Question: {question.question}\nAnswer:", []
    for choice in question.choices:
        start = len(tokenizer.encode(context))
        whole = tokenizer.encode(context + " " + choice)
        sums.append(float(scorer.loglikelihood([whole])[0].logprobs[start - 1:].sum()))
    lengths = np.array([len(choice) for choice in question.choices]) if per_character else 1
    return np.array(sums) / lengths


def test_items_are_what_scoring_by_hand_gives(scorer, tokenizer, data, tmp_path, no_network, capsys):
    items = answer(scorer, tokenizer, data, ["facts", "truth"], scratch=tmp_path, key="k",
                   report=lambda event: print(event.stage, file=sys.stderr))
    captured = capsys.readouterr()
    assert captured.out == ""
    assert set(captured.err.split()) == {"accuracy"}
    questions = {question.id: question for question in data.items}
    assert len(items) == 36
    for item in items:
        question = questions[item.id]
        scores = by_hand(scorer, tokenizer, question, per_character=item.task == "facts")
        assert item.choice == scores.argmax()
        assert item.correct == (scores.argmax() == question.answer)
        expected = scores[question.answer] - np.delete(scores, question.answer).max()
        assert item.margin == pytest.approx(expected, abs=1e-5)
        assert item.answer == question.choices[item.choice]
        assert item.n_choices == len(question.choices)
    assert len({item.prompt_sha256 for item in items}) == 36
    pooled = pooled_accuracy(items)
    assert pooled.value == pytest.approx(np.mean([item.correct for item in items]))
    assert pooled.ci_low < pooled.value < pooled.ci_high
    assert pooled.tasks == ["facts", "truth"]


def test_limit_takes_seeded_random_questions(scorer, tokenizer, data, tmp_path):
    some = answer(scorer, tokenizer, data, ["facts"], limit=6, seed=3, scratch=tmp_path / "a", key="k")
    others = answer(scorer, tokenizer, data, ["facts"], limit=6, seed=4, scratch=tmp_path / "b", key="k")
    head = [question.id for question in data.task("facts")[:6]]
    assert len(some) == len(others) == 6
    assert len({tuple(sorted(ids)) for ids in (head, [i.id for i in some], [i.id for i in others])}) == 3


class Interrupted:
    """Dies after some calls, like a killed process."""

    def __init__(self, scorer, calls):
        self.scorer, self.calls, self.asked = scorer, calls, 0

    def loglikelihood(self, prompts, *, top_k=0, at_ids=None):
        raise AssertionError("choices are asked together")

    def score_choices(self, questions):
        if self.calls == 0:
            raise KeyboardInterrupt
        self.calls -= 1
        self.asked += sum(len(each) for _, each in questions)
        return self.scorer.score_choices(questions)


def test_a_killed_run_goes_on_and_another_target_starts_over(scorer, tokenizer, data, tmp_path):
    whole = answer(scorer, tokenizer, data, ["facts"], scratch=tmp_path / "whole", key="k", batch=8)
    with pytest.raises(KeyboardInterrupt):
        answer(Interrupted(scorer, 3), tokenizer, data, ["facts"], scratch=tmp_path / "work", key="k", batch=8)
    second = Interrupted(scorer, -1)
    assert answer(second, tokenizer, data, ["facts"], scratch=tmp_path / "work", key="k", batch=8) == whole
    assert second.asked == 24 * 4 - 24
    third = Interrupted(scorer, -1)
    answer(third, tokenizer, data, ["facts"], scratch=tmp_path / "work", key="another target", batch=8)
    assert third.asked == 24 * 4


def test_a_score_that_is_not_finite_marks_its_item_and_is_wrong(scorer, tokenizer, data, tmp_path):
    class Broken:
        def loglikelihood(self, prompts, *, top_k=0, at_ids=None):
            return [PromptScore(logprobs=np.full(len(p) - 1, np.nan, np.float32), greedy=np.zeros(len(p) - 1, bool))
                    for p in prompts]
    items = answer(Broken(), tokenizer, data, ["truth"], scratch=tmp_path, key="k")
    assert all(item.choice is None and item.margin is None and not item.correct for item in items)


def test_a_scorer_that_drops_requests_is_an_error(scorer, tokenizer, data, tmp_path):
    class Short:
        def loglikelihood(self, prompts, *, top_k=0, at_ids=None):
            return scorer.loglikelihood(prompts)[:-1]
    with pytest.raises(EvalError, match="came back"):
        answer(Short(), tokenizer, data, ["truth"], scratch=tmp_path, key="k")


def test_token_boundary_and_bos(tokenizer, bos_tokenizer):
    with_bos = bos_tokenizer
    for tok, extra in ((tokenizer, 0), (with_bos, 1)):
        whole, start = split_tokens(tok, "Question: a\nAnswer:", DELIMITER + "the river")
        assert whole == tok.encode("Question: a\nAnswer: the river")
        assert tok.decode(whole[start:]) == " the river"
        assert whole[:1] == [tok.bos_id] if extra else whole[0] != tok.bos_id
        assert whole.count(with_bos.bos_id) == extra
    merged, start = split_tokens(tokenizer, "the riv", "er")
    assert merged == tokenizer.encode("the river")
    assert 1 <= start < len(merged)
    assert split_tokens(with_bos, "", "the river")[1] == 1
    with pytest.raises(EvalError, match="no token before it"):
        split_tokens(tokenizer, "", "the river")


def test_no_items_give_no_accuracy():
    assert pooled_accuracy([]) is None
    one = Item(id="a", task="t", prompt_sha256="p", correct=True)
    assert pooled_accuracy([one]).ci_low > 0


def test_the_scorer_refuses_another_models_tokenizer(model, tokenizer):
    class Wider:
        vocab_size, eos_ids = tokenizer.vocab_size * 2, tokenizer.eos_ids
    with pytest.raises(Exception, match="another model"):
        ModuleScorer(model, Wider())

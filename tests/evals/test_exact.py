"""Generated answers: how they are read, that each is paid for once, and what an answer that got lost looks like."""

import pytest

from calib.model import load_hf
from calib.text import Tokenizer
from engines.llm import LLM
from engines.request import CompletionOutput, RequestOutput, SamplingParams
from evals.accuracy import answer
from evals.data import Source, write_folder
from evals.errors import EvalError
from evals.exact import read_answer
from evals.fidelity import EvalSettings, evaluate
from evals.gate import able_to_gate
from evals.module import ModuleScorer
from evals.target import describe


@pytest.mark.parametrize(("reply", "right", "read", "correct"), [
    (" 9 apples", "9 apples", "9", True), ("2 + 7 = 9.", "9", "9", True), ("The 1,234.50", "1234.5", "1,234.50", True),
    ("3/4", "0.75", "3/4", True), ("it is 3-4", "-4", "4", False), ("-3", "-3", "-3", True), ("none", "4", None, False),
    ("\n\n 12\n13", "12", "12", True), ("", "cat", None, False), ("The Cat!", "cat", "The Cat!", True),
    ("a dog", "cat", "a dog", False), ("1/0", "1", "1/0", True)])
def test_how_a_reply_is_read(reply, right, read, correct):
    assert read_answer(reply, right) == (read, correct)


@pytest.fixture(scope="module")
def sums(tmp_path_factory):
    rows = [{"question": f"What is {i} and {i + 1}?", "answer": str(2 * i + 1)} for i in range(8)]
    facts = [{"question": f"Is {i} odd?", "choices": ["yes", "no"], "answer": 1 - i % 2} for i in range(6)]
    return write_folder(tmp_path_factory.mktemp("sums") / "data", {
        "sums": Source(rows, "made here", "CC0-1.0"), "odd": Source(facts, "made here", "CC0-1.0")})


class Calculator:
    """A target that adds, except that it loses the format of one answer and gets one wrong."""

    def __init__(self, tokenizer):
        self.tokenizer, self.asked = tokenizer, []

    def loglikelihood(self, prompts, *, top_k=0, at_ids=None):
        raise AssertionError("exact match does not score")

    def generate(self, prompts, params=None):
        outputs = []
        for prompt in prompts:
            words = self.tokenizer.decode(prompt).split()
            self.asked.append(words[3])
            i = int(words[3])
            text = {0: " I do not know", 1: " 4"}.get(i, f" {2 * i + 1}")
            outputs.append(RequestOutput(list(prompt), [CompletionOutput(0, text, [5], None, "length")]))
        return outputs


def test_items_of_generated_answers(tokenizer, sums, tmp_path):
    target = Calculator(tokenizer)
    items = answer(target, tokenizer, sums, ["sums"], scratch=tmp_path, key="k", batch=3)
    found = {item.id: item for item in items}
    rights = {question.id: question.answer for question in sums.task("sums")}
    assert sorted(rights[i] for i, item in found.items() if not item.correct) == ["1", "3"]
    assert [item.answer for item in items if rights[item.id] == "1"] == [None]
    assert all(item.exact and item.n_choices is None for item in items)
    assert able_to_gate(items)
    again = Calculator(tokenizer)
    assert answer(again, tokenizer, sums, ["sums"], limit=5, scratch=tmp_path, key="k") == items[:5]
    assert again.asked == []


def test_a_report_with_both_kinds_says_what_could_not_be_read(engine, tokenizer, sums, tmp_path):
    with LLM(engine) as llm:
        report = evaluate(llm, tokenizer, describe("tiny", engine.digest, llm.numerics, tokenizer), sums, None,
                          tmp_path / "report", settings=EvalSettings(limit_items=5, samples=0, exact_tokens=4))
    assert report.accuracy.n == 10
    assert report.accuracy.tasks == ["odd", "sums"]
    assert report.unparsed == sum(item.answer is None for item in report.items if item.exact) / 5
    assert not report.faults
    assert report.harness["exact_tokens"] == "4"


class OnlyScores:
    def __init__(self, scorer):
        self.loglikelihood = scorer.loglikelihood


def test_a_target_that_only_scores_is_refused(scorer, tokenizer, sums, tmp_path):
    with pytest.raises(EvalError, match="sums needs generated answers, and OnlyScores only scores"):
        answer(OnlyScores(scorer), tokenizer, sums, ["sums"], scratch=tmp_path, key="k")


def test_a_module_in_memory_continues_like_its_engine(engine, model_folder, data):
    tokenizer = Tokenizer.open(model_folder)
    scorer = ModuleScorer(load_hf(model_folder), tokenizer)
    prompts = [tokenizer.encode(text.text)[:n] for text, n in zip(data.texts[:4], (8, 8, 12, 5), strict=True)]
    params = SamplingParams(max_tokens=12)
    with LLM(engine) as llm:
        expected = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    found = [output.outputs[0] for output in scorer.generate(prompts, params)]
    assert [one.token_ids for one in found] == expected
    assert all(one.text == tokenizer.decode(one.token_ids) for one in found)
    with pytest.raises(EvalError, match="only continues greedily"):
        scorer.generate(prompts, SamplingParams(max_tokens=4, temperature=1.0))

"""What a caller from Python hands in: honest ids and numbers are taken, everything else is told what was found."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from calib.errors import UsageError
from engines.asked import id_rows, prompt_of, prompts_of, token_ids
from engines.errors import EngineError, LimitError
from engines.llm import LLM
from engines.request import Grammar, SamplingParams


@pytest.mark.parametrize("prompts", [
    [[3, 4]], ((3, 4),), [range(3, 5)], [np.array([3, 4], np.int32)], np.array([[3, 4]], np.uint16),
    torch.tensor([[3, 4]]), [torch.tensor([3, 4], dtype=torch.int16)], [[np.int64(3), np.uint8(4)]],
    [[torch.tensor(3), 4]]])
def test_integers_of_every_width_are_ids(prompts: Any) -> None:
    found = prompts_of(prompts)
    assert found == [[3, 4]]
    assert {type(one) for one in found[0]} == {int}


@pytest.mark.parametrize(("prompts", "words"), [
    ([[1.7]], "prompt 0 holds 1.7, which is no token id"), ([["3"]], "prompt 0 holds '3', which is no token id"),
    ([[3], [True]], "prompt 1 holds True, which is no token id"), ([[None]], "holds None"),
    ([[np.bool_(True)]], "holds np.True_"), ([[np.float32(3)]], "holds np.float32(3.0)"),
    ([[torch.tensor(True)]], "holds tensor(True)"), ([[torch.tensor(2.0)]], "holds tensor(2.)"),
    ([np.array([3.0])], "prompt 0 is an array of float64 [1], not of token ids"),
    ([torch.tensor([True])], "prompt 0 is an array of torch.bool [1]"),
    (torch.tensor([3, 4]), "prompts are an array of shape [2]"),
    ([3, 4], "prompts are [3, 4]: ids of one prompt stand"),
    ([b"abc"], "prompt 0 is b'abc', not a list of token ids"),
    (b"abc", "prompts are b'abc'"), (None, "prompts are None"),
    ({"a": 1}, "prompts are {'a': 1}"), ([{3}], "prompt 0 is {3}"), ([[[3]]], "prompt 0 holds [3]"),
    (3, "prompts are 3"),
    (["a", "b\ud800"], "prompt 1 holds half of a surrogate pair ('\\ud800' at 1)")])
def test_what_is_no_prompt_is_told_with_its_value(prompts: Any, words: str) -> None:
    with pytest.raises(UsageError) as error:
        prompts_of(prompts)
    assert words in error.value.message
    assert error.value.hint


def test_texts_and_ids_may_be_mixed_and_ids_have_any_shape_that_is_asked() -> None:
    assert prompts_of(["a", [3]]) == ["a", [3]]
    assert prompts_of("a") == ["a"]
    assert (prompt_of("a"), prompt_of((3,))) == ("a", [3])
    assert id_rows([[3], [4]], "x").tolist() == [[3], [4]]
    with pytest.raises(UsageError, match=r"x holds 1\.5 \(float64\), which is no token id"):
        id_rows([[1.5]], "x")
    with pytest.raises(UsageError, match="the prompt is 'a', not a list of token ids"):
        token_ids("a", "the prompt")


@pytest.mark.parametrize(("settings", "words", "hint"), [
    ({"n": 0}, "n must be at least 1, not 0", "n=2"), ({"n": True}, "n must be a whole number, not True", "n=2"),
    ({"max_tokens": 2.0}, "max_tokens must be a whole number, not 2.0", "max_tokens=128"),
    ({"max_tokens": "2"}, "max_tokens must be a whole number, not '2'", "max_tokens=128"),
    ({"temperature": "hot"}, "temperature must be a number, not 'hot'", "temperature=0.7"),
    ({"temperature": True}, "temperature must be a number, not True", "temperature=0.7"),
    ({"temperature": float("nan")}, "temperature must be a finite number, not nan", "temperature=0.7"),
    ({"top_p": 0}, "top_p must be above 0, not 0.0", "top_p=0.95"),
    ({"seed": 2**70}, "seed must be below 9,223,372,036,854,775,808", "seed=7"),
    ({"stop": "abc"}, "stop must be a list, not 'abc'", "stop=['\\n\\n', 'END']"),
    ({"stop": b"abc"}, "stop must be a list, not b'abc'", "stop=["),
    ({"stop": [b"a"]}, "stop.0 must be text", "stop=["),
    ({"stop": [""]}, "a stop must not be empty", "Change stop"), ({"stop": ["a"] * 17}, "at most 16 entries", "stop="),
    ({"stop_bytes": b"a"}, "stop_bytes must be a list, not b'a'", "stop_bytes=[b'\\x00']"),
    ({"stop_token_ids": [3.0]}, "stop_token_ids.0 must be a whole number, not 3.0", "stop_token_ids=[2]"),
    ({"bad_words": [""]}, "bad_words.0 must have at least 1 character, not ''", "bad_words=['secret']"),
    ({"logit_bias": {"x": 1}}, "logit_bias.x must be a whole number, not 'x'", "logit_bias={1234: -5.0}"),
    ({"logit_bias": {3: "x"}}, "logit_bias.3 must be a number, not 'x'", "logit_bias={1234"),
    ({"logit_bias": {True: 1}}, "must be a whole number, not True", "logit_bias={1234"),
    ({"logit_bias": {3: 101}}, "a logit_bias of 101.0 is outside -100..100", "Change logit_bias."),
    ({"ignore_eos": 1}, "ignore_eos must be true or false, not 1", "ignore_eos=True"),
    ({"logprobs": 50}, "logprobs must be at most 20, not 50", "logprobs=5"),
    ({"grammar": "x"}, "grammar must be a mapping", "grammar=Grammar("),
    ({"min_tokens": 5, "max_tokens": 3}, "min_tokens 5 is larger than max_tokens 3",
     "Change max_tokens or min_tokens."),
    ({"max_token": 3}, "max_token is not a known key", "Did you mean 'max_tokens'?")])
def test_a_setting_that_is_none_is_told_how_it_is_written(settings: dict[str, Any], words: str, hint: str) -> None:
    with pytest.raises(UsageError) as error:
        SamplingParams(**settings)
    assert error.value.message.startswith("SamplingParams: ")
    assert words in error.value.message
    assert hint in error.value.hint
    assert isinstance(error.value.__cause__, ValidationError), "the server names the parameter from it"


def test_a_grammar_that_is_none_is_told_so() -> None:
    with pytest.raises(UsageError, match="Grammar: kind must be 'json_schema', 'regex' or 'lark', not 'zz'"):
        Grammar(kind="zz", source="a")  # type: ignore[arg-type]


def test_numbers_of_every_width_and_keys_from_json_are_settings() -> None:
    made = SamplingParams(n=np.int64(2), temperature=np.float32(0.5), seed=np.uint8(3),  # type: ignore[arg-type]
                          logit_bias={np.int64(3): 1, "4": np.float64(2.0)})  # type: ignore[dict-item]
    assert (made.n, made.temperature, made.seed, made.logit_bias) == (2, 0.5, 3, {3: 1.0, 4: 2.0})
    assert SamplingParams.model_validate(made.model_dump(mode="json")) == made


@pytest.fixture(scope="module")
def llm(engine):
    with LLM(engine) as found:
        yield found


@pytest.mark.parametrize("call", [
    lambda llm: llm.generate([[1.7]]), lambda llm: llm.generate("a", 3), lambda llm: llm.generate(["a"], [3]),
    lambda llm: llm.generate("a", {"max_tokens": 3}), lambda llm: next(llm.stream(["a"])),
    lambda llm: next(llm.stream("a", {"max_tokens": 3})), lambda llm: llm.loglikelihood(["ab"]),
    lambda llm: llm.loglikelihood("ab"), lambda llm: llm.loglikelihood([[3, 4]], top_k=1.5),
    lambda llm: llm.loglikelihood([[3, 4]], at_ids=[[[1.5]]]), lambda llm: llm.loglikelihood([[3, 4]], at_ids=3),
    lambda llm: llm.score_choices([([3], [[4.5]])]), lambda llm: llm.score_choices([([3], [[4]], 1)]),
    lambda llm: llm.score_choices(3), lambda llm: LLM(3)])
def test_every_call_refuses_what_it_cannot_mean(llm, call) -> None:
    with pytest.raises(UsageError) as error:
        call(llm)
    assert error.value.hint
    assert llm.stats()["free_blocks"] > 0, "and goes on"


def test_a_question_without_continuations_is_empty(llm) -> None:
    with pytest.raises(EngineError, match="0 tokens"):
        llm.score_choices([([3], [])])
    with pytest.raises(LimitError, match="outside the vocabulary"):
        llm.generate([[10**30]])


def test_a_closed_engine_says_so_and_may_be_closed_again(engine) -> None:
    found = LLM(engine)
    found.close()
    found.close()
    for call in (lambda: found.generate("a"), lambda: next(found.stream("a")), found.stats, found.forget_prefixes,
                 lambda: found.loglikelihood([[3, 4]]), lambda: found.score_choices([([3], [[4]])])):
        with pytest.raises(EngineError, match="was closed") as error:
            call()
        assert error.value.hint == "Open it again."

"""Texts that must not appear: whatever tokens would spell them, and nothing else is forbidden."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calib.errors import UsageError
from engines.errors import LimitError
from engines.llm import LLM
from engines.request import Grammar, SamplingParams
from engines.runtime.bad_words import BadWords, Spellings

PIECES = [b"a", b"b", b"ab", b"ba", b"aab", b"abab", b"\xff", b"\xe6", b"\xbc\xa2", "\u6f22".encode(), b"", b"c" * 5]

WORDS = ["a", "b", "ab", "bab", "aabb", "\u6f22", "b\u6f22a", "cc", "ac"]


class Pieces:
    """Token i is PIECES[i]; the last one is special."""

    special_ids = frozenset({len(PIECES)})

    def id_to_bytes(self, index: int) -> bytes:
        return PIECES[index]

    def decode(self, ids: list[int]) -> str:
        return b"".join(PIECES[index] for index in ids if index < len(PIECES)).decode("utf-8", "replace")


SPELLINGS = Spellings(Pieces(), len(PIECES) + 1)


def written(ids: list[int]) -> bytes:
    return b"".join(SPELLINGS.of[index] for index in ids)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(WORDS), min_size=1, max_size=3),
       st.lists(st.integers(0, len(PIECES)), max_size=8))
def test_exactly_those_tokens_are_forbidden_that_would_complete_a_word(words: list[str], ids: list[int]) -> None:
    clean: list[int] = []
    for index in ids:  # an output that holds no word yet
        if not any(word.encode() in written([*clean, index]) for word in words):
            clean.append(index)
    wanted = {index for index in range(len(PIECES) + 1)
              if any(word.encode() in written([*clean, index]) for word in words)}
    assert set(BadWords(words, SPELLINGS).banned(clean).tolist()) == wanted


def test_a_word_that_no_token_can_complete_forbids_nothing() -> None:
    assert BadWords(["xyz"], SPELLINGS).banned([0, 1, 2]).dtype == np.int64
    assert BadWords(["xyz"], SPELLINGS).banned([0, 1, 2]).size == 0


@pytest.fixture(scope="module")
def llm(engine):
    with LLM(engine) as opened:
        yield opened


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_answer_holds_no_bad_word_and_is_else_the_same(llm, temperature: float) -> None:
    free = SamplingParams(max_tokens=24, ignore_eos=True, temperature=temperature, seed=3)
    [plain] = llm.generate([[5, 6, 7]], free)
    text = plain.outputs[0].text
    words = tuple(dict.fromkeys(a + b for a, b in itertools.pairwise(text) if "\ufffd" not in a + b))[:4]
    [out] = llm.generate([[5, 6, 7]], free.model_copy(update={"bad_words": words}))
    assert words
    assert not any(word in out.outputs[0].text for word in words)
    assert len(out.outputs[0].token_ids) == 24
    [same] = llm.generate([[5, 6, 7]], free.model_copy(update={"bad_words": ("never said",)}))
    assert same.outputs[0].token_ids == plain.outputs[0].token_ids


def test_words_that_forbid_all_that_a_grammar_allows_are_named_with_it(llm) -> None:
    grammar = Grammar(kind="regex", source="(yes|no)")
    with pytest.raises(LimitError) as refused:
        llm.generate([[5, 6, 7]], SamplingParams(max_tokens=8, grammar=grammar, bad_words=("y", "n")))
    assert refused.value.message == ("generation failed: the request forbids every token: the grammar and bad_words "
                                     "together leave none that the model has at token 1 of the answer")
    assert refused.value.hint == "Ease one of them, so that something is left to say."
    [out] = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=8, grammar=grammar, bad_words=("y",)))
    assert out.outputs[0].text == "no"


def test_a_bias_against_all_that_a_grammar_allows_forbids_nothing(llm) -> None:
    grammar, bias = Grammar(kind="regex", source="(yes|no)"), dict.fromkeys(range(256), -100.0)
    [out] = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=8, grammar=grammar, logit_bias=bias))
    assert out.outputs[0].text in ("yes", "no")


def test_bytes_may_end_an_answer(llm) -> None:
    [plain] = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=24, ignore_eos=True))
    raw = b"".join(llm.tokenizer.id_to_bytes(index) for index in plain.outputs[0].token_ids)
    [out] = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=24, ignore_eos=True, stop_bytes=(raw[6:8],)))
    assert out.outputs[0].finish_reason == "stop"
    assert out.outputs[0].text == raw[:raw.find(raw[6:8])].decode("utf-8", "replace")


def test_words_are_bounded() -> None:
    for words in (("",), ("a" * 129,), tuple(map(str, range(33)))):
        with pytest.raises(UsageError, match="bad_words"):
            SamplingParams(bad_words=words)

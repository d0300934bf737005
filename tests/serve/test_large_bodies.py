"""Bodies of up to 8 MiB that are wrong a million times: few errors are built, and soon.

The event loop is nobody else's meanwhile. What takes it as long as a body may is bounded here by a generous time, and
how many errors are built exactly.
"""

from __future__ import annotations

import threading
import time

import pytest
from pydantic import ValidationError

from calib.errors import UsageError, shown
from calib.text import Tokenizer
from engines.request import SamplingParams
from toolkit.serve.faults import ApiError
from toolkit.serve.gate import load_json
from toolkit.serve.kserve import read_values
from toolkit.serve.options import ServeOptions
from toolkit.serve.parts import validated
from toolkit.serve.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from toolkit.serve.tensors import parse

OPTIONS = ServeOptions(model="m")
LARGE = OPTIONS.max_body_bytes - 100
MANY = 20_000
ONES, FIELDS = [1] * MANY, {f"k{number}": 1 for number in range(MANY)}
SAID = {"role": "user", "content": "a"}
TEXT = {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["a"]}
COMPLETION, CHAT = {"model": "m", "prompt": "x"}, {"model": "m", "messages": [SAID]}


@pytest.mark.parametrize(("kind", "body"), [
    *((CompletionRequest, COMPLETION | more) for more in (
        {"stop": ONES}, {"stop": [""] * MANY}, {"bad_words": ONES}, {"stop_token_ids": ["a"] * MANY},
        {"logit_bias": FIELDS}, {"metadata": FIELDS}, {"stream_options": FIELDS}, FIELDS, {"prompt": [*ONES, "a"]},
        {"prompt": [["a"] * MANY] * 2}, {"prompt": [["a"]] * MANY}, {"prompt": FIELDS}, {"model": ONES})),
    *((ChatRequest, CHAT | more) for more in (
        {"messages": ONES}, {"messages": [{}] * MANY}, {"messages": [SAID] * MANY}, {"messages": [{}] * 4000},
        {"messages": [{"role": "user", "content": ONES}]}, {"messages": [{"role": "user", "content": ONES[:2]}] * 2000},
        {"messages": [SAID | FIELDS]}, {"messages": [{"role": "assistant", "tool_calls": ONES}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"} | FIELDS]}]},
        {"tools": ONES}, {"tools": [{"type": "function", "function": {"name": "f"} | FIELDS}]}, {"tool_choice": FIELDS},
        {"response_format": {"type": "text"} | FIELDS}, {"response_format": {"type": ONES}})),
    (TokenizeRequest, {"messages": ONES}), (TokenizeRequest, {"prompt": "a"} | FIELDS),
    (DetokenizeRequest, {"tokens": ["a"] * MANY}), (DetokenizeRequest, {"tokens": [-1] * MANY})])
def test_what_is_wrong_many_times_is_said_a_few_times(kind, body) -> None:
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(body, strict=True)
    assert caught.value.error_count() <= 8
    with pytest.raises(ApiError) as refused:
        validated(kind, body, strict=True)
    assert len(refused.value.message) < 400


@pytest.mark.parametrize("name", ["stop", "stop_bytes", "stop_token_ids", "bad_words"])
def test_sampling_parameters_end_at_their_first_wrong_entry(name) -> None:
    with pytest.raises(UsageError) as caught:
        SamplingParams(**{name: tuple(["a", None][name != "stop_token_ids"] for _ in range(MANY))})
    assert caught.value.__cause__.error_count() == 1


def _filled(begin: str, entry: str, end: str) -> bytes:
    return (begin + ",".join([entry] * ((LARGE - len(begin) - len(end)) // (len(entry) + 1))) + end).encode()


@pytest.mark.parametrize("body", [
    _filled('{"model":"m","prompt":"x","stop":[', "1", "]}"), _filled('{"model":"m","prompt":[', "1", ',"a"]}'),
    _filled('{"model":"m","prompt":[', "[]", "]}"), _filled("[", "[[[[]]]]", "]"), _filled("{", '"a":1', "}"),
    _filled('{"model":"m","prompt":"x",', '"unknown field":{}', "}"), _filled('{"model":"m","prompt":[', '""', "]}"),
    b'"' + b'\\"' * (LARGE // 2), b'[{:"' * (LARGE // 4)],
    ids=["stop", "ids", "lists", "deep", "fields", "objects", "texts", "no end", "no JSON"])
def test_the_largest_bodies_are_refused_soon(body) -> None:
    begin = time.thread_time()  # the processor's: others may hold the machine
    with pytest.raises(ApiError):
        validated(CompletionRequest, load_json(body, OPTIONS), strict=True).check(OPTIONS)
    assert time.thread_time() - begin < 2.0  # 0.05 to 0.4 s on two idle cores


def test_texts_may_hold_any_number_of_brackets() -> None:
    text = '[{:"\\' * 100_000
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    assert load_json(f'{{"prompt": "{escaped}"}}'.encode(), OPTIONS) == {"prompt": text}
    with pytest.raises(ApiError, match="at most 262144 are allowed"):
        load_json(b"[" + b"[]," * 262_144 + b"1]", OPTIONS)


@pytest.mark.parametrize(("document", "words"), [
    ({"inputs": [TEXT | {"shape": [0] * MANY}]}, "has shape"), ({"inputs": [TEXT | {"shape": ["a"] * MANY}]}, "shape"),
    ({"inputs": [TEXT | {"datatype": ONES}]}, "has datatype"), ({"inputs": [TEXT | {"name": ONES}]}, "name is"),
    ({"inputs": [TEXT], "outputs": [{"name": "text_output"}] * MANY}, "20000 outputs"),
    ({"inputs": [TEXT], "parameters": FIELDS}, "unknown request parameter"), ({"inputs": [TEXT]} | FIELDS, "field"),
    ({"inputs": [TEXT | {"data": [["a"], "b"]}]}, "side by side"),
    ({"inputs": [{"name": "input_ids", "datatype": "INT32", "shape": [16_000_000, 0], "data": []}]}, "16000000 rows"),
    ({"inputs": [TEXT | {"shape": [70_000]}]}, "70000 rows"),
    ({"inputs": [TEXT | {"shape": [1, 70_000]}]}, "70000 rows"),
    ({"inputs": [TEXT], "x" * MANY: 1}, "unknown field"), ({"inputs": [TEXT | {"name": "x" * MANY}]}, "unknown input")])
def test_tensors_are_bounded_before_they_are_looked_at(document, words) -> None:
    with pytest.raises(ApiError, match=words) as caught:
        parse(b"", None, lambda _: document)
    assert len(caught.value.message) < 400
    assert len(caught.value.param or "") < 100


@pytest.mark.parametrize(("values", "words"), [
    ({"text_input": "a", "stop_words": ONES}, "stop"), ({"text_input": "a", "max_tokens": [ONES]}, "max_tokens"),
    ({"text_input": ["a"] * 70_000}, "70000 prompts"), ({"text_input": [FIELDS]}, "a prompt is a text")])
def test_plain_values_are_bounded_too(values, words) -> None:
    with pytest.raises(ApiError, match=words) as caught:
        read_values(values)
    assert len(caught.value.message) < 400


@pytest.mark.parametrize("value", [[], [1, "a"], (1,), (1, [2, {"a": None}]), {"a": {"b": 2.5}}, "it's", b"x", True])
def test_a_small_value_is_shown_as_it_is_written(value) -> None:
    assert shown(value) == repr(value)


@pytest.mark.parametrize("value", [ONES, tuple(ONES), FIELDS, "a" * MANY, [["a" * MANY]], [[[]] * MANY]])
def test_a_large_value_is_cut(value) -> None:
    assert shown(value) == repr(value)[:80] + "..."


@pytest.fixture(scope="module")
def tokenizer(tiny_engine):
    return Tokenizer.open(tiny_engine / "tokenizer")


def test_others_go_on_while_a_long_text_is_tokenized(tokenizer) -> None:
    """The library's plain call holds the interpreter's lock to the end: this thread would have no turn."""
    text, ids = "some words " * 60_000, []
    working = threading.Thread(target=lambda: ids.extend(tokenizer.encode(text)))
    working.start()
    turns = 0
    while working.is_alive():
        time.sleep(0.001)
        turns += 1
    assert len(ids) == len(text)
    assert turns > 10
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("text", ["", "a", "plain words " * 300, "漢字 🙂" * 500, "<|special_1|>" * 300, "\0 \n" * 999])
def test_a_text_has_no_fewer_tokens_than_foreseen(tokenizer, text) -> None:
    least = tokenizer.least_tokens(text)
    assert len(text.encode()) / 14 <= least <= len(tokenizer.encode(text))  # the longest one is "<|special_10|>"


def test_a_text_that_cannot_fit_is_refused_untokenized(http) -> None:
    found = http.post("/v1/completions", json={"model": "tiny", "prompt": "a" * 1_000_000})
    assert found.status_code == 400
    assert (found.json()["error"]["param"], found.json()["error"]["code"]) == ("prompt", "context_length_exceeded")
    assert "which are 71429 tokens or more; this engine's max_seq_len is 1024" in found.json()["error"]["message"]
    count = http.post("/tokenize", json={"prompt": "a" * 200_000}).json()
    assert count["count"] == len(count["tokens"]) == 200_000
    assert http.post("/detokenize", json={"tokens": count["tokens"]}).json()["prompt"] == "a" * 200_000

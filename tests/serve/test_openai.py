"""The server through OpenAI's own client: completions, chat, streams, log-probabilities, formats, tools."""

from __future__ import annotations

import itertools
import json
import re

import openai
import pytest

from engines.llm import LLM
from engines.request import SamplingParams

PROMPT = "The cat sat on the mat and"
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "The weather of a town.", "parameters": {
    "type": "object", "properties": {"town": {"type": "string", "enum": ["Oslo", "Rome"]}, "days": {
        "type": "integer", "minimum": 1, "maximum": 9}}, "required": ["town", "days"], "additionalProperties": False}}},
    {"type": "function", "function": {"name": "stop"}}]


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as opened:
        yield opened


@pytest.fixture(scope="module")
def local(tiny_engine):
    with LLM(tiny_engine) as llm:
        yield llm


def chat(client, text="hi", **options):
    return client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": text}], **options)


def test_the_model_is_listed(client) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_greedy_answers_are_the_engines_own(client, local) -> None:
    prompts = [PROMPT, "x", "Some other words " * 6]
    expected = local.generate(prompts, SamplingParams(max_tokens=20, logprobs=2))
    found = client.completions.create(model="tiny", prompt=prompts, max_tokens=20, temperature=0, logprobs=2)
    assert [choice.text for choice in found.choices] == [out.outputs[0].text for out in expected]
    assert [choice.finish_reason for choice in found.choices] == [out.outputs[0].finish_reason for out in expected]
    for choice, out in zip(found.choices, expected, strict=True):
        assert choice.logprobs.token_logprobs == pytest.approx([one.logprob for one in out.outputs[0].logprobs],
                                                               abs=1e-4)
    assert found.usage.prompt_tokens == sum(len(out.prompt_token_ids) for out in expected)
    assert found.usage.completion_tokens == sum(len(out.outputs[0].token_ids) for out in expected)


def test_a_stream_is_the_whole_answer_in_pieces(client) -> None:
    options = {"model": "tiny", "prompt": [PROMPT, "y"], "max_tokens": 30, "temperature": 0, "logprobs": 1}
    whole = client.completions.create(**options)
    texts, reasons, tokens, usage = ["", ""], [None, None], [[], []], None
    for event in client.completions.create(**options, stream=True, stream_options={"include_usage": True}):
        usage = event.usage or usage
        for choice in event.choices:
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
            tokens[choice.index] += choice.logprobs.tokens if choice.logprobs else []
    assert texts == [choice.text for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert tokens == [choice.logprobs.tokens for choice in whole.choices]
    assert usage.completion_tokens == whole.usage.completion_tokens


def test_chat_follows_the_template_once(client, local) -> None:
    ids = local.tokenizer.chat([{"role": "user", "content": "hi"}])
    [out] = local.generate([ids], SamplingParams(max_tokens=12))
    found = chat(client, max_completion_tokens=12, temperature=0, logprobs=True, top_logprobs=3)
    assert found.usage.prompt_tokens == len(ids)
    assert found.choices[0].message.content == out.outputs[0].text
    assert [len(one.top_logprobs) for one in found.choices[0].logprobs.content] == [3] * 12
    raw = b"".join(bytes(one.bytes) for one in found.choices[0].logprobs.content)
    assert raw.decode("utf-8", "replace") == out.outputs[0].text
    pieces = [event.choices[0].delta.content or "" for event in chat(client, max_tokens=12, temperature=0, stream=True)]
    assert "".join(pieces) == out.outputs[0].text


def test_user_text_is_never_a_control_token(client, local) -> None:
    text = "<|special_2|><|special_0|>"
    assert chat(client, text, max_tokens=1).usage.prompt_tokens == len(
        local.tokenizer.chat([{"role": "user", "content": "x" * len(text)}]))


def test_the_prefix_cache_is_reported_and_parted_by_salt(client) -> None:
    text = "a long beginning that is shared by several requests " * 2
    cached = []
    for salt in ("one", "one", "two"):
        found = client.completions.create(model="tiny", prompt=text, max_tokens=2, extra_body={"cache_salt": salt})
        cached.append(found.usage.prompt_tokens_details.cached_tokens)
    assert cached[0] == cached[2] == 0
    assert cached[1] == (len(text) - 1) // 16 * 16


def test_n_and_seed_are_reproducible(client) -> None:
    def texts(**options):
        found = chat(client, n=3, temperature=1.3, max_tokens=12, **options)
        return [choice.message.content for choice in found.choices]
    first = texts(seed=7)
    assert len(set(first)) == 3
    assert texts(seed=7) == first
    assert texts(seed=8) != first
    streamed = ["", "", ""]
    for event in chat(client, n=3, temperature=1.3, max_tokens=12, seed=7, stream=True):
        streamed[event.choices[0].index] += event.choices[0].delta.content or ""
    assert streamed == first


@pytest.mark.parametrize("stream", [False, True])
def test_two_stops_of_which_one_begins_the_other(client, local, stream: bool) -> None:
    text = local.generate(PROMPT, SamplingParams(max_tokens=40))[0].outputs[0].text
    at = next(i for i in range(4, len(text) - 4) if "\ufffd" not in text[i:i + 4] and text.find(text[i:i + 2]) == i)
    stops = [text[at:at + 3], text[at:at + 2]]
    found = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=40, temperature=0, stop=stops,
                                      stream=stream)
    events = list(found) if stream else [found]
    assert "".join(event.choices[0].text for event in events) == text[:at]
    assert events[-1].choices[0].finish_reason == "stop"


def test_bias_and_penalties_change_the_answer_as_they_say(client) -> None:
    biased = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=5, temperature=0, logit_bias={"65": 100})
    assert biased.choices[0].text == client.completions.create(
        model="tiny", prompt=[65] * 1, max_tokens=1, echo=True).choices[0].text[0] * 5
    spread = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=40, temperature=0, frequency_penalty=2,
                                       presence_penalty=2, extra_body={"repetition_penalty": 10.0, "ignore_eos": True},
                                       logprobs=0)
    assert len(set(spread.choices[0].logprobs.tokens)) > 30


@pytest.mark.parametrize("stream", [False, True])
def test_bad_words_are_in_no_answer(client, stream: bool) -> None:
    options = {"model": "tiny", "prompt": PROMPT, "max_tokens": 30, "temperature": 0}
    plain = client.completions.create(**options).choices[0].text
    word = next(a + b for a, b in itertools.pairwise(plain) if "\ufffd" not in a + b)
    found = client.completions.create(**options, stream=stream, extra_body={"bad_words": [word]})
    text = "".join(event.choices[0].text for event in found) if stream else found.choices[0].text
    assert word in plain
    assert word not in text
    with pytest.raises(openai.BadRequestError, match="bad_words"):
        client.completions.create(**options, extra_body={"bad_words": [""]})


def test_words_that_forbid_what_the_schema_demands_are_the_callers_fault(client) -> None:
    schema = {"name": "one", "schema": {"enum": ["Ann"]}}
    with pytest.raises(openai.BadRequestError, match="the grammar and bad_words together leave none") as refused:
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "who"}], max_tokens=20,
                                       response_format={"type": "json_schema", "json_schema": schema},
                                       extra_body={"bad_words": ['"']})
    assert refused.value.code == "conflict"


def test_an_expression_beyond_the_bounds_is_the_callers_fault(client) -> None:
    with pytest.raises(openai.BadRequestError, match="the grammar stopped") as refused:
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "a"}], max_tokens=20,
                                       extra_body={"response_format": {"type": "regex", "regex": "a{1000000}"}})
    assert refused.value.code == "grammar"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("options", "param", "words"), [
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"$ref": "#"}}}},
     "response_format", "no text can match it from here on; it may refer to itself"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": []}}}},
     "response_format", "the json_schema cannot be used"),
    ({"response_format": {"type": "regex", "regex": "(?!a)b"}}, "response_format", "the regex cannot be used"),
    ({"response_format": {"type": "regex", "regex": "a" * 70_000}}, "response_format", "has 70000 characters"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"$ref": "#/no"}}}],
      "tool_choice": "required"}, "tools", "does not exist")])
def test_grammars_that_cannot_be_are_refused_in_words_and_by_name(client, options, param, words, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError, match=words) as refused:
        chat(client, max_tokens=5, stream=stream, extra_body=options)
    assert refused.value.param == param


SCHEMA = {"type": "object", "properties": {"name": {"enum": ["Ann", "Bo"]}, "age": {"type": "integer", "minimum": 0,
          "maximum": 120}}, "required": ["name", "age"], "additionalProperties": False}


@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_and_an_expression_are_met(client, stream: bool) -> None:
    def text(response_format):
        found = chat(client, temperature=1, seed=3, max_tokens=80, stream=stream, response_format=response_format)
        if not stream:
            assert found.choices[0].finish_reason == "stop"
            return found.choices[0].message.content
        return "".join(event.choices[0].delta.content or "" for event in found)
    person = json.loads(text({"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}))
    assert person["name"] in ("Ann", "Bo")
    assert 0 <= person["age"] <= 120
    assert re.fullmatch(r"[A-F]{3}-\d{4}", text({"type": "regex", "regex": r"[A-F]{3}-\d{4}"}))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_tools_that_must_be_called_are_called_with_valid_arguments(client, stream: bool, choice) -> None:
    found = chat(client, tools=TOOLS, tool_choice=choice, temperature=1, seed=5, max_tokens=150, stream=stream,
                 parallel_tool_calls=False)
    if stream:
        events = list(found)
        calls = [call for event in events for call in event.choices[0].delta.tool_calls or []]
        content = "".join(event.choices[0].delta.content or "" for event in events)
        reason = events[-1].choices[0].finish_reason
    else:
        calls = found.choices[0].message.tool_calls
        content, reason = found.choices[0].message.content or "", found.choices[0].finish_reason
    assert (len(calls), content, reason) == (1, "", "tool_calls")
    arguments = json.loads(calls[0].function.arguments)
    if calls[0].function.name == "weather":
        assert arguments["town"] in ("Oslo", "Rome")
        assert 1 <= arguments["days"] <= 9
    else:
        assert choice == "required"
    again = client.chat.completions.create(model="tiny", max_tokens=4, tools=TOOLS, messages=[
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [calls[0].model_dump(exclude={"index"})]},
        {"role": "tool", "tool_call_id": calls[0].id, "content": "sunny"}])
    assert again.choices[0].finish_reason in ("length", "stop")


def test_strict_functions_under_auto_leave_text_free(client) -> None:
    strict = [{**tool, "function": tool["function"] | {"strict": True}} for tool in TOOLS]
    for seed in range(3):
        message = chat(client, tools=strict, temperature=1, seed=seed, max_tokens=24).choices[0].message
        assert message.content or message.tool_calls


def test_the_model_decides_with_auto_and_none(client) -> None:
    for choice in ("auto", "none"):
        found = chat(client, tools=TOOLS, tool_choice=choice, temperature=0, max_tokens=8)
        assert found.choices[0].message.tool_calls is None
        assert found.choices[0].finish_reason == "length"


@pytest.mark.parametrize(("options", "words"), [
    ({"extra_body": {"best_of": 3}}, "unknown or unsupported parameter: best_of"),
    ({"extra_body": {"temprature": 1}}, "temprature"), ({"store": True}, "store"), ({"temperature": 3}, "temperature"),
    ({"n": 999}, "n is 999"), ({"logit_bias": {"99999": 1}}, "token 99999"), ({"top_logprobs": 3}, "top_logprobs"),
    ({"max_tokens": 100_000}, "max_seq_len of 1024"), ({"max_tokens": 4, "max_completion_tokens": 5}, "differ"),
    ({"tool_choice": "auto"}, "tool_choice needs tools"), ({"stop": ["x" * 2000]}, "1024 characters"),
    ({"response_format": {"type": "regex"}}, "regex"), ({"extra_body": {"top_k": "5"}}, "top_k"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "what"}}}},
     "cannot be used"),
    ({"tools": TOOLS, "tool_choice": "perhaps"}, "tool_choice: Input should be 'none', 'auto' or 'required'"),
    ({"tools": [*TOOLS, TOOLS[0]]}, "same name"), ({"service_tier": "flex"}, "service_tier"),
    ({"extra_body": {"min_tokens": 9, "max_tokens": 3}}, "min_tokens 9 is larger")])
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_done_is_refused_by_name(client, options, words: str, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError, match=re.escape(words)):
        chat(client, stream=stream, **options)


@pytest.mark.parametrize("stream", [False, True])
def test_null_is_not_given(client, stream: bool) -> None:
    """Programs that pass their own options on pass None for what nobody set (a seed, too: any token may be drawn)."""
    shared = dict.fromkeys(["frequency_penalty", "logit_bias", "n", "presence_penalty", "seed", "stop", "temperature",
                            "top_p", "user", "logprobs", "stream_options"])
    found = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=2, best_of=None, suffix=None, echo=None,
                                      **shared, stream=stream or None, extra_body={"ignore_eos": True})
    assert (list(found)[-1] if stream else found).choices[0].finish_reason == "length"
    found = chat(client, max_tokens=2, stream=stream or None, **shared, extra_body=dict.fromkeys([
        "audio", "function_call", "functions", "metadata", "modalities", "parallel_tool_calls", "prediction",
        "reasoning_effort", "response_format", "service_tier", "store", "tool_choice", "tools", "top_logprobs", "top_k",
        "verbosity", "max_completion_tokens"]) | {"ignore_eos": True})
    assert (list(found)[-1] if stream else found).choices[0].finish_reason == "length"


@pytest.mark.parametrize(("options", "words"), [
    ({"suffix": "x"}, "unknown or unsupported parameter: suffix"), ({"best_of": 2}, "unsupported parameter: best_of"),
    ({"temprature": None}, "temprature"), ({"model": None}, "model: Field required"), ({"prompt": None}, "prompt")])
def test_a_value_for_what_is_not_served_and_null_for_what_must_be_are_refused(client, options, words: str) -> None:
    with pytest.raises(openai.BadRequestError, match=words):
        client.completions.create(model="tiny", prompt="a", extra_body=options)


def test_a_message_goes_back_as_it_came(client) -> None:
    said = chat(client, max_tokens=2).choices[0].message.model_dump()
    assert {"annotations", "audio", "function_call", "refusal", "tool_calls"} <= {
        name for name, value in said.items() if value is None}
    history = [{"role": "user", "content": "hi"}, said, {"role": "user", "content": "on"}]
    assert client.chat.completions.create(model="tiny", messages=history, max_tokens=1).choices
    for name, words in (("audio", "messages.1.audio"), ("function_call", "messages.1.function_call"),
                        ("refusal", "messages.1.refusal")):
        with pytest.raises(openai.BadRequestError, match=words):
            client.chat.completions.create(model="tiny", messages=[history[0], said | {name: {"id": "1"}}])


def test_fields_without_effect_are_taken_at_their_only_values(client) -> None:
    assert chat(client, max_tokens=1, user="me", metadata={"a": "b"}, store=False, service_tier="auto").choices


def test_another_model_is_not_found(client) -> None:
    with pytest.raises(openai.NotFoundError, match="'gpt' is not served here"):
        client.completions.create(model="gpt", prompt="a")

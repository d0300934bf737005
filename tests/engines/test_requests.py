"""Requests beside each other in one loop: prefix hits, grammars, deadlines, aborts, faults."""

from __future__ import annotations

import json
import re
import time

import numpy as np
import pytest
from tiny_models import VOCAB

from engines.errors import EngineError, LimitError
from engines.llm import LLM
from engines.request import Grammar, SamplingParams, seed_of
from engines.runtime.admission import Terms
from engines.runtime.grammar import GrammarError
from engines.runtime.loop import Loop

PLAIN = SamplingParams(max_tokens=20, ignore_eos=True, logprobs=2)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 256, length).tolist()


@pytest.fixture(scope="module")
def llm(engine):
    with LLM(engine) as opened:
        yield opened


@pytest.fixture
def loop(llm):
    llm.forget_prefixes()
    yield llm.loop
    assert llm.loop.idle
    llm.loop.check()
    assert llm.stats()["used_blocks"] == 0


def drain(loop: Loop) -> list:
    events = []
    while not loop.idle:
        events += loop.step()
        loop.check()
    return events


def test_answers_on_a_hit_equal_those_on_a_miss(llm, loop) -> None:
    stem = prompt_of(100)
    prompts = [stem, stem + prompt_of(9, 1), stem[:50] + prompt_of(30, 2), stem[:33]]
    missed = []
    for prompt in prompts:
        llm.forget_prefixes()
        missed += llm.generate([prompt], PLAIN)
    llm.forget_prefixes()
    llm.generate([stem], PLAIN)
    hit = [llm.generate([prompt], PLAIN)[0] for prompt in prompts]
    assert [out.cached_tokens for out in missed] == [0] * 4
    assert [out.cached_tokens for out in hit] == [96, 96, 48, 32]
    for a, b in zip(missed, hit, strict=True):
        assert a.outputs[0].token_ids == b.outputs[0].token_ids
        pairs = zip(a.outputs[0].logprobs, b.outputs[0].logprobs, strict=True)
        assert max(abs(x.logprob - y.logprob) for x, y in pairs) < 1e-4


def test_generated_tokens_are_found_by_the_next_turn(llm, loop) -> None:
    [first] = llm.generate([prompt_of(20)], PLAIN)
    turn = first.prompt_token_ids + first.outputs[0].token_ids + prompt_of(5, 3)
    assert llm.generate([turn], PLAIN)[0].cached_tokens == 32


def test_salts_do_not_share(loop) -> None:
    cached = []
    for salt in ("a", "b", "a"):
        number = loop.admit(prompt_of(40), PLAIN, terms=Terms(salt=salt))
        drain(loop)
        cached.append(loop.take(number).cached_tokens)
    assert cached == [0, 0, 32]


def test_reuse_can_be_left_out(engine, loop) -> None:
    for _ in range(2):
        number = loop.admit(prompt_of(40), PLAIN, terms=Terms(reuse=False))
        drain(loop)
        assert loop.take(number).cached_tokens == 0
    assert loop.stats()["cached_blocks"] == 0
    with LLM(engine, prefix_cache=False) as plain:
        assert [out.cached_tokens for out in plain.generate([prompt_of(40)] * 2, PLAIN)] == [0, 0]
        assert plain.stats()["cached_blocks"] == 0


def test_n_gives_independent_reproducible_continuations(llm, loop) -> None:
    params = SamplingParams(n=3, max_tokens=12, temperature=1.5, seed=5, ignore_eos=True)
    [out] = llm.generate([prompt_of(10)], params)
    texts = [each.token_ids for each in out.outputs]
    assert [each.index for each in out.outputs] == [0, 1, 2]
    assert len({tuple(each) for each in texts}) == 3
    [alone] = llm.generate([prompt_of(10)], params.model_copy(update={"n": 1}))
    assert alone.outputs[0].token_ids == texts[0]
    streamed: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for delta in llm.stream(prompt_of(10), params):
        streamed[delta.outputs[0].index] += delta.outputs[0].token_ids
    assert list(streamed.values()) == texts


@pytest.mark.parametrize(("length", "computed"), [(100, 100 + 3 * 4), (97, 97 + 3), (96, 96 + 3 * 16), (16, 4 * 16)])
def test_the_prompt_of_n_continuations_is_computed_once(llm, loop, length: int, computed: int) -> None:
    """All are admitted in one step; the others compute what is behind the last full block before the prompt's last
    token. The answers are those of continuations that are asked for one by one."""
    params = SamplingParams(n=4, max_tokens=6, temperature=1.0, seed=9, ignore_eos=True)
    before = loop.stats()["tokens_computed"]
    [out] = llm.generate([prompt_of(length)], params)
    assert loop.stats()["tokens_computed"] - before == computed + 4 * 5
    apart = []
    for index in range(4):
        llm.forget_prefixes()
        one = params.model_copy(update={"n": 1, "seed": seed_of(9, index)})
        apart += [each.token_ids for each in llm.generate([prompt_of(length)], one)[0].outputs]
    assert [each.token_ids for each in out.outputs] == apart


def test_continuations_go_on_when_the_first_one_is_aborted(loop) -> None:
    numbers = loop.admit_all(prompt_of(200), SamplingParams(n=3, max_tokens=4, ignore_eos=True))
    loop.step()
    assert loop.stats()["waiting"] == 2
    loop.abort(numbers[0])
    drain(loop)
    assert [len(loop.take(number).outputs[0].token_ids) for number in numbers[1:]] == [4, 4]


def test_of_n_continuations_all_or_none_are_queued(loop) -> None:
    with pytest.raises(LimitError):
        loop.admit_all(prompt_of(5), SamplingParams(n=3, stop_token_ids=(VOCAB,)))
    assert loop.stats()["waiting"] == 0
    assert loop.idle


def test_a_seeded_answer_does_not_depend_on_its_batch(llm, loop) -> None:
    params = SamplingParams(max_tokens=16, temperature=1.0, top_p=0.95, top_k=50, min_p=0.01, seed=77, ignore_eos=True,
                            frequency_penalty=0.3, repetition_penalty=1.1, logit_bias={3: 1.0})
    [alone] = llm.generate([prompt_of(40)], params)
    llm.forget_prefixes()
    mates = [prompt_of(20 + index, index + 1) for index in range(5)]
    each = [SamplingParams(max_tokens=9 + index, temperature=1.3, seed=index, n=1 + index % 3) for index in range(5)]
    *_, beside = llm.generate([*mates, prompt_of(40)], [*each, params])
    assert beside.outputs[0].token_ids == alone.outputs[0].token_ids


SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x", "yy"]}, "n": {"type": "integer", "maximum": 99,
                                                                            "minimum": 0}},
          "required": ["a", "n"], "additionalProperties": False}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_schema_is_met_whatever_the_model_would_say(llm, loop, temperature: float) -> None:
    grammar = Grammar(kind="json_schema", source=json.dumps(SCHEMA | {"x-guidance": {"whitespace_flexible": False}}))
    [out] = llm.generate(["hello"], SamplingParams(max_tokens=60, grammar=grammar, temperature=temperature, seed=1))
    found = json.loads(out.outputs[0].text)
    assert found["a"] in ("x", "yy")
    assert 0 <= found["n"] <= 99
    assert out.outputs[0].finish_reason == "stop"


def test_an_expression_is_met_beside_free_text(llm, loop) -> None:
    free = SamplingParams(max_tokens=12, ignore_eos=True)
    [alone] = llm.generate([prompt_of(9)], free)
    formed = SamplingParams(max_tokens=30, grammar=Grammar(kind="regex", source="(ab|cd){2,4}-[0-9]{3}"))
    a, b = llm.generate([prompt_of(9), prompt_of(9)], [free, formed])
    assert a.outputs[0].token_ids == alone.outputs[0].token_ids
    assert re.fullmatch("(ab|cd){2,4}-[0-9]{3}", b.outputs[0].text)


@pytest.mark.parametrize(("kind", "source"), [
    ("json_schema", "{"), ("json_schema", '{"type": "nonsense"}'), ("regex", "a("), ("regex", "(" * 200 + ")" * 200),
    ("json_schema", '{"$ref": "https://example.com/schema"}'), ("lark", "start: missing")])
def test_grammars_that_cannot_be_used_are_refused_in_words(loop, kind, source: str) -> None:
    with pytest.raises(GrammarError, match=r"cannot be|nested"):
        loop.admit([1], SamplingParams(grammar=Grammar(kind=kind, source=source)))


@pytest.mark.parametrize("source", ["(a{1,1000}){1,1000}(b{1,1000}){1,1000}x", "(.*a){30}.{500}b(.*c){30}",
                                    "[a-z]{1,5000}(x|y){1,5000}" * 8])
def test_a_pathological_expression_is_bounded(loop, source: str) -> None:
    start = time.monotonic()
    try:
        number = loop.admit([1, 2], SamplingParams(max_tokens=4, grammar=Grammar(kind="regex", source=source)))
        drain(loop)
        out = loop.take(number).outputs[0]
        assert out.finish_reason in ("length", "stop", "error")
    except GrammarError:
        pass
    assert time.monotonic() - start < 5


def test_a_deadline_ends_one_request_between_two_steps(loop) -> None:
    late = loop.admit(prompt_of(5), SamplingParams(max_tokens=200, ignore_eos=True), terms=Terms(deadline_s=0.0))
    fine = loop.admit(prompt_of(5), SamplingParams(max_tokens=5, ignore_eos=True), terms=Terms(deadline_s=60.0))
    ends = {event.number: event for event in drain(loop) if event.finish_reason}
    assert ends[late].finish_reason == "deadline"
    assert "deadline passed" in (ends[late].error or "")
    assert ends[fine].finish_reason == "length"
    loop.take(late)
    loop.take(fine)


def test_an_abort_frees_blocks_at_once(llm, loop) -> None:
    number = loop.admit(prompt_of(50), SamplingParams(max_tokens=100, ignore_eos=True))
    loop.step()
    assert llm.stats()["used_blocks"] > 0
    loop.abort(number)
    loop.abort(number)
    assert llm.stats()["used_blocks"] == 0
    loop.check()


def test_a_step_that_raises_fails_the_culprit_alone(engine) -> None:
    with LLM(engine) as llm:
        loop = llm.loop
        [alone] = llm.generate([prompt_of(9)], PLAIN)
        inner = loop._runner.launch

        def launch(chunks):
            if any(chunk.sequence.prompt_len == 13 for chunk in chunks):
                inner([chunk for chunk in chunks if chunk.sequence.prompt_len != 13] or chunks)  # half of it was done
                raise RuntimeError("boom")
            return inner(chunks)
        loop._runner.launch = launch  # type: ignore[method-assign]
        good, bad = loop.admit(prompt_of(9), PLAIN), loop.admit(prompt_of(13), PLAIN)
        ends = {event.number: event for event in drain(loop) if event.finish_reason}
        assert (ends[bad].finish_reason, ends[bad].error) == ("error", "RuntimeError: boom")
        assert loop.take(good).outputs[0].token_ids == alone.outputs[0].token_ids
        assert loop.take(bad).outputs[0].error == "RuntimeError: boom"
        assert loop.stats()["faults"] == 1
        with pytest.raises(EngineError, match="boom"):
            llm.generate([prompt_of(13)], PLAIN)


def test_what_a_device_does_not_honour_is_refused_by_name(engine) -> None:
    with LLM(engine) as llm:
        llm.loop._admission._adjusts_logits = False
        with pytest.raises(LimitError, match=r"presence_penalty, logit_bias, min_p cannot be honoured"):
            llm.generate("a", SamplingParams(presence_penalty=1.0, logit_bias={3: 1.0}, min_p=0.1))
        with pytest.raises(LimitError, match=f"token {VOCAB}"):
            llm.generate("a", SamplingParams(logit_bias={VOCAB: 1.0}))

"""lm-eval's ``local-completions`` against the server gives the scores that the engine gives in process."""

from __future__ import annotations

import numpy as np
import pytest
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI

from engines.llm import LLM
from engines.request import SamplingParams

PAIRS = [("The sky is", " blue"), ("The sky is", " made of cheese"), ("Two and two are", " four"), ("a", "b")]


@pytest.fixture(scope="module")
def harness(server, tiny_engine):
    return LocalCompletionsAPI(base_url=f"{server.url}/v1/completions", model="tiny", tokenizer=str(
        tiny_engine / "tokenizer"), tokenizer_backend="huggingface", tokenized_requests=True, batch_size=2)


def instances(kind, arguments):
    return [Instance(request_type=kind, doc={}, arguments=pair, idx=index) for index, pair in enumerate(arguments)]


def test_log_likelihoods_are_the_engines_own(harness, tiny_engine) -> None:
    found = harness.loglikelihood(instances("loglikelihood", PAIRS), disable_tqdm=True)
    with LLM(tiny_engine) as llm:
        for (context, continuation), (value, greedy) in zip(PAIRS, found, strict=True):
            prefix, whole = llm.tokenizer.encode(context), llm.tokenizer.encode(context + continuation)
            [score] = llm.loglikelihood([whole])
            own = slice(len(prefix) - 1, None)
            assert value == pytest.approx(float(np.sum(score.logprobs[own])), abs=1e-3)
            assert greedy == bool(score.greedy[own].all())


def test_generations_are_the_engines_own(harness, tiny_engine) -> None:
    asked = [("Say something", {"until": ["\x02"], "max_gen_toks": 20}), ("And more", {"until": ["zz"],
                                                                                   "max_gen_toks": 12})]
    found = harness.generate_until(instances("generate_until", asked), disable_tqdm=True)
    with LLM(tiny_engine) as llm:
        for (context, options), text in zip(asked, found, strict=True):
            [out] = llm.generate(context, SamplingParams(max_tokens=options["max_gen_toks"],
                                                         stop=(*options["until"], "<|special_0|>")))
            assert text == out.outputs[0].text

"""The server through Triton Inference Server's own HTTP client, unchanged."""

from __future__ import annotations

import itertools
import json

import httpx
import numpy as np
import pytest
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException, triton_to_np_dtype

from engines.llm import LLM
from engines.request import SamplingParams

PROMPTS = ["The cat sat", "Grüße aus Köln", "z"]


@pytest.fixture(scope="module")
def client(server):
    opened = triton.InferenceServerClient(server.url.removeprefix("http://"), network_timeout=60)
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def expected(tiny_engine):
    with LLM(tiny_engine) as llm:
        return [out.outputs[0] for out in llm.generate(PROMPTS, SamplingParams(max_tokens=10))]


def tensor(name, values, kind, binary=True):
    array = (np.array([value.encode() for value in values], object) if kind == "BYTES"
             else np.array(values, triton_to_np_dtype(kind)))
    made = triton.InferInput(name, list(array.shape), kind)
    made.set_data_from_numpy(array, binary_data=binary)
    return made


def test_health_and_metadata(client) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("tiny")
    assert not client.is_model_ready("other")
    assert client.get_server_metadata()["name"] == "toolkit"
    assert "binary_tensor_data" in client.get_server_metadata()["extensions"]
    found = client.get_model_metadata("tiny", "1")
    assert {one["name"] for one in found["inputs"]} >= {"text_input", "max_tokens"}
    config = client.get_model_config("tiny")
    assert next(one["name"] for one in config["output"]) == "text_output"
    assert client.get_model_repository_index()[0]["state"] == "READY"


@pytest.mark.parametrize("binary_in", [True, False])
@pytest.mark.parametrize("binary_out", [True, False])
def test_infer_gives_the_engines_own_answers(client, expected, binary_in: bool, binary_out: bool) -> None:
    inputs = [tensor("text_input", PROMPTS, "BYTES", binary_in), tensor("max_tokens", [10], "INT32", binary_in)]
    outputs = [triton.InferRequestedOutput(name, binary_data=binary_out) for name in (
        "text_output", "output_ids", "finish_reason", "completion_tokens")]
    found = client.infer("tiny", inputs, outputs=outputs, request_id="seven")
    texts = [one.decode() if isinstance(one, bytes) else one for one in found.as_numpy("text_output").tolist()]
    assert texts == [out.text for out in expected]
    assert found.get_response()["id"] == "seven"
    assert found.as_numpy("completion_tokens").tolist() == [len(out.token_ids) for out in expected]
    rows = found.as_numpy("output_ids")
    assert [[one for one in row if one >= 0] for row in rows.tolist()] == [out.token_ids for out in expected]


def test_words_are_lists_and_numbers_are_one_for_all(client, expected) -> None:
    word = next(a + b for a, b in itertools.pairwise(expected[0].text) if "\ufffd" not in a + b)
    inputs = [tensor("text_input", PROMPTS, "BYTES"), tensor("max_tokens", [10], "INT32"),
              tensor("bad_words", [word, "never said"], "BYTES")]
    found = client.infer("tiny", inputs).as_numpy("text_output").tolist()
    assert not any(word.encode() in text for text in found)
    with pytest.raises(InferenceServerException, match="top_k has 2 values"):
        client.infer("tiny", [*inputs, tensor("top_k", [1, 2], "INT32")])


def test_infer_without_asking_for_outputs_and_with_ids(client, expected, tiny_engine) -> None:
    with LLM(tiny_engine) as llm:
        ids = llm.tokenizer.encode(PROMPTS[0])
    found = client.infer("tiny", [tensor("input_ids", [ids], "INT32"), tensor("max_tokens", [10], "INT32")])
    assert found.as_numpy("text_output").tolist() == [expected[0].text.encode()]


def test_sampling_inputs_are_honoured(client) -> None:
    def text(seed):
        return client.infer("tiny", [tensor("text_input", ["a"], "BYTES"), tensor("temperature", [1.5], "FP32"),
                                     tensor("random_seed", [seed], "INT64"), tensor("max_tokens", [12], "INT32"),
                                     tensor("ignore_eos", [True], "BOOL")]).as_numpy("text_output")[0]
    assert text(1) == text(1)
    assert text(1) != text(2)


def test_generate_and_its_stream(server, expected) -> None:
    base = f"{server.url}/v2/models/tiny"
    body = {"text_input": PROMPTS[0], "parameters": {"max_tokens": 10}}
    whole = httpx.post(f"{base}/generate", json=body, timeout=60).json()
    assert (whole["model_name"], whole["text_output"]) == ("tiny", expected[0].text)
    with httpx.stream("POST", f"{base}/versions/1/generate_stream", json=body, timeout=60) as stream:
        events = [json.loads(line.removeprefix("data: ")) for line in stream.iter_lines() if line]
    assert "".join(event["text_output"] for event in events) == expected[0].text
    assert events[-1]["finish_reason"] == expected[0].finish_reason


def test_faults_are_in_words(client, server) -> None:
    with pytest.raises(InferenceServerException, match="unknown input 'prompt'"):
        client.infer("tiny", [tensor("prompt", ["a"], "BYTES")])
    with pytest.raises(InferenceServerException, match="datatype 'FP32'; it is INT32"):
        client.infer("tiny", [tensor("text_input", ["a"], "BYTES"), tensor("max_tokens", [4.0], "FP32")])
    with pytest.raises(InferenceServerException, match="max_seq_len of 1024"):
        client.infer("tiny", [tensor("text_input", ["a"], "BYTES"), tensor("max_tokens", [4000], "INT32")])
    with pytest.raises(InferenceServerException, match="text_input or input_ids"):
        client.infer("tiny", [tensor("max_tokens", [4], "INT32")])
    with pytest.raises(InferenceServerException, match="not served here"):
        client.infer("other", [tensor("text_input", ["a"], "BYTES")])
    base = f"{server.url}/v2/models/tiny/infer"
    for header, body in (("9999", b"{}"), ("x", b"{}"), ("2", b"{}\x00\x01"), ("1", b"{}"), ("2", b"[]")):
        found = httpx.post(base, content=body, headers={"Inference-Header-Content-Length": header})
        assert found.status_code == 400, found.text
        assert isinstance(found.json()["error"], str)
    huge = {"inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1],
                        "parameters": {"binary_data_size": 8}}]}
    head = json.dumps(huge).encode()
    found = httpx.post(base, content=head + b"\xff\xff\xff\x7fabcd",
                       headers={"Inference-Header-Content-Length": str(len(head))})
    assert "longer than its data" in found.json()["error"]


def test_what_triton_has_and_this_has_not_says_so(client) -> None:
    with pytest.raises(InferenceServerException, match="shared memory"):
        client.get_system_shared_memory_status()

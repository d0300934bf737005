"""``toolkit export triton-server``: the documented layout, a configuration that Triton's own schema reads, and a model
that answers as the engine does (Triton itself is not here: a stand-in of its Python API calls the model)."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tritonclient
from google.protobuf import text_format

from engines.llm import LLM
from engines.request import SamplingParams
from toolkit.cli import run_command


def load(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@dataclass
class Tensor:
    name: str
    array: np.ndarray

    def as_numpy(self) -> np.ndarray:
        return self.array


@dataclass
class TritonError:
    words: str


@dataclass
class InferenceResponse:
    output_tensors: list[Tensor] = field(default_factory=list)
    error: TritonError | None = None


@dataclass
class Request:
    tensors: list[Tensor]


def request(**values: Any) -> Request:
    return Request([Tensor(name, np.array(value)) for name, value in values.items()])


@pytest.fixture(scope="module")
def repository(tiny_engine, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("repository")
    home = str(tmp_path_factory.mktemp("home"))
    assert run_command(["export", "triton-server", str(tiny_engine), "--out", str(out), "--name", "tiny", "--home",
                        home, "-q"]) == 0
    assert run_command(["export", "triton-server", str(tiny_engine), "--out", str(out), "--name", "tiny", "--home",
                        home, "-q"]) == 2
    return out


@pytest.fixture(scope="module")
def model(repository):
    backend = ModuleType("triton_python_backend_utils")
    backend.Tensor, backend.TritonError, backend.InferenceResponse = Tensor, TritonError, InferenceResponse
    backend.get_input_tensor_by_name = lambda asked, name: next(
        (tensor for tensor in asked.tensors if tensor.name == name), None)
    sys.modules["triton_python_backend_utils"] = backend
    try:
        made = load(repository / "tiny" / "1" / "model.py", "exported_model").TritonPythonModel()
        made.initialize({"model_repository": str(repository / "tiny"), "model_version": "1", "model_config": "{}"})
        yield made
        made.finalize()
    finally:
        del sys.modules["triton_python_backend_utils"]
        sys.modules.pop("toolkit.serve.triton_backend", None)


def test_the_layout_and_the_configuration(repository) -> None:
    files = {str(path.relative_to(repository)) for path in repository.rglob("*") if path.is_file()}
    assert {"tiny/config.pbtxt", "tiny/1/model.py", "tiny/1/engine/manifest.json"} <= files
    schema = load(Path(tritonclient.__path__[0]) / "grpc" / "model_config_pb2.py", "model_config_pb2")
    config = text_format.Parse((repository / "tiny" / "config.pbtxt").read_text(), schema.ModelConfig())
    assert (config.name, config.backend, config.max_batch_size) == ("tiny", "python", 8)
    inputs = {one.name: one for one in config.input}
    assert inputs["text_input"].data_type == schema.TYPE_STRING
    assert list(inputs["text_input"].dims) == [1]
    assert list(inputs["input_ids"].dims) == [-1]
    assert inputs["max_tokens"].optional
    assert next(one.name for one in config.output) == "text_output"
    assert config.instance_group[0].kind == schema.ModelInstanceGroup.KIND_CPU
    assert config.HasField("dynamic_batching")


def test_the_model_answers_as_the_engine_does(model, tiny_engine) -> None:
    responses = model.execute([
        request(text_input=[[b"The cat"]], max_tokens=[[9]]),
        request(text_input=[[b"a"], [b"bcd"]], max_tokens=[[4], [4]]),
        request(text_input=[[b"a"]], max_tokens=[[5000]]), request(max_tokens=[[3]]),
        request(input_ids=[[5, 6, 7]], max_tokens=[[3]], temperature=[[1.0]], random_seed=[[3]])])
    with LLM(tiny_engine) as llm:
        [cat] = llm.generate("The cat", SamplingParams(max_tokens=9))
        short = llm.generate(["a", "bcd"], SamplingParams(max_tokens=4))
        [drawn] = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=3, temperature=1.0, seed=3))
    found = [{tensor.name: tensor.array for tensor in response.output_tensors} for response in responses]
    assert found[0]["text_output"].tolist() == [[cat.outputs[0].text.encode()]]
    assert found[1]["text_output"].tolist() == [[out.outputs[0].text.encode()] for out in short]
    assert found[1]["completion_tokens"].tolist() == [[len(out.outputs[0].token_ids)] for out in short]
    assert found[4]["output_ids"].tolist() == [drawn.outputs[0].token_ids]
    assert "max_seq_len of 1024" in responses[2].error.words
    assert "text_input or input_ids" in responses[3].error.words

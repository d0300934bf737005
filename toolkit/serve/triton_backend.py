"""The model that Triton Inference Server's Python backend runs: one engine, loaded once.

``toolkit export triton-server`` writes a repository whose ``model.py`` takes this class. Triton's dynamic batcher hands
over the requests that came together; they run in one loop (in-flight batching among them) and are answered together.
Requests that come later wait for the next call: where that matters, ``toolkit serve`` speaks the same protocol.

A request that cannot be served is answered with an error of its own; the others go on.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as backend

from calib.errors import ToolkitError
from engines.llm import LLM
from engines.request import RequestOutput
from toolkit.serve.faults import ApiError
from toolkit.serve.kserve import read_values
from toolkit.serve.tensors import INPUTS, NUMPY, OUTPUTS

#: The engine's folder beside model.py.
ENGINE = "engine"


class TritonPythonModel:
    """The face that Triton's Python backend calls: initialize, execute, finalize."""

    def initialize(self, args: dict[str, str]) -> None:
        """Open the engine. What is wrong is raised, and Triton shows the model as unavailable with those words."""
        self._llm = LLM(Path(args["model_repository"]) / args["model_version"] / ENGINE)

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """One response a request, in order."""
        loop = self._llm.loop
        admitted = [self._admit(request) for request in requests]
        while not loop.idle:
            loop.step()
        return [numbers if isinstance(numbers, backend.InferenceResponse)
                else self._response([loop.take(number) for number in numbers]) for numbers in admitted]

    def _admit(self, request: Any) -> Any:
        """Numbers of the request's sequences, or its error."""
        numbers: list[int] = []
        try:
            prompts, params = read_values(_values(request))
            for prompt in prompts:
                ids = self._llm.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
                numbers.append(self._llm.loop.admit(ids, params))
            return numbers
        except (ToolkitError, ApiError) as error:
            for number in numbers:
                self._llm.loop.abort(number)
            return backend.InferenceResponse(error=backend.TritonError(error.message))

    @staticmethod
    def _response(outputs: Sequence[RequestOutput]) -> Any:
        ends = [output.outputs[0] for output in outputs]
        if failed := [end.error for end in ends if end.error]:
            return backend.InferenceResponse(error=backend.TritonError(f"generation failed: {failed[0]}"))
        longest = max(len(end.token_ids) for end in ends)
        columns: dict[str, list[Any]] = {
            "text_output": [end.text.encode() for end in ends],
            "output_ids": [end.token_ids + [-1] * (longest - len(end.token_ids)) for end in ends],
            "finish_reason": [str(end.finish_reason).encode() for end in ends],
            "prompt_tokens": [len(output.prompt_token_ids) for output in outputs],
            "completion_tokens": [len(end.token_ids) for end in ends]}
        return backend.InferenceResponse(output_tensors=[
            backend.Tensor(name, _column(OUTPUTS[name][0], values)) for name, values in columns.items()])

    def finalize(self) -> None:
        """Free the engine."""
        self._llm.close()


def _column(kind: str, values: list[Any]) -> np.ndarray:
    """[batch, 1], or [batch, longest] for ids: every output has the batch dimension first."""
    array = np.array(values, np.object_ if kind == "BYTES" else NUMPY[kind])
    return array.reshape(len(values), -1)


def _values(request: Any) -> dict[str, Any]:
    """The request's inputs as ``read_values`` takes them; a parameter is the same for the whole request."""
    values: dict[str, Any] = {}
    for name, (kind, _, field) in INPUTS.items():
        tensor = backend.get_input_tensor_by_name(request, name)
        if tensor is None:
            continue
        array = tensor.as_numpy()
        if name == "input_ids":
            values[name] = array.tolist()
            continue
        flat = [one.decode() if isinstance(one, bytes) else one for one in array.reshape(-1).tolist()]
        if field is not None and kind != "BYTES" and len(set(flat)) == 1:
            flat = flat[:1]
        values[name] = flat
    return values

"""The KServe v2 protocol, as Triton Inference Server speaks it: tensors in, tensors out, on the same engine.

    text_input  BYTES [n]      n prompts, answered in one batch       text_output        BYTES [n]
    input_ids   INT32 [n, s]   or token ids instead                   output_ids         INT32 [n, longest], -1 behind
    max_tokens INT32, temperature FP32, top_k INT32, top_p FP32,      finish_reason      BYTES [n]
    min_p FP32, random_seed INT64, stop_words BYTES [k],              prompt_tokens      INT32 [n]
    repetition_penalty, presence_penalty, frequency_penalty FP32,     completion_tokens  INT32 [n]
    bad_words BYTES [j], ignore_eos BOOL          all others [1]

``generate`` takes the same names as plain JSON values. Without ``temperature`` an answer is greedy.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from calib.errors import shown
from engines.request import SamplingParams
from toolkit.serve.faults import ApiError, bad
from toolkit.serve.parts import validated
from toolkit.serve.service import Service
from toolkit.serve.tensors import INPUTS, LISTS, MOST_ROWS, OUTPUTS, VERSION

EXTENSIONS = ["binary_tensor_data", "model_configuration", "generate"]
DEFAULT_MAX_TOKENS = 16


def metadata(model: str) -> dict[str, Any]:
    """``GET /v2/models/NAME``."""
    return {"name": model, "versions": [VERSION], "platform": "llm_quant_toolkit",
            "inputs": [{"name": name, "datatype": kind, "shape": shape} for name, (kind, shape, _) in INPUTS.items()],
            "outputs": [{"name": name, "datatype": kind, "shape": shape} for name, (kind, shape) in OUTPUTS.items()]}


def configuration(model: str) -> dict[str, Any]:
    """``GET /v2/models/NAME/config``, in the words of model_config.proto: no batch dimension, any number of prompts."""
    def typed(kind: str) -> str:
        return "TYPE_STRING" if kind == "BYTES" else f"TYPE_{kind}"
    return {"name": model, "platform": "", "backend": "python", "max_batch_size": 0,
            "input": [{"name": name, "data_type": typed(kind), "dims": shape, "optional": True}
                      for name, (kind, shape, _) in INPUTS.items()],
            "output": [{"name": name, "data_type": typed(kind), "dims": shape}
                       for name, (kind, shape) in OUTPUTS.items()]}


class Inference:
    """One request, admitted."""

    def __init__(self, service: Service, prompts: list[list[int]], params: SamplingParams, terms: dict[str, Any]
                 ) -> None:
        self._service, self._prompts, self._params, self._terms = service, prompts, params, terms

    @classmethod
    async def admit(cls, service: Service, values: Mapping[str, Any], caller: str) -> Inference:
        """Check everything that can be checked before the engine is asked. ``values`` are lists, or scalars."""
        given, params = read_values(values)
        if len(given) > service.options.max_prompts:
            raise bad(f"{len(given)} prompts; this server allows 1 to {service.options.max_prompts}", "text_input")
        service.admit(len(given))
        prompts = [await service.texts.ids(one) for one in given]
        if sum(map(len, params.stop)) > service.options.max_stop_chars:
            raise bad(f"stop_words have more than {service.options.max_stop_chars} characters", "stop_words")
        for prompt in prompts:
            service.texts.room(prompt, params.max_tokens, "max_tokens")
        return cls(service, prompts, params, service.terms(caller))

    async def tensors(self) -> dict[str, Any]:
        """Output -> values."""
        ends = [end for [end] in await self._service.generate(self._prompts, self._params, self._terms)]
        longest = max(len(end["tokens"]) for end in ends)
        return {"text_output": [end["text"] for end in ends],
                "output_ids": [end["tokens"] + [-1] * (longest - len(end["tokens"])) for end in ends],
                "finish_reason": [end["finish"] for end in ends],
                "prompt_tokens": [len(prompt) for prompt in self._prompts],
                "completion_tokens": [end["generated"] for end in ends]}

    async def pieces(self, model: str) -> AsyncGenerator[str, None]:
        """``generate_stream`` events of a single prompt: text by text; the last one has a reason."""
        if len(self._prompts) != 1:
            raise bad("generate_stream takes one prompt", "text_input")
        async with contextlib.aclosing(self._service.stream(self._prompts, self._params, self._terms)) as stream:
            async for _, message in stream:
                if message["kind"] == "token" and (message["text"] or message["finish"]):
                    document = {"model_name": model, "model_version": VERSION, "text_output": message["text"]}
                    yield json.dumps(document | ({"finish_reason": message["finish"]} if message["finish"] else {}))


def read_values(values: Mapping[str, Any]) -> tuple[list[str | list[int]], SamplingParams]:
    """Prompts and parameters of a request's inputs, each a list or a scalar. ApiError 400 names what is wrong."""
    values = {name: value if isinstance(value, list) else [value] for name, value in values.items()}
    if ("text_input" in values) == ("input_ids" in values):
        raise bad("give text_input or input_ids", "text_input")
    given = values.get("text_input") or values.get("input_ids") or []
    if "input_ids" in values and given and isinstance(given[0], int):
        given = [given]
    if not 1 <= len(given) <= MOST_ROWS:
        raise bad(f"{len(given)} prompts; 1 to {MOST_ROWS} are allowed", "text_input")
    fields: dict[str, Any] = {"max_tokens": DEFAULT_MAX_TOKENS}
    for name, (_, _, field) in INPUTS.items():
        if field is not None and name in values:
            fields[field] = tuple(values[name]) if field in LISTS else _one(name, values[name])
    params = validated(SamplingParams, fields)
    if params.max_tokens < 1:
        raise bad("max_tokens is 0", "max_tokens")
    return [_prompt(one) for one in given], params


def _prompt(value: Any) -> str | list[int]:
    if isinstance(value, str) or (isinstance(value, list) and set(map(type, value)) <= {int}):
        return value
    raise bad(f"a prompt is a text or a list of ids, not {shown(value)}", "text_input")


def _one(name: str, values: Sequence[Any]) -> Any:
    if len(values) != 1:
        raise bad(f"{name} has {len(values)} values; it is one for all prompts", name)
    return values[0]


def fault_document(error: ApiError) -> dict[str, str]:
    """An error as this protocol writes it."""
    return {"error": error.message}

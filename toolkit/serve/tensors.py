"""Tensors of the KServe v2 protocol: in JSON, or as raw bytes behind it (the binary extension).

The header Inference-Header-Content-Length says where the JSON ends, and each tensor's ``binary_data_size`` how many
bytes are its own, in order. A BYTES element is 4 bytes of little-endian length and the bytes. Source: the KServe v2
"open inference protocol" and Triton Inference Server's binary tensor data extension.
"""

from __future__ import annotations

import itertools
import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from calib.errors import shown
from toolkit.serve.faults import bad
from toolkit.serve.text import checked

VERSION = "1"
NUMPY: dict[str, Any] = {"BOOL": np.bool_, "INT8": np.int8, "INT16": np.int16, "INT32": np.int32, "INT64": np.int64,
                         "UINT8": np.uint8, "UINT16": np.uint16, "UINT32": np.uint32, "UINT64": np.uint64,
                         "FP32": np.float32, "FP64": np.float64}
#: Input -> (datatype, shape, field of SamplingParams). The first two are the prompts.
INPUTS: dict[str, tuple[str, list[int], str | None]] = {
    "text_input": ("BYTES", [-1], None), "input_ids": ("INT32", [-1, -1], None),
    "max_tokens": ("INT32", [1], "max_tokens"), "temperature": ("FP32", [1], "temperature"),
    "top_k": ("INT32", [1], "top_k"), "top_p": ("FP32", [1], "top_p"), "min_p": ("FP32", [1], "min_p"),
    "random_seed": ("INT64", [1], "seed"), "stop_words": ("BYTES", [-1], "stop"),
    "bad_words": ("BYTES", [-1], "bad_words"),
    "repetition_penalty": ("FP32", [1], "repetition_penalty"), "presence_penalty": ("FP32", [1], "presence_penalty"),
    "frequency_penalty": ("FP32", [1], "frequency_penalty"), "ignore_eos": ("BOOL", [1], "ignore_eos")}
#: Strings of one tensor, and rows of ids.
MOST_ROWS = 1 << 16
#: Dimensions of a tensor.
_MOST_DIMENSIONS = 8
#: Fields that take a list; all others are one value for all prompts.
LISTS = frozenset({"stop", "bad_words"})
OUTPUTS: dict[str, tuple[str, list[int]]] = {
    "text_output": ("BYTES", [-1]), "output_ids": ("INT32", [-1, -1]), "finish_reason": ("BYTES", [-1]),
    "prompt_tokens": ("INT32", [-1]), "completion_tokens": ("INT32", [-1])}


@dataclass(frozen=True, slots=True)
class Asked:
    """One inference request."""

    identity: str | None
    values: dict[str, Any]
    #: Output -> whether its data are binary.
    outputs: dict[str, bool]


def parse(body: bytes, header_length: int | None, load: Any) -> Asked:
    """An ``infer`` body. ``load`` reads JSON. ApiError 400 names what is wrong."""
    size = len(body) if header_length is None else header_length
    if not 0 <= size <= len(body):
        raise bad(f"Inference-Header-Content-Length is {size}, and the body has {len(body)} bytes")
    document, rest = load(body[:size]), body[size:]
    if not isinstance(document, dict):
        raise bad("the request is not a JSON object")
    known(document, {"id", "parameters", "inputs", "outputs"}, "field")
    parameters = _object(document.get("parameters", {}), "parameters")
    known(parameters, {"binary_data_output"}, "request parameter")
    values: dict[str, Any] = {}
    for tensor in _objects(document.get("inputs"), "inputs"):
        name = _name(tensor)
        known({name: None}, INPUTS, "input")
        if name in values:
            raise bad(f"input {name} is there twice", name)
        values[name], rest = _tensor(name, tensor, rest)
    if rest:
        raise bad(f"{len(rest)} bytes of binary data belong to no input")
    return Asked(_identity(document), values, _wanted(document, bool(parameters.get("binary_data_output", False))))


def _identity(document: Mapping[str, Any]) -> str | None:
    identity = document.get("id")
    if identity is not None and not isinstance(identity, str):
        raise bad("id is not a string", "id")
    return None if identity is None else checked(identity, "id")


def known(given: Mapping[str, Any], known: Any, what: str) -> None:
    if strange := next((name for name in given if name not in known), None):
        raise bad(f"unknown {what} {shown(strange)}; known: {', '.join(sorted(known))}", strange[:80],
                  "unknown_parameter")


def _object(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise bad(f"{name} is not an object", name)
    return value


def _objects(value: Any, name: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        raise bad(f"{name} is not a list of tensors", name)
    return value


def _name(tensor: Mapping[str, Any]) -> str:
    name = tensor.get("name")
    if not isinstance(name, str):
        raise bad(f"a tensor's name is {shown(name)}", "name")
    return name


def _wanted(document: Mapping[str, Any], binary: bool) -> dict[str, bool]:
    asked = _objects(document.get("outputs") or [], "outputs")
    if not asked:
        return {"text_output": binary}
    if len(asked) > len(OUTPUTS):
        raise bad(f"{len(asked)} outputs are asked for; there are {len(OUTPUTS)}", "outputs")
    found: dict[str, bool] = {}
    for output in asked:
        name, parameters = _name(output), _object(output.get("parameters", {}), "outputs.parameters")
        known({name: None}, OUTPUTS, "output")
        known(parameters, {"binary_data"}, "output parameter")
        found[name] = bool(parameters.get("binary_data", binary))
    return found


def _tensor(name: str, tensor: Mapping[str, Any], rest: bytes) -> tuple[Any, bytes]:
    """A tensor's values in their shape, and the binary data behind it."""
    known(tensor, {"name", "shape", "datatype", "parameters", "data"}, "field of an input")
    kind, shape = tensor.get("datatype"), tensor.get("shape")
    if not isinstance(shape, list) or len(shape) > _MOST_DIMENSIONS or not all(
            isinstance(size, int) and 0 <= size < 1 << 24 for size in shape):
        raise bad(f"{name} has shape {shown(shape)}", name)
    wanted = INPUTS[name][0]
    if kind != wanted and not (isinstance(kind, str) and kind in NUMPY and wanted in NUMPY
                               and _same_family(kind, wanted)):
        raise bad(f"{name} has datatype {shown(kind)}; it is {wanted}", name)
    count = math.prod(shape)
    if (rows := count if wanted == "BYTES" else shape[0] if len(shape) == 2 else 0) > MOST_ROWS:
        raise bad(f"{name} has {rows} rows; at most {MOST_ROWS} are allowed", name)
    parameters = _object(tensor.get("parameters", {}), f"{name}.parameters")
    known(parameters, {"binary_data_size"}, f"parameter of {name}")
    if "binary_data_size" in parameters:
        size = parameters["binary_data_size"]
        if not isinstance(size, int) or not 0 <= size <= len(rest) or "data" in tensor:
            raise bad(f"{name} claims {shown(size)} bytes of {len(rest)}", name)
        flat, rest = _from_binary(name, str(kind), rest[:size], count), rest[size:]
    else:
        flat = _flattened(tensor.get("data"))
    if len(flat) != count:
        raise bad(f"{name} has {len(flat)} values for shape {shape}", name)
    if len(shape) == 2 and name == "input_ids":
        return [flat[row * shape[1]:(row + 1) * shape[1]] for row in range(shape[0])], rest
    return flat, rest


def _same_family(kind: str, wanted: str) -> bool:
    return kind.lstrip("U").rstrip("0123456789") == wanted.lstrip("U").rstrip("0123456789")


def _from_binary(name: str, kind: str, data: bytes, count: int) -> list[Any]:
    """The values; of texts, at most one more than there should be."""
    if kind != "BYTES":
        if len(data) % np.dtype(NUMPY[kind]).itemsize:
            raise bad(f"{name} has {len(data)} bytes, no whole number of {kind}", name)
        return np.frombuffer(data, NUMPY[kind]).tolist()
    found: list[Any] = []
    at = 0
    while at < len(data) and len(found) <= count:
        if at + 4 > len(data) or at + 4 + (size := struct.unpack_from("<I", data, at)[0]) > len(data):
            raise bad(f"{name} has a string that is longer than its data", name)
        found.append(_utf8(name, data[at + 4:at + 4 + size]))
        at += 4 + size
    return found


def _utf8(name: str, data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise bad(f"{name} is not UTF-8: {error.reason} at byte {error.start}", name) from error


def _flattened(data: Any) -> list[Any]:
    if not isinstance(data, list):
        raise bad("an input has neither data nor binary_data_size", "data")
    while list in (kinds := set(map(type, data))):
        if len(kinds) > 1:
            raise bad("an input's data are lists and values side by side", "data")
        data = list(itertools.chain.from_iterable(data))
    return data


def answer(model: str, asked: Asked, tensors: Mapping[str, Any]) -> tuple[bytes, int | None]:
    """An ``infer`` answer: its bytes, and where the JSON ends when binary data follow."""
    outputs, blobs = [], []
    for name, binary in asked.outputs.items():
        kind, values = OUTPUTS[name][0], tensors[name]
        shape = [len(values), len(values[0])] if name == "output_ids" else [len(values)]
        flat = [one for row in values for one in row] if name == "output_ids" else values
        output: dict[str, Any] = {"name": name, "datatype": kind, "shape": shape}
        if binary:
            blobs.append(_to_binary(kind, flat))
            output["parameters"] = {"binary_data_size": len(blobs[-1])}
        else:
            output["data"] = flat
        outputs.append(output)
    document: dict[str, Any] = {"model_name": model, "model_version": VERSION, "outputs": outputs}
    if asked.identity is not None:
        document["id"] = asked.identity
    data = json.dumps(document, ensure_ascii=False).encode()
    return data + b"".join(blobs), len(data) if blobs else None


def _to_binary(kind: str, values: Sequence[Any]) -> bytes:
    if kind != "BYTES":
        return np.asarray(values, NUMPY[kind]).tobytes()
    encoded = [value.encode() for value in values]
    return b"".join(struct.pack("<I", len(one)) + one for one in encoded)

"""A model repository for Triton Inference Server, as its documentation lays one out.

    OUT/NAME/config.pbtxt      inputs, outputs, batching: model_config.proto in text form
    OUT/NAME/1/model.py        takes ``TritonPythonModel`` from ``toolkit.serve.triton_backend``
    OUT/NAME/1/engine/         a copy of the engine, with its manifest

The toolkit must be installed in the Python of Triton's Python backend. The engine is tied to its device like any other:
elsewhere the model is shown as unavailable, with the sentence that says how to rebuild.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from calib.artifact import Artifact
from toolkit.errors import UsageError
from toolkit.serve.tensors import INPUTS, LISTS, OUTPUTS, VERSION

_MODEL = '''"""An engine for Triton Inference Server's Python backend; written by `toolkit export triton-server`."""

from toolkit.serve.triton_backend import TritonPythonModel

__all__ = ["TritonPythonModel"]
'''


def configuration(name: str, max_batch_size: int, device: str) -> dict[str, Any]:
    """The fields of a ModelConfig. Shapes leave the batch dimension out, as Triton adds it."""
    def typed(kind: str) -> str:
        return "TYPE_STRING" if kind == "BYTES" else f"TYPE_{kind}"

    def dims(shape: Sequence[int], scalar: bool) -> list[int]:
        return [1] if scalar else list(shape[1:]) or [1]
    inputs = [{"name": key, "data_type": typed(kind), "dims": [-1] if field in LISTS else
               dims(shape, field is not None), "optional": True} for key, (kind, shape, field) in INPUTS.items()]
    outputs = [{"name": key, "data_type": typed(kind), "dims": dims(shape, False)}
               for key, (kind, shape) in OUTPUTS.items()]
    return {"name": name, "backend": "python", "max_batch_size": max_batch_size, "input": inputs, "output": outputs,
            "instance_group": [{"count": 1, "kind": "KIND_GPU" if device == "cuda" else "KIND_CPU"}],
            "dynamic_batching": {"max_queue_delay_microseconds": 1000}}


#: Values of these fields are names of an enum, which text form writes bare.
_ENUMS = frozenset({"data_type", "kind"})


def pbtxt(fields: Mapping[str, Any], indent: int = 0) -> str:
    """Protobuf text form of nested fields: messages in braces, repeated ones one by one."""
    lines: list[str] = []
    margin = "  " * indent
    for key, value in fields.items():
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, Mapping):
                lines.append(f"{margin}{key} {{\n{pbtxt(one, indent + 1)}{margin}}}\n")
            elif isinstance(one, bool):
                lines.append(f"{margin}{key}: {str(one).lower()}\n")
            elif isinstance(one, str) and key not in _ENUMS:
                lines.append(f"{margin}{key}: {json.dumps(one)}\n")
            else:
                lines.append(f"{margin}{key}: {one}\n")
    return "".join(lines)


def export(engine: Artifact, out: Path, name: str) -> Path:
    """Write the repository; returns the model's folder. UsageError when that is there already."""
    plan = engine.manifest.record["plan"]
    model = out / name
    if model.exists():
        raise UsageError(f"{model} is there already", "Give another --out or --name.")
    place = model / VERSION
    place.mkdir(parents=True)
    shutil.copytree(engine.path, place / "engine")
    (place / "model.py").write_text(_MODEL, encoding="utf-8")
    text = pbtxt(configuration(name, plan["limits"]["max_batch_size"], plan["device"]["kind"]))
    (model / "config.pbtxt").write_text(text, encoding="utf-8")
    return model

"""Plain Hugging Face folders: safetensors shards, strictly opened, lazily read, written one shard at a time.

safetensors: 8 bytes little-endian header length, a JSON header {name: {dtype, shape, data_offsets}}, then the bytes.
The header alone gives every name, shape and dtype, so a plan needs no weights, and a truncated file is recognised
before anything is loaded: the last offset must be the end of the file.
"""

from __future__ import annotations

import contextlib
import json
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers.utils import logging

from calib.errors import ENVIRONMENT, CalibError
from calib.layers import natural_key
from calib.scheme import BF16, Grid, Scheme

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SHARD_BYTES = 2 * 1024**3
_QUANTIZED = {"weight_scale", "weight_packed", "qweight", "qzeros"}
_HEADER_LIMIT = 100 * 1024 * 1024
DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I64": 8, "I32": 4, "I16": 2,
               "I8": 1, "U8": 1, "BOOL": 1}


class MissingWeightsError(CalibError):
    """A weight file is missing, truncated, or no safetensors file."""

    code = "weights"
    exit_code = ENVIRONMENT


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """Where a tensor lies: safetensors dtype name ("BF16"), shape, bytes, file."""

    dtype: str
    shape: tuple[int, ...]
    bytes: int
    file: str


def read_header(path: Path) -> dict[str, TensorMeta]:
    """Names, dtypes and shapes of one safetensors file. MissingWeightsError when it is truncated or damaged."""
    hint = "Copy or download this file again."
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            raw = file.read(8)
            length = struct.unpack("<Q", raw)[0] if len(raw) == 8 else -1
            if not 0 < length <= min(_HEADER_LIMIT, size - 8):
                raise MissingWeightsError(f"{path} is no whole safetensors file ({size} bytes)", hint)
            header = json.loads(file.read(length))
    except FileNotFoundError as error:
        raise MissingWeightsError(f"{path} is missing", "Copy or download the model folder again.") from error
    except ValueError as error:
        raise MissingWeightsError(f"{path} has a damaged header: {error}", hint) from error
    entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
    end = 8 + length + max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    if end != size:
        raise MissingWeightsError(f"{path} is truncated: {size} bytes, its header promises {end}", hint)
    return {name: TensorMeta(entry["dtype"], tuple(entry["shape"]),
                             entry["data_offsets"][1] - entry["data_offsets"][0], path.name)
            for name, entry in entries.items()}


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a model folder. CalibError when it is missing or no object."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise CalibError(f"{path} is missing", "A model folder holds config.json, weights and tokenizer files."
                         ) from error
    except ValueError as error:
        raise CalibError(f"{path} is not JSON: {error}", "Copy or download this file again.") from error
    if not isinstance(value, dict):
        raise CalibError(f"{path} holds no JSON object", "Copy or download this file again.")
    return value


class Shards(Mapping[str, TensorMeta]):
    """All tensors of a folder by name. Opening reads headers only; ``load`` reads one tensor."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if (folder / INDEX).is_file():
            placed: dict[str, str] = read_json(folder / INDEX).get("weight_map", {})
            files = sorted(set(placed.values()))
        else:
            placed, files = {}, [SINGLE]
        self._meta: dict[str, TensorMeta] = {}
        for name in files:
            self._meta |= read_header(folder / name)
        absent = sorted(set(placed) - set(self._meta))
        if absent:
            raise MissingWeightsError(f"{folder}: tensor {absent[0]} is in the index but in no file",
                                      "Copy or download the model folder again.")
        self._order = sorted(self._meta, key=natural_key)

    def __getitem__(self, name: str) -> TensorMeta:
        return self._meta[name]

    def __iter__(self) -> Iterator[str]:
        """Names in natural order: layer 2 before layer 10."""
        return iter(self._order)

    def __len__(self) -> int:
        return len(self._meta)

    def load(self, name: str) -> torch.Tensor:
        """One tensor, in its dtype on disk, on the CPU."""
        meta = self._meta.get(name)
        if meta is None:
            raise MissingWeightsError(f"{self.folder} has no tensor {name}", "The checkpoint is incomplete.")
        with safe_open(self.folder / meta.file, framework="pt") as file:
            return file.get_tensor(name)

    @property
    def nbytes(self) -> int:
        return sum(meta.bytes for meta in self._meta.values())


@contextlib.contextmanager
def without_progress_bars() -> Iterator[None]:
    """transformers draws bars on stderr while it loads and saves; progress has one way here, and this is not it."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def write_shards(folder: Path, tensors: Iterable[tuple[str, torch.Tensor]], shard_bytes: int = SHARD_BYTES) -> None:
    """Write a stream of tensors as safetensors; memory holds one shard. An index is written for more than one shard."""
    shards: list[list[str]] = []
    sizes: list[int] = []
    pending: dict[str, torch.Tensor] = {}

    def flush() -> None:
        path = folder / f"shard-{len(shards)}"
        save_file(pending, path, metadata={"format": "pt"})
        path.chmod(0o644)
        shards.append(list(pending))
        sizes.append(sum(tensor.nbytes for tensor in pending.values()))
        pending.clear()

    for name, tensor in tensors:
        if pending and sum(held.nbytes for held in pending.values()) + tensor.nbytes > shard_bytes:
            flush()
        pending[name] = tensor.contiguous()
    if pending or not shards:
        flush()
    if len(shards) == 1:
        (folder / "shard-0").rename(folder / SINGLE)
        return
    names = [f"model-{index + 1:05d}-of-{len(shards):05d}.safetensors" for index in range(len(shards))]
    for index, name in enumerate(names):
        (folder / f"shard-{index}").rename(folder / name)
    index_json = {"metadata": {"total_size": sum(sizes)},
                  "weight_map": {tensor: name for name, held in zip(names, shards, strict=True) for tensor in held}}
    (folder / INDEX).write_text(json.dumps(index_json, indent=1, sort_keys=True))


class HFLayout:
    """An unquantized folder: every tensor as it lies there, no module has a Scheme."""

    name = "hf"

    def schemes(self, config: Mapping[str, Any], shards: Shards) -> tuple[dict[str, Scheme], Grid]:
        stray = next((name for name in shards if name.rpartition(".")[2] in _QUANTIZED), None)
        if stray is not None:
            raise CalibError(f"{shards.folder} has quantized tensors ({stray}) but no quantization_config",
                             "Its config.json has lost how it was quantized; fetch the original folder.")
        return {}, BF16

    def tensors(self, config: Mapping[str, Any], shards: Shards, schemes: Mapping[str, Scheme], kv: Grid
                ) -> Iterator[tuple[str, torch.Tensor]]:
        for name in shards:
            yield name, shards.load(name)

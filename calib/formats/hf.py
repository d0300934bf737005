"""Plain Hugging Face folders: safetensors shards, strictly opened, lazily read, written one shard at a time.

safetensors: 8 bytes little-endian header length, a JSON header {name: {dtype, shape, data_offsets}}, then the bytes.
The header alone gives every name, shape and dtype, so a plan needs no weights, and a truncated file is recognised
before anything is loaded: the last offset must be the end of the file.
"""

from __future__ import annotations

import contextlib
import json
import math
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
from calib.json_text import parse_object
from calib.layers import natural_key
from calib.scheme import BF16, Grid, Scheme

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SHARD_BYTES = 2 * 1024**3
_QUANTIZED = {"weight_scale", "weight_packed", "qweight", "qzeros"}
_HEADER_LIMIT = 100 * 1024 * 1024
_AGAIN = "Copy or download this file again."
DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I64": 8, "I32": 4,
               "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1}


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
    """Names, dtypes and shapes of one safetensors file, its header believed in nothing.

    MissingWeightsError when the file is truncated, or its header is no JSON, names a tensor twice, or describes tensors
    that overlap, leave a gap, or have other than ``dtype x shape`` bytes.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            raw = file.read(8)
            length = struct.unpack("<Q", raw)[0] if len(raw) == 8 else -1
            if not 0 < length <= min(_HEADER_LIMIT, size - 8):
                raise MissingWeightsError(f"{path} is no whole safetensors file ({size} bytes)", _AGAIN)
            text = file.read(length)
    except FileNotFoundError as error:
        raise MissingWeightsError(f"{path} is missing", "Copy or download the model folder again.") from error
    except OSError as error:
        raise MissingWeightsError(f"{path} cannot be read: {error.strerror or error}", _AGAIN) from error
    header = parse_object(text, f"the header of {path}", MissingWeightsError, _AGAIN)
    found = {name: _tensor_meta(path, name, entry) for name, entry in header.items() if name != "__metadata__"}
    _check_places(path, {name: header[name]["data_offsets"] for name in found}, 8 + length, size)
    return found


def _tensor_meta(path: Path, name: str, entry: Any) -> TensorMeta:
    """One header entry. MissingWeightsError when it is malformed or its bytes are not its dtype times its shape."""
    fields = entry if isinstance(entry, dict) else {}
    dtype, shape, offsets = fields.get("dtype"), _counts(fields.get("shape")), _counts(fields.get("data_offsets"))
    if shape is None or offsets is None or len(offsets) != 2 or not isinstance(dtype, str):
        raise MissingWeightsError(f"{path} has a damaged header: the entry of {name} has no dtype, shape and offsets",
                                  _AGAIN)
    if dtype not in DTYPE_BYTES:
        raise MissingWeightsError(f"{path}: {name} has the unknown dtype {dtype!r}", _AGAIN)
    begin, end = offsets
    if end - begin != math.prod(shape) * DTYPE_BYTES[dtype]:
        raise MissingWeightsError(f"{path} has a damaged header: {name} is {dtype} {shape} and takes {end - begin} "
                                  "bytes", _AGAIN)
    return TensorMeta(dtype, tuple(shape), end - begin, path.name)


def _counts(value: Any) -> list[int] | None:
    """The value if it is a list of whole numbers from 0 on."""
    whole = isinstance(value, list) and all(type(part) is int and part >= 0 for part in value)
    return value if whole else None


def _check_places(path: Path, places: Mapping[str, list[int]], start: int, size: int) -> None:
    """The tensors lie one behind the other and fill the file: anything else is a cut file or a lying header."""
    end = 0
    for name, (begin, stop) in sorted(places.items(), key=lambda item: item[1]):
        if begin != end:
            raise MissingWeightsError(f"{path} has a damaged header: {name} begins at {begin}, the tensor before it "
                                      f"ends at {end}", _AGAIN)
        end = stop
    if start + end != size:
        raise MissingWeightsError(f"{path} is truncated: {size} bytes, its header promises {start + end}", _AGAIN)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a model folder. CalibError when it is missing or no object."""
    try:
        return parse_object(path.read_bytes(), str(path), CalibError)
    except FileNotFoundError as error:
        raise CalibError(f"{path} is missing", "A model folder holds config.json, weights and tokenizer files."
                         ) from error


def _read_index(path: Path) -> dict[str, str]:
    """Tensor -> file of a sharded folder. A file is a plain name: an index cannot reach outside its folder."""
    placed = parse_object(path.read_bytes(), str(path), MissingWeightsError, _AGAIN).get("weight_map")
    if not isinstance(placed, dict) or not placed:
        raise MissingWeightsError(f"{path} has no weight_map", _AGAIN)
    for tensor, name in placed.items():
        if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\\" in name or "\0" in name:
            raise MissingWeightsError(f"{path} places {tensor} in {name!r}, which is no file of the folder", _AGAIN)
    return placed


class Shards(Mapping[str, TensorMeta]):
    """All tensors of a folder by name. Opening reads headers only; ``load`` reads one tensor."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        placed = _read_index(folder / INDEX) if (folder / INDEX).is_file() else {}
        self._meta: dict[str, TensorMeta] = {}
        for name in sorted(set(placed.values())) or [SINGLE]:
            for tensor, meta in read_header(folder / name).items():
                if tensor in self._meta:
                    other = self._meta[tensor].file
                    raise MissingWeightsError(f"{folder}: tensor {tensor} is in {other} and in {name}",
                                              "Copy or download the model folder again.")
                self._meta[tensor] = meta
        for tensor, name in sorted(placed.items()):
            if tensor not in self._meta or self._meta[tensor].file != name:
                raise MissingWeightsError(f"{folder}: the index places tensor {tensor} in {name}, which does not hold "
                                          "it", "Copy or download the model folder again.")
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

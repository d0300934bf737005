"""What a layerwise run keeps on disk: hidden states between layers, and a checkpoint of every finished layer.

    <work>/layer-00017.safetensors            canonical tensors of layer 17: it is done
    <work>/hidden-00018/<stream>.<batch>.safetensors   float32 [b, s, h]: what layer 18 will read
    <work>/statistics-00017.safetensors       amax of layer 17's inputs (smoothing)

A *stream* is one way of the data through the layers. Statistics and search make several passes over the data, and what
a later pass gives may differ (an fp8 KV cache is at work by then), so each pass is a stream of its own: pass p of layer
k reads what pass p of layer k-1 gave, as it would inside the whole model.

Everything is written beside its place, flushed and renamed, and a layer's file comes last: where it stands, so does the
input of the next layer. So a run may be killed anywhere and goes on at the first layer without a file. Hidden states of
two layers at most lie there at a time. No pickle: safetensors and JSON.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import overload

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from calib.artifact import canonical_json, write_atomic
from calib.errors import CalibError

_KEY = "inputs.json"


class LayerStore:
    """The work folder of one run. ``key`` names all inputs: a folder of other inputs is emptied."""

    def __init__(self, folder: Path, key: str) -> None:
        self.folder = folder
        held = json.loads((folder / _KEY).read_bytes()) if (folder / _KEY).is_file() else None
        if held != {"key": key}:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            write_atomic(folder / _KEY, canonical_json({"key": key}))
        for left in folder.rglob(".*.tmp"):  # of a killed run; the artifact's lock keeps another run out
            left.unlink()

    def put_hidden(self, stream: str, layer: int, batch: int, hidden: torch.Tensor) -> None:
        _save(self._hidden(stream, layer, batch), {"hidden": hidden})

    def hidden(self, stream: str, layer: int, batch: int) -> torch.Tensor:
        """Float32 [b, s, h], in memory of its own."""
        return _load(self._hidden(stream, layer, batch))["hidden"].clone()

    def has_hidden(self, stream: str, layer: int, batch: int = 0) -> bool:
        return self._hidden(stream, layer, batch).is_file()

    def drop_hidden(self, layer: int) -> None:
        """Forget what layer number ``layer`` has read."""
        shutil.rmtree(self.folder / f"hidden-{layer:05d}", ignore_errors=True)

    def _hidden(self, stream: str, layer: int, batch: int) -> Path:
        return self.folder / f"hidden-{layer:05d}" / f"{stream}.{batch:05d}.safetensors"

    def put(self, kind: str, layer: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Commit a layer's ``kind``: "layer" or "statistics"."""
        _save(self._place(kind, layer), tensors)

    def has(self, kind: str, layer: int) -> bool:
        return self._place(kind, layer).is_file()

    def names(self, kind: str, layer: int) -> list[str]:
        with safe_open(self._place(kind, layer), framework="pt") as file:
            return list(file.keys())

    def get(self, kind: str, layer: int, name: str) -> torch.Tensor:
        """One tensor, mapped from its file."""
        with safe_open(self._place(kind, layer), framework="pt") as file:
            return file.get_tensor(name)

    def _place(self, kind: str, layer: int) -> Path:
        return self.folder / f"{kind}-{layer:05d}.safetensors"

    @property
    def nbytes(self) -> int:
        return sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())


class LayerBatches(Sequence[torch.Tensor]):
    """The data as one layer sees it: each iteration is a pass, and reads that pass's stream.

    ``take`` is the layer's sink: it keeps what the layer gave for the batch that is at work. A look at one batch
    (``batches[0]``) is no pass and gives the first stream's. With ``one`` every pass reads the first stream and nothing
    is kept until ``give_out``: for methods that fit a layer to what the layers before it, already rounded, give.
    """

    def __init__(self, store: LayerStore, layer: int, stream: str, count: int, *, one: bool = False) -> None:
        self._store, self._layer, self._stream, self._count, self._one = store, layer, stream, count, one
        self._pass = 0
        self._at: int | None = None

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> torch.Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> list[torch.Tensor]: ...

    def __getitem__(self, index: int | slice) -> torch.Tensor | list[torch.Tensor]:
        if isinstance(index, slice):
            return [self._read(1, batch) for batch in range(*index.indices(self._count))]
        return self._read(1, range(self._count)[index])

    def __iter__(self) -> Iterator[torch.Tensor]:
        self._pass += 1
        try:
            for batch in range(self._count):
                self._at = None if self._one else batch
                yield self._read(1 if self._one else self._pass, batch)
        finally:
            self._at = None

    def _read(self, number: int, batch: int) -> torch.Tensor:
        if self._layer == 0:
            return self._store.hidden(self._stream, 0, batch)
        stream = f"{self._stream}-{number}"
        if not self._store.has_hidden(stream, self._layer, batch):
            raise CalibError(f"layer {self._layer} makes pass {number} over the data, the layer before made fewer",
                             "This recipe cannot be calibrated layer by layer; run it with --layerwise off.")
        return self._store.hidden(stream, self._layer, batch)

    def give_out(self, run: Callable[[torch.Tensor], object]) -> None:
        """Send every batch through ``run``, the layer as it now is, and keep what its sink takes as the one stream."""
        self._pass = 1
        for batch in range(self._count):
            self._at = batch
            run(self._read(1, batch))
        self._at = None

    def take(self, output: torch.Tensor) -> None:
        if self._at is not None:
            self._store.put_hidden(f"{self._stream}-{self._pass}", self._layer + 1, self._at, output)


def _save(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, temporary)
    descriptor = os.open(temporary, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    temporary.replace(path)


def _load(path: Path) -> dict[str, torch.Tensor]:
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)

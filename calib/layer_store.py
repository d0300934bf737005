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

Nothing of it is believed unseen. Each tensor's hash, over its place, dtype, shape and bytes, stands in its file's own
metadata (so no kill can part them) and is compared whenever the tensor is read. A folder is looked through when it is
opened: one wrong bit, and the run begins anew, since what a finished layer has read is gone by then. A flipped bit in a
scale would be a checkpoint that opens, runs and is wrong.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import overload

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from calib.artifact import canonical_json
from calib.errors import CalibError
from calib.kept import read_kept, write_kept

_KEY = "inputs.json"
#: What the folder holds and how: raised when that changes, so that older work is made anew.
_LAYOUT = {"layout": 2}


class DamagedWorkError(CalibError):
    """A file of the work folder is not as it was written."""

    code = "damaged_work"


class LayerStore:
    """The work folder of one run. ``key`` names all inputs: a folder of other inputs, or a damaged one, is emptied."""

    def __init__(self, folder: Path, key: str) -> None:
        self.folder = folder
        for left in folder.rglob(".*.tmp"):  # of a killed run; the artifact's lock keeps another run out
            left.unlink()
        if read_kept(folder / _KEY, key) != _LAYOUT or not self._whole():
            shutil.rmtree(folder, ignore_errors=True)
            write_kept(folder / _KEY, key, _LAYOUT)

    def _whole(self) -> bool:
        """Whether every tensor there is the one that was written."""
        try:
            for path in sorted(self.folder.rglob("*.safetensors")):
                for name in _names(path):
                    _load(path, name)
        except DamagedWorkError:
            return False
        return True

    def put_hidden(self, stream: str, layer: int, batch: int, hidden: torch.Tensor) -> None:
        _save(self._hidden(stream, layer, batch), {"hidden": hidden})

    def hidden(self, stream: str, layer: int, batch: int) -> torch.Tensor:
        """Float32 [b, s, h], in memory of its own."""
        return _load(self._hidden(stream, layer, batch), "hidden").clone()

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
        return _names(self._place(kind, layer))

    def get(self, kind: str, layer: int, name: str) -> torch.Tensor:
        """One tensor, mapped from its file. DamagedWorkError when it is not the one that was put there."""
        return _load(self._place(kind, layer), name)

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
    """Write beside the place, flush, rename; each tensor's seal goes into the file's metadata."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    plain = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    save_file(plain, temporary, metadata={name: _seal(path, name, tensor) for name, tensor in plain.items()})
    descriptor = os.open(temporary, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    temporary.replace(path)


def _seal(path: Path, name: str, tensor: torch.Tensor) -> str:
    """sha256 over where a tensor belongs, what it is, and its bytes (which are not copied)."""
    about = [path.parent.name, path.name, name, str(tensor.dtype), list(tensor.shape)]
    found = hashlib.sha256(canonical_json(about))
    found.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def _names(path: Path) -> list[str]:
    """The tensors that were written; DamagedWorkError when the file holds others."""
    try:
        with safe_open(path, framework="pt") as file:
            names, sealed = list(file.keys()), set(file.metadata() or {})
    except (OSError, SafetensorError) as error:
        raise _damaged(path, str(error)) from error
    if set(names) != sealed:
        raise _damaged(path, f"{min(set(names) ^ sealed)} is not both there and sealed")
    return names


def _load(path: Path, name: str) -> torch.Tensor:
    """One tensor, mapped from its file, once its seal has been compared."""
    try:
        with safe_open(path, framework="pt") as file:
            tensor, seal = file.get_tensor(name), (file.metadata() or {}).get(name)
    except (OSError, SafetensorError) as error:
        raise _damaged(path, str(error)) from error
    if seal != _seal(path, name, tensor):
        raise _damaged(path, f"{name} is not as it was written")
    return tensor


def _damaged(path: Path, why: str) -> DamagedWorkError:
    return DamagedWorkError(f"{path.name} of the calibration's work folder is damaged: {why}",
                            "Run the same command again: it begins anew. Should it come back, look at the disk.")

"""Weights from an engine's files into device memory: read, hashed and copied at once, by several threads.

A file is read in the 64 MiB chunks that its hash is made of. Each chunk goes into pinned memory, is hashed there, and
is copied
from there into the tensors that it holds pieces of; every tensor has its own allocation, as a file only keeps
them 8-byte aligned and kernels want 16. Reading, hashing and copying of different files overlap (all three let other
threads run), so an 8B model is limited by the page cache, not by one core's SHA-256. A byte that changed since the
build is found before the first token.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import torch

from calib.artifact import CHUNK
from calib.errors import ArtifactError
from calib.json_text import parse_object
from engines.build.impls import group_of
from engines.build.weights import linear_key
from engines.engine import Engine
from engines.errors import EngineError
from engines.kernels.impl import Packed
from engines.models.rope import cosines_and_sines
from engines.parallel.mesh import Mesh
from engines.plan import Plan
from engines.program import Linear, Program, Rope, RopeKV

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F8_E4M3": torch.float8_e4m3fn,
           "I8": torch.int8, "U8": torch.uint8, "I32": torch.int32, "I64": torch.int64}
THREADS = 8


class _Header:
    """Where a safetensors file keeps which tensor."""

    def __init__(self, path: Path, head: bytes) -> None:
        size = int.from_bytes(head[:8], "little")
        if size + 8 > len(head):
            raise ArtifactError(f"{path} has a header of {size} bytes", "The file is damaged; build the engine again.")
        self.start = 8 + size
        content = parse_object(head[8:self.start], f"the header of {path}", ArtifactError, "Build the engine again.")
        content.pop("__metadata__", None)
        self.tensors: dict[str, dict] = content

    def allocate(self, device: torch.device) -> dict[str, torch.Tensor]:
        return {name: torch.empty(spec["shape"], dtype=_DTYPES[spec["dtype"]], device=device)
                for name, spec in self.tensors.items()}


def empty_weights(files: Iterable[Path], device: torch.device) -> dict[str, torch.Tensor]:
    """Every tensor of these files by name, allocated but not read."""
    found: dict[str, torch.Tensor] = {}
    for path in files:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            found |= _Header(path, size.to_bytes(8, "little") + file.read(size)).allocate(device)
    return found


class _FileReader:
    """One thread's pinned buffers (two: one is filled while the other is copied)."""

    def __init__(self, device: torch.device, largest: int) -> None:
        cuda = device.type == "cuda"
        self._device = device
        self._buffers = [torch.empty(min(CHUNK, largest), dtype=torch.uint8, pin_memory=cuda) for _ in range(2)]
        self._stream = torch.cuda.Stream(device) if cuda else None
        self._done: list[torch.cuda.Event | None] = [None, None]

    def read(self, path: Path, sha256: str) -> dict[str, torch.Tensor]:
        """All tensors of a file. ArtifactError when its bytes are not the ones that were built."""
        with path.open("rb", buffering=0) as file:
            if self._stream is None:
                return self._read(path, file, sha256)
            with torch.cuda.stream(self._stream):
                found = self._read(path, file, sha256)
            self._stream.synchronize()
            return found

    def _read(self, path: Path, file: BinaryIO, sha256: str) -> dict[str, torch.Tensor]:
        whole = hashlib.sha256()
        header: _Header | None = None
        flat: dict[str, torch.Tensor] = {}
        tensors: dict[str, torch.Tensor] = {}
        at = 0
        while True:
            which = (at // CHUNK) % 2
            if (event := self._done[which]) is not None:
                event.synchronize()
            buffer = self._buffers[which]
            count = _fill(file, buffer)
            if count == 0:
                break
            piece = memoryview(buffer[:count].numpy())  # type: ignore[arg-type]
            whole.update(hashlib.sha256(piece).digest())
            if header is None:
                header = _Header(path, bytes(piece[:8 + int.from_bytes(piece[:8], "little")]))
                tensors = header.allocate(self._device)
                flat = {name: tensor.reshape(-1).view(torch.uint8) for name, tensor in tensors.items()
                        if tensor.numel()}
            _scatter(header, flat, buffer, at, count)
            if self._stream is not None:
                self._done[which] = self._stream.record_event()
            at += count
        if whole.hexdigest() != sha256:
            raise ArtifactError(f"{path} is not the file that was built: its hash has changed",
                                "Copy the engine again, or build it again.")
        return tensors


def _fill(file: BinaryIO, buffer: torch.Tensor) -> int:
    """Read until the buffer is full or the file ends."""
    view = memoryview(buffer.numpy())  # type: ignore[arg-type]
    done = 0
    while done < len(view):
        count = file.readinto(view[done:])  # type: ignore[attr-defined]
        if not count:
            break
        done += count
    return done


def _scatter(header: _Header, flat: Mapping[str, torch.Tensor], buffer: torch.Tensor, at: int, count: int) -> None:
    """Copy the pieces that file bytes ``at`` ... ``at + count`` hold into their tensors."""
    for name, target in flat.items():
        begin, end = (header.start + offset for offset in header.tensors[name]["data_offsets"])
        low, high = max(begin, at), min(end, at + count)
        if low < high:
            target[low - begin:high - begin].copy_(buffer[low - at:high - at], non_blocking=True)


def read_weights(engine: Engine, device: torch.device) -> dict[str, torch.Tensor]:
    """Every tensor of this rank by name, on ``device``, each file's hash checked."""
    prefix = f"{Mesh.single(engine.plan.tp, engine.plan.pp).folder}/"
    files = {name: entry for name, entry in engine.artifact.manifest.files.items() if name.startswith(prefix)}
    order = sorted(files, key=lambda name: -files[name].bytes)
    largest = max(entry.bytes for entry in files.values())
    workers = min(THREADS, len(order))
    lanes = [order[lane::workers] for lane in range(workers)]

    def work(names: list[str]) -> dict[str, torch.Tensor]:
        reader, found = _FileReader(device, largest), dict[str, torch.Tensor]()
        with torch.inference_mode():
            for name in names:
                found |= reader.read(engine.path / name, files[name].sha256)
        return found

    with ThreadPoolExecutor(workers) as pool:
        return {name: tensor for part in pool.map(work, lanes) for name, tensor in part.items()}


class DeviceWeights:
    """Loaded weights as Ops ask for them. ``done`` names a tensor that nobody asked for."""

    def __init__(self, plan: Plan, tensors: dict[str, torch.Tensor], device: torch.device) -> None:
        self._tensors = tensors
        self._taken: set[str] = set()
        self._fields: dict[str, list[str]] = {}
        for name in tensors:
            module, _, field = name.rpartition(".")
            self._fields.setdefault(module, []).append(field)
        self._device = device
        self._made: dict[str, torch.Tensor] = {}
        self._cos_sin = {local: rotary(plan, local).to(device) for local in rotations(plan.program)}

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for held in (self._tensors, self._made) for tensor in held.values()) + sum(
            table.nbytes for table in self._cos_sin.values())

    def cos_sin(self, local: bool) -> torch.Tensor:
        """The rotary table of all layers, or of those with a window where these have their own."""
        return self._cos_sin[local]

    def norm(self, module: str, offset: float) -> torch.Tensor:
        """A norm's weight; with an ``offset`` float32, as what Gemma adds 1 to has more digits than their sum."""
        stored = self.vector(f"{module}.weight")
        if offset == 0.0:
            return stored
        if module not in self._made:
            self._made[module] = stored.float() + offset
        return self._made[module]

    def vector(self, name: str) -> torch.Tensor:
        """A tensor by its whole name."""
        if name not in self._tensors:
            raise EngineError(f"the engine has no tensor {name}", "Build it again.")
        self._taken.add(name)
        return self._tensors[name]

    def optional(self, name: str | None) -> torch.Tensor | None:
        return None if name is None else self.vector(name)

    def linear(self, op: Linear) -> Packed:
        """A linear as its kernels read it. A tied head is the embedding itself."""
        key = linear_key(op)
        found = {field: self.vector(f"{key}.{field}") for field in self._fields.get(key, ())}
        facts = {}
        if "weight_scale" in found:
            scale = found["weight_scale"]
            facts["per_tensor"] = int(op.weight.granularity.kind == "tensor" and bool((scale == scale[0]).all()))
        return Packed(found, op.n, op.k, group_of(op.weight), facts)

    def done(self) -> None:
        left = sorted(set(self._tensors) - self._taken)
        if left:
            raise EngineError(f"the engine holds a tensor that its plan does not read: {left[0]}", "Build it again.")


def rotations(program: Program) -> list[bool]:
    """The rotary tables that a program asks for, by whether they are local."""
    return sorted({op.local for op in program.ops if isinstance(op, Rope | RopeKV)})


def rotary(plan: Plan, local: bool) -> torch.Tensor:
    """float32 [max_seq_len, rotary_dim]: cosines, then sines, of every position (see ``kernels/rope_kv``)."""
    return torch.cat(cosines_and_sines(plan.model.rope_of(local), plan.model.head_dim, plan.limits.max_seq_len), -1)

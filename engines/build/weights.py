"""The weights' way from a checkpoint to an engine: a stream that is renamed, fused, packed and written layer by layer.

Each linear of the fused Program is stacked from its parts and stored in its disk form (``kernels/cpu/disk.py``); norms,
scales and the embedding are stored as they are. One safetensors file a layer is written as soon as the layer is
complete, two at most while the next one is packed, so the peak is a few layers, not one model. The stream must end
empty: a tensor nobody wants and a tensor that never came are errors that name it.

Opening is the way back: files are mapped, names and count are checked, and each operator makes its private layout.
"""

from __future__ import annotations

import hashlib
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from calib.scheme import Grid, Scheme
from engines.errors import EngineError
from engines.kernels.cpu.disk import FIELDS, Stored, as_bf16, check_float, pack
from engines.program import ActQuant, AddNorm, Embed, HeadNorm, Linear, Program, RMSNorm, RopeKV

_LAYER = re.compile(r"\.layers\.(\d+)\.")
Part = Mapping[str, torch.Tensor]
#: A linear and the canonical tensors of its parts -> what is stored of it, by field name.
Pack = Callable[[Linear, Sequence[Part]], Mapping[str, torch.Tensor]]
#: Layers that are being written while the next one is packed.
_WRITING = 2
_LINEAR_FIELDS = ("weight", "weight_scale", "weight_zero", "g_idx", "bias")
#: Tensors that some checkpoints carry and that are computed here instead.
_COMPUTED = re.compile(r"rotary_emb\.inv_freq$")


def activation_keys(stream: Iterable[tuple[str, torch.Tensor]], schemes: Mapping[str, Scheme]) -> dict[str, str]:
    """Module -> key over grid, input_scale, pre_quant_scale and g_idx: equal keys mean equal quantized activations (and
    an equal order of columns)."""
    hashes = {module: hashlib.sha256(str(scheme.activation).encode()) for module, scheme in schemes.items()}
    if any(scheme.pre_quant_scale or scheme.act_order or (scheme.activation and not scheme.activation.dynamic)
           for scheme in schemes.values()):
        for name, tensor in stream:
            module, _, kind = name.rpartition(".")
            if module in hashes and kind in ("input_scale", "pre_quant_scale", "g_idx"):
                hashes[module].update(kind.encode() + tensor.float().numpy().tobytes())
    return {module: value.hexdigest() for module, value in hashes.items()}


def linear_key(op: Linear) -> str:
    """The name under which a stacked linear is stored."""
    return "+".join(op.parts)


def quants(program: Program) -> Iterator[ActQuant]:
    """Every activation quantization of a program."""
    for op in program.ops:
        if isinstance(quant := getattr(op, "quant", None), ActQuant):
            yield quant


def _save(tensors: dict[str, torch.Tensor], path: Path) -> None:
    save_file({name: tensor.cpu() for name, tensor in tensors.items()}, path)


def stored_names(program: Program, kv: Grid) -> set[str]:
    """Names of everything that is stored besides linears."""
    names = {f"{op.weight}.weight" for op in program.ops if isinstance(op, RMSNorm | AddNorm | HeadNorm | Embed)}
    heads = [op.norms for op in program.ops if isinstance(op, RopeKV) and op.norms is not None]
    names |= {f"{name}.weight" for norms in heads for name in (norms.q, norms.k)}
    names |= {name for quant in quants(program) for name in (quant.input_scale, quant.pre_quant_scale) if name}
    if kv.quantized:
        layers = {op.layer for op in program.ops if op.op == "attention"}
        names |= {f"model.layers.{layer}.self_attn.{kind}_scale" for layer in layers for kind in "kv"}
    return names


def pack_portable(op: Linear, parts: Sequence[Part]) -> dict[str, torch.Tensor]:
    """The disk form of ``kernels/cpu/disk.py``."""
    return pack(op.weight, parts, op.parts).tensors()


class _Writer:
    """Collects tensors of each layer and writes its file when nothing of it is missing any more."""

    def __init__(self, program: Program, kv: Grid, folder: Path, pack: Pack) -> None:
        self.folder, self.pack = folder, pack
        self.pool, self.writing = ThreadPoolExecutor(_WRITING), deque[Future[None]]()
        self.vectors = stored_names(program, kv)
        self.parts = {part: op for op in program.linears() for part in op.parts}
        self.embeddings = {op.weight for op in program.ops if isinstance(op, Embed)}
        self.shared = self.embeddings & self.parts.keys()
        hidden = max(program.linears(), key=lambda op: op.out == "logits").k
        self.widths = {f"{op.weight}.weight": hidden for op in program.ops if isinstance(op, RMSNorm | AddNorm | Embed)}
        self.missing: dict[str, set[str]] = {}
        for name in self.vectors | {linear_key(op) for op in program.linears() if not set(op.parts) & self.shared}:
            self.missing.setdefault(_group(name), set()).add(name)
        self.partial: dict[str, dict[str, dict[str, torch.Tensor]]] = {}
        self.ready: dict[str, dict[str, torch.Tensor]] = {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        module, _, field = name.rpartition(".")
        if name in self.vectors:
            self._check_width(name, tensor, 2 if module in self.embeddings else 1)
            tensor = as_bf16(name, tensor) if module in self.embeddings else tensor
            self._store(name, {name: _checked(name, tensor)})
        elif module in self.parts and field in _LINEAR_FIELDS:
            self._add_part(module, field, tensor)
        elif not self._redundant(module, field, name):
            raise EngineError(f"the checkpoint holds {name}, which the model has no use for",
                              "It belongs to another architecture, or the config.json does.")

    def _check_width(self, name: str, tensor: torch.Tensor, dimensions: int) -> None:
        width = self.widths.get(name, tensor.shape[-1] if tensor.dim() else 0)
        if name in self.widths and (tensor.dim() != dimensions or tensor.shape[-1] != width):
            raise EngineError(f"{name} has shape {list(tensor.shape)}, config.json says {width} values a row",
                              "config.json belongs to another model.")

    def _redundant(self, module: str, field: str, name: str) -> bool:
        """Scales that equal their stack's first one, a tied head's copy, KV scales of an unquantized cache."""
        copy = module == "lm_head" and bool(self.shared)
        return (field in ("input_scale", "pre_quant_scale") and module in self.parts) or copy or (
            field in ("k_scale", "v_scale")) or _COMPUTED.search(name) is not None

    def _add_part(self, module: str, field: str, tensor: torch.Tensor) -> None:
        op = self.parts[module]
        key = linear_key(op)
        self.partial.setdefault(key, {}).setdefault(module, {})[field] = tensor

    def flush(self, next_group: str | None) -> None:
        """Pack the linears of every group but ``next_group`` that is complete, and write it."""
        for key in [key for key in self.partial if _group(key) != next_group]:
            parts = self.partial.pop(key)
            op = self.parts[key.split("+")[0]]
            absent = [part for part in op.parts if part not in parts]
            if absent:
                raise EngineError(f"{absent[0]} has no weight in the checkpoint",
                                  "The checkpoint is incomplete; make it again.")
            _check_bias(op, parts)
            _check_shapes(op, parts)
            stored = self.pack(op, [parts[part] for part in op.parts])
            self._store(key, {f"{key}.{field}": value for field, value in stored.items()})
        for group in [group for group, names in self.missing.items() if not names and group in self.ready]:
            self.folder.mkdir(parents=True, exist_ok=True)
            while len(self.writing) > _WRITING:
                self.writing.popleft().result()
            self.writing.append(self.pool.submit(_save, self.ready.pop(group), self.folder / f"{group}.safetensors"))

    def _store(self, name: str, tensors: dict[str, torch.Tensor]) -> None:
        group = _group(name)
        self.missing[group].discard(name)
        self.ready.setdefault(group, {}).update({key: value.contiguous() for key, value in tensors.items()})


def _check_shapes(op: Linear, parts: Mapping[str, Part]) -> None:
    for part, rows in zip(op.parts, op.rows, strict=True):
        found = parts[part]["weight"].shape if "weight" in parts[part] else None
        if found is not None and tuple(found) != (rows, op.k):
            raise EngineError(f"{part} is {' x '.join(map(str, found))}, config.json says {rows} x {op.k}",
                              "config.json belongs to another model.")


def _check_bias(op: Linear, parts: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
    for part in op.parts:
        if ("bias" in parts[part]) != op.bias:
            has = "a bias" if "bias" in parts[part] else "no bias"
            raise EngineError(f"{part} has {has} in the checkpoint, config.json says otherwise",
                              "config.json belongs to another model.")


def _checked(name: str, tensor: torch.Tensor) -> torch.Tensor:
    check_float(name, tensor)
    if not torch.isfinite(tensor.float()).all():
        raise EngineError(f"{name} holds NaN or infinity", "The checkpoint is broken; make it again.")
    if name.endswith("_scale") and not (tensor.float() > 0).all():
        raise EngineError(f"{name} is not positive", "The checkpoint is broken; calibrate again.")
    return tensor


def _group(name: str) -> str:
    found = _LAYER.search(name)
    return f"layer{int(found[1]):04d}" if found else "outside"


def write_weights(stream: Iterable[tuple[str, torch.Tensor]], program: Program, kv: Grid, folder: Path,
                  pack: Pack = pack_portable) -> None:
    """Write all weights of a program below ``folder``. EngineError names a tensor that is missing, extra or broken."""
    writer = _Writer(program, kv, folder, pack)
    group: str | None = None
    with writer.pool:  # an error leaves only after the files that are being written
        for name, tensor in stream:
            if group is not None and _group(name) != group:
                writer.flush(_group(name))
            group = _group(name)
            writer.add(name, tensor)
        writer.flush(None)
        for file in writer.writing:
            file.result()
    lost = sorted(name for names in writer.missing.values() for name in names)
    if lost:
        raise EngineError(f"the checkpoint has no {lost[0]}" + (f" (and {len(lost) - 1} more)" if lost[1:] else ""),
                          "The checkpoint is incomplete; make it again.")


class Weights:
    """The mapped weights of an opened engine. Every tensor must be taken: ``done`` names what was not."""

    def __init__(self, files: Iterable[Path]) -> None:
        self._files = {}
        for path in files:
            handle = safe_open(path, "pt")
            self._files.update(dict.fromkeys(handle.keys(), handle))
        self._taken: set[str] = set()

    def take(self, name: str) -> torch.Tensor:
        """A tensor by name, mapped from its file."""
        if name not in self._files:
            raise EngineError(f"the engine has no tensor {name}", "Build it again.")
        self._taken.add(name)
        return self._files[name].get_tensor(name)

    def linear(self, op: Linear) -> Stored:
        """A linear in its disk form. A tied head is the embedding itself."""
        key = linear_key(op)
        if f"{key}.codes" not in self._files:
            return Stored(op.weight, self.take(f"{key}.weight"))
        fields = {field: self.take(f"{key}.{field}") for field in FIELDS if f"{key}.{field}" in self._files}
        return Stored.of(op.weight, fields)

    def done(self) -> None:
        left = sorted(set(self._files) - self._taken)
        if left:
            raise EngineError(f"the engine holds a tensor that its plan does not read: {left[0]}", "Build it again.")

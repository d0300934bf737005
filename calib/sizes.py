"""What a checkpoint weighs on disk, to the byte: every tensor that a layout stores, and the files they lie in.

A safetensors file is 8 bytes of length, a JSON header padded to a multiple of 8, and the tensors, sorted by dtype
(largest first) and name. The header names every tensor with dtype, shape and offsets, so its own length follows from
the plan; for a model of 8 billion parameters that is some 60 KB, which a plan that says bytes should not leave out.
Layouts: see ``calib/formats``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from calib.formats.hf import DTYPE_BYTES, SHARD_BYTES
from calib.layers import natural_key, scale_shape
from calib.scheme import BITS, Grid, Scheme

#: safetensors' order of dtypes in a file is the reverse of this one.
_RANK = ["BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "I16", "U16", "F16", "BF16", "I32", "U32", "F32", "F64",
         "I64", "U64"]
_CODES = {"fp8_e4m3": "F8_E4M3", "int8": "I8", "mxfp8": "F8_E4M3"}


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor as it lies in a file."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


def stored_tensors(layout: str, plain: Mapping[str, tuple[int, ...]], schemes: Mapping[str, tuple[Scheme, int, int]],
                   attentions: Iterable[str], kv: Grid) -> Iterator[Stored]:
    """Tensors in the order in which they are written.

    ``plain``: names and shapes of what stays bf16; ``schemes``: module -> (Scheme, out, in).
    """
    found: dict[str, list[Stored]] = {name: [Stored(name, "BF16", shape)] for name, shape in plain.items()}
    for module, (scheme, rows, columns) in schemes.items():
        for leaf, tensors in _WRITERS[layout](module, scheme, rows, columns).items():
            found[f"{module}.{leaf}"] = tensors
    for attention in attentions if kv.quantized else ():
        for side in "kv":
            name = f"{attention}.{side}_scale"
            place = f"{attention}.{side}_proj.{side}_scale" if layout == "modelopt" else name
            found[name] = [Stored(place, "F32", ())]
    for name in sorted(found, key=natural_key):
        yield from found[name]


def _scales(scheme: Scheme, rows: int, columns: int) -> tuple[int, ...]:
    return scale_shape(scheme.weight, (rows, columns))


def _compressed(module: str, scheme: Scheme, rows: int, columns: int) -> dict[str, list[Stored]]:
    grid, bits = scheme.weight, BITS[scheme.weight.dtype]
    scale = _scales(scheme, rows, columns)
    shape = (1,) if grid.granularity.kind == "tensor" else (*scale, 1) if grid.granularity.kind == "channel" else scale
    found = {"weight_scale": [Stored(f"{module}.weight_scale", "F32", shape)]}
    if grid.dtype == "int4" or (grid.dtype == "int8" and scheme.activation is None):
        found["weight"] = [Stored(f"{module}.weight_packed", "I32", (rows, -(-columns * bits // 32))),
                           Stored(f"{module}.weight_shape", "I64", (2,))]
    else:
        found["weight"] = [Stored(f"{module}.weight", _CODES[grid.dtype], (rows, columns))]
    if not grid.symmetric:
        found["weight_zero"] = [Stored(f"{module}.weight_zero_point", "I32", (-(-rows // 8), *scale[1:]))]
    if scheme.activation is not None and not scheme.activation.dynamic:
        found["input_scale"] = [Stored(f"{module}.input_scale", "F32", (1,))]
    if scheme.act_order:
        found["g_idx"] = [Stored(f"{module}.weight_g_idx", "I32", (columns,))]
    return found


def _modelopt(module: str, scheme: Scheme, rows: int, columns: int) -> dict[str, list[Stored]]:
    grid, scale = scheme.weight, _scales(scheme, rows, columns)
    if grid.dtype == "nvfp4":
        return {"weight": [Stored(f"{module}.weight", "U8", (rows, columns // 2))],
                "weight_scale": [Stored(f"{module}.weight_scale", "F8_E4M3", scale),
                                 Stored(f"{module}.weight_scale_2", "F32", ())]}
    if grid.dtype == "mxfp8":
        return {"weight": [Stored(f"{module}.weight", "F8_E4M3", (rows, columns))],
                "weight_scale": [Stored(f"{module}.weight_scale", "U8", scale)]}
    packed = grid.dtype == "int4"
    found = {"weight": [Stored(f"{module}.weight", "U8" if packed else _CODES[grid.dtype],
                               (rows // 2 if packed else rows, columns))],
             "weight_scale": [Stored(f"{module}.weight_scale", "F32", scale)]}
    if scheme.pre_quant_scale:
        found["pre_quant_scale"] = [Stored(f"{module}.pre_quant_scale", "BF16", (columns,))]
    if scheme.activation is not None and not scheme.activation.dynamic:
        found["input_scale"] = [Stored(f"{module}.input_scale", "F32", ())]
    return found


def _awq(module: str, scheme: Scheme, rows: int, columns: int) -> dict[str, list[Stored]]:
    groups = _scales(scheme, rows, columns)[1]
    return {"weight": [Stored(f"{module}.qweight", "I32", (columns, rows // 8))],
            "weight_scale": [Stored(f"{module}.scales", "F16", (groups, rows))],
            "weight_zero": [Stored(f"{module}.qzeros", "I32", (groups, rows // 8))]}


def _gptq(module: str, scheme: Scheme, rows: int, columns: int) -> dict[str, list[Stored]]:
    groups = _scales(scheme, rows, columns)[1]
    return {"weight": [Stored(f"{module}.qweight", "I32", (columns // 8, rows)),
                       Stored(f"{module}.g_idx", "I32", (columns,))],
            "weight_scale": [Stored(f"{module}.scales", "F16", (groups, rows)),
                             Stored(f"{module}.qzeros", "I32", (groups, rows // 8))]}


_WRITERS: dict[str, Callable[[str, Scheme, int, int], dict[str, list[Stored]]]] = {
    "compressed-tensors": _compressed, "modelopt": _modelopt, "awq": _awq, "gptq": _gptq}


def files_bytes(tensors: Iterable[Stored], shard_bytes: int = SHARD_BYTES) -> int:
    """Bytes of the safetensors files that ``write_shards`` makes of these tensors, headers and all."""
    total, pending, held = 0, list[Stored](), 0
    for tensor in tensors:
        if pending and held + tensor.bytes > shard_bytes:
            total, pending, held = total + _file_bytes(pending), [], 0
        pending.append(tensor)
        held += tensor.bytes
    return total + _file_bytes(pending)


def _file_bytes(tensors: list[Stored]) -> int:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in sorted(tensors, key=lambda one: (-_RANK.index(one.dtype), one.name)):
        header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape),
                               "data_offsets": [offset, offset + tensor.bytes]}
        offset += tensor.bytes
    length = len(json.dumps(header, separators=(",", ":")).encode())
    return 8 + -(-length // 8) * 8 + offset


def module_bytes(layout: str, scheme: Scheme, shape: tuple[int, int]) -> int:
    """Bytes of a weight [out, in] and all that lies beside it, without headers."""
    return sum(tensor.bytes for tensors in _WRITERS[layout]("m", scheme, *shape).values() for tensor in tensors)

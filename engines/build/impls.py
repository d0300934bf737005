"""The one table of what runs a Scheme: by the grids of weight and activation, the CPU's tiles and the GPU's Impl.

    CPU     ``engines/kernels/cpu``: the named tiles of the compiled step (``native/tiles.py``); where a program or a
            processor has no compiled step, torch's operators (``linear.py``), which take every row of the table
    CUDA    ``engines/kernels/linear``: the Impl of that name, or None: refused when an engine is built

"row" is one scale a tensor or one a channel (a per-tensor scale is a channel's repeated). On CUDA, group activations
must have the weight's own groups, and ``act_order`` has no kernel; both run on a CPU. A scheme that is not in the table
is refused by name, with the list, before a weight is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from calib.scheme import Grid, Scheme
from engines.errors import EngineError
from engines.kernels.cpu.native.grids import group_size as group_of

Place = Literal["cpu", "cuda"]


class Row(NamedTuple):
    """A scheme by name, its grids (``weight_class``, ``activation_class``), and what runs it."""

    name: str
    weight: str
    activation: str
    cpu: str
    cuda: str | None


TABLE: tuple[Row, ...] = (
    Row("bf16", "bf16", "16-bit", "BF16", "bf16"),
    Row("fp8", "fp8 row", "fp8 tensor", "FP8", "fp8"),
    Row("fp8_dynamic", "fp8 row", "fp8 token", "FP8", "fp8"),
    Row("fp8_weight_only", "fp8 row", "16-bit", "FP8", "fp8_weight_only"),
    Row("fp8_block", "fp8 block", "fp8 group", "FP8", "fp8_block"),
    Row("fp8_block_weight_only", "fp8 block", "16-bit", "FP8", None),
    Row("int8", "int8 row", "int8 token", "INT8", "int8"),
    Row("int8_static", "int8 row", "int8 tensor", "INT8", "int8"),
    Row("int8_weight_only", "int8 row", "16-bit", "INT8_WIDE", "int8_weight_only"),
    Row("int8_group_weight_only", "int8 group", "16-bit", "INT8_WIDE", None),
    Row("int4", "int4 group", "16-bit", "INT4", "int4_a16"),
    Row("int4_channel", "int4 row", "16-bit", "INT4", None),
    Row("int4_asym", "int4 group asym", "16-bit", "INT4_ZERO", None),
    Row("int4_a8", "int4 group", "int8 group", "INT4", "int4_a8"),
    Row("int4_a8_token", "int4 group", "int8 token", "INT4", None),
    Row("w4a8_fp8", "int4 group", "fp8 token", "INT4", None),
    Row("w4a8_fp8_static", "int4 group", "fp8 tensor", "INT4", None),
)

_SHORT = {"fp8_e4m3": "fp8"}
#: KV grids by place: dtype and who shares a scale ("channel" is a head).
_KV = {"cpu": {("fp8_e4m3", "tensor"), ("fp8_e4m3", "channel"), ("int8", "tensor"), ("int8", "channel")},
       "cuda": {("fp8_e4m3", "tensor"), ("int8", "tensor")}}
_KV_WORDS = {"cpu": "bf16; static fp8 or int8, one scale a tensor or one a head",
             "cuda": "bf16; static fp8 or int8, one scale a tensor"}


def weight_class(grid: Grid) -> str:
    """A weight's grid as the table names it."""
    if not grid.quantized:
        return grid.dtype
    kind = grid.granularity.kind
    shared = "row" if kind in ("tensor", "channel") else kind
    return f"{_SHORT.get(grid.dtype, grid.dtype)} {shared}{'' if grid.symmetric else ' asym'}"


def activation_class(grid: Grid | None) -> str:
    """An activation's grid as the table names it: a tensor's scale is static, others dynamic; else it says so."""
    if grid is None:
        return "16-bit"
    kind = grid.granularity.kind
    usual = grid.dynamic == (kind != "tensor")
    odd = "" if usual else " dynamic" if grid.dynamic else " static"
    return f"{_SHORT.get(grid.dtype, grid.dtype)} {kind}{odd}{'' if grid.symmetric else ' asym'}"


def row_for(weight: Grid, activation: Grid | None) -> Row | None:
    """The table's row of a pair of grids, or None."""
    wanted = weight_class(weight), activation_class(activation)
    return next((row for row in TABLE if (row.weight, row.activation) == wanted), None)


def impl_name(weight: Grid, activation: Grid | None, place: Place, act_order: bool = False) -> str | None:
    """What runs a linear there, or None."""
    row = row_for(weight, activation)
    if row is None or (act_order and (place == "cuda" or weight.dtype != "int4")):
        return None
    if place == "cpu":
        return row.cpu
    groups = group_of(weight) if activation is None else group_of(activation)
    return row.cuda if groups in (0, group_of(weight)) else None


def check_schemes(schemes: Mapping[str, Scheme], kv: Grid, place: Place) -> None:
    """EngineError names the first module whose scheme nothing implements there, and what is implemented."""
    for module, scheme in schemes.items():
        if impl_name(scheme.weight, scheme.activation, place, scheme.act_order) is None:
            raise refusal(module, scheme.weight, scheme.activation, place, scheme.act_order)
    if kv.quantized and (kv.dynamic or not kv.symmetric or (kv.dtype, kv.granularity.kind) not in _KV[place]):
        raise EngineError(f"a KV cache on {kv} has no implementation on {place}", f"Implemented: {_KV_WORDS[place]}.")


def refusal(module: str, weight: Grid, activation: Grid | None, place: Place, act_order: bool = False) -> EngineError:
    """What a build says about a scheme that nothing implements."""
    known = [row.name for row in TABLE if place == "cpu" or row.cuda is not None]
    order = " in act_order" if act_order else ""
    elsewhere = place == "cuda" and impl_name(weight, activation, "cpu", act_order) is not None
    return EngineError(f"{module}: {weight} weights{order} with {activation or '16-bit'} activations have no "
                       f"implementation on {place}", f"Implemented: {', '.join(known)}."
                       + (" This scheme runs on a cpu." if elsewhere else ""))

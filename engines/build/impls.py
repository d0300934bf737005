"""Which Impl runs a Linear on a GPU, by the grids of its weight and its activation; and its bias's place.

    weight                  activation               Impl
    bf16                    16-bit                   bf16
    fp8 tensor, channel     fp8 static or token      fp8
    int8 tensor, channel    int8 token               int8
    int8 tensor, channel    16-bit                   int8_weight_only
    int4 group, symmetric   16-bit                   int4_a16
    int4 group, symmetric   int8 the same groups     int4_a8

The 4-bit kernels have no bias of their own. That of a stacked qkv is added by the RoPE kernel, which reads those rows
anyway; another one is refused.
"""

from __future__ import annotations

from calib.scheme import Grid
from engines.errors import EngineError
from engines.kernels.impl import LinearImpl, LinearShape
from engines.kernels.linear.bf16 import Bf16Linear
from engines.kernels.linear.fp8 import Fp8Linear
from engines.kernels.linear.int4_a8 import Int4A8
from engines.kernels.linear.int4_a16 import Int4A16
from engines.kernels.linear.int8 import Int8Linear
from engines.kernels.linear.int8_weight_only import Int8WeightOnlyLinear
from engines.program import Linear

#: Every Impl by name, as the KernelTable names them.
_ALL: tuple[LinearImpl, ...] = (Bf16Linear(), Fp8Linear(), Int8Linear(), Int8WeightOnlyLinear(), Int4A16(), Int4A8())
IMPLS: dict[str, LinearImpl] = {impl.name: impl for impl in _ALL}


def group_of(grid: Grid) -> int:
    """The group size of a grid, 0 without groups."""
    return grid.granularity.size if grid.granularity.kind == "group" else 0


def impl_for(op: Linear) -> LinearImpl:
    """The Impl of a linear. EngineError names a pair of grids that no kernel multiplies."""
    name = _impl_name(op.weight, op.activation)
    if name is None:
        raise EngineError(f"{op.parts[0]}: {op.weight} weights with {op.activation or '16-bit'} activations have no "
                          "GPU kernel", "Supported: bf16; fp8 with fp8; int8 with int8 per token or 16-bit; symmetric "
                          "int4 groups with 16-bit or int8 activations in the same groups.")
    return IMPLS[name]


def _impl_name(weight: Grid, activation: Grid | None) -> str | None:
    kind = weight.granularity.kind
    if not weight.quantized:
        return "bf16" if activation is None else None
    if not weight.symmetric or kind == "block":
        return None
    if weight.dtype == "int4":
        if activation is None:
            return "int4_a16"
        same = activation.dtype == "int8" and group_of(activation) == group_of(weight) and activation.dynamic
        return "int4_a8" if same else None
    if kind == "group":
        return None
    if activation is None:
        return "int8_weight_only" if weight.dtype == "int8" else None
    return weight.dtype.removesuffix("_e4m3") if activation_mode(activation) and (
        activation.dtype == weight.dtype) else None


def activation_mode(grid: Grid) -> str | None:
    """The kernels' name for an activation grid (``jit.ActQuant``), or None where they have none."""
    return {("fp8_e4m3", "tensor", False): "FP8_STATIC", ("fp8_e4m3", "token", True): "FP8_TOKEN",
            ("int8", "token", True): "INT8_TOKEN", ("int8", "group", True): "INT8_GROUP"}.get(
                (grid.dtype, grid.granularity.kind, grid.dynamic)) if grid.symmetric else None


def shape_of(op: Linear, tokens: int) -> LinearShape:
    """The problem of a linear for a step of that many tokens."""
    return LinearShape(tokens, op.n, op.k, group_of(op.weight))


def weight_bytes(op: Linear) -> int:
    """Bytes that one pass over the stored weight reads: codes, scales, bias."""
    bits = {"bf16": 16, "fp8_e4m3": 8, "int8": 8, "int4": 4}[op.weight.dtype]
    group = group_of(op.weight)
    scales = 2 * op.n * (op.k // group) if group else 4 * op.n * op.weight.quantized
    return op.n * op.k * bits // 8 + scales + 2 * op.n * op.bias

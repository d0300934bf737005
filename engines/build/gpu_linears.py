"""A program's Linears as GPU kernels see them: Impl, shape, bytes, and the mode of their activations.

The 4-bit kernels have no bias of their own. That of a stacked qkv is added by the RoPE kernel, which reads those rows
anyway; another one is refused.
"""

from __future__ import annotations

from calib.scheme import Grid
from engines.build.impls import group_of, impl_name, refusal
from engines.kernels.impl import LinearImpl, LinearShape
from engines.kernels.linear.impls import IMPLS
from engines.program import Linear

_MODES = {("fp8_e4m3", "tensor", False): "FP8_STATIC", ("fp8_e4m3", "token", True): "FP8_TOKEN",
          ("int8", "token", True): "INT8_TOKEN", ("int8", "group", True): "INT8_GROUP",
          ("fp8_e4m3", "group", True): "FP8_GROUP", ("int8", "tensor", False): "INT8_STATIC"}


def impl_for(op: Linear) -> LinearImpl:
    """The Impl of a linear. EngineError names a pair of grids that no kernel multiplies."""
    name = impl_name(op.weight, op.activation, "cuda")
    if name is None:
        raise refusal(op.parts[0], op.weight, op.activation, "cuda")
    return IMPLS[name]


def activation_mode(grid: Grid) -> str | None:
    """The kernels' name for an activation grid (``jit.ActQuant``), or None where they have none."""
    return _MODES.get((grid.dtype, grid.granularity.kind, grid.dynamic)) if grid.symmetric else None


def shape_of(op: Linear, tokens: int) -> LinearShape:
    """The problem of a linear for a step of that many tokens."""
    return LinearShape(tokens, op.n, op.k, group_of(op.weight))


def weight_bytes(op: Linear) -> int:
    """Bytes that one pass over the stored weight reads: codes, scales, bias."""
    bits = {"bf16": 16, "fp8_e4m3": 8, "int8": 8, "int4": 4}[op.weight.dtype]
    group = group_of(op.weight)
    scales = (2 if bits == 4 else 4) * op.n * (op.k // group if group else op.weight.quantized)
    return op.n * op.k * bits // 8 + scales + 2 * op.n * op.bias

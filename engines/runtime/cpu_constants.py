"""What the CPU backends read from an engine once: rotations, the scales of the cache, how rows are quantized."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from engines.build.weights import Weights
from engines.errors import EngineError
from engines.kernels.cpu import rows as row_ops
from engines.kernels.cpu.native.grids import group_size
from engines.kernels.cpu.rope_kv import rotary_table
from engines.models.rope import cosines_and_sines
from engines.plan import Plan
from engines.program import ActQuant, Rope, RopeKV

Quantizer = Callable[[torch.Tensor], Any]


def rotary_tables(plan: Plan) -> dict[bool, tuple[torch.Tensor, torch.Tensor]]:
    """C and S (``kernels/cpu/rope_kv.py``) of every rotation that the program asks for, by whether it is local."""
    wanted = {op.local for op in plan.program.ops if isinstance(op, Rope | RopeKV)}
    return {local: rotary_table(*cosines_and_sines(plan.model.rope_of(local), plan.model.head_dim,
                                                   plan.limits.max_seq_len)) for local in sorted(wanted)}


def kv_scales(plan: Plan, weights: Weights, layer: int) -> torch.Tensor:
    """Scales of a layer's cache, keys' heads, then values': float32 [2 * kv_heads]; ones for an unquantized cache.

    A checkpoint has one a tensor [] or one a head [kv_heads]; EngineError for another shape.
    """
    heads = plan.model.num_kv_heads
    if not plan.kv.quantized:
        return torch.ones(2 * heads)
    parts = []
    for name in (f"model.layers.{layer}.self_attn.{kind}_scale" for kind in "kv"):
        scale = weights.take(name).float().reshape(-1)
        if scale.numel() not in (1, heads):
            raise EngineError(f"{name} holds {scale.numel()} numbers, the model has {heads} kv heads",
                              "A scale is one a tensor or one a head; calibrate again.")
        parts.append(scale.expand(heads))
    return torch.cat(parts)


def quantizer(weights: Weights, quant: ActQuant | None) -> Quantizer:
    """A function that may overwrite its rows."""
    if quant is None:
        return _same
    code = _coder(weights, quant)
    if quant.pre_quant_scale is None:
        return code
    multiplier = weights.take(quant.pre_quant_scale).float()
    return lambda x: code(x.mul_(multiplier))


def _coder(weights: Weights, quant: ActQuant) -> Quantizer:
    grid = quant.grid
    if grid is None:
        return _same
    if (size := group_size(grid)) > 0:
        return lambda x: row_ops.round_groups(x, size, grid.dtype)
    if grid.dynamic:
        return row_ops.quantize_int8_token if grid.dtype == "int8" else row_ops.quantize_fp8_token
    assert quant.input_scale is not None
    scale = float(weights.take(quant.input_scale))
    static = row_ops.quantize_int8_static if grid.dtype == "int8" else row_ops.quantize_fp8_static
    return lambda x: static(x, scale)


def _same(x: torch.Tensor) -> torch.Tensor:
    return x

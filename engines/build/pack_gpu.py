"""Packing a fused linear for the GPU: its parts are stacked and given to the Impl that will read them.

Stacking is by rows, so q, k and v (gate and up) become one product. Per-tensor scales of different parts become one a
row. What comes out goes to disk as it is; loading is a strict copy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from engines.build.gpu_linears import impl_for
from engines.build.weights import Part
from engines.errors import EngineError
from engines.kernels.cpu.disk import CODE_DTYPE, check_part, stacked_scale
from engines.program import Linear


def pack_gpu(op: Linear, parts: Sequence[Part]) -> Mapping[str, torch.Tensor]:
    """The stored tensors of a linear by field name. EngineError names a part that is missing, broken or unsupported."""
    for part, name in zip(parts, op.parts, strict=True):
        check_part(op.weight, part, name)
        for field in ("weight_zero", "g_idx"):
            if field in part:
                raise EngineError(f"{name} has a {field}, which no GPU kernel reads",
                                  "Quantize symmetrically and without act_order.")
    weight = torch.cat([part["weight"] for part in parts])
    if op.weight.dtype in ("bf16", "fp8_e4m3"):
        weight = weight.to(CODE_DTYPE[op.weight.dtype])
    scale = stacked_scale(op.weight, parts, op.rows, "weight_scale")
    if scale is not None:
        scale = scale.float()
        if op.weight.granularity.kind in ("tensor", "channel"):
            scale = scale.reshape(()) if scale.numel() == 1 else scale.reshape(op.n)
    bias = torch.cat([part["bias"] for part in parts]).to(torch.bfloat16) if op.bias else None
    return impl_for(op).pack(weight, scale, bias=bias).tensors

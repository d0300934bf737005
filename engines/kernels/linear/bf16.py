"""Unquantized linear: 16-bit weights and activations, fp32 accumulation.

``out[m, n] = x[m, k] weight[n, k]^T (+ bias)``, weight natural [n, k] (see natural). bf16 is meant; fp16 is read the
same way. GEMV for one to four tokens, the swapped dot for small batches, torch.mm (cuBLAS) or the persistent mm for
prefill.
"""

from __future__ import annotations

import torch

from engines.kernels.impl import Packed
from engines.kernels.linear.candidates import DotTiles, GemvTile, MmTile
from engines.kernels.linear.natural import NaturalLinear

_GEMV: dict[int, list[GemvTile]] = {
    1: [(2, 1024, 1, 4), (4, 512, 0, 4), (8, 512, 0, 4), (2, 1024, 0, 4), (4, 1024, 4, 4), (1, 1024, 0, 4)],
    2: [(2, 1024, 1, 4), (2, 1024, 0, 4), (1, 1024, 0, 4)],
}
_DOT = {
    16: DotTiles([(64, 256, 4, 4, 4), (64, 256, 1, 5, 4), (64, 256, 2, 4, 4), (64, 256, 1, 4, 4), (64, 256, 2, 5, 4)],
                 [(64, 256, 1, 5, 4), (128, 128, 1, 5, 8), (128, 256, 1, 3, 8)]),
    64: DotTiles([(64, 256, 2, 4, 4), (64, 256, 1, 4, 4), (64, 256, 1, 5, 4), (64, 256, 4, 4, 4)],
                 [(128, 128, 1, 5, 8), (128, 256, 1, 3, 8), (128, 128, 1, 4, 8)]),
    256: DotTiles([(64, 128, 2, 5, 4), (64, 128, 1, 5, 4), (64, 256, 2, 3, 4), (128, 128, 4, 3, 8)],
                  [(128, 128, 1, 4, 8)]),
}
_MM: list[MmTile] = [(128, 256, 128, 3, 8, 1), (128, 256, 128, 4, 8, 2), (128, 128, 128, 4, 4, 1)]


class Bf16Linear(NaturalLinear):
    """bf16 (or fp16) weights times activations of the same type."""

    name = "bf16"
    kind = "float"
    weight_dtypes = (torch.bfloat16, torch.float16)
    gemv_tiles = _GEMV
    dot_tiles = _DOT
    mm_tiles = _MM
    x_dtypes = (torch.bfloat16, torch.float16)
    scaled = False
    quantized_x = False

    def launch_torch(self, x: torch.Tensor, packed: Packed, out: torch.Tensor, x_scale: torch.Tensor | None,
                     workspace: torch.Tensor | None) -> None:
        weight = packed.tensors["weight"].t()
        bias = packed.tensors.get("bias")
        if out.dtype != x.dtype:  # float32 logits
            if x.is_cuda:
                torch.mm(x, weight, out_dtype=out.dtype, out=out)
            else:
                torch.mm(x.float(), weight.float(), out=out)
            if bias is not None:
                out += bias
        elif bias is None:
            torch.mm(x, weight, out=out)
        else:
            torch.addmm(bias, x, weight, out=out)

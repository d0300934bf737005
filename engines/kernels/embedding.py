"""Token embedding: a gather of rows, with Gemma's factor folded in.

    out[t] = table[token_ids[t] - first_row] * scale

``table`` [rows, n] is the whole vocabulary, or a tensor-parallel rank's slice that begins at ``first_row``: ids outside
give a zero row, so that summing over ranks gives the whole. Whether an id is in the vocabulary at all is checked on the
host by whoever accepts requests; here a wrong one can never read outside the table.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from engines.kernels.impl import DeviceFacts, KernelConfig
from engines.kernels.jit import gdc_launch, gdc_wait, launch_options, next_pow2


@triton.jit(do_not_specialize_on_alignment=["ids_ptr"])
def embedding_kernel(ids_ptr, table_ptr, out_ptr, table_stride, out_stride, first_row, num_rows, n, scale,
                     BLOCK: tl.constexpr, PDL: tl.constexpr) -> None:
    """One program a token."""
    token = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    gdc_launch(PDL)
    gdc_wait(PDL)
    row = tl.load(ids_ptr + token).to(tl.int64) - first_row
    known = (row >= 0) & (row < num_rows)
    mask = (cols < n) & known
    x = tl.load(table_ptr + tl.where(known, row, 0) * table_stride + cols, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + tl.cast(token, tl.int64) * out_stride + cols, (x * scale).to(out_ptr.dtype.element_ty),
             mask=cols < n)


def candidates(n: int, device: DeviceFacts) -> Sequence[KernelConfig]:
    """Warps to try for rows of ``n``; the first is the default."""
    best = min(8, max(1, next_pow2(n) // 256))
    return [KernelConfig.of("row", num_warps=w, pdl=device.capability >= 90) for w in dict.fromkeys((best, 4))]


def launch(token_ids: torch.Tensor, table: torch.Tensor, out: torch.Tensor, config: KernelConfig, *, scale: float = 1.0,
           first_row: int = 0) -> torch.Tensor:
    """Fill ``out`` [t, n] from ``token_ids`` [t] (int32 or int64) and ``table`` [rows, n]. Graph safe."""
    _check(token_ids, table, out)
    tokens, n = out.shape
    if tokens:
        embedding_kernel[(tokens,)](token_ids, table, out, table.stride(0), out.stride(0), first_row, table.shape[0], n,
                                    scale, BLOCK=next_pow2(n), **launch_options(config))
    return out


def _check(token_ids: torch.Tensor, table: torch.Tensor, out: torch.Tensor) -> None:
    if token_ids.shape != out.shape[:1] or table.shape[1] != out.shape[1] or table.stride(1) != 1 or out.stride(1) != 1:
        raise ValueError(f"token_ids {tuple(token_ids.shape)}, table {tuple(table.shape)} and out {tuple(out.shape)} "
                         "do not fit")


def twin(token_ids: torch.Tensor, table: torch.Tensor, out: torch.Tensor, config: KernelConfig | None = None, *,
         scale: float = 1.0, first_row: int = 0) -> torch.Tensor:
    """The same in plain torch."""
    _check(token_ids, table, out)
    row = token_ids.long() - first_row
    known = (row >= 0) & (row < table.shape[0])
    picked = table[torch.where(known, row, 0)].float() * scale
    out.copy_(torch.where(known[:, None], picked, 0.0))
    return out

"""Splitting k over programs, with a sum whose order never changes.

When n gives fewer tiles than the device has multiprocessors, several programs share a tile's k range. Each writes its
fp32 partial tile to the workspace and draws a ticket; the one that draws the last adds all partials, in the order of
the splits, whoever came last. So the result is the same on every run (no floating-point atomics).

Workspace (one tensor for all layers, any dtype, zeroed once before its first use)::

    | 16,384 int32 tickets, always zero between kernels | partials fp32 [tile][split][BLOCK_N * BLOCK_M] ... |

The tickets keep one fixed place for every configuration: partials of one kernel never overwrite another's tickets.
Kernels of one stream may share it; kernels that run side by side may not.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

TICKETS = 16384
_TICKET_BYTES = 4 * TICKETS


def split_k_bytes(tiles: int, split_k: int, tile_elements: int) -> int:
    """Bytes of workspace for ``tiles`` output tiles; 0 without a split. Raises when there are more than TICKETS."""
    if split_k == 1:
        return 0
    if tiles > TICKETS:
        raise ValueError(f"{tiles} tiles are split over k, at most {TICKETS} can be")
    return _TICKET_BYTES + 4 * tiles * split_k * tile_elements


def split_k_views(workspace: torch.Tensor | None, needed: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """(partials fp32, tickets int32) in ``workspace``; None if nothing is needed. Raises when it is too small."""
    if needed == 0:
        return None
    partials = scratch_view(workspace, needed - _TICKET_BYTES).view(torch.float32)
    assert workspace is not None
    return partials, workspace.view(-1).view(torch.uint8)[:_TICKET_BYTES].view(torch.int32)


def scratch_bytes(size: int) -> int:
    """Bytes of workspace that leave ``size`` bytes behind the tickets, for whatever a kernel keeps there."""
    return _TICKET_BYTES + size


def scratch_view(workspace: torch.Tensor | None, size: int) -> torch.Tensor:
    """``size`` uint8 behind the tickets. Raises when the workspace is too small."""
    needed = scratch_bytes(size)
    _require(workspace, needed)
    assert workspace is not None
    return workspace.view(-1).view(torch.uint8)[_TICKET_BYTES:needed]


def _require(workspace: torch.Tensor | None, needed: int) -> None:
    have = 0 if workspace is None else workspace.nbytes
    if have < needed:
        raise ValueError(f"the workspace has {have} bytes, this launch needs {needed}")


@triton.jit
def store_partial(partial_ptr, tile, split, acc, ROWS: tl.constexpr, COLS: tl.constexpr, SPLIT_K: tl.constexpr) -> None:
    """Put a program's fp32 [ROWS, COLS] tile at its place in the workspace."""
    base = partial_ptr + (tile * SPLIT_K + split).to(tl.int64) * (ROWS * COLS)
    tl.store(base + tl.arange(0, ROWS)[:, None] * COLS + tl.arange(0, COLS)[None, :], acc)


@triton.jit
def sum_partials(partial_ptr, tile, ROWS: tl.constexpr, COLS: tl.constexpr, SPLIT_K: tl.constexpr) -> tl.tensor:
    """The sum of a tile's partials in split order; read past L1, which may hold older values."""
    base = partial_ptr + tile.to(tl.int64) * SPLIT_K * (ROWS * COLS)
    at = base + tl.arange(0, ROWS)[:, None] * COLS + tl.arange(0, COLS)[None, :]
    total = tl.zeros((ROWS, COLS), tl.float32)
    for split in tl.static_range(SPLIT_K):
        total += tl.load(at + split * (ROWS * COLS), cache_modifier=".cg")
    return total

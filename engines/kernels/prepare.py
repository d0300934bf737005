"""From one small record a step to everything that the other kernels read: the host copies once and computes nothing.

The host knows, for each row (sequence) of a step, only a few numbers; tokens that were sampled in the step before are
not among them, they never left the device. One program a row turns the record into

    token_ids  int32 [tokens]     row's ids: from the record, or the one sampled by the previous step
    positions  int32 [tokens]     start, start + 1, ...
    slots      int32 [tokens]     block * block_size + offset of each position in the KV cache, -1 for padding
    seq_lens   int32 [rows]       start + count, 0 for padding rows
    tables     int32 [rows, width]  the row's blocks, in the order of the step's rows

and one more program pads tokens beyond the last row's. ``known`` int32 [slots, width] keeps each sequence's blocks on
the device between steps (``slot`` is its place there), so that a step sends only blocks that are new.

The record is int32 [fields, capacity] followed by two lists, ids and new blocks (``Field`` names the fields)::

    slot, start, count      where its blocks are kept; tokens already in the cache; tokens in this step
    first                   its first token among the step's tokens
    source                  >= 0: its only token is ``sampled[source]``; -1: ids[at ...]
    at                      offset of its ids in the list of ids
    blocks, new, new_at     blocks already in ``known``; how many more; their offset in the list of new blocks
"""

from __future__ import annotations

from enum import IntEnum

import torch
import triton
import triton.language as tl

from engines.kernels.impl import KernelConfig
from engines.kernels.jit import gdc_launch, gdc_wait, launch_options


class Field(IntEnum):
    """Rows of the record."""

    SLOT = 0
    START = 1
    COUNT = 2
    FIRST = 3
    SOURCE = 4
    AT = 5
    BLOCKS = 6
    NEW = 7
    NEW_AT = 8


FIELDS = len(Field)


@triton.jit
def _block(index, mask, known_ptr, blocks, new_ptr, new):
    """Blocks number ``index`` of a row: old ones from ``known``, new ones from the list."""
    old = tl.load(known_ptr + index, mask=mask & (index < blocks), other=0)
    fresh = tl.load(new_ptr + (index - blocks), mask=mask & (index >= blocks) & (index < blocks + new), other=0)
    return tl.where(index < blocks, old, fresh)


@triton.jit(do_not_specialize=["capacity", "rows", "tokens", "width"])
def prepare_kernel(record_ptr, head_ptr, ids_ptr, new_blocks_ptr, sampled_ptr, known_ptr, token_ids_ptr, positions_ptr,
                   slots_ptr, seq_lens_ptr, tables_ptr, capacity, rows, tokens, width, BLOCK_SIZE: tl.constexpr,
                   CHUNK: tl.constexpr, PDL: tl.constexpr) -> None:
    """Programs 0 .. rows - 1: a row each; program ``rows``: padding. ``head`` = (live rows, live tokens)."""
    row = tl.program_id(0)
    lane = tl.arange(0, CHUNK)
    gdc_launch(PDL)
    gdc_wait(PDL)
    live_rows = tl.load(head_ptr)
    live_tokens = tl.load(head_ptr + 1)
    if row == rows:
        for base in range(live_tokens, tokens, CHUNK):
            token = base + lane
            tl.store(token_ids_ptr + token, lane * 0, mask=token < tokens)
            tl.store(positions_ptr + token, lane * 0, mask=token < tokens)
            tl.store(slots_ptr + token, lane * 0 - 1, mask=token < tokens)
    elif row >= live_rows:
        tl.store(seq_lens_ptr + row, 0)
    else:
        own = record_ptr + row
        slot = tl.load(own)
        start = tl.load(own + capacity)
        count = tl.load(own + 2 * capacity)
        first = tl.load(own + 3 * capacity)
        source = tl.load(own + 4 * capacity)
        at = tl.load(own + 5 * capacity)
        blocks = tl.load(own + 6 * capacity)
        new = tl.load(own + 7 * capacity)
        new_ptr = new_blocks_ptr + tl.load(own + 8 * capacity)
        kept = known_ptr + slot.to(tl.int64) * width
        table = tables_ptr + row.to(tl.int64) * width
        tl.store(seq_lens_ptr + row, start + count)
        for base in range(0, count, CHUNK):
            index = base + lane
            mask = index < count
            ids = tl.load(ids_ptr + at + index, mask=mask & (source < 0), other=0)
            drawn = tl.load(sampled_ptr + source + lane * 0, mask=mask & (source >= 0), other=0)
            position = start + index
            block = _block(position // BLOCK_SIZE, mask, kept, blocks, new_ptr, new)
            tl.store(token_ids_ptr + first + index, tl.where(source < 0, ids, drawn), mask=mask)
            tl.store(positions_ptr + first + index, position, mask=mask)
            tl.store(slots_ptr + first + index, block * BLOCK_SIZE + position % BLOCK_SIZE, mask=mask)
        for base in range(0, blocks + new, CHUNK):
            index = base + lane
            mask = index < blocks + new
            block = _block(index, mask, kept, blocks, new_ptr, new)
            tl.store(table + index, block, mask=mask)
            tl.store(kept + index, block, mask=mask & (index >= blocks))


def launch(record: torch.Tensor, head: torch.Tensor, ids: torch.Tensor, new_blocks: torch.Tensor, sampled: torch.Tensor,
           known: torch.Tensor, token_ids: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor,
           seq_lens: torch.Tensor, tables: torch.Tensor, *, block_size: int, pdl: bool = False) -> None:
    """Fill ``token_ids``, ``positions``, ``slots`` [tokens], ``seq_lens`` [rows], ``tables`` [rows, width]; all int32.

    ``record`` [fields, capacity] with capacity >= rows, ``head`` (live rows, live tokens). Graph safe: the grid depends
    on shapes only. Raises ValueError on a misfit.
    """
    rows, tokens = seq_lens.shape[0], token_ids.shape[0]
    _check(record, known, tables, rows)
    options = launch_options(KernelConfig.of("prepare", num_warps=4, pdl=pdl))
    prepare_kernel[(rows + 1,)](record, head, ids, new_blocks, sampled, known, token_ids, positions, slots, seq_lens,
                                tables, record.shape[1], rows, tokens, known.shape[1], BLOCK_SIZE=block_size, CHUNK=512,
                                **options)


def _check(record: torch.Tensor, known: torch.Tensor, tables: torch.Tensor, rows: int) -> None:
    if record.shape[0] != FIELDS or record.shape[1] < rows or not record.is_contiguous():
        raise ValueError(f"record must be contiguous [{FIELDS}, >= {rows}], found {tuple(record.shape)}")
    if tables.shape != (rows, known.shape[1]) or not (tables.is_contiguous() and known.is_contiguous()):
        raise ValueError(f"tables {tuple(tables.shape)} and known {tuple(known.shape)} must be contiguous and alike")


def twin(record: torch.Tensor, head: torch.Tensor, ids: torch.Tensor, new_blocks: torch.Tensor, sampled: torch.Tensor,
         known: torch.Tensor, token_ids: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor,
         seq_lens: torch.Tensor, tables: torch.Tensor, *, block_size: int) -> None:
    """The same in plain torch."""
    rows = seq_lens.shape[0]
    _check(record, known, tables, rows)
    live_rows, live_tokens = (int(x) for x in head[:2])
    seq_lens[live_rows:] = 0
    token_ids[live_tokens:], positions[live_tokens:], slots[live_tokens:] = 0, 0, -1
    for row in range(live_rows):
        slot, start, count, first, source, at, blocks, new, new_at = (int(x) for x in record[:, row])
        known[slot, blocks:blocks + new] = new_blocks[new_at:new_at + new]
        tables[row, :blocks + new] = known[slot, :blocks + new]
        here = torch.arange(start, start + count, device=record.device)
        span = slice(first, first + count)
        seq_lens[row] = start + count
        positions[span] = here.int()
        slots[span] = known[slot, here // block_size] * block_size + (here % block_size).int()
        token_ids[span] = sampled[source].int() if source >= 0 else ids[at:at + count]

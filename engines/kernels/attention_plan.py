"""The work list of decode attention: contexts cut into items of near-equal length, on the device, once a step.

A (sequence, kv head) pair alone fills a chip only at large batch; splitting every context into a fixed count wastes it
at small batch or with mixed lengths (engines that switch by batch size fall off a cliff there). So ``plan_kernel``
reads ``seq_lens`` and writes a list of items, for all layers of the step: no host sync, so the step can be a CUDA
graph.

* balanced (``SPLIT`` = 0): about ``TARGET`` programs' worth of items, dealt by length. An item is no longer than all
  keys over the target, unless it would be cut into parts under ``MIN_SPLIT`` tokens: a step takes as long as its
  longest item (dealt by the share of each context, rounded down, the shortest of 16 contexts of nearly one length was
  cut in three where the others were in four). Where a program fills a multiprocessor (``FUSED``), items are as much
  longer as it takes for there to be no more than the target: one more would be a second wave;
* fixed (``SPLIT`` > 0 tokens): item boundaries depend on the sequence alone, so a row's bits do not depend on its batch
  mates (deterministic mode). Its price is the capacity: batch * max_seq_len / SPLIT partials must have room.

    plan   int32 [1 + capacity, 8]: row 0 = (items, ...), rows 1.. = (sequence, begin, end, seq_len, split, splits)

Balanced item count: ceil(tiles / q) each, q = ceil(total tiles / target), so at most target + batch in all: the
capacity is known beforehand. With q = ceil(total tiles / (target - batch + 1)) there are at most target. seq_len 0 (a
padded row) is one empty item, whose output is zeros.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from engines.kernels.impl import KernelConfig
from engines.kernels.jit import gdc_launch, gdc_wait, launch_options

PLAN_WIDTH = 8


@triton.jit
def load_item(plan_ptr, item) -> tuple[tl.tensor, ...]:
    """Row ``item`` of the list, and before it how many items there are (beyond them stand older steps' rows)."""
    record = plan_ptr + (1 + item) * 8
    return (tl.load(plan_ptr), tl.load(record), tl.load(record + 1), tl.load(record + 2), tl.load(record + 3),
            tl.load(record + 4), tl.load(record + 5))


@triton.jit
def _first_key(seq_len, QUERY_LEN: tl.constexpr, WINDOW: tl.constexpr, TILE: tl.constexpr):
    """The first key any query of the sequence sees, rounded down to a tile."""
    if WINDOW > 0:
        r = tl.maximum(seq_len - QUERY_LEN + 1 - WINDOW, 0) // TILE * TILE
    else:
        r = seq_len * 0
    return r


@triton.jit
def _split_tiles(tiles, longest, TILE: tl.constexpr, MIN_SPLIT: tl.constexpr, SPLIT: tl.constexpr):
    """Tiles per item for a context of ``tiles`` tiles, of which an item takes ``longest``."""
    if SPLIT > 0:
        r = tiles * 0 + SPLIT // TILE
    else:
        most = tl.maximum(tiles // (MIN_SPLIT // TILE), 1)
        r = tl.cdiv(tiles, tl.minimum(tl.maximum(tl.cdiv(tiles, longest), 1), most))
    return tl.maximum(r, 1)


@triton.jit
def _count(seq_lens_ptr, begin, stop, longest, index, TILE: tl.constexpr, MIN_SPLIT: tl.constexpr, SPLIT: tl.constexpr,
           QUERY_LEN: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr) -> tl.tensor:
    """Items of the sequences begin .. stop."""
    items = 0
    for start in range(begin, stop, CHUNK):
        known = start + index < stop
        lens = tl.load(seq_lens_ptr + start + index, mask=known, other=0)
        tiles = tl.cdiv(lens - _first_key(lens, QUERY_LEN, WINDOW, TILE), TILE)
        splits = tl.maximum(tl.cdiv(tiles, _split_tiles(tiles, longest, TILE, MIN_SPLIT, SPLIT)), 1)
        items += tl.sum(tl.where(known, splits, 0), 0)
    return items


@triton.jit(do_not_specialize=["batch", "target", "capacity"], do_not_specialize_on_alignment=["seq_lens_ptr"])
def plan_kernel(seq_lens_ptr, plan_ptr, batch, target, capacity, CHUNK: tl.constexpr, TILE: tl.constexpr,
                MIN_SPLIT: tl.constexpr, SPLIT: tl.constexpr, QUERY_LEN: tl.constexpr, WINDOW: tl.constexpr,
                WAVE: tl.constexpr, PDL: tl.constexpr) -> None:
    """One program a sequence; each adds up all lengths (a few hundred numbers) and writes its own items."""
    me = tl.program_id(0)
    index = tl.arange(0, CHUNK)
    gdc_launch(PDL)
    gdc_wait(PDL)
    total = 0
    for start in range(0, batch, CHUNK):
        lens = tl.load(seq_lens_ptr + start + index, mask=start + index < batch, other=0)
        total += tl.sum(tl.cdiv(lens - _first_key(lens, QUERY_LEN, WINDOW, TILE), TILE), 0)
    longest = tl.maximum(tl.cdiv(total, target), 1)
    if WAVE:
        items = _count(seq_lens_ptr, 0, batch, longest, index, TILE, MIN_SPLIT, SPLIT, QUERY_LEN, WINDOW, CHUNK)
        fitting = tl.cdiv(total, tl.maximum(target - batch + 1, 1))
        longest = tl.where(items > target, tl.maximum(fitting, longest), longest)
    before = _count(seq_lens_ptr, 0, me, longest, index, TILE, MIN_SPLIT, SPLIT, QUERY_LEN, WINDOW, CHUNK)
    items = before + _count(seq_lens_ptr, me, batch, longest, index, TILE, MIN_SPLIT, SPLIT, QUERY_LEN, WINDOW, CHUNK)
    seq_len = tl.load(seq_lens_ptr + me)
    first = _first_key(seq_len, QUERY_LEN, WINDOW, TILE)
    tiles = tl.cdiv(seq_len - first, TILE)
    each = _split_tiles(tiles, longest, TILE, MIN_SPLIT, SPLIT)
    splits = tl.maximum(tl.cdiv(tiles, each), 1)
    tl.store(plan_ptr, tl.minimum(items, capacity))
    for start in range(0, splits, CHUNK):
        split = start + index
        item = before + split
        mask = (split < splits) & (item < capacity)
        row = plan_ptr + (1 + item) * 8
        begin = first + split * each * TILE
        tl.store(row, me + index * 0, mask=mask)
        tl.store(row + 1, begin, mask=mask)
        tl.store(row + 2, tl.minimum(begin + each * TILE, seq_len), mask=mask)
        tl.store(row + 3, seq_len + index * 0, mask=mask)
        tl.store(row + 4, split, mask=mask)
        tl.store(row + 5, splits + index * 0, mask=mask)


@dataclass(frozen=True, slots=True)
class Workspace:
    """What a decode step needs beside its tensors; made once, shared by all layers of one window. int32 and float32.

    ``plan`` is written by ``make_plan`` each step; ``counters`` are zero between launches.
    """

    plan: torch.Tensor
    acc: torch.Tensor
    stats: torch.Tensor
    counters: torch.Tensor
    batch: int
    query_len: int
    window: int

    @property
    def capacity(self) -> int:
        """The most items a plan may hold."""
        return self.acc.shape[0]


def _target(config: KernelConfig, num_kv_heads: int) -> int:
    """Items of all sequences together, in eights where there are many: partials are added up by so many or more."""
    items = max(1, config["TARGET"] // num_kv_heads)
    return items // 8 * 8 if items > 32 else items


def item_capacity(batch: int, max_seq_len: int, num_kv_heads: int, config: KernelConfig) -> int:
    """The most items that any lengths up to ``max_seq_len`` can make: the grid's size."""
    if config["SPLIT"]:
        return batch * max(1, triton.cdiv(max_seq_len, config["SPLIT"]))
    return batch + _target(config, num_kv_heads)


def workspace(batch: int, max_seq_len: int, num_heads: int, num_kv_heads: int, head_dim: int, config: KernelConfig,
              device: torch.device | str, *, query_len: int = 1, window: int = 0) -> Workspace:
    """Allocate for ``batch`` sequences (the graph's bucket) of ``query_len`` tokens; window 0 means none."""
    capacity = item_capacity(batch, max_seq_len, num_kv_heads, config)
    rows = query_len * num_heads // num_kv_heads

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    return Workspace(empty(1 + capacity, PLAN_WIDTH, dtype=torch.int32),
                     empty(capacity, num_kv_heads, rows, head_dim), empty(capacity, num_kv_heads, rows, 2),
                     empty(capacity + batch, num_kv_heads, dtype=torch.int32), batch,
                     query_len, window)


def make_plan(seq_lens: torch.Tensor, work: Workspace, num_kv_heads: int, config: KernelConfig, chunk: int = 256
              ) -> None:
    """Fill ``work.plan`` from ``seq_lens`` [batch] int32 (new tokens included; 0 = padding). Once a step, graph safe.

    ``chunk`` lengths are added up at a time.
    """
    if seq_lens.shape != (work.batch,) or seq_lens.dtype != torch.int32:
        raise ValueError(f"seq_lens must be int32 [{work.batch}], found {seq_lens.dtype} {tuple(seq_lens.shape)}")
    least = max(config["MIN_SPLIT"], config["TILE"])
    if config["SPLIT"] % config["TILE"] or least % config["TILE"]:
        raise ValueError(f"SPLIT and MIN_SPLIT must be multiples of TILE, found {config}")
    if work.batch:
        plan_kernel[(work.batch,)](seq_lens, work.plan, work.batch, _target(config, num_kv_heads), work.capacity,
                                   CHUNK=chunk, TILE=config["TILE"], MIN_SPLIT=least,
                                   SPLIT=config["SPLIT"], QUERY_LEN=work.query_len, WINDOW=work.window,
                                   WAVE=bool(config.get("FUSED")),
                                   **launch_options(KernelConfig("plan", pdl=config.pdl)))

"""The record of a step: everything the device must be told, in one pinned int32 buffer and one copy.

    rows        [fields, rows]      see ``kernels/prepare``
    head        [32]                live rows, live tokens
    selected    [samples]           the tokens whose logits are wanted, in order
    temperature, top_p, min_p       [samples] float32
    top_k                           [samples] int32
    seeds, positions                [samples] int64
    new_blocks  [...]               KV blocks that sequences got since their last step
    ids         [tokens]            token ids that the device does not have yet

Sections begin at multiples of 32 words, so that pointers into the record are as aligned as any allocation. Only what is
used is copied: ids stand last, and a decode step has none. Pinned buffers are a ring: while a copy may be under way the
host writes the next one.

A row's record never repeats what the device knows: blocks are sent once (``Slots`` remembers how many), tokens sampled
by the last step are named by their place among its samples.
"""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from dataclasses import dataclass

import numpy as np
import torch

from engines.errors import EngineError
from engines.kernels.prepare import FIELDS, Field
from engines.kernels.sample import SamplingRows
from engines.runtime.sequence import Sequence

ALIGN = 32
_FLOATS = ("temperature", "top_p", "min_p")


def _aligned(words: int) -> int:
    return -(-words // ALIGN) * ALIGN


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes and offsets (in words) of a record."""

    rows: int
    samples: int
    tokens: int
    new_blocks: int

    @classmethod
    def of(cls, max_batch_size: int, max_num_tokens: int, table_width: int, block_size: int) -> Layout:
        """Decode rows, then prefill rows from the next bucket on: twice the batch. Each step admits at most
        ``max_num_tokens`` tokens' blocks, one prompt that is only begun, and one block a decoding row."""
        blocks = -(-max_num_tokens // block_size) + table_width + 2 * max_batch_size
        return cls(_aligned(2 * max_batch_size + 8), _aligned(max_batch_size), _aligned(max_num_tokens),
                   _aligned(blocks))

    @property
    def offsets(self) -> dict[str, int]:
        sizes = {"rows": FIELDS * self.rows, "head": ALIGN, "selected": self.samples,
                 **dict.fromkeys((*_FLOATS, "top_k"), self.samples), "seeds": 2 * self.samples,
                 "positions": 2 * self.samples, "new_blocks": self.new_blocks, "ids": self.tokens}
        found, at = {}, 0
        for name, size in sizes.items():
            found[name] = at
            at += size
        found["end"] = at
        return found


class DeviceRecord:
    """The device's copy, and views of its sections."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self.layout = layout
        at = layout.offsets
        self.words = torch.zeros(at["end"], dtype=torch.int32, device=device)
        self.rows = self.words[:FIELDS * layout.rows].view(FIELDS, layout.rows)
        self.head = self.words[at["head"]:at["head"] + ALIGN]
        self.selected = self.words[at["selected"]:at["selected"] + layout.samples]
        self.new_blocks = self.words[at["new_blocks"]:at["ids"]]
        self.ids = self.words[at["ids"]:at["end"]]
        self._sampling = {name: self._section(name, torch.float32 if name in _FLOATS else torch.int32)
                          for name in (*_FLOATS, "top_k")} | {
                              name: self._section(name, torch.int64) for name in ("seeds", "positions")}

    def _section(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        start = self.layout.offsets[name]
        words = self.layout.samples * (2 if dtype == torch.int64 else 1)
        return self.words[start:start + words].view(dtype)

    def sampling(self, count: int) -> SamplingRows:
        """The first ``count`` rows' sampling parameters."""
        return SamplingRows(**{name: tensor[:count] for name, tensor in self._sampling.items()})

    def cu_seqlens(self, first: int, rows: int) -> torch.Tensor:
        """int32 [rows + 1]: where the new tokens of rows ``first`` ... begin."""
        return self.rows[Field.FIRST, first:first + rows + 1]


class HostRecord:
    """One pinned buffer of the ring, with numpy views to write into."""

    def __init__(self, layout: Layout, pinned: bool) -> None:
        at = layout.offsets
        self.layout = layout
        self.words = torch.zeros(at["end"], dtype=torch.int32, pin_memory=pinned)
        flat = self.words.numpy()
        self._flat = flat
        self.rows = flat[:FIELDS * layout.rows].reshape(FIELDS, layout.rows)
        self.head = flat[at["head"]:at["head"] + ALIGN]
        self.selected = flat[at["selected"]:at["selected"] + layout.samples]
        self.new_blocks = flat[at["new_blocks"]:at["ids"]]
        self.ids = flat[at["ids"]:at["end"]]
        self._floats = {name: flat[at[name]:at[name] + layout.samples].view(np.float32) for name in _FLOATS}
        self._top_k = flat[at["top_k"]:at["top_k"] + layout.samples]
        self._longs = {name: flat[at[name]:at[name] + 2 * layout.samples].view(np.int64)
                       for name in ("seeds", "positions")}
        self._greedy = True

    def write_sampling(self, sequences: Ordered[Sequence]) -> None:
        """Sampling parameters of the selected rows. All-greedy steps need nothing but zero temperatures."""
        count = len(sequences)
        if not any(sequence.params.temperature for sequence in sequences):
            if not self._greedy:
                self._floats["temperature"][:] = 0.0
                self._greedy = True
            return
        self._greedy = False
        params = [sequence.params for sequence in sequences]
        self._floats["temperature"][:] = 0.0
        self._floats["temperature"][:count] = [its.heat for its in params]
        self._floats["top_p"][:count] = [its.top_p for its in params]
        self._floats["min_p"][:count] = [its.min_p for its in params]
        self._top_k[:count] = [its.top_k for its in params]
        self._longs["seeds"][:count] = [sequence.seed for sequence in sequences]
        self._longs["positions"][:count] = [len(sequence.tokens) for sequence in sequences]

    def used(self, new_blocks: int, ids: int) -> int:
        """Words that must be copied."""
        at = self.layout.offsets
        return at["ids"] + ids if ids else at["new_blocks"] + new_blocks


@dataclass(slots=True)
class SlotState:
    """What the device holds of a sequence: its slot, how many blocks it was sent, and where its last sample lies."""

    sequence: Sequence
    slot: int
    sent: int = 0
    preemptions: int = 0
    sample: int = -1


class Slots:
    """Sequences -> slots of the device's block tables. A slot is taken back when its sequence owns no block."""

    def __init__(self, count: int) -> None:
        self._free = list(range(count - 1, -1, -1))
        self._states: dict[int, SlotState] = {}

    def of(self, sequence: Sequence) -> SlotState:
        """The state of a scheduled sequence; its blocks are sent anew after a preemption."""
        state = self._states.get(sequence.number)
        if state is None:
            if not self._free:
                self._sweep()
            state = self._states[sequence.number] = SlotState(sequence, self._free.pop(), 0, sequence.preemptions)
        elif state.preemptions != sequence.preemptions:
            state.sent, state.preemptions, state.sample = 0, sequence.preemptions, -1
        return state

    def _sweep(self) -> None:
        for number, state in list(self._states.items()):
            if state.sequence.finished or not state.sequence.table:
                self._free.append(self._states.pop(number).slot)
        if not self._free:
            raise EngineError("more sequences run than the device has slots for",
                              "This is a bug in the scheduler; report it.")


@dataclass(slots=True)
class RowWriter:
    """Fills a host record row by row."""

    record: HostRecord
    block_size: int
    tokens: int = 0
    row: int = 0
    ids: int = 0
    blocks: int = 0

    def add(self, state: SlotState, count: int) -> None:
        """``count`` tokens of the sequence from ``computed`` on."""
        sequence, record, row = state.sequence, self.record, self.row
        start, table = sequence.computed, sequence.table
        source = -1
        if count == 1 and sequence.tokens[start] < 0:
            source = state.sample
        else:
            record.ids[self.ids:self.ids + count] = sequence.tokens[start:start + count]
        fresh = len(table) - state.sent
        record.rows[:, row] = (state.slot, start, count, self.tokens, source, self.ids, state.sent, fresh, self.blocks)
        if fresh:
            record.new_blocks[self.blocks:self.blocks + fresh] = table[state.sent:]
            self.blocks += fresh
            state.sent = len(table)
        if source < 0:
            self.ids += count
        self.tokens += count
        self.row += 1

    def pad_to(self, row: int) -> None:
        """Empty rows up to ``row``."""
        if row > self.row:
            self.record.rows[:, self.row:row] = 0
            self.record.rows[Field.FIRST, self.row:row] = self.tokens
            self.row = row

    def finish(self, rows: int) -> int:
        """Close the record for a step of ``rows`` rows; returns the words to copy."""
        self.record.rows[Field.FIRST, self.row:rows + 1] = self.tokens
        self.record.head[0], self.record.head[1] = self.row, self.tokens
        return self.record.used(self.blocks, self.ids)

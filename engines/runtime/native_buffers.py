"""Memory for the values of a Program in the compiled backend: buffers of float32 rows, shared by values in turn."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engines.kernels.cpu.native.tiles import Array, aligned, padded
from engines.program import Attention, GatedSilu, Linear, Program, RopeKV, SelectRows, SoftCap, reads, writes
from engines.runtime.batch import HEAD_ROWS


@dataclass(slots=True)
class Buffer:
    """Memory of one or more values that are never alive together."""

    width: int
    rows: int
    data: Array
    scales: Array

    @property
    def row_bytes(self) -> int:
        return self.width * 4


class Buffers:
    """Names of values -> buffers, used again after the last reader. Two passes: widths first, then memory."""

    def __init__(self, program: Program, widths: dict[str, int], body_rows: int) -> None:
        last = {name: index for index, op in enumerate(program.ops) for name in (*writes(op), *reads(op))}
        select = next(index for index, op in enumerate(program.ops) if isinstance(op, SelectRows))
        place: dict[str, int] = {}
        size: list[tuple[int, int]] = []
        free: list[int] = []
        for index, op in enumerate(program.ops):
            rows = body_rows if index <= select else HEAD_ROWS
            if index == select + 1:
                free = []  # hidden rows pass through the head in parts: it must not write over those that wait
            for name in writes(op):
                if isinstance(op, SoftCap):  # element by element, and as wide as the vocabulary: where it stands
                    place[name] = place[op.x]
                    continue
                width = widths[name]
                fits = [at for at in free if size[at][1] >= rows and size[at][0] >= width]
                grows = fits or [at for at in free if size[at][1] >= rows]
                at = min(grows, key=lambda at: size[at][0] if fits else -size[at][0]) if grows else len(size)
                if grows:
                    free.remove(at)
                    size[at] = (max(width, size[at][0]), size[at][1])
                else:
                    size.append((width, rows))
                place[name] = at
            for name in {*reads(op), *writes(op)}:
                moved = isinstance(op, SoftCap) and name == op.x
                if last[name] == index and name not in writes(program.ops[select]) and not moved:
                    free.append(place[name])
        made = [Buffer(width, rows, aligned((rows, width), np.float32), np.ones(rows, np.float32))
                for width, rows in size]
        self.of = {name: made[at] for name, at in place.items()}


def widths_of(program: Program, hidden: int) -> dict[str, int]:
    """Floats of a row of every value, whole tiles."""
    widths: dict[str, int] = {}
    for op in program.ops:
        if isinstance(op, Linear):
            widths[op.out] = padded(op.n)
            widths[op.x] = max(widths.get(op.x, 0), padded(op.k))
        elif isinstance(op, RopeKV | Attention):
            widths[op.out] = padded(op.heads * op.head_dim)
        elif isinstance(op, GatedSilu):
            widths[op.out] = max(widths.get(op.out, 0), padded(op.width))
        elif isinstance(op, SoftCap):
            widths[op.out] = widths[op.x]
    for op in program.ops:
        for name in writes(op):
            widths.setdefault(name, padded(hidden))
    return widths

"""The table of Ops that ``step.run`` walks, written by column name, and the call that runs a part of it on a team.

A table holds addresses; what they point at must live as long as the table does, so the table keeps it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from engines.kernels.cpu.native.step import Code, Field, Real, run
from engines.kernels.cpu.native.team import Team
from engines.kernels.cpu.native.tiles import Array, Tiles


@dataclass(frozen=True, slots=True)
class OpRow:
    """One Op's rows of the two tables, and the table's list of what must outlive it."""

    numbers: Array
    reals: Array
    kept: list[Any]

    def set(self, **values: int) -> None:
        """Columns of ``Field`` by name."""
        for name, value in values.items():
            self.numbers[Field[name]] = value

    def real(self, **values: float) -> None:
        """Columns of ``Real`` by name."""
        for name, value in values.items():
            self.reals[Real[name]] = value

    def address(self, tensor: torch.Tensor) -> int:
        """Where a tensor's numbers lie, contiguous; kept."""
        held = tensor.contiguous()
        self.kept.append(held)
        return held.data_ptr()

    def linear(self, tiles: Tiles) -> None:
        """Everything of a linear but its rows."""
        self.kept.append(tiles)
        self.set(CODE=Code.LINEAR, KIND=tiles.kind, N=tiles.n, WEIGHT=tiles.data.ctypes.data, TILES=tiles.tiles,
                 TILE_BYTES=tiles.tile_bytes, COUNT=tiles.count, PITCH=tiles.pitch,
                 TOTAL=tiles.total)
        for field, array in (("GROUP_SCALES", tiles.group_scales), ("INDEX", tiles.index), ("SCALE", tiles.scale),
                             ("BIAS", tiles.bias)):
            if array is not None:
                self.set(**{field: array.ctypes.data})


class Table:
    """Rows of Ops."""

    def __init__(self, count: int) -> None:
        self._ops = np.zeros((count, len(Field)), np.int64)
        self._reals = np.zeros((count, len(Real)), np.float64)
        self._kept: list[Any] = []

    def __len__(self) -> int:
        return len(self._ops)

    def row(self, index: int) -> OpRow:
        return OpRow(self._ops[index], self._reals[index], self._kept)

    def run(self, team: Team, first: int, last: int, numbers: Array) -> None:
        """Ops first to last on every thread, with a step's ``Context`` numbers."""
        ops, reals = self._ops, self._reals
        team.run(lambda rank, size, sync: run(rank, size, sync, first, last, ops, reals, numbers))

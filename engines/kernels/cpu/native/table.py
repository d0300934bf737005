"""The table of Ops that ``step.run`` walks, written by column name, and the call that runs a part of it on a team."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engines.kernels.cpu.native.step import Code, Field, Real, run
from engines.kernels.cpu.native.team import Team
from engines.kernels.cpu.native.tiles import Array, Tiles


@dataclass(frozen=True, slots=True)
class OpRow:
    """One Op's rows of the two tables."""

    numbers: Array
    reals: Array

    def set(self, **values: int) -> None:
        """Columns of ``Field`` by name."""
        for name, value in values.items():
            self.numbers[Field[name]] = value

    def real(self, **values: float) -> None:
        """Columns of ``Real`` by name."""
        for name, value in values.items():
            self.reals[Real[name]] = value

    def linear(self, tiles: Tiles) -> None:
        """Everything of a linear but its rows. The caller keeps ``tiles``."""
        self.set(CODE=Code.LINEAR, KIND=tiles.kind, N=tiles.n, WEIGHT=tiles.data.ctypes.data, TILES=tiles.tiles,
                 TILE_BYTES=tiles.tile_bytes, COUNT=tiles.count, PITCH=tiles.pitch)
        for field, array in (("GROUP_SCALES", tiles.group_scales), ("SCALE", tiles.scale), ("BIAS", tiles.bias)):
            if array is not None:
                self.set(**{field: array.ctypes.data})


class Table:
    """Rows of Ops."""

    def __init__(self, count: int) -> None:
        self._ops = np.zeros((count, len(Field)), np.int64)
        self._reals = np.zeros((count, len(Real)), np.float64)

    def __len__(self) -> int:
        return len(self._ops)

    def row(self, index: int) -> OpRow:
        return OpRow(self._ops[index], self._reals[index])

    def run(self, team: Team, first: int, last: int, numbers: Array) -> None:
        """Ops first to last on every thread, with a step's ``Context`` numbers."""
        ops, reals = self._ops, self._reals
        team.run(lambda rank, size, sync: run(rank, size, sync, first, last, ops, reals, numbers))

"""A packed linear on its own, with the face of the other CPU operators: for timing it and for testing it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from calib.scheme import Grid
from engines.kernels.cpu.disk import Stored
from engines.kernels.cpu.native.step import Context
from engines.kernels.cpu.native.table import Table
from engines.kernels.cpu.native.team import team
from engines.kernels.cpu.native.tiles import TILE, Kind, Tiles
from engines.kernels.cpu.rows import Quantized


def prepare(stored: Stored, activation: Grid | None, threads: int | None = None, copies: int = 1
            ) -> Callable[[torch.Tensor | Quantized], torch.Tensor]:
    """Pack a weight; the result is a function of float32 rows [t, k] or quantized ones -> float32 [t, n].

    With ``copies`` of the packed weight, a call runs through all of them in one step (each gives the same result).
    """
    packed = [Tiles.of(stored, activation) for _ in range(copies)]
    tiles = packed[0]
    workers = team(threads or torch.get_num_threads())
    table = Table(copies)
    for index, copy in enumerate(packed):
        table.row(index).linear(copy)
    numbers = np.zeros(len(Context), np.int64)

    def run(rows: torch.Tensor | Quantized) -> torch.Tensor:
        values = rows.codes if isinstance(rows, Quantized) else rows
        count = values.shape[0]
        x = values.contiguous().numpy()
        if tiles.kind is Kind.INT8:
            x = np.zeros((count, 2 * tiles.count), np.int16)
            x[:, :tiles.k] = values.numpy()
        out = np.empty((count, tiles.tiles * TILE), np.float32)
        scales = None
        if isinstance(rows, Quantized):
            scales = np.ascontiguousarray(np.broadcast_to(np.asarray(rows.scale, np.float32).reshape(-1), (count,)))
        for index in range(copies):
            table.row(index).set(X=x.ctypes.data, X_BYTES=x.strides[0], OUT=out.ctypes.data, OUT_BYTES=out.strides[0],
                                 X_SCALES=0 if scales is None else scales.ctypes.data)
        numbers[Context.ROWS] = count
        table.run(workers, 0, copies, numbers)
        return torch.from_numpy(out)[:, :tiles.n]
    return run

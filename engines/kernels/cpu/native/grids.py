"""What a plan needs to know of the tiles, without the compiler behind them."""

from __future__ import annotations

from calib.scheme import Grid

#: The compiled step's linears in a KernelTable.
NAME = "tiles"


def integer_rows(weight: Grid, activation: Grid | None) -> bool:
    """Whether a linear of these grids multiplies int16 codes (INT8), not float32 rows."""
    return (weight.dtype == "int8" and weight.symmetric and weight.granularity.kind in ("tensor", "channel")
            and activation is not None and activation.dtype == "int8")


def bits(weight: Grid, activation: Grid | None) -> float:
    """Bits that a weight of this grid takes in its tiles (what can be known before it is seen)."""
    if integer_rows(weight, activation):
        return 8
    if weight.dtype == "int4":
        granularity = weight.granularity
        narrow = weight.symmetric and granularity.kind == "group" and granularity.size % 8 == 0
        return 4 + 32 / granularity.size if narrow and granularity.kind == "group" else 32
    return 16 if weight.granularity.kind in ("tensor", "channel") else 32

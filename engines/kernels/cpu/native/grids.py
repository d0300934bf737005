"""What a plan needs to know of the tiles, without the compiler behind them."""

from __future__ import annotations

from calib.scheme import Grid

#: The compiled step's linears in a KernelTable.
NAME = "tiles"


def integer_rows(weight: Grid, activation: Grid | None) -> bool:
    """Whether a linear of these grids multiplies int16 codes (INT8), not float32 rows."""
    return (weight.dtype == "int8" and weight.symmetric and weight.granularity.kind in ("tensor", "channel")
            and activation is not None and activation.dtype == "int8" and activation.granularity.kind != "group")


def scaled_rows(weight: Grid, activation: Grid | None) -> bool:
    """Whether rows come as codes with one scale a row. Other quantized rows come as the numbers they stand for."""
    return integer_rows(weight, activation) or (
        activation is not None and activation.dtype == "fp8_e4m3" and activation.granularity.kind != "group")


def group_size(grid: Grid) -> int:
    """Inputs that share a scale of a row, 0 for all of them."""
    granularity = grid.granularity
    return granularity.size if granularity.kind == "group" else granularity.cols if granularity.kind == "block" else 0


def packs_nibbles(grid: Grid, k: int) -> bool:
    """Whether an int4 weight stays in 4 bits: eight inputs of a word have one scale."""
    return k % 8 == 0 and group_size(grid) % 8 == 0


def bits(weight: Grid, activation: Grid | None, k: int, act_order: bool = False) -> float:
    """Bits that a weight of this grid takes in its tiles (what can be known before it is seen)."""
    if integer_rows(weight, activation):
        return 8
    scales = 32 / (group_size(weight) or k)
    if weight.dtype == "int4":
        zeros = act_order or not weight.symmetric
        return (4 + 1.25 * scales if zeros else 4 + scales) if packs_nibbles(weight, k) else 32
    if weight.dtype == "bf16":
        return 16
    return 8 + scales if weight.symmetric else 32

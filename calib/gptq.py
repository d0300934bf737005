"""GPTQ (Frantar et al., arXiv 2210.17323): columns are rounded one by one, and each error is made up for by the rest.

For one linear with inputs x the output's squared error is tr(E H E^T), E = rounded - exact and H = mean of x x^T.
Rounding column j of W by e_j is best answered by moving the columns that are still free by

    W[:, k] -= e_j / U[j, j] * U[j, k]          k > j,   U upper Cholesky factor of H^-1  (H^-1 = U^T U)

which is the paper's form: one factorisation instead of an inverse per column. Columns are worked in blocks of 128, and
the columns behind a block are moved once per block (the same sums, far fewer passes over memory). A constant times the
mean diagonal is added to H; where the factorisation still fails, or gives what is not finite, ten times as much is
tried, three times over, and then the module is named. Inputs that were always zero get weight zero.

*Order*: "none" from left to right; "static" loud inputs first (they are rounded while all others can still make up for
it), groups staying where they are, their ranges found beforehand; "groups" loud inputs first and groups formed in that
order, which a kernel has to gather by (``g_idx`` [in] names each column's group).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from calib.errors import CalibError
from calib.grids import code_range
from calib.ranges import Ranges, searched_ranges
from calib.scheme import Grid

_BLOCK = 128
_RETRIES = 3
_MORE = 10.0


class HessianError(CalibError):
    """A module's Hessian has no usable inverse, however it is damped."""

    code = "hessian"


class Rounded(NamedTuple):
    """Codes int8 [out, in], f32 ``scale`` and ``zero`` [out, in/g], int32 ``g_idx`` [in] where groups were formed anew.

    ``damping`` is what was needed in the end.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None
    g_idx: torch.Tensor | None
    damping: float


def gptq(grid: Grid, weight: torch.Tensor, hessian: torch.Tensor, *, damping: float, order: str = "none",
         ratios: Sequence[float] = (1.0,), ranges: Ranges | None = None, half: bool = False,
         module: str = "the module") -> Rounded:
    """Round a weight [out, in] to grouped int4 with ``hessian`` [in, in] = mean of x x^T (any scale).

    ``ratios`` are clipping candidates of each group's range, unless ``ranges`` gives them for groups that stay where
    they are. HessianError names ``module``.
    """
    if grid.granularity.kind != "group" or (ranges is not None and order == "groups"):
        raise ValueError(f"gptq rounds groups, whose ranges are known only where they stay, not {grid} in {order!r}")
    weight, hessian = weight.detach().float().clone(), hessian.double()
    if not torch.isfinite(hessian).all():
        raise HessianError(f"the inputs of {module} are not finite", "The model overflows; keep this module in bf16.")
    dead = hessian.diagonal() == 0
    hessian = hessian + torch.diag(dead.double())
    weight[:, dead] = 0
    columns = weight.shape[1]
    permutation = torch.arange(columns) if order == "none" else hessian.diagonal().argsort(descending=True, stable=True)
    upper, needed = _factor(hessian[permutation][:, permutation], damping, module)
    sorted_weight, importance = weight[:, permutation], hessian.diagonal().float()
    if order == "static" and ranges is None:
        ranges = searched_ranges(grid, weight, ratios, importance=importance, half=half)
    groups = (torch.arange(columns) if order == "groups" else permutation) // grid.granularity.size
    codes, found = _columns(grid, sorted_weight, upper, groups, ranges, ratios, importance[permutation], half)
    inverse = permutation.argsort()
    g_idx = groups[inverse].to(torch.int32) if order == "groups" else None
    return Rounded(codes[:, inverse], found.scale, found.zero, g_idx, needed)


def _factor(hessian: torch.Tensor, damping: float, module: str) -> tuple[torch.Tensor, float]:
    """(U float32 [in, in], the damping that it took)."""
    mean = hessian.diagonal().mean()
    for attempt in range(_RETRIES + 1):
        needed = damping * _MORE**attempt
        damped = hessian + torch.diag(torch.full_like(hessian.diagonal(), float(mean) * needed))
        lower, failed = torch.linalg.cholesky_ex(damped)
        if failed == 0:
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if failed == 0 and torch.isfinite(upper).all():
                return upper.float(), needed
    raise HessianError(f"the Hessian of {module} has no inverse, even with {damping * _MORE**_RETRIES:g} of its mean "
                       "diagonal added", "Give more calibration text, raise damping, or keep this module in bf16.")


def _columns(grid: Grid, weight: torch.Tensor, upper: torch.Tensor, groups: torch.Tensor, ranges: Ranges | None,
             ratios: Sequence[float], importance: torch.Tensor, half: bool) -> tuple[torch.Tensor, Ranges]:
    """Round the columns in their order; ranges that are not given are found when a group's first column is reached."""
    assert grid.granularity.kind == "group"
    size, count = grid.granularity.size, weight.shape[1]
    shape = (weight.shape[0], count // size)
    scale = torch.empty(shape) if ranges is None else ranges.scale
    zero = (None if grid.symmetric else torch.empty(shape)) if ranges is None else ranges.zero
    codes = torch.empty(weight.shape, dtype=torch.int8)
    for start in range(0, count, _BLOCK):
        end = min(start + _BLOCK, count)
        errors = torch.empty(weight.shape[0], end - start)
        for column in range(start, end):
            group = int(groups[column])
            if ranges is None and column % size == 0:
                # columns of this group behind the block have not been moved by this block's errors yet
                ahead = weight[:, column:column + size].clone()
                behind = max(end, column)
                if column + size > behind and column > start:
                    ahead[:, behind - column:] -= errors[:, :column - start] @ upper[start:column, behind:column + size]
                here = searched_ranges(grid, ahead, ratios, importance=importance[column:column + size], half=half)
                scale[:, group] = here.scale[:, 0]
                if zero is not None and here.zero is not None:
                    zero[:, group] = here.zero[:, 0]
            errors[:, column - start] = _round_column(grid, weight[:, column], scale[:, group],
                                                      None if zero is None else zero[:, group], codes[:, column])
            errors[:, column - start] /= upper[column, column]
            weight[:, column:end] -= errors[:, column - start, None] * upper[column, column:end]
        weight[:, end:] -= errors @ upper[start:end, end:]
    return codes, Ranges(scale, zero)


def _round_column(grid: Grid, values: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None, codes: torch.Tensor
                  ) -> torch.Tensor:
    """Write the codes of one column; what rounding took away, exact - rounded."""
    offset = torch.zeros_like(values) if zero is None else zero
    found = ((values / scale).round() + offset).clamp(*code_range(grid))
    codes.copy_(found)
    return values - (found - offset) * scale

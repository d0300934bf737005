"""How much memory a calibration takes, and what this machine has. (Time is measured: ``calib/rehearsal.py``.)

What is counted is anonymous memory: weights that are computed with, activations, and what is being written. The whole
pass holds every weight in float32; layer by layer it is one layer, one batch's activations and a shard.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from calib.dataset import BATCH_ROWS
from calib.errors import CalibError
from calib.formats.hf import SHARD_BYTES
from calib.recipe import Recipe
from calib.scheme import Frozen

MIB = 1024**2
#: Share of the memory that is free now which a whole pass may take; above it, calibration goes layer by layer.
_SHARE = 0.6
_SCORED_ROWS, _SCORED_LENGTH = 4, 256


class Sizes(Frozen):
    """What memory depends on. Counts of elements, except ``result_bytes``."""

    parameters: int
    layer_parameters: int
    largest: int
    hidden: int
    inter: int
    vocab: int
    layers: int
    result_bytes: int


def activation_bytes(sizes: Sizes, rows: int, length: int) -> int:
    """One batch inside a layer, float32: hidden states, attention and MLP. ``rows``: of the whole calibration."""
    return 4 * min(BATCH_ROWS, rows) * length * (6 * sizes.hidden + 3 * sizes.inter)


def working_bytes(sizes: Sizes, recipe: Recipe, length: int, *, layerwise: bool) -> int:
    """Anonymous memory above what the libraries take."""
    if recipe.method == "none":
        return min(2 * sizes.parameters, SHARD_BYTES)
    measured = len(recipe.alphas) > 1 or recipe.protect > 0
    rows = 1 if layerwise or not measured else _SCORED_ROWS
    logits = 3 * 4 * rows * (_SCORED_LENGTH if measured else length) * sizes.vocab
    scratch = 4 * 4 * sizes.largest
    written = min(sizes.result_bytes, SHARD_BYTES)
    weights = 4 * (sizes.layer_parameters if layerwise else sizes.parameters)
    inside = activation_bytes(sizes, recipe.rows, length)
    # A whole model is scored in the heap that its calibration left, and logits do not fit in the holes of a layer's
    # activations: of 43 M parameters 62 MB were still held when scoring took its 112.
    beside = max(scratch, logits) if measured and not layerwise else scratch
    return max(weights + inside + beside, weights + logits, weights + written)


def available_bytes() -> int | None:
    """Memory that a new process could take now (the machine's, or its control group's); None where nobody says."""
    info = Path("/proc/meminfo")
    if not info.is_file():
        return None
    free = next(int(line.split()[1]) * 1024 for line in info.read_text().splitlines() if line.startswith("MemAvail"))
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.is_file() and used.is_file() and limit.read_text().strip().isdigit():
        free = min(free, max(0, int(limit.read_text()) - int(used.read_text())))
    return free


def memory_bound(asked: int | None) -> int | None:
    """The bound above which calibration goes layer by layer: what was asked, or a share of what is free."""
    free = available_bytes()
    return asked if asked is not None else None if free is None else int(_SHARE * free)


class MemoryBoundError(CalibError):
    """Calibration would work in more memory than it was given."""

    code = "memory_bound"


def check_bound(needed: int, bound: int | None, *, asked: bool, way: str, remedy: str = "") -> str:
    """Whether calibration in this ``way`` (whole, or layer by layer) keeps within its bound: empty, or a warning.

    MemoryBoundError where the bound was ``asked`` for: it is a promise. A bound that follows from what is free now is a
    guess, which others' memory may outdate before the peak comes. ``remedy``: what else would help.
    """
    if bound is None or needed <= bound:
        return ""
    said = f"calibrating {way} works in {needed:,} bytes; the bound is {bound:,}"
    if asked:
        raise MemoryBoundError(said, f"{remedy}Give --memory {-(-needed // 10**6)}MB or more.")
    return f"{said}, a share of what is free now"


def free_bytes(out: Path) -> int:
    """Free bytes on the disk that ``out`` will lie on."""
    place = out.absolute()
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free

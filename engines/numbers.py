"""Numbers from callers: Python's, numpy's and torch's, where they are numbers.

Python lets ``int`` and pydantic's lax mode make 1 of True, 1.7 and '1'. (No torch here: the server's front end reads
settings without it. An integer tensor of no dimension is known by its dtype.)
"""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
from pydantic import BeforeValidator

from calib.errors import shown

_INTEGERS = ("int", "uint")


def whole(value: Any) -> int:
    """An ``int`` from an integer of any width. ValueError, in words, for anything else."""
    if type(value) is int:
        return value
    if getattr(value, "shape", None) == () and str(value.dtype).removeprefix("torch.").startswith(_INTEGERS):
        return int(value)
    raise ValueError(f"must be a whole number, not {shown(value)}")


def number(value: Any) -> float:
    """A finite ``float`` from a number of any width. ValueError, in words, for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise ValueError(f"must be a number, not {shown(value)}")
    if not np.isfinite(value):
        raise ValueError(f"must be a finite number, not {shown(value)}")
    return float(value)


Whole = Annotated[int, BeforeValidator(whole)]
Number = Annotated[float, BeforeValidator(number)]

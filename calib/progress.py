"""The one way in which long work says how far it is.

Work calls ``report(Progress(...))``; who listens (a rich bar, a line every 30 s, the job table) is decided far to the
right. Reporting must be cheap and must never raise into the work.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Progress:
    """``done`` of ``total`` ``unit``s of ``stage`` are finished; ``total`` is None while it is unknown."""

    stage: str
    done: float
    total: float | None
    unit: str = "step"
    message: str = ""
    at: float = field(default_factory=time.monotonic)


Report = Callable[[Progress], None]


def silent(event: Progress) -> None:
    """The listener that does not listen."""

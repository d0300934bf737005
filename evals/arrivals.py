"""When requests arrive: open-loop schedules, and traces to replay.

A closed loop (fixed users, each waiting for its answer) never shows a queue growing: a slow server is simply asked
less. An open loop asks at a rate, whatever the answers do. Gaps are gamma distributed with shape ``burstiness``: 1 is a
Poisson process, below 1 is burstier, above 1 more regular. Offsets are rescaled so that n requests take exactly n/rate
seconds: otherwise the achieved rate of a short run differs by its luck (10 % at 100 requests).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from pydantic import Field, ValidationError

from calib.scheme import Frozen
from evals.errors import DataError, MeasureError


class TraceRow(Frozen):
    """One line of a trace (JSONL): ``timestamp`` in ms, and the lengths in tokens."""

    timestamp: float = Field(ge=0, allow_inf_nan=False)
    input_length: int = Field(ge=1)
    output_length: int = Field(ge=1)


def offsets(n: int, rate: float, *, burstiness: float = 1.0, seed: int = 0) -> np.ndarray:
    """Seconds after the start at which each of ``n`` requests is sent, ascending, float64 [n]; the last at n/rate.

    MeasureError for no requests, a rate or burstiness that is not positive.
    """
    if n < 1 or not rate > 0 or not burstiness > 0:
        raise MeasureError(f"{n} requests at {rate} a second with burstiness {burstiness} are no load",
                           "Give at least one request, a positive rate and a positive burstiness.")
    gaps = np.random.default_rng(seed).gamma(burstiness, 1.0 / burstiness, size=n)
    times = np.cumsum(gaps)
    return times * (n / rate / times[-1])


def read_trace(path: Path | str) -> list[TraceRow]:
    """The rows of a trace, the first at 0. DataError for no rows, other fields (``hash_ids``: shared prefixes are not
    replayed), or times that go back."""
    path, rows = Path(path), []
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read trace {path}: {error}", "Give a JSONL file.") from error
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                rows.append(TraceRow.model_validate_json(line))
            except ValidationError as error:
                first = error.errors()[0]
                raise DataError(f"{path} line {number}: {'.'.join(map(str, first['loc']))}: {first['msg']}",
                                'A line is {"timestamp": ms, "input_length": n, "output_length": n}.') from error
    if not rows:
        raise DataError(f"{path} holds no requests", "Give at least one line.")
    times = [row.timestamp for row in rows]
    if times != sorted(times):
        raise DataError(f"{path}: times go back", "Sort the trace by timestamp.")
    return [row.model_copy(update={"timestamp": row.timestamp - times[0]}) for row in rows]

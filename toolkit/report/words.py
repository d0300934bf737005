"""How a figure is written: the same in the terminal, the page, the HTML report and the model card.

A figure that was not measured is an en dash, never 0. An estimate carries its interval; sizes are decimal (1 GB = 10^9
bytes); a minus is a real minus so that columns align.
"""

from __future__ import annotations

from dataclasses import dataclass

from evals.report import Cell, Estimate, Row
from evals.tradeoff import label

MISSING = "–"
#: Said wherever verdicts stand beside figures.
WIDER = ("A verdict's interval is wider than the table's 95 %: it is corrected for all looks and all engines judged "
         "together.")


def number(value: float | None, digits: int, signed: bool = False) -> str:
    if value is None:
        return MISSING
    text = f"{value:+,.{digits}f}" if signed else f"{value:,.{digits}f}"
    if float(text.replace(",", "")) == 0:
        text = f"{0:.{digits}f}"
    return text.replace("-", "−")


def nats(value: float | None) -> str:
    return number(value, 4, signed=True)


def percent(value: float | None, digits: int = 1) -> str:
    return MISSING if value is None else f"{number(100 * value, digits)} %"


def milliseconds(value: float | None) -> str:
    return number(value, 1 if value is None or value < 1000 else 0)


def rate(value: float | None) -> str:
    return number(value, 1 if value is None or value < 1000 else 0)


def size(value: int | None) -> str:
    if value is None:
        return MISSING
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= scale:
            scaled = value / scale
            return f"{scaled:,.{0 if scaled >= 100 else 1 if scaled >= 10 else 2}f} {unit}"
    return f"{value} B"


def lengths(cell: Cell) -> tuple[str, str]:
    """Tokens in and out that a cell achieved: missing where nothing answered, whatever was asked for."""
    known = cell.answered != 0
    return number(cell.isl if known else None, 0), number(cell.osl if known else None, 0)


def nats_interval(estimate: Estimate | None) -> str:
    if estimate is None:
        return MISSING
    return f"{nats(estimate.value)} [{nats(estimate.ci_low)}, {nats(estimate.ci_high)}]"


def percent_interval(estimate: Estimate | None) -> str:
    if estimate is None:
        return MISSING
    return f"{percent(estimate.value)} [{number(100 * estimate.ci_low, 1)}, {number(100 * estimate.ci_high, 1)}]"


def points(estimate: Estimate | None) -> str:
    """A share as percentage points with its interval: ``2.5 [−1.0, 6.0]``."""
    if estimate is None:
        return MISSING
    return (f"{number(100 * estimate.value, 1)} [{number(100 * estimate.ci_low, 1)}, "
            f"{number(100 * estimate.ci_high, 1)}]")


def short(digest: str) -> str:
    return digest[:12]


#: Nats per token. Two correct programs of one model differ by 1e-6 to 2e-5 (seen); the unquantized engine's interval is
#: no wider than that, so without this allowance it would be "outside" for a rounding.
FLOAT_NOISE = 1e-4


@dataclass(frozen=True, slots=True)
class Agreement:
    """An engine's delta NLL beside that of its in-memory fake-quantized model: what the engine itself adds."""

    label: str
    engine: Estimate
    model: Estimate

    @property
    def added(self) -> float:
        """Nats per token that building and running the engine adds to what quantizing cost."""
        return self.engine.value - self.model.value

    @property
    def agrees(self) -> bool:
        """Either value lies in the other's interval, give or take what two float32 programs differ by."""
        return (self.model.ci_low - FLOAT_NOISE <= self.engine.value <= self.model.ci_high + FLOAT_NOISE
                or self.engine.ci_low - FLOAT_NOISE <= self.model.value <= self.engine.ci_high + FLOAT_NOISE)


def agreement(row: Row, model_delta: Estimate | None) -> Agreement | None:
    if row.delta_nll is None or model_delta is None:
        return None
    return Agreement(label(row), row.delta_nll, model_delta)

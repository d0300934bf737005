"""The figures that can stand on an axis or in a comparison. Names, titles and directions are ``evals.metric``'s.

Energy is there where a sweep read a GPU's counter. Two more are derived from a row: recovery (accuracy as a share of
the baseline's) and cost (a device's price an hour over the tokens it puts out). Each is a monotone function of a
measured figure, its ``basis``: who dominates whom is decided on that one, with its own interval.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from evals.metric import METRICS
from evals.report import Row

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True, slots=True)
class Axis:
    """``unit`` and ``digits`` as shown; ``scale`` turns the stored unit into the shown one."""

    key: str
    unit: str
    scale: float = 1.0
    digits: int = 1
    basis: str | None = None
    named: str | None = None
    better: str | None = None
    formula: str | None = None

    @property
    def title(self) -> str:
        return self.named or METRICS[self.key].title

    @property
    def ranked_by(self) -> str:
        """The measured figure that decides who is better."""
        return self.basis or self.key

    @property
    def direction(self) -> str:
        return self.better or METRICS[self.key].better

    @property
    def directed(self) -> bool:
        """Whether one end is better: figures that only raise alarms have no frontier."""
        return self.direction != "none"

    @property
    def lower_is_better(self) -> bool:
        return self.direction == "lower"

    @property
    def heading(self) -> str:
        better = f"  ·  {self.direction} is better" if self.directed else ""
        return f"{self.title}, {self.unit}{better}"

    @property
    def help(self) -> str:
        return self.formula or METRICS[self.key].formula


QUALITY = {axis.key: axis for axis in (
    Axis("delta_nll", "nats/token", digits=4), Axis("accuracy", "%", 100.0), Axis("kl_mean", "nats/token", digits=4),
    Axis("same_top1", "%", 100.0), Axis("flips", "%", 100.0))}
RECOVERY = Axis("recovery", "% of the baseline's accuracy", 100.0, basis="accuracy", named="Recovery", better="higher",
                formula="accuracy / accuracy of the unquantized engine of the same run")
COST = {axis.key: axis for axis in (
    Axis("tpot_ms", "ms", digits=2), Axis("ttft_ms", "ms"), Axis("out_tok_s", "tok/s"),
    Axis("size_bytes", "MB", 1e-6), Axis("peak_memory_bytes", "MB", 1e-6))}
ENERGY = Axis("joules_per_token", "J/token", digits=3)


def price_axis() -> Axis:
    return Axis("price", "per million output tokens", digits=2, basis="out_tok_s", named="Cost", better="lower",
                formula="price of the device an hour / (output tokens/s x 3600) x 10^6")


def derive(table: pandas.DataFrame, rows: Sequence[Row], price: float | None) -> pandas.DataFrame:
    """The table of ``tables.frame`` with recovery and, where an hour has a price, cost; intervals carried along."""
    found = table.copy()
    base = next((row.accuracy.value for row in rows if row.verdict == "BASELINE" and row.accuracy), None)
    if base:
        for end in ("", "_low", "_high"):
            found[f"recovery{end}"] = found[f"accuracy{end}"] / base
    if price:
        found["price"] = price / (found["out_tok_s"] * 3600) * 1e6
    return found


def usable(table: pandas.DataFrame, axes: Mapping[str, Axis]) -> list[Axis]:
    """The axes for which at least one engine has a figure."""
    return [axis for axis in axes.values() if axis.key in table and table[axis.key].notna().any()]

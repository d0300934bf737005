"""The figures that can stand on an axis or in a comparison. Names, titles and directions are ``evals.metric``'s."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from evals.metric import METRICS

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True, slots=True)
class Axis:
    """``unit`` and ``digits`` as shown; ``scale`` turns the stored unit into the shown one."""

    key: str
    unit: str
    scale: float = 1.0
    digits: int = 1

    @property
    def title(self) -> str:
        return METRICS[self.key].title

    @property
    def directed(self) -> bool:
        """Whether one end is better: figures that only raise alarms have no frontier."""
        return METRICS[self.key].better != "none"

    @property
    def lower_is_better(self) -> bool:
        return METRICS[self.key].better == "lower"

    @property
    def heading(self) -> str:
        better = f"  ·  {METRICS[self.key].better} is better" if self.directed else ""
        return f"{self.title}, {self.unit}{better}"

    @property
    def help(self) -> str:
        return METRICS[self.key].formula


QUALITY = {axis.key: axis for axis in (
    Axis("delta_nll", "nats/token", digits=4), Axis("accuracy", "%", 100.0), Axis("kl_mean", "nats/token", digits=4),
    Axis("same_top1", "%", 100.0), Axis("flips", "%", 100.0))}
COST = {axis.key: axis for axis in (
    Axis("tpot_ms", "ms", digits=2), Axis("ttft_ms", "ms"), Axis("out_tok_s", "tok/s"),
    Axis("size_bytes", "MB", 1e-6), Axis("peak_memory_bytes", "MB", 1e-6))}


def usable(table: pandas.DataFrame, axes: Mapping[str, Axis]) -> list[Axis]:
    """The axes for which at least one engine has a figure."""
    return [axis for axis in axes.values() if axis.key in table and table[axis.key].notna().any()]

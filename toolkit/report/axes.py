"""The metrics that can stand on an axis or in a comparison: title, unit, direction, and how they are written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True, slots=True)
class Axis:
    """A metric that can stand on an axis. ``scale`` turns the stored unit into the shown one."""

    key: str
    title: str
    unit: str
    lower_is_better: bool
    scale: float = 1.0
    digits: int = 1

    @property
    def heading(self) -> str:
        better = "lower is better" if self.lower_is_better else "higher is better"
        return f"{self.title}{f', {self.unit}' if self.unit else ''}  ·  {better}"


QUALITY = {axis.key: axis for axis in (
    Axis("delta_nll", "ΔNLL", "nats/token", True, digits=4),
    Axis("accuracy", "Accuracy", "%", False, 100.0),
    Axis("kl_mean", "KL from unquantized", "nats/token", True, digits=4),
    Axis("same_top1", "Same most probable token", "%", False, 100.0),
    Axis("flips", "Answers that changed", "%", True, 100.0))}
COST = {axis.key: axis for axis in (
    Axis("tpot_ms", "Time per token", "ms", True),
    Axis("ttft_ms", "Time to first token", "ms", True),
    Axis("out_tok_s", "Output", "tok/s", False),
    Axis("size_bytes", "Engine size", "MB", True, 1e-6),
    Axis("peak_memory_bytes", "Peak memory", "MB", True, 1e-6))}


def usable(table: pandas.DataFrame, axes: Mapping[str, Axis]) -> list[Axis]:
    """The axes for which at least one engine has a figure."""
    return [axis for axis in axes.values() if axis.key in table and table[axis.key].notna().any()]

"""What a bound Op of the CPU backend is: a function of a list of values and the step's context."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from engines.kernels.cpu.attention import AttentionPlan
from engines.program import Op, Program, reads, writes
from engines.runtime.batch import Batch

Values = list[Any]


@dataclass(frozen=True, slots=True)
class StepContext:
    """What all layers of one step share: rotations by whether they are local, attention plans by window."""

    batch: Batch
    rotary: dict[bool, tuple[torch.Tensor, torch.Tensor]]
    attention: dict[int, AttentionPlan]


Step = Callable[[Values, StepContext], None]


class Places:
    """Names of values -> places in the list, reused after the last reader."""

    def __init__(self, program: Program) -> None:
        self._last = {name: index for index, op in enumerate(program.ops) for name in (*writes(op), *reads(op))}
        self._place: dict[str, int] = {}
        self._free: list[int] = []
        self.count = 0

    def of(self, name: str) -> int:
        if name not in self._place:
            if self._free:
                self._place[name] = self._free.pop()
            else:
                self._place[name] = self.count
                self.count += 1
        return self._place[name]

    def retire(self, index: int, op: Op) -> None:
        """Free the places of values whose last use was the Op at ``index``."""
        for name in {*reads(op), *writes(op)}:
            if self._last[name] == index:
                self._free.append(self._place[name])

"""Steps under way on a device: the host's buffers that their tokens arrive in, and how they are read."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from engines.request import TokenLogprob
from engines.runtime.cuda.arena import Arena
from engines.runtime.cuda.record import HostRecord
from engines.runtime.sampler import Fault
from engines.runtime.sequence import Sequence

Choice = tuple[Sequence, int | Fault, TokenLogprob | None]


@dataclass(slots=True)
class Pending:
    """A launched step. ``result`` waits for it."""

    samplers: list[Sequence | None]
    tokens: np.ndarray
    logprobs: np.ndarray
    event: torch.cuda.Event | None
    tops: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    faults: dict[int, Fault] = field(default_factory=dict)

    def result(self) -> list[Choice]:
        """The next token of every sequence that got one; a Fault where the logits are not numbers."""
        if self.event is not None:
            self.event.synchronize()
        found: list[Choice] = []
        for index, sequence in enumerate(self.samplers):
            if sequence is None:
                continue
            token = int(self.tokens[index])
            if token < 0 or index in self.faults:
                fault = self.faults.get(index) or Fault(
                    f"the logits at position {len(sequence.tokens)} are not finite")
                found.append((sequence, fault, None))
                continue
            found.append((sequence, token, self._logprob(index, token, sequence)))
        return found

    def _logprob(self, index: int, token: int, sequence: Sequence) -> TokenLogprob | None:
        if sequence.params.logprobs is None:
            return None
        top: dict[int, float] = {}
        if index in self.tops:
            values, ids = self.tops[index]
            top = dict(zip(ids.tolist(), values.tolist(), strict=True))
        return TokenLogprob(token_id=token, logprob=float(self.logprobs[index]), top=top)


class Ring:
    """Host buffers of steps under way: one more than can be in flight."""

    def __init__(self, arena: Arena, pinned: bool, count: int) -> None:
        samples = arena.layout.samples
        self._records = [HostRecord(arena.layout, pinned) for _ in range(count)]
        self._tokens = [torch.zeros(samples, dtype=torch.int32, pin_memory=pinned) for _ in range(count)]
        self._logprobs = [torch.zeros(samples, dtype=torch.float32, pin_memory=pinned) for _ in range(count)]
        self._events: list[torch.cuda.Event | None] = [torch.cuda.Event() if pinned else None for _ in range(count)]
        self._at = 0

    def next(self) -> tuple[HostRecord, torch.Tensor, torch.Tensor, torch.cuda.Event | None]:
        self._at = (self._at + 1) % len(self._records)
        event = self._events[self._at]
        if event is not None:
            event.synchronize()
        return self._records[self._at], self._tokens[self._at], self._logprobs[self._at], event

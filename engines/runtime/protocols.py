"""What the loop asks of whatever runs its chunks: a CPU's runner, a GPU's, the interpreter's."""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from typing import Protocol, runtime_checkable

from engines.request import PromptScore, TokenLogprob
from engines.runtime.choices import Choices, Part
from engines.runtime.sampler import Fault
from engines.runtime.scheduler import Chunk
from engines.runtime.sequence import Sequence


class Launched(Protocol):
    """A step under way."""

    def result(self) -> Ordered[tuple[Sequence, int | Fault, TokenLogprob | None]]:
        """Wait for it; the next token, or the fault, of every sequence that was to get one."""
        ...


class Runner(Protocol):
    """What runs chunks: ``launch`` starts a step, advances ``Sequence.computed`` and fills prompt scores; ``parts`` are
    the launches that it would have a step be.

    ``adjusts_logits``: penalties, bias, grammars and min-p are honoured; elsewhere requests with them are refused.
    """

    lookahead: int
    adjusts_logits: bool

    def parts(self, chunks: Ordered[Chunk]) -> Ordered[Ordered[Chunk]]: ...

    def launch(self, chunks: Ordered[Chunk]) -> Launched: ...


@runtime_checkable
class ChoiceRunner(Protocol):
    """A runner that computes a context once for all its continuations."""

    def score_choices(self, questions: Ordered[Choices], parts: Ordered[Ordered[Part]]
                      ) -> list[list[PromptScore]]: ...

"""Mesh: which rank of how many an engine's process is. Passed in, never global.

One rank for now: a spec with more is refused in words, before anything is built.
"""

from __future__ import annotations

from dataclasses import dataclass

from engines.errors import EngineError


@dataclass(frozen=True, slots=True)
class Mesh:
    """``tp`` ranks share every layer, ``pp`` ranks follow one another; ``rank`` = pp_rank * tp + tp_rank."""

    tp: int
    pp: int
    rank: int

    @classmethod
    def single(cls, tp: int, pp: int) -> Mesh:
        """The only rank there is; EngineError when more are asked for."""
        if (tp, pp) != (1, 1):
            raise EngineError(f"tp={tp}, pp={pp} asks for {tp * pp} ranks, but engines run on one",
                              "Leave tp and pp at 1.")
        return cls(1, 1, 0)

    @property
    def folder(self) -> str:
        """Where this rank's weights lie in an engine."""
        return f"weights/rank{self.rank}"

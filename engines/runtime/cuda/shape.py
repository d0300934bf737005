"""A step's shape, and what an Op becomes when it is bound: a function of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shape:
    """A step's shape: ``tokens`` in all (padded), of which the first rows are ``decodes`` (a bucket, 0: none), then
    ``prefills`` rows from row ``decodes`` on, none of more than ``longest`` new tokens. ``whole``: each of those begins
    its sequence, so that all the keys it sees are this step's. ``long``: attention of the decoding rows as it is best
    for long contexts (``Configs.long_from``)."""

    tokens: int
    decodes: int = 0
    prefills: int = 0
    longest: int = 0
    whole: bool = False
    long: bool = False

    @property
    def rows(self) -> int:
        return self.decodes + self.prefills


Run = Callable[[Shape], None]


@dataclass(frozen=True, slots=True)
class Bound:
    """A bound Op. Two of one ``kind`` launch the same kernel variants, on other tensors."""

    kind: str
    run: Run

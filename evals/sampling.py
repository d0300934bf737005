"""Which items, in which order, in which split: decided by hashes, never by the order of a file.

Items are never "the first N of the file": public sets are sorted in ways that make their head easier or harder (the
first 200 GSM8K questions score .68 where the whole scores .642). ``shuffled`` sorts by sha256(seed, id), which needs no
random state, does not depend on the order of the file, and *nests*: the first 200 of a look are also the first 200 of
the next look at 400, which the sequential gate relies on.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Protocol, TypeVar

from evals.errors import DataError


class _HasId(Protocol):
    @property
    def id(self) -> str: ...


class _HasTask(_HasId, Protocol):
    @property
    def task(self) -> str: ...


Identified = TypeVar("Identified", bound=_HasId)
Tasked = TypeVar("Tasked", bound=_HasTask)


def part_of(document: str, shares: Mapping[str, int]) -> str:
    """The split a document belongs to, by hash: {"choose": 1, "gate": 4} sends one in five to ``choose``.

    It depends on the document alone, so data that is prepared again, in another order or with more documents, keeps
    every document where it was.
    """
    if not shares or any(share <= 0 for share in shares.values()):
        raise DataError(f"shares {dict(shares)} cannot split anything", "Give each split a positive share.")
    point = int.from_bytes(hashlib.sha256(b"split\0" + document.encode()).digest()[:8], "big") % sum(shares.values())
    for name, share in shares.items():
        if point < share:
            return name
        point -= share
    raise AssertionError("shares were exhausted")


def shuffled(items: Iterable[Identified], seed: int) -> list[Identified]:
    """Seeded order that depends on ids only and nests: a longer sample begins with the shorter one."""
    return sorted(items, key=lambda item: hashlib.sha256(f"{seed}\0{item.id}".encode()).digest())


def in_turn(items: Iterable[Tasked], seed: int) -> list[Tasked]:
    """The tasks' items in turn, each task spread evenly over the whole; within a task as ``shuffled``.

    A prefix holds every task by its share of the items, not by chance. Where the tasks have equally many (all drawn up
    to one limit) it is also the same prefix whatever the limit: a gate's look at 200 stays what it was when more is
    drawn. A task that has run out is spread more thinly, and then only its part of an earlier look changes.
    """
    ordered = shuffled(items, seed)
    sizes, turn = Counter(item.task for item in ordered), Counter[str]()
    ranked = []
    for item in ordered:
        ranked.append(((turn[item.task] + 0.5) / sizes[item.task], item))
        turn[item.task] += 1
    return [item for _, item in sorted(ranked, key=lambda one: one[0])]


def sample(items: Iterable[Identified], limit: int | None, seed: int) -> list[Identified]:
    """``limit`` random items (all when None). More than there are is an error, not a silent shortfall."""
    ordered = shuffled(items, seed)
    if limit is None:
        return ordered
    if limit < 1 or limit > len(ordered):
        raise DataError(f"{limit} items were asked for and {len(ordered)} exist",
                        f"Ask for between 1 and {len(ordered)}, or prepare more data.")
    return ordered[:limit]

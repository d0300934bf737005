"""BlockPool: who owns which block of the paged KV cache.

A block holds ``block_size`` tokens of one sequence in every layer. Every block is free or owned by exactly one
sequence: ``check`` proves free + used = all, and is called after every step in tests and whenever the loop is idle.

A sequence is given the block after its last one when that is free, so that a lone sequence's keys stay contiguous and
the CPU can attend on a view instead of a copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from engines.errors import EngineError


class BlockPool:
    """``num_blocks`` blocks of ``block_size`` tokens."""

    __slots__ = ("_free", "block_size", "num_blocks")

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        #: Free block ids as an ordered set (a dict keeps insertion order and removes by key in O(1)).
        self._free: dict[int, None] = dict.fromkeys(range(num_blocks))

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return self.num_blocks - len(self._free)

    def blocks_for(self, tokens: int) -> int:
        """How many blocks hold that many tokens."""
        return -(-tokens // self.block_size)

    def grow(self, table: list[int], tokens: int) -> bool:
        """Extend a block table so that it holds ``tokens`` tokens. False, and nothing taken, when too few are free."""
        missing = self.blocks_for(tokens) - len(table)
        if missing > len(self._free):
            return False
        for _ in range(missing):
            table.append(self._take(table[-1] + 1 if table else -1))
        return True

    def _take(self, preferred: int) -> int:
        if preferred not in self._free:
            preferred = next(iter(self._free))
        del self._free[preferred]
        return preferred

    def release(self, table: list[int]) -> None:
        """Give all blocks of a table back and empty it."""
        for block in table:
            if block in self._free:
                raise EngineError(f"block {block} was given back twice", "This is a bug in the scheduler; report it.")
            self._free[block] = None
        table.clear()

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Prove that every block is free or in exactly one of ``tables``; EngineError says which is not."""
        owned = [block for table in tables for block in table]
        if len(set(owned)) != len(owned):
            raise EngineError("a KV block belongs to two sequences", "This is a bug in the scheduler; report it.")
        if set(owned) & self._free.keys() or len(owned) + len(self._free) != self.num_blocks:
            raise EngineError(f"{len(owned)} owned + {len(self._free)} free of {self.num_blocks} KV blocks",
                              "A block is lost or owned while free: a bug in the scheduler; report it.")

    def defragment(self) -> None:
        """Order the free blocks by number (called when nothing is used): new sequences are contiguous again."""
        self._free = dict.fromkeys(sorted(self._free))

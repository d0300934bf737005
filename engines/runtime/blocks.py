"""BlockPool: who owns which block of the paged KV cache, and what unowned blocks still hold.

A block holds ``block_size`` tokens of a sequence in every layer. It is

    free     nothing of use in it
    used     in one sequence's table, or in several that begin alike (``owners`` counts them)
    cached   full, in nobody's table, kept for a sequence that will begin alike; taken back least recently used first

and ``check`` proves free + used + cached = all, and every count, after every step in tests and whenever the loop is
idle.

**Prefix reuse.** A full block gets a key: sha256 over the parent block's key and its own token ids; the first parent is
a hash of the engine's digest and the request's salt. So a key says everything that the block's keys and values depend
on, and two tenants with different salts never share (nor learn from times what another asked). A found block is
compared token by token as well: a collision, or a bug, gives a miss and not another's text.

Only full blocks are shared, and nobody writes into them: a sequence writes from its own first uncomputed position on,
which lies behind them.

A sequence is given the block after its last one when that is free, so that a lone sequence's keys stay contiguous and
the CPU can attend on a view instead of a copy.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from engines.errors import EngineError

#: Pools up to this many blocks are proven block by block and kept in order whenever nothing runs.
SMALL = 4096
_BUG = "This is a bug in the scheduler; report it."


def root_key(engine_digest: str, salt: str) -> bytes:
    """The parent of every first block: 32 bytes of engine and salt (each preceded by its length)."""
    parts = [engine_digest.encode(), salt.encode()]
    return hashlib.sha256(b"".join(len(part).to_bytes(8, "little") + part for part in parts)).digest()


def block_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The 256-bit key of a full block behind ``parent``."""
    return hashlib.sha256(parent + array("q", tokens).tobytes()).digest()


@dataclass(frozen=True, slots=True)
class Kept:
    """What a full block holds: its key, the key before it, and its tokens, for the comparison on a hit."""

    key: bytes
    parent: bytes
    tokens: tuple[int, ...]


class BlockPool:
    """``num_blocks`` blocks of ``block_size`` tokens. ``reuse`` False keeps nothing of ended sequences."""

    __slots__ = ("_by_key", "_cached", "_free", "_kept", "block_size", "evictions", "num_blocks", "owners", "reuse")

    def __init__(self, num_blocks: int, block_size: int, *, reuse: bool = True) -> None:
        self.num_blocks, self.block_size, self.reuse = num_blocks, block_size, reuse
        #: Block ids as ordered sets (a dict keeps insertion order and removes by key in O(1)).
        self._free: dict[int, None] = dict.fromkeys(range(num_blocks))
        self._cached: dict[int, None] = {}
        self._kept: dict[int, Kept] = {}
        self._by_key: dict[bytes, int] = {}
        #: How many tables hold a block.
        self.owners = [0] * num_blocks
        self.evictions = 0

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def cached(self) -> int:
        return len(self._cached)

    @property
    def available(self) -> int:
        """Blocks that can be given away: free and cached."""
        return len(self._free) + len(self._cached)

    @property
    def used(self) -> int:
        return self.num_blocks - self.available

    def blocks_for(self, tokens: int) -> int:
        """How many blocks hold that many tokens."""
        return -(-tokens // self.block_size)

    def grow(self, table: list[int], tokens: int) -> bool:
        """Extend a block table so that it holds ``tokens`` tokens. False, and nothing taken, when too few are left."""
        missing = self.blocks_for(tokens) - len(table)
        if missing > self.available:
            return False
        for _ in range(missing):
            table.append(self._take(table[-1] + 1 if table else -1))
        return True

    def _take(self, preferred: int) -> int:
        if not self._free:
            self._evict(next(iter(self._cached)))
        if preferred not in self._free:
            preferred = next(iter(self._free))
        del self._free[preferred]
        self.owners[preferred] = 1
        return preferred

    def _evict(self, block: int) -> None:
        del self._cached[block]
        del self._by_key[self._kept.pop(block).key]
        self._free[block] = None
        self.evictions += 1

    def release(self, table: list[int]) -> None:
        """Give all blocks of a table back and empty it; the last block is the first to be taken back."""
        for block in reversed(table):
            if self.owners[block] == 0:
                raise EngineError(f"block {block} was given back twice", _BUG)
            self.owners[block] -= 1
            if self.owners[block] == 0:
                (self._cached if block in self._kept else self._free)[block] = None
        table.clear()

    def find(self, keys: Sequence[bytes], parent: bytes, tokens: Sequence[int]) -> list[int]:
        """The blocks that hold the longest beginning of ``tokens``, given the keys of its full blocks."""
        found: list[int] = []
        for index, key in enumerate(keys):
            block = self._by_key.get(key)
            if block is None:
                break
            kept, start = self._kept[block], index * self.block_size
            if kept.parent != parent or kept.tokens != tuple(tokens[start:start + self.block_size]):
                break
            found.append(block)
            parent = key
        return found

    def idle_among(self, blocks: Iterable[int]) -> int:
        """How many of the blocks nobody owns now: sharing them takes that many from what is available."""
        return sum(1 for block in blocks if self.owners[block] == 0)

    def share(self, table: list[int], blocks: Iterable[int]) -> None:
        """Put kept blocks at the beginning of an empty table."""
        for block in blocks:
            if self.owners[block] == 0:
                del self._cached[block]
            self.owners[block] += 1
            table.append(block)

    def keep(self, block: int, kept: Kept) -> None:
        """Say what a used, full block holds. The first block of a key is the one that is found."""
        if self.reuse and kept.key not in self._by_key and block not in self._kept:
            self._by_key[kept.key] = block
            self._kept[block] = kept

    def forget(self) -> int:
        """Free every cached block; returns how many there were. What is in use stays, and stays findable."""
        count = len(self._cached)
        for block in list(self._cached):
            self._evict(block)
        self.evictions -= count
        return count

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Prove who owns what: every block is free, cached, or in as many tables as it has owners."""
        counts = [0] * self.num_blocks
        for table in tables:
            if len(set(table)) != len(table):
                raise EngineError("a KV block is twice in one table", _BUG)
            for block in table:
                counts[block] += 1
        if wrong := [block for block in range(self.num_blocks) if counts[block] != self.owners[block]]:
            raise EngineError(f"KV block {wrong[0]} is in {counts[wrong[0]]} tables and has {self.owners[wrong[0]]} "
                              "owners", _BUG)
        owned = {block for block, count in enumerate(counts) if count}
        if (owned & self._free.keys() or owned & self._cached.keys() or self._free.keys() & self._cached.keys()
                or len(owned) + len(self._free) + len(self._cached) != self.num_blocks):
            raise EngineError(f"{len(owned)} owned + {len(self._free)} free + {len(self._cached)} cached of "
                              f"{self.num_blocks} KV blocks", "A block is lost or counted twice: " + _BUG)
        if self._cached.keys() - self._kept.keys() or self._free.keys() & self._kept.keys() or (
                {kept.key: block for block, kept in self._kept.items()} != self._by_key):
            raise EngineError("the prefix cache names blocks that it does not hold", _BUG)
        if shared := [block for block in owned if counts[block] > 1 and block not in self._kept]:
            raise EngineError(f"KV block {shared[0]} is shared and may still be written", _BUG)

    def settle(self) -> None:
        """Called when nothing is used: prove it, and order the free blocks, so that new sequences are contiguous again.

        A pool of many thousand blocks (a GPU's, whose kernels follow the table anyway) stays in the order it has and is
        proven by its counts alone: a few tenths of a millisecond instead of ten in the last token's way.
        """
        if self.num_blocks <= SMALL:
            self.check(())
            self._free = dict.fromkeys(sorted(self._free))
        elif self.available != self.num_blocks:
            raise EngineError(f"nothing runs, but {self.num_blocks - self.available} of {self.num_blocks} KV blocks "
                              "are not free", "A block is lost: " + _BUG)

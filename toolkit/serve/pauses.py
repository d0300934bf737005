"""Garbage is collected when nothing is under way.

A collection visits every id of every prompt of every request under way, and stops all of them: with 256 at once, some
20 ms a burst in which the device waits for requests and clients wait for answers. Almost all of what requests leave
needs no collector. So while there is work one is a last resort, and what is due is done between requests.
"""

from __future__ import annotations

import gc

#: New objects, less those that went again, after which a busy process collects: more than some hundred requests hold.
BUSY = 50_000
#: How long nothing must be under way: the next requests of who has just been answered do not wait for a collection.
AFTER_S = 0.02
#: After how many an idle one does. (Python's own for all.)
IDLE = 700


def begin() -> None:
    """All that was loaded stays: no collection looks through it (tens of milliseconds)."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(BUSY, 10, 10)


def rest() -> None:
    """Nothing is under way: collect, if that is due."""
    if gc.get_count()[0] >= IDLE:
        gc.collect()

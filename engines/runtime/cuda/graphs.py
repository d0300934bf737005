"""CUDA graphs of whole steps: a step that Python launches as 300 kernels becomes one launch of a few microseconds.

    decode (b)              prepare, attention plan, all layers, head, sampling for b rows
    body (b)                the same without head and sampling, for rows whose logits are adjusted in between
    decode, body (b, long)  the same for few rows of which one has a long context, where other attention is faster
    prefill (tokens, rows)  prepare and all layers for short prompts, where launching would take longer than computing
    prompt (tokens, rows)   the same for whole prompts, whose attention needs no cache (see ``ops``)
    head (b)                the output layer and sampling after a prefill or mixed step

A step takes the smallest graph that holds it and pads: padding rows have length 0 and write nothing to the cache.
Graphs are captured largest first into one shared memory pool, so that later ones reuse what earlier ones took; they run
one at a time on one stream, which is what makes sharing safe. Programmatic dependent launches inside are kept by the
capture.

Everything that a graph touches is static (``arena``); it holds no memory of its own but what torch's own operators
allocate inside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

DECODE = (1, 2, 4, 8, 16, 32, 64, 128, 256)
#: Python launches a step in some 40 ms (an H200's host); from 4096 tokens on the device takes longer than that. Closest
#: from 1024 to 2048, which is what a burst's prompts come to while others are computed: 256 tokens of padding are 3 ms.
PREFILL_TOKENS = (16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1280, 1536, 1792, 2048, 3072, 4096)
PREFILL_ROWS = (1, 8, 32)
#: Where reading keys from the cache begins to cost something.
PROMPT_TOKENS = tuple(size for size in PREFILL_TOKENS if size >= 512)


def up_to(sizes: Iterable[int], most: int) -> tuple[int, ...]:
    """The sizes below ``most``, and ``most`` itself."""
    return (*(size for size in sizes if size < most), most)


def smallest(sizes: Iterable[int], wanted: int) -> int | None:
    """The smallest of ascending sizes that holds ``wanted``; None when none does."""
    return next((size for size in sizes if size >= wanted), None)


def decode_sizes(max_batch_size: int) -> tuple[int, ...]:
    """Batch sizes of decode graphs. The largest is a multiple of 4: prefill rows follow decode rows in a mixed step,
    and pointers to them must stay 16-byte aligned, as every other launch's are."""
    return up_to(DECODE, max_batch_size if max_batch_size == 1 else -(-max_batch_size // 4) * 4)


@dataclass(frozen=True, slots=True, order=True)
class Key:
    """Which step a graph is: ``kind`` decode, body, prefill, prompt or head, its tokens and rows; ``long``: see
    ``Shape``."""

    kind: str
    tokens: int
    rows: int
    long: bool = False


def keys(max_batch_size: int, max_num_tokens: int, has_long: Callable[[int], bool] = lambda rows: False) -> list[Key]:
    """Every graph of an engine with these limits, largest first. ``has_long``: whether decoding rows have a second
    one."""
    sizes = decode_sizes(max_batch_size)
    found = [Key(kind, b, b) for kind in ("decode", "body", "head") for b in sizes]
    found += [Key(kind, tokens, rows) for kind, sizes in (("prefill", PREFILL_TOKENS), ("prompt", PROMPT_TOKENS))
              for tokens in sizes if tokens <= max_num_tokens
              for rows in PREFILL_ROWS if rows <= min(tokens, max_batch_size)]
    found += [Key(kind, b, b, long=True) for kind in ("decode", "body") for b in sizes if has_long(b)]
    return sorted(found, key=lambda key: (-key.tokens, -key.rows, key.kind))


class Graphs:
    """Captured steps. On a device without graphs (the interpreter) ``replay`` says False and the caller launches."""

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self._stream = stream
        self._graphs: dict[Key, torch.cuda.CUDAGraph] = {}
        self._pool = None if stream is None else torch.cuda.graph_pool_handle()

    def __len__(self) -> int:
        return len(self._graphs)

    def has(self, key: Key) -> bool:
        return key in self._graphs

    def capture(self, key: Key, run: Callable[[], None]) -> None:
        """Record what ``run`` launches. Everything it launches must have been compiled and run before."""
        if self._stream is None:
            return
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool)
            try:
                run()
            finally:
                graph.capture_end()
        self._graphs[key] = graph

    def replay(self, key: Key) -> bool:
        """Launch the graph on the current stream; False when there is none."""
        graph = self._graphs.get(key)
        if graph is None:
            return False
        graph.replay()
        return True

    def clear(self) -> None:
        """Forget all graphs and give their memory back."""
        self._graphs.clear()
        if self._stream is not None:
            self._stream.synchronize()
            torch.cuda.empty_cache()
            self._pool = torch.cuda.graph_pool_handle()

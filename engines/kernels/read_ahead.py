"""Weights on their way while attention waits: its idle programs ask for what the next linears will read.

Decode attention of few short sequences is all latency: a handful of programs, each a chain of dependent loads, and for
some microseconds a layer the memory does nothing, though every byte of the next weights is known. The grid of decode
attention is fixed (``attention_plan``), so most of its programs find no item then. Before returning they spread the
first bytes of the output projection and of gate_up over themselves and ask for them to be brought into L2
(``cp.async.bulk.prefetch``: nothing waits for it, no register holds it, no result depends on it). Where contexts are
long or many no program is idle, and nothing is asked for.

What is asked for first stands in the memory's queue before attention's own loads: on an H200 (int8, one sequence, four
layers) 8 MiB at once took 278 us, 16 MiB 282, 24 MiB 283. With a DELAY (ns) the idle programs wait for the qkv linear
and then a little: by then the first keys and values are under way.

Hopper and later; the launcher gives no bytes elsewhere, and none where kernels are interpreted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from engines.kernels.impl import DeviceFacts, KernelConfig
from engines.kernels.jit import INTERPRETED, gdc_wait

CHUNK = 2048
_CHUNK = tl.constexpr(CHUNK)


@triton.jit
def _ask(ptr, chunks, mine, programs, THREADS: tl.constexpr) -> None:
    """Chunks ``mine``, ``mine + programs`` ... of _CHUNK bytes, one a thread (the copy engine takes them in turn)."""
    for turn in range(0, chunks, programs * THREADS):
        chunk = turn + mine + programs * tl.arange(0, THREADS)
        pointers = ptr.to(tl.int64) + chunk.to(tl.int64) * _CHUNK
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p cp.async.bulk.prefetch.L2.global [$1], $3; mov.b32 $0, 0; }",
            "=r,l,r,n", [pointers, (chunk < chunks).to(tl.int32), _CHUNK], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def read_ahead(next_ptr, next_chunks, after_ptr, after_chunks, mine, programs, THREADS: tl.constexpr,
               DELAY: tl.constexpr, PDL: tl.constexpr) -> None:
    """``mine``: this program's number among the ``programs`` that have nothing to do. DELAY: ns after PDL's wait."""
    if DELAY > 0:
        gdc_wait(PDL)
        tl.inline_asm_elementwise("nanosleep.u32 $1; mov.b32 $0, 0;", "=r,n", [DELAY], dtype=tl.int32, is_pure=False,
                                  pack=1)
    _ask(next_ptr, next_chunks, mine, programs, THREADS)
    _ask(after_ptr, after_chunks, mine, programs, THREADS)


@dataclass(frozen=True, slots=True)
class ReadAhead:
    """The next weights in the order of their use, the most bytes of them to ask for, and after how many ns."""

    weights: Sequence[torch.Tensor]
    most: int
    delay: int = 0

    def chunks(self) -> tuple[int, int]:
        """Whole chunks of the first and the second weight."""
        left, found = self.most, [0, 0]
        for index, weight in enumerate(self.weights[:2]):
            found[index] = min(left, weight.nbytes) // CHUNK
            left -= min(left, weight.nbytes)
        return found[0], found[1]


def arguments(ahead: ReadAhead | None, config: KernelConfig, unused: torch.Tensor
              ) -> tuple[tuple[torch.Tensor, int, torch.Tensor, int], dict[str, int]]:
    """A launch's (next_ptr, next_chunks, after_ptr, after_chunks) and constexprs; ``unused`` fills absent pointers."""
    if ahead is None or INTERPRETED or not config.pdl or not any(ahead.chunks()):
        return (unused, 0, unused, 0), {"AHEAD": 0, "THREADS": 0, "DELAY": 0}
    first, second = ahead.chunks()
    return ((ahead.weights[0], first, ahead.weights[1] if second else unused, second),
            {"AHEAD": 1, "THREADS": 32 * config.num_warps, "DELAY": ahead.delay})


def candidates(device: DeviceFacts, batch: int = 1) -> Sequence[KernelConfig]:
    """How much to ask for, in MiB, and when; the first is the default."""
    if device.capability < 90:
        return [KernelConfig.of("bytes", MIB=0, DELAY=0)]
    found = [KernelConfig.of("bytes", MIB=most, DELAY=delay)
             for most, delay in ((8, 0), (8, 500), (16, 500), (32, 500), (16, 1500), (4, 0), (0, 0))]
    return found if batch <= 4 else found[::-1]

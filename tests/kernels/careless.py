"""A kernel as nobody should write it, for test_sass: codes widened in registers, and nobody waits for their product."""

from __future__ import annotations

import triton
import triton.language as tl

from engines.kernels.jit import settled


@triton.jit
def widened_product(w_desc, x_desc, out_ptr, steps, SETTLED: tl.constexpr) -> None:
    acc = tl.zeros((64, 16), tl.float32)
    for step in tl.range(0, steps, num_stages=4):
        w = w_desc.load([0, step * 128])
        x = x_desc.load([0, step * 128]).T
        acc = tl.dot(w.to(x.dtype), x, acc)
        if SETTLED:
            acc = settled(acc)
    tl.store(out_ptr + tl.arange(0, 64)[:, None] * 16 + tl.arange(0, 16)[None, :], acc)

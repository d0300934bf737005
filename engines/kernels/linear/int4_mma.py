"""4-bit linears for up to 32 tokens: weights go from memory straight into the tensor core's registers.

    out[t, row] = sum over groups g of  scale[row, g] * sum over k in g of  q[row, k] * x[t, k]

A general matrix kernel copies a weight tile to shared memory, reads it back in the order the matrix instruction wants,
widens it, and waits at every group for the sum to be scaled: at 4 bits a weight that, not the memory, sets the pace.
Here the weights already lie in register order (``int4_layout``), so nothing is shared and nothing waits:

    load      16 bytes a lane, coalesced: a 16 x 64 block of weights per warp
    widen     A16: 3 shifts, 4 and-or, 4 fused multiply-adds per 8 weights      A8: 1 shift, 2 and, per 8 weights
    multiply  ``mma.m16n8k16`` bf16/fp16 -> fp32                                ``mma.m16n8k32`` int8 -> int32
    scale     at the end of a group: 4 multiply-adds per lane into the running fp32 sum

The instruction's third side is 8 tokens wide: one token costs what eight do, and column t of the result never sees
another column. So a row's bits do not depend on how many rows are with it (while NT, RT, NUM_WARPS stand).

Work split. A program owns RT tiles of 16 rows; its warps take runs of UNIT (2 or 4) groups in turn (run i to warp i
mod warps), the next run's weights being loaded while the current one is used, and add up through shared memory at the
end, always in the same order. With LOOP the program goes on to further tiles, otherwise it ends. With PDL the first
weights are asked for before the wait for the previous kernel. What then remains is latency, so it is kept short: STAGED
brings all activations of a step in by one load each and spreads them through shared memory, and the groups of a run are
summed side by side, because matrix instructions on the same sum wait for each other.

Written in Gluon, Triton's dialect with explicit layouts: which lane holds which word *is* the algorithm. It runs on
sm_80 and later; elsewhere, and in the interpreter, ``int4_dot`` reads the same storage.
"""

# Device code grows tuples by +; it knows no unpacking, and their types grow with them.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment"

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from engines.kernels.linear.int4_asm import (
    mma_asm,
    mma_registers,
    scaled_asm,
    scaled_registers,
    widen_asm,
    widen_registers,
)
from engines.kernels.linear.int4_stage import load_step, load_step_scales, spread_scales, spread_step

__all__ = ["MAX_TOKENS", "int4_mma"]

MAX_TOKENS = 32
_FP32 = tl.constexpr(2)


@gluon.jit
def _load_run(w_ptr, s_ptr, tile, run, live, lane, j, tiles, GROUPS: gl.constexpr, GROUP: gl.constexpr,
              UNIT: gl.constexpr, RT: gl.constexpr, SCALE: gl.constexpr):
    """A run's words (4 a lane and chunk) and scale words (1 or 2 tensors per tile) into registers."""
    words = ()
    scales = ()
    PER_RUN: gl.constexpr = UNIT * GROUP // 64
    for r in gl.static_range(RT):
        at = gl.minimum(tile + r, tiles - 1)
        w = w_ptr + (at * (GROUPS * GROUP // 64) + run * PER_RUN) * 128 + (lane * 4 + j)
        for q in gl.static_range(PER_RUN):
            words = words + (gl.load(w + q * 128, mask=live, other=0, cache_modifier=".cg"),)
        s = s_ptr + lane // 4 * 4
        if SCALE == _FP32:
            for i in gl.static_range(UNIT // 2):
                s_at = s + (at * (GROUPS // 2) + run * (UNIT // 2) + i) * 32
                scales = scales + (gl.load(s_at + j, mask=live, other=0),)
        else:
            s_at = s + (at * (GROUPS // 4) + run // (4 // UNIT)) * 32 + run % (4 // UNIT) * UNIT
            scales = scales + (gl.load(s_at + j % UNIT, mask=live, other=0),)
    return words, scales


@gluon.jit
def _load_x(x_ptr, m, k0, lane, j, HALF: gl.constexpr, K: gl.constexpr, NT: gl.constexpr, A8: gl.constexpr,
            EVEN: gl.constexpr):
    """Activations of 32 inputs from k0 (A16), or of 64 (A8), for each tile of 8 tokens: 4 words a lane."""
    loaded = ()
    for t in gl.static_range(NT):
        token = gl.minimum(lane // 4 + 8 * t, m - 1)
        if A8:
            inner = 8 * (j // 2) + 2 * (lane % 4) + j % 2
            x = x_ptr + (token * (K // 4) + k0 // 4 + inner)
            inside = k0 + 32 * (j // 2) < K
        else:
            x = x_ptr + (token * (K // 2) + k0 // 2 + (16 * HALF + 4 * j + lane % 4))
            inside = k0 + 32 * HALF < K
        if EVEN:
            loaded = loaded + (gl.load(x, mask=(lane // 4 + 8 * t < m) & (j >= 0)),)  # other columns may hold anything
        else:
            loaded = loaded + (gl.load(x, mask=inside & (j >= 0), other=0),)
    return loaded


@gluon.jit
def _half(d, w, x, HALF: gl.constexpr, RT: gl.constexpr, NT: gl.constexpr, A8: gl.constexpr, FP16: gl.constexpr):
    """Group sums d (RT * NT) += 32 inputs of the weights w (RT words tensors) times x (NT)."""
    out = ()
    for r in gl.static_range(RT):
        if A8:
            a = gl.inline_asm_elementwise(widen_asm(HALF, A8, FP16), widen_registers(A8), [w[r]], dtype=gl.int32,
                                          is_pure=True, pack=4)
        else:
            a, b = gl.inline_asm_elementwise(widen_asm(HALF, A8, FP16), widen_registers(A8), [w[r]],
                                             dtype=(gl.int32, gl.int32), is_pure=True, pack=4)
        for t in gl.static_range(NT):
            v = d[r * NT + t]
            if A8:
                v = gl.inline_asm_elementwise(mma_asm(HALF, A8, FP16), mma_registers(A8), [a, x[t], v], dtype=gl.int32,
                                              is_pure=True, pack=4)
            else:
                v = gl.inline_asm_elementwise(mma_asm(0, A8, FP16), mma_registers(A8), [a, x[t], v], dtype=gl.float32,
                                              is_pure=True, pack=4)
                v = gl.inline_asm_elementwise(mma_asm(1, A8, FP16), mma_registers(A8), [b, x[t], v], dtype=gl.float32,
                                              is_pure=True, pack=4)
            out = out + (v,)
    return out


@gluon.jit
def _scale_in(acc, d, scales, xs, G: gl.constexpr, UNIT: gl.constexpr, RT: gl.constexpr, NT: gl.constexpr,
              A8: gl.constexpr, SCALE: gl.constexpr):
    """acc += group G's sums d times the rows' scales (and, for A8, the tokens')."""
    out = ()
    for r in gl.static_range(RT):
        s = scales[r * (UNIT // 2) + G // 2] if SCALE == _FP32 else scales[r]
        for t in gl.static_range(NT):
            if A8:
                v = gl.inline_asm_elementwise(scaled_asm(G, SCALE, A8), scaled_registers(A8),
                                              [acc[r * NT + t], d[r * NT + t], s, xs[2 * t], xs[2 * t + 1]],
                                              dtype=gl.float32, is_pure=True, pack=4)
            else:
                v = gl.inline_asm_elementwise(scaled_asm(G, SCALE, A8), scaled_registers(A8),
                                              [acc[r * NT + t], d[r * NT + t], s], dtype=gl.float32, is_pure=True,
                                              pack=4)
            out = out + (v,)
    return out


@gluon.jit
def _load_x_scales(xs_ptr, m, run, lane, j, KG: gl.constexpr, UNIT: gl.constexpr, NT: gl.constexpr,
                   EVEN: gl.constexpr):
    """The run's activation scales (UNIT of them, four registers) of the two tokens whose columns this lane holds."""
    out = ()
    for t in gl.static_range(NT):
        for i in gl.static_range(2):
            token = gl.minimum(2 * (lane % 4) + (8 * t + i), m - 1)
            group = run * UNIT + j % UNIT
            p = xs_ptr + (token * KG + group)
            if EVEN:
                out = out + (gl.load(p),)
            else:
                out = out + (gl.load(p, mask=group < KG, other=0.0),)
    return out


@gluon.jit
def _use_run(acc, words, scales, x_ptr, xs_ptr, m, step, run, lane, j, L: gl.constexpr, THREADS: gl.constexpr,
             K: gl.constexpr, GROUP: gl.constexpr, UNIT: gl.constexpr, RT: gl.constexpr, NT: gl.constexpr,
             A8: gl.constexpr, FP16: gl.constexpr, SCALE: gl.constexpr, EVEN: gl.constexpr, STAGED: gl.constexpr):
    """acc (RT * NT tensors of 4 a lane) += one run of UNIT groups."""
    PER_RUN: gl.constexpr = UNIT * GROUP // 64
    zero = gl.full([THREADS, 4], 0, gl.int32 if A8 else gl.float32, layout=L)
    xs = ()
    NW: gl.constexpr = THREADS // 32
    WORDS: gl.constexpr = UNIT * GROUP * NW // (4 if A8 else 2)
    staged = ()
    if STAGED > 0:
        raw = load_step(x_ptr, m, step, STAGED, K, WORDS, NW, A8)
        if A8 and STAGED == 1:
            raw_scales = load_step_scales(xs_ptr, step, K // GROUP, UNIT, NW)
            staged = spread_step(raw, STAGED, WORDS, NW, L, A8)
            one = spread_scales(raw_scales, UNIT, NW, L)
            xs = (one, one)
        else:
            staged = spread_step(raw, STAGED, WORDS, NW, L, A8)
    if A8 and STAGED != 1:
        xs = _load_x_scales(xs_ptr, m, run, lane, j, K // GROUP, UNIT, NT, EVEN)
    HALVES: gl.constexpr = 1 if A8 else 2
    PARTS: gl.constexpr = GROUP // 32
    if STAGED > 0:
        sums = ((zero,) * RT,) * UNIT  # all groups at once: matrix instructions on one sum wait for each other
        for part in gl.static_range(PARTS):
            later = ()
            for g in gl.static_range(UNIT):
                w = ()
                for r in gl.static_range(RT):
                    w = w + (words[r * PER_RUN + (g * PARTS + part) // 2],)
                x = (staged[(g * PARTS + part) * HALVES // 2],)
                later = later + (_half(sums[g], w, x, (g * PARTS + part) % 2, RT, NT, A8, FP16),)
            sums = later
        for g in gl.static_range(UNIT):
            acc = _scale_in(acc, sums[g], scales, xs, g, UNIT, RT, NT, A8, SCALE)
    else:
        d = (zero,) * (RT * NT)
        x = ()
        for q in gl.static_range(PER_RUN):
            w = ()
            for r in gl.static_range(RT):
                w = w + (words[r * PER_RUN + q],)
            for half in gl.static_range(2):
                if half < HALVES:
                    x = _load_x(x_ptr, m, run * (UNIT * GROUP) + q * 64, lane, j, half, K, NT, A8, EVEN)
                d = _half(d, w, x, half, RT, NT, A8, FP16)
                if (q * 64 + half * 32 + 32) % GROUP == 0:
                    acc = _scale_in(acc, d, scales, xs, (q * 64 + half * 32) // GROUP, UNIT, RT, NT, A8, SCALE)
                    d = (zero,) * (RT * NT)
    return acc


@gluon.jit
def _store(acc, bias_ptr, y_ptr, first_row, first_token, m, n, NW: gl.constexpr, A8: gl.constexpr,
           HAS_BIAS: gl.constexpr):
    """Add the warps' partial sums of a 16 x 8 tile, in their order, and write columns < m, rows < n."""
    R: gl.constexpr = gl.BlockedLayout([NW, 1, 1], [1, 8, 4], [1, NW, 1], [0, 2, 1])  # partial sums in one thread
    y = gl.sum(gl.convert_layout(gl.reshape(acc, [NW, 32, 4]), R), 0)
    if A8:
        y = y * 0.0625
    L: gl.constexpr = y.type.layout
    lane = gl.arange(0, 32, layout=gl.SliceLayout(1, L))[:, None]
    j = gl.arange(0, 4, layout=gl.SliceLayout(0, L))[None, :]
    row = first_row + lane // 4 + 8 * (j // 2)
    token = first_token + 2 * (lane % 4) + j % 2
    if HAS_BIAS:
        y += gl.load(bias_ptr + row, mask=row < n, other=0.0).to(gl.float32)
    gl.store(y_ptr + (token * n + row), y.to(y_ptr.dtype.element_ty), mask=(token < m) & (row < n))


@gluon.jit(do_not_specialize=["m", "n", "programs"])
def int4_mma(x_ptr, xs_ptr, w_ptr, s_ptr, bias_ptr, y_ptr, m, n, programs, K: gl.constexpr, GROUP: gl.constexpr,
             NUM_WARPS: gl.constexpr, UNIT: gl.constexpr, RT: gl.constexpr, NT: gl.constexpr, A8: gl.constexpr,
             FP16: gl.constexpr, SCALE: gl.constexpr, STAGED: gl.constexpr, LOOP: gl.constexpr, HAS_BIAS: gl.constexpr,
             PDL: gl.constexpr) -> None:
    """One program: RT * 16 rows of ``y`` [m, n] for m <= 8 NT tokens (module docstring); grid (programs,).

    x [m, K] bf16/fp16 (FP16) or int8 codes with xs [m, K / GROUP]; w, s as ``int4_layout`` stores them.
    """
    L: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [NUM_WARPS, 1], [1, 0])
    GROUPS: gl.constexpr = (K + 4 * GROUP - 1) // (4 * GROUP) * 4
    RUNS: gl.constexpr = GROUPS // UNIT
    STEPS: gl.constexpr = (RUNS + NUM_WARPS - 1) // NUM_WARPS
    EVEN: gl.constexpr = (STEPS * NUM_WARPS * UNIT * GROUP) == K
    THREADS: gl.constexpr = NUM_WARPS * 32
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    x_ptr = x_ptr.to(gl.pointer_type(gl.int32), bitcast=True)
    s_ptr = s_ptr.to(gl.pointer_type(gl.int32), bitcast=True)
    thread = gl.arange(0, THREADS, layout=gl.SliceLayout(1, L))[:, None]
    j = gl.arange(0, 4, layout=gl.SliceLayout(0, L))[None, :]
    lane = thread % 32
    warp = thread // 32
    tiles = (n + 15) // 16
    tile = gl.program_id(0) * RT
    words, scales = _load_run(w_ptr, s_ptr, tile, warp, (warp + j * 0) < RUNS, lane, j, tiles, GROUPS, GROUP, UNIT, RT,
                              SCALE)
    if PDL:
        tl.extra.cuda.gdc_wait()
    zero = gl.full([THREADS, 4], 0.0, gl.float32, layout=L)
    last = tiles if LOOP else tile + 1
    for at in range(tile, last, programs * RT):
        acc = (zero,) * (RT * NT)
        for step in range(STEPS - 1):
            run = warp + step * NUM_WARPS
            ahead = run + NUM_WARPS
            next_words, next_scales = _load_run(w_ptr, s_ptr, at, ahead, (ahead + j * 0) < RUNS, lane, j, tiles, GROUPS,
                                                GROUP, UNIT, RT, SCALE)
            acc = _use_run(acc, words, scales, x_ptr, xs_ptr, m, step, run, lane, j, L, THREADS, K, GROUP, UNIT, RT, NT,
                           A8, FP16, SCALE, EVEN, STAGED)
            words = next_words
            scales = next_scales
        run = warp + (STEPS - 1) * NUM_WARPS
        if LOOP:
            beyond = at + programs * RT
            live = (warp + j * 0 < RUNS) & (beyond < tiles)
            next_words, next_scales = _load_run(w_ptr, s_ptr, beyond, warp, live, lane, j, tiles, GROUPS, GROUP, UNIT,
                                                RT, SCALE)
        acc = _use_run(acc, words, scales, x_ptr, xs_ptr, m, STEPS - 1, run, lane, j, L, THREADS, K, GROUP, UNIT, RT,
                       NT, A8, FP16, SCALE, EVEN, STAGED)
        if LOOP:
            words = next_words
            scales = next_scales
        for r in gl.static_range(RT):
            for t in gl.static_range(NT):
                _store(acc[r * NT + t], bias_ptr, y_ptr, (at + r) * 16, t * 8, m, n, NUM_WARPS, A8, HAS_BIAS)

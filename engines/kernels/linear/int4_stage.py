"""How ``int4_mma`` brings the activations of a step to the lanes that multiply them.

Each lane needs 16 bytes here and there of each 32 inputs of its token. Loading them one by one is slow, as
the assembler puts every load right before its use and their latencies add up. So a step's activations come in by one
coalesced load a thread (``load_step``), and are handed out through shared memory (``spread_step``): a change of layout,
then a split of the registers into the fragments in the order of use.
"""

# Device code grows tuples by +; it knows no unpacking, and their types grow with them.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment"

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

__all__ = ["load_step", "load_step_scales", "spread_scales", "spread_step"]


@gluon.jit
def _halves(x):
    """[T, 4, 2 n] -> the even and the odd slices [T, 4, n] along the last axis."""
    shape: gl.constexpr = [x.shape[0], x.shape[1], x.shape[2] // 2, 2]
    return gl.split(gl.reshape(x, shape))


@gluon.jit
def load_step(x_ptr, m, step, TOKENS: gl.constexpr, K: gl.constexpr, WORDS: gl.constexpr, NW: gl.constexpr,
               A8: gl.constexpr) -> Any:
    """Activations of a whole step (WORDS words of each token, for all warps), coalesced: [TOKENS, WORDS]."""
    PER_WORD: gl.constexpr = 4 if A8 else 2
    B: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [1, NW], [1, 0])
    word = step * WORDS + gl.arange(0, WORDS, layout=gl.SliceLayout(0, B))[None, :]
    token = gl.arange(0, TOKENS, layout=gl.SliceLayout(1, B))[:, None]
    mask = (token < m) & (word < K // PER_WORD)
    return gl.load(x_ptr + (token * (K // PER_WORD) + word), mask=mask, other=0)


@gluon.jit
def spread_step(x, TOKENS: gl.constexpr, WORDS: gl.constexpr, NW: gl.constexpr, L: gl.constexpr,
                A8: gl.constexpr) -> Any:
    """``load_step``'s words through shared memory to the lanes that multiply them.

    Returns the fragments in the order of use, each [threads, 4]. TOKENS is 1 (all columns get the same) or 8.
    """
    PARTS: gl.constexpr = WORDS // NW // 16
    if A8:
        x = gl.permute(gl.reshape(x, [TOKENS, NW, PARTS, 2, 4, 2]), [1, 0, 4, 3, 5, 2])
        x = gl.reshape(x, [NW, TOKENS, 4, 4, PARTS])
    else:
        x = gl.permute(gl.reshape(x, [TOKENS, NW, PARTS, 4, 4]), [1, 0, 4, 3, 2])
    F: gl.constexpr = gl.BlockedLayout([1, 1, 1, 4, PARTS], [1, 8, 4, 1, 1], [NW, 1, 1, 1, 1], [4, 3, 2, 1, 0])
    x = gl.convert_layout(x, F)
    if TOKENS == 1:
        x, _ = gl.broadcast(x, gl.full([NW, 8, 4, 4, PARTS], 0, gl.int32, layout=F))
    parts = (gl.reshape(x, [NW * 32, 4, PARTS]),)
    COUNT: gl.constexpr = PARTS
    for level in gl.static_range(5):
        if (1 << level) < COUNT:
            evens = ()
            odds = ()
            for i in gl.static_range(1 << level):
                even, odd = _halves(parts[i])
                evens = evens + (even,)
                odds = odds + (odd,)
            parts = evens + odds
    out = ()
    for i in gl.static_range(PARTS):
        out = out + (gl.convert_layout(gl.reshape(parts[i], [NW * 32, 4]), L),)
    return out


@gluon.jit
def load_step_scales(xs_ptr, step, KG: gl.constexpr, UNIT: gl.constexpr, NW: gl.constexpr) -> Any:
    """One token's activation scales of a step: [warps, 1, UNIT]."""
    B: gl.constexpr = gl.BlockedLayout([1, 1, 1], [1, 1, 32], [NW, 1, 1], [2, 1, 0])
    warp = gl.arange(0, NW, layout=gl.SliceLayout(1, gl.SliceLayout(2, B)))[:, None, None]
    unit = gl.arange(0, UNIT, layout=gl.SliceLayout(0, gl.SliceLayout(1, B)))[None, None, :]
    group = (step * NW + warp) * UNIT + unit
    return gl.load(xs_ptr + group, mask=group < KG, other=0.0)


@gluon.jit
def spread_scales(x, UNIT: gl.constexpr, NW: gl.constexpr, L: gl.constexpr) -> Any:
    """A warp's UNIT scales into four registers of each of its lanes."""
    F: gl.constexpr = gl.BlockedLayout([1, 1, UNIT], [1, 32, 1], [NW, 1, 1], [2, 1, 0])
    x, _ = gl.broadcast(gl.convert_layout(x, F), gl.full([NW, 32, UNIT], 0.0, gl.float32, layout=F))
    x = gl.reshape(x, [NW * 32, UNIT])
    if UNIT == 2:
        x = gl.reshape(gl.permute(gl.join(x, x), [0, 2, 1]), [NW * 32, 4])
    return gl.convert_layout(x, L)

"""Causal attention over the paged cache on a CPU: one call for all decoding sequences, one for each prefill chunk.

**Decode** (one new token a sequence). The query heads that share a kv head become the rows of one small matrix, so
grouped-query attention needs no repeated keys: q [b, kv_heads, group, d] against k, v [b, kv_heads, len, d].
- One sequence, its slots contiguous: keys and values are a view of the cache, nothing is copied.
- Several: gathered by block into [b, longest], the rest masked with -inf. The softmax of a masked key is exactly 0,
  but the sum's blocking follows the padded length, so a row may differ by some 1e-7 with its mates' lengths.
- Long contexts (``VIEW_FROM`` tokens) with contiguous slots: one call a sequence on views, as copying would cost more
  than the calls.

**Prefill** (a chunk of n new tokens after ``length - n`` cached ones): one call a sequence, causal with an offset.

**Windows and softcaps.** A layer with a window w sees the last w tokens, its own among them: the same calls with a
narrower mask. A softcap (cap * tanh(score / cap)) has no place in torch's fused call; scores are then made by hand.

The plan (which blocks, which mask) is made once a step for each window that layers have.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engines.kernels.cpu.rope_kv import LayerCache

#: Longest context of a batch from which sequences are attended one by one on views instead of gathered.
VIEW_FROM = 512


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, causal: bool, scale: float,
            softcap: float | None) -> torch.Tensor:
    """softmax(cap(q k^T scale) [masked]) v of q [b, h, n, d] and k, v [b, kv heads, s, d]."""
    grouped = q.shape[1] != k.shape[1]
    if softcap is None:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale,
                                                                enable_gqa=grouped)
    if grouped:
        k, v = (part.repeat_interleave(q.shape[1] // k.shape[1], 1) for part in (k, v))
    scores = (q @ k.transpose(-1, -2)).mul_(scale / softcap).tanh_().mul_(softcap)
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril_()
    if mask is not None:
        scores = scores.masked_fill_(~mask, -math.inf) if mask.dtype is torch.bool else scores.add_(mask)
    return scores.softmax(-1) @ v


@dataclass(frozen=True, slots=True)
class Span:
    """Where one sequence's keys lie: a contiguous run from slot ``start``, or gathered from ``blocks`` int64.

    ``first``: keys before it are seen by none of the new tokens.
    """

    length: int
    new: int
    start: int
    blocks: torch.Tensor | None
    mask: torch.Tensor | None = None
    first: int = 0


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """``decodes`` leading rows in one call (or none), padded to ``longest`` slots; then ``spans``, a call each."""

    block_size: int
    decodes: int
    longest: int
    blocks: torch.Tensor | None
    mask: torch.Tensor | None
    spans: tuple[Span, ...]


def _contiguous(blocks: Sequence[int], count: int) -> bool:
    return all(blocks[i + 1] == blocks[i] + 1 for i in range(count - 1))


def _span(blocks: Sequence[int], block_size: int, length: int, new: int, window: int) -> Span:
    mask, cached = None, length - new
    first = max(0, cached + 1 - window) if window else 0
    if 1 < new < length or (new > 1 and 0 < window < length):
        mask = torch.ones(new, length, dtype=torch.bool).tril_(cached)
        if window:
            mask = mask.triu_(cached + 1 - window)[:, first:]
    count = -(-length // block_size)
    if _contiguous(blocks, count):
        return Span(length, new, blocks[0] * block_size, None, mask, first)
    return Span(length, new, 0, torch.tensor(blocks[:count]), mask, first)


def plan(tables: Sequence[Sequence[int]], lengths: Sequence[int], new: Sequence[int], block_size: int, window: int = 0
         ) -> AttentionPlan:
    """Plan a step. ``lengths`` count the new tokens; sequences with one new token come first; window 0: all keys."""
    decodes = sum(1 for count in new if count == 1)
    longest = max(lengths[:decodes], default=0)
    separate = decodes == 1 or (longest >= VIEW_FROM and all(
        _contiguous(blocks, -(-length // block_size))
        for blocks, length in zip(tables[:decodes], lengths[:decodes], strict=True)))
    first = 0 if separate else decodes
    spans = tuple(_span(tables[i], block_size, lengths[i], new[i], window) for i in range(first, len(tables)))
    if first == 0:
        return AttentionPlan(block_size, 0, 0, None, None, spans)
    count = -(-longest // block_size)
    padded = [[*blocks[:count], *[0] * (count - len(blocks))] for blocks in tables[:decodes]]
    ends = torch.tensor(lengths[:decodes]).view(-1, 1, 1, 1)
    keys = torch.arange(count * block_size)
    hidden = (keys >= ends) | (keys < ends - window) if window else keys >= ends
    mask = torch.zeros(hidden.shape).masked_fill_(hidden, -math.inf)
    return AttentionPlan(block_size, decodes, count * block_size, torch.tensor(padded).view(-1), mask, spans)


def _keys_values(rows: torch.Tensor, batch: int, length: int) -> tuple[torch.Tensor, ...]:
    """[batch * length, 2 * kv_heads, d] -> k, v [batch, kv_heads, length, d] (views)."""
    return rows.view(batch, length, rows.shape[1], rows.shape[2]).transpose(1, 2).chunk(2, 1)


def attention(q: torch.Tensor, cache: LayerCache, work: AttentionPlan, kv_heads: int, scale: float | None = None,
              softcap: float | None = None) -> torch.Tensor:
    """q [t, heads, head_dim] -> [t, heads * head_dim]; softmax(cap(q k * scale)) v by sequence.

    ``scale`` None is 1 / sqrt(head_dim).
    """
    outs: list[torch.Tensor] = []
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    if work.decodes:
        assert work.blocks is not None
        k, v = _keys_values(cache.gather(work.blocks, work.block_size), work.decodes, work.longest)
        rows = q[:work.decodes].view(work.decodes, kv_heads, -1, q.shape[-1])
        outs.append(_attend(rows, k, v, work.mask, False, factor, softcap).reshape(work.decodes, -1))
    at = work.decodes
    for span in work.spans:
        outs.append(_attend_span(q[at:at + span.new], cache, span, work.block_size, kv_heads, factor, softcap))
        at += span.new
    return outs[0] if len(outs) == 1 else torch.cat(outs)


def _attend_span(q: torch.Tensor, cache: LayerCache, span: Span, block_size: int, kv_heads: int, scale: float,
                 softcap: float | None) -> torch.Tensor:
    rows = (cache.span(span.start, span.length) if span.blocks is None
            else cache.gather(span.blocks, block_size).narrow(0, 0, span.length))
    if span.first:
        rows = rows[span.first:]
    k, v = _keys_values(rows, 1, span.length - span.first)
    if span.new == 1:
        return _attend(q.view(1, kv_heads, -1, q.shape[-1]), k, v, None, False, scale, softcap).reshape(1, -1)
    out = _attend(q.transpose(0, 1).unsqueeze(0), k, v, span.mask, span.mask is None, scale, softcap)
    return out.squeeze(0).transpose(0, 1).reshape(span.new, -1)

"""Causal attention over the paged cache on a CPU: one call for all decoding sequences, one for each prefill chunk.

**Decode** (one new token a sequence). The query heads that share a kv head become the rows of one small matrix, so
grouped-query attention needs no repeated keys: q [b, kv_heads, group, d] against k, v [b, kv_heads, len, d].
- One sequence, its slots contiguous: keys and values are a view of the cache, nothing is copied.
- Several: gathered by block into [b, longest], the rest masked with -inf. The softmax of a masked key is exactly 0,
  but the sum's blocking follows the padded length, so a row may differ by some 1e-7 with its mates' lengths.
- Long contexts (``VIEW_FROM`` tokens) with contiguous slots: one call a sequence on views, as copying would cost more
  than the calls.

**Prefill** (a chunk of n new tokens after ``length - n`` cached ones): one call a sequence, causal with an offset.

The plan (which blocks, which mask) is made once a step and used by every layer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engines.kernels.cpu.rope_kv import LayerCache

#: Longest context of a batch from which sequences are attended one by one on views instead of gathered.
VIEW_FROM = 512
_attend = torch.nn.functional.scaled_dot_product_attention


@dataclass(frozen=True, slots=True)
class Span:
    """Where one sequence's keys lie: a contiguous run from slot ``start``, or gathered from ``blocks`` int64."""

    length: int
    new: int
    start: int
    blocks: torch.Tensor | None
    mask: torch.Tensor | None = None


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


def _span(blocks: Sequence[int], block_size: int, length: int, new: int) -> Span:
    mask = None
    if 1 < new < length:
        cached = length - new
        mask = torch.ones(new, length, dtype=torch.bool).tril_(cached)
    count = -(-length // block_size)
    if _contiguous(blocks, count):
        return Span(length, new, blocks[0] * block_size, None, mask)
    return Span(length, new, 0, torch.tensor(blocks[:count]), mask)


def plan(tables: Sequence[Sequence[int]], lengths: Sequence[int], new: Sequence[int], block_size: int) -> AttentionPlan:
    """Plan a step. ``lengths`` count the new tokens; sequences with one new token come first."""
    decodes = sum(1 for count in new if count == 1)
    longest = max(lengths[:decodes], default=0)
    separate = decodes == 1 or (longest >= VIEW_FROM and all(
        _contiguous(blocks, -(-length // block_size))
        for blocks, length in zip(tables[:decodes], lengths[:decodes], strict=True)))
    first = 0 if separate else decodes
    spans = tuple(_span(tables[i], block_size, lengths[i], new[i]) for i in range(first, len(tables)))
    if first == 0:
        return AttentionPlan(block_size, 0, 0, None, None, spans)
    count = -(-longest // block_size)
    padded = [[*blocks[:count], *[0] * (count - len(blocks))] for blocks in tables[:decodes]]
    ends = torch.tensor(lengths[:decodes]).view(-1, 1, 1, 1)
    beyond = torch.arange(count * block_size) >= ends
    mask = torch.zeros(beyond.shape).masked_fill_(beyond, -math.inf)
    return AttentionPlan(block_size, decodes, count * block_size, torch.tensor(padded).view(-1), mask, spans)


def _keys_values(rows: torch.Tensor, batch: int, length: int) -> tuple[torch.Tensor, ...]:
    """[batch * length, 2 * kv_heads, d] -> k, v [batch, kv_heads, length, d] (views)."""
    return rows.view(batch, length, rows.shape[1], rows.shape[2]).transpose(1, 2).chunk(2, 1)


def attention(q: torch.Tensor, cache: LayerCache, work: AttentionPlan, kv_heads: int) -> torch.Tensor:
    """q [t, heads, head_dim] -> [t, heads * head_dim]; softmax(q k / sqrt(head_dim)) v by sequence."""
    outs: list[torch.Tensor] = []
    if work.decodes:
        assert work.blocks is not None
        k, v = _keys_values(cache.gather(work.blocks, work.block_size), work.decodes, work.longest)
        rows = q[:work.decodes].view(work.decodes, kv_heads, -1, q.shape[-1])
        outs.append(_attend(rows, k, v, attn_mask=work.mask).view(work.decodes, -1))
    at = work.decodes
    for span in work.spans:
        outs.append(_attend_span(q[at:at + span.new], cache, span, work.block_size, kv_heads))
        at += span.new
    return outs[0] if len(outs) == 1 else torch.cat(outs)


def _attend_span(q: torch.Tensor, cache: LayerCache, span: Span, block_size: int, kv_heads: int) -> torch.Tensor:
    rows = (cache.span(span.start, span.length) if span.blocks is None
            else cache.gather(span.blocks, block_size).narrow(0, 0, span.length))
    k, v = _keys_values(rows, 1, span.length)
    if span.new == 1:
        return _attend(q.view(1, kv_heads, -1, q.shape[-1]), k, v).view(1, -1)
    out = _attend(q.transpose(0, 1).unsqueeze(0), k, v, attn_mask=span.mask,
                  is_causal=span.mask is None, enable_gqa=q.shape[1] != kv_heads)
    return out.squeeze(0).transpose(0, 1).reshape(span.new, -1)

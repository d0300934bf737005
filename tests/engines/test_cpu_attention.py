"""Paged attention and the cache against a plain softmax over gathered keys; RoPE against transformers."""

from __future__ import annotations

import math

import pytest
import torch
from tiny_models import VARIANTS
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from engines.kernels.cpu import attention as attention_module
from engines.kernels.cpu.attention import attention, plan
from engines.kernels.cpu.rope_kv import LayerCache, rotary_table, rotate
from engines.models.rope import cosines_and_sines, rope_facts

KV_HEADS, GROUP, DIM, BLOCK = 2, 3, 16, 4
#: (block table, length with new tokens, new tokens); one-token sequences first.
MIXES = {
    "one decode, contiguous": [([3, 4, 5], 10, 1)],
    "one decode, scattered": [([5, 2, 7], 12, 1)],
    "decodes of many lengths": [([0], 1, 1), ([9, 3], 8, 1), ([1, 2, 6, 11], 13, 1)],
    "whole prefill": [([1, 2, 3], 9, 9)],
    "chunk after cached tokens": [([8, 1, 5], 11, 4)],
    "decodes and prefills": [([0], 4, 1), ([10, 4], 7, 1), ([2, 3], 6, 6), ([11, 7, 5, 1], 14, 3)],
}


def expected(q: torch.Tensor, cache: LayerCache, mix: list[tuple[list[int], int, int]]) -> torch.Tensor:
    rows, at = [], 0
    for blocks, length, new in mix:
        slots = torch.tensor([blocks[i // BLOCK] * BLOCK + i % BLOCK for i in range(length)])
        values = cache._values(cache.slots[slots]).double()
        for index in range(new):
            seen = length - new + index + 1
            k = values[:seen, :KV_HEADS].repeat_interleave(GROUP, 1)
            v = values[:seen, KV_HEADS:].repeat_interleave(GROUP, 1)
            scores = torch.einsum("hd,shd->hs", q[at].double(), k) / math.sqrt(DIM)
            rows.append(torch.einsum("hs,shd->hd", scores.softmax(-1), v).flatten())
            at += 1
    return torch.stack(rows)


SCALES = torch.tensor([0.02, 0.021, 0.03, 0.018])  # a number for each head: keys', then values'


@pytest.mark.parametrize("form", [(None, "bf16"), (SCALES, "fp8_e4m3"), (SCALES, "int8")], ids=lambda form: form[1])
@pytest.mark.parametrize("view_from", [1, 512])
@pytest.mark.parametrize("mix", MIXES)
def test_attention_is_a_softmax_over_the_sequence(mix: str, view_from: int, form: tuple[torch.Tensor | None, str],
                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_module, "VIEW_FROM", view_from)
    torch.manual_seed(0)
    cache = LayerCache.empty(12 * BLOCK, KV_HEADS, DIM, *form)
    cache.store(torch.arange(12 * BLOCK), torch.randn(12 * BLOCK, 2 * KV_HEADS, DIM))
    work = MIXES[mix]
    q = torch.randn(sum(new for _, _, new in work), KV_HEADS * GROUP, DIM)
    tables, lengths, new = zip(*work, strict=True)
    with torch.inference_mode():
        found = attention(q, cache, plan(tables, lengths, new, BLOCK), KV_HEADS)
    assert (found - expected(q, cache, work)).abs().max() < 1e-5


def test_masked_slots_may_hold_anything_but_nan() -> None:
    """Blocks of other sequences and never-written ones stand behind the mask."""
    torch.manual_seed(1)
    cache = LayerCache.empty(4 * BLOCK, KV_HEADS, DIM)
    cache.slots.fill_(1e30)
    cache.store(torch.tensor([0, 4, 5]), torch.randn(3, 2 * KV_HEADS, DIM))
    work = [([0], 1, 1), ([1], 2, 1)]
    q = torch.randn(2, KV_HEADS * GROUP, DIM)
    found = attention(q, cache, plan([[0], [1]], [1, 2], [1, 1], BLOCK), KV_HEADS)
    assert (found - expected(q, cache, work)).abs().max() < 1e-5


def test_a_new_cache_is_zero() -> None:
    """A masked slot is multiplied by 0: NaN left in fresh memory once became every logit of a batch."""
    for scales in (None, torch.ones(4)):
        assert not LayerCache.empty(4096, 2, 64, scales).slots.any()


def test_an_int8_cache_saturates_and_rounds_to_even() -> None:
    cache = LayerCache.empty(2, 2, 2, torch.tensor([0.5, 1.0, 2.0, 4.0]), "int8")
    cache.store(torch.tensor([1]), torch.tensor([[[1000.0, 0.26], [2.5, 3.5], [-3000.0, 5.0], [-6.0, 0.0]]]))
    assert cache.span(1, 1).tolist() == [[[63.5, 0.5], [2.0, 4.0], [-254.0, 4.0], [-8.0, 0.0]]]


def test_an_fp8_cache_saturates_and_rounds() -> None:
    cache = LayerCache.empty(2, 1, 2, torch.tensor([0.5, 2.0]))
    cache.store(torch.tensor([1]), torch.tensor([[[1000.0, 0.26], [-3000.0, 5.0]]]))
    assert cache.span(1, 1).tolist() == [[[224.0, 0.25], [-896.0, 5.0]]]


@pytest.mark.parametrize("variant", ["gqa", "llama3_rope"])
def test_rotation_equals_transformers(variant: str) -> None:
    settings = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
                "max_position_embeddings": 256} | VARIANTS[variant]
    config = LlamaConfig(**settings)
    rope = rope_facts(config.to_dict())
    cos, sin = rotary_table(*cosines_and_sines(rope, 16, 200))
    torch.manual_seed(2)
    x = torch.randn(200, 4, 16)
    theirs_cos, theirs_sin = LlamaRotaryEmbedding(config)(x, torch.arange(200)[None])
    theirs, _ = apply_rotary_pos_emb(x.transpose(0, 1)[None], x.transpose(0, 1)[None], theirs_cos, theirs_sin)
    ours = rotate(x.clone(), cos[:, None], sin[:, None])
    assert (ours - theirs[0].transpose(0, 1)).abs().max() < 1e-5

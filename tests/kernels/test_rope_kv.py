"""RoPE, qk-norm, bias and the write into the paged cache, against plain torch."""

from __future__ import annotations

import pytest
import torch

from engines.kernels import rope_kv


def table(rotary_dim, positions, device):
    angle = torch.arange(positions)[:, None] / 10000 ** (torch.arange(rotary_dim // 2) / (rotary_dim // 2))
    return torch.cat([angle.cos(), angle.sin()], 1).to(device).contiguous()


def raw(cache):
    return cache.view(torch.uint8) if cache.dtype == torch.float8_e4m3fn else cache


CASES = [  # tokens, heads, kv heads, head_dim, rotary_dim, block_size, bias, qk norm, cache dtype
    (1, 4, 1, 64, 64, 16, False, False, torch.bfloat16),
    (5, 9, 3, 64, 64, 16, True, False, torch.bfloat16),
    (3, 4, 2, 128, 128, 32, False, True, torch.bfloat16),
    (3, 2, 2, 96, 96, 16, False, False, torch.bfloat16),
    (4, 3, 1, 96, 48, 16, True, True, torch.float8_e4m3fn),
    (2, 4, 4, 256, 64, 64, False, False, torch.int8),
    (6, 8, 1, 64, 32, 16, True, False, torch.int8),
    (2, 4, 1, 80, 80, 16, False, True, torch.float8_e4m3fn),
    (0, 4, 1, 64, 64, 16, False, False, torch.bfloat16),
]


@pytest.mark.parametrize(("tokens", "heads", "kv_heads", "head_dim", "rotary", "block", "bias", "norm", "dtype"), CASES)
def test_cases(device, facts, judge, tokens, heads, kv_heads, head_dim, rotary, block, bias, norm, dtype):
    torch.manual_seed(tokens * 100 + head_dim)
    width = (heads + 2 * kv_heads) * head_dim
    qkv = torch.randn(tokens, width, device=device).bfloat16()
    coded = dtype != torch.bfloat16
    scale = torch.tensor(4.0 / (448 if dtype == torch.float8_e4m3fn else 127), device=device) if coded else None
    keys = {"bias": torch.randn(width, device=device).bfloat16() if bias else None,
            "q_norm": torch.rand(head_dim, device=device) + 0.5 if norm else None,
            "k_norm": torch.rand(head_dim, device=device) + 0.5 if norm else None, "k_scale": scale, "v_scale": scale}
    positions = torch.randint(0, 40, (tokens,), device=device)
    slots = torch.randperm(4 * block, device=device)[:tokens].int()
    if tokens > 2:
        slots[1] = -1
    results = []
    for run in (rope_kv.launch, rope_kv.twin):
        q = torch.full((tokens, heads, head_dim), float("nan"), device=device).bfloat16()
        rows = [torch.full((tokens, kv_heads, head_dim), float("nan"), device=device).bfloat16() for _ in range(2)]
        shape = (4, kv_heads, block, head_dim)
        caches = [torch.full(sides, 77.0, device=device).to(dtype) for sides in (shape, rope_kv.v_shape(
            shape, scale is not None))]
        config = rope_kv.candidates(heads, kv_heads, facts, tokens)[0]
        run(qkv, table(rotary, 40, device), positions, slots, q, *caches, config, **keys,
            k_out=rows[0] if coded else None, v_out=rows[1] if coded else None)
        if coded:
            q = torch.cat([q, *rows], 1)
        results.append((q, *caches))
    judge(results[0][0], results[1][0], 6e-2, 6e-3)
    for turned, found, wanted in zip((False, scale is not None), results[0][1:], results[1][1:], strict=True):
        judge(found.float(), wanted.float(), 0.5, 2e-2)
        same = (raw(found) == raw(wanted)).float().mean()
        assert same > 0.95, f"only {same:.3f} of the cache agrees"
        touched = {int(s) for s in slots.tolist() if s >= 0}
        rest = torch.ones(4 * block, dtype=torch.bool)
        rest[list(touched)] = False
        flat = (found.mT if turned else found).float().transpose(1, 2).reshape(4 * block, -1).cpu()
        assert flat[rest].eq(77.0 if dtype != torch.float8_e4m3fn else 80.0).all(), "a foreign slot was written"


def test_scales_belong_to_coded_caches(device, facts):
    cache = torch.zeros(1, 1, 16, 64, device=device).bfloat16()
    one = torch.ones((), device=device)
    q = torch.empty(1, 1, 64, device=device)
    with pytest.raises(ValueError, match="k_scale"):
        rope_kv.launch(torch.ones(1, 192, device=device), table(64, 4, device), torch.zeros(1, device=device).long(),
                       torch.zeros(1, device=device).int(), q, cache, cache.clone(), rope_kv.candidates(1, 1, facts)[0],
                       k_scale=one, v_scale=one)

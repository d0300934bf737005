"""Configs and problems of both decode attention kernels' tests."""

from __future__ import annotations

import torch

from engines.kernels.impl import KernelConfig


def _split(tile: int, target: int, least: int, split: int = 0, tail: int = 0) -> KernelConfig:
    return KernelConfig.of("split", TILE=tile, SPLIT=split, TARGET=target, MIN_SPLIT=least, TAIL=tail, num_warps=1)


BALANCED = _split(16, 12, 16)
MANY = _split(16, 96, 16)  # more items a sequence than eight
WIDE = _split(32, 12, 32)  # a tile over several blocks
TAILED = _split(32, 12, 32, tail=1)
FIXED = _split(16, 0, 0, 32)


def problem(lens, heads, kv_heads, head_dim, block, dtype, device, query_len=1):
    """q, caches with NaN in every slot that no sequence owns, block table, scales."""
    torch.manual_seed(sum(lens) + heads)
    blocks = [-(-n // block) for n in lens]
    pool = sum(blocks) + 2
    order = torch.randperm(pool - 1)[: sum(blocks)] + 1
    table = torch.zeros(len(lens), max([*blocks, 1]) + 1, dtype=torch.int32)
    coded = dtype in (torch.float8_e4m3fn, torch.int8)
    caches = []
    for turned in (False, coded):
        cache = torch.full((pool, kv_heads, block, head_dim), float("nan") if dtype != torch.int8 else -128.0)
        at = 0
        for i, n in enumerate(lens):
            table[i, : blocks[i]] = order[at : at + blocks[i]].int()
            at += blocks[i]
            values = torch.randn(n, kv_heads, head_dim) * (20 if coded else 1)
            slot = torch.arange(n)
            cache[table[i].long()[slot // block], :, slot % block] = values.round() if dtype == torch.int8 else values
        caches.append((cache.mT.contiguous() if turned else cache).to(dtype).to(device))
    q = torch.randn(len(lens) * query_len, heads, head_dim).bfloat16().to(device)
    scale = torch.tensor(0.05, device=device) if coded else None
    return q, *caches, table.to(device), {"k_scale": scale, "v_scale": scale}

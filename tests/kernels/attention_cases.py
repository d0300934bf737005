"""Configs and problems of both decode attention kernels' tests."""

from __future__ import annotations

import torch

from engines.kernels.impl import KernelConfig

BALANCED = KernelConfig.of("split", TILE=16, SPLIT=0, TARGET=12, MIN_SPLIT=16)
MANY = KernelConfig.of("split", TILE=16, SPLIT=0, TARGET=96, MIN_SPLIT=16)  # more items a sequence than eight
WIDE = KernelConfig.of("split", TILE=32, SPLIT=0, TARGET=12, MIN_SPLIT=32)  # a tile over several blocks
TAILED = KernelConfig.of("split", TILE=32, SPLIT=0, TARGET=12, MIN_SPLIT=32, TAIL=1)
FIXED = KernelConfig.of("split", TILE=16, SPLIT=32, TARGET=0, MIN_SPLIT=0)


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

"""Attention in plain torch, float32: the oracle of both attention kernels, and their CPU path."""

from __future__ import annotations

import torch


def gather_cache(k_cache: torch.Tensor, v_cache: torch.Tensor, blocks: torch.Tensor, length: int,
                 k_scale: torch.Tensor | None, v_scale: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V [length, num_kv_heads, head_dim] in float32 of the sequence whose blocks these are (``rope_kv``)."""
    used = blocks[:-(-length // k_cache.shape[2])].long()

    def read(cache: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        flat = cache[used].float().transpose(1, 2).reshape(-1, cache.shape[1], cache.shape[3])[:length]
        return flat if scale is None else flat * scale.float()

    return read(k_cache, k_scale), read(v_cache if v_scale is None else v_cache.transpose(2, 3), v_scale)


def attend_twin(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sm_scale: float, softcap: float, window: int
                ) -> torch.Tensor:
    """Causal attention of the last t tokens, float32: q [t, heads, d], k and v [n, kv heads, d] -> [t, heads, d]."""
    repeat = q.shape[1] // k.shape[1]
    scores = torch.einsum("thd,nhd->htn", q, k.repeat_interleave(repeat, 1)) * sm_scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    own = torch.arange(k.shape[0] - q.shape[0], k.shape[0], device=q.device)[:, None]
    key = torch.arange(k.shape[0], device=q.device)[None, :]
    seen = (key <= own) & (key > own - window) if window else key <= own
    weights = torch.softmax(scores.masked_fill(~seen, float("-inf")), -1)
    return torch.einsum("htn,nhd->thd", weights, v.repeat_interleave(repeat, 1))

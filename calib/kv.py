"""Keys and values on a grid: fake quantization inside attention, and the static scales found for it.

transformers looks an attention function up by name; ours round keys (after RoPE) and values before scaled-dot-product
attention, or only note their largest magnitude. One scale each per layer: amax / largest code, float32 []. Softcaps
(cap * tanh(score / cap), Gemma 2) have no place in torch's fused attention: there it is written out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from calib.errors import CalibError
from calib.grids import fake_quantize
from calib.scheme import CODE_MAX, Grid

FAKE_KV, _WATCH_KV = "toolkit_fake_kv", "toolkit_watch_kv"


def _attend(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None,
            *, scaling: float | None = None, softcap: float | None = None, **kwargs: Any) -> Any:
    if softcap is None:
        return sdpa_attention_forward(module, query, key, value, mask, scaling=scaling, **kwargs)
    repeats = query.shape[1] // key.shape[1]
    key, value = (part.repeat_interleave(repeats, 1) for part in (key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = softcap * torch.tanh(query @ key.transpose(2, 3) * (scale / softcap))
    if mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(scores.shape[-1] - scores.shape[-2])
    out = scores.masked_fill(~mask, -torch.inf).softmax(-1) @ value
    return out.transpose(1, 2).contiguous(), None


def _fake(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    return _attend(module, query, fake_quantize(module.kv_grid, key, module.k_scale),
                   fake_quantize(module.kv_grid, value, module.v_scale), *args, **kwargs)


def _watch(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    seen = module.kv_seen
    seen[0], seen[1] = torch.maximum(seen[0], key.abs().amax()), torch.maximum(seen[1], value.abs().amax())
    return _attend(module, query, key, value, *args, **kwargs)


for _name, _function in ((FAKE_KV, _fake), (_WATCH_KV, _watch)):
    AttentionInterface.register(_name, _function)
    AttentionMaskInterface.register(_name, sdpa_mask)


def calibrate_kv(model: nn.Module, attentions: Sequence[str], batches: Sequence[torch.Tensor], grid: Grid
                 ) -> dict[str, dict[str, torch.Tensor]]:
    """attention module -> {"k_scale": [], "v_scale": []}, from token ids [b, s]. CalibError when nothing was seen."""
    config: Any = model.config
    modules: dict[str, Any] = {name: model.get_submodule(name) for name in attentions}
    before = config._attn_implementation
    for module in modules.values():
        module.kv_seen = [torch.zeros(()), torch.zeros(())]
    config._attn_implementation = _WATCH_KV
    body: Any = getattr(model, "model")  # noqa: B009 (nn.Module types attributes as Tensor | Module)
    with torch.inference_mode():
        for batch in batches:
            body(batch, use_cache=False)
    config._attn_implementation = before
    found = {}
    for name, module in modules.items():
        keys, values = module.kv_seen
        del module.kv_seen
        for side, seen in (("keys", keys), ("values", values)):
            if not torch.isfinite(seen) or seen <= 0:
                raise CalibError(f"{name}: its {side} were {'all zero' if seen == 0 else 'not finite'}",
                                 "No data reached it, or the model overflows; keep the KV cache in bf16.")
        limit = CODE_MAX[grid.dtype]
        found[name] = {"k_scale": (keys / limit).clone(), "v_scale": (values / limit).clone()}
    return found

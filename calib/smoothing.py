"""SmoothQuant by folding: an activation's outlier channels are scaled down where they are made, up where they are read.

For a pair (source -> readers) and any positive s [in], ``(x / s) @ (W * s)^T == x @ W^T``: dividing the source's output
channel j by s_j and multiplying column j of every reader by s_j changes nothing in exact arithmetic, but moves range
from the activation, which is quantized per token over all channels, into the weights. Xiao et al. 2022 take
``s_j = amax(x_j)^alpha / amax(W_:j)^(1 - alpha)``; alpha = 0 here means no smoothing at all.

A norm's weight is stored in bf16, so its division is rounded; the readers get the *effective* factor old/new, which
keeps the pair exact (of a norm that multiplies by 1 + weight, old and new are 1 + weight). Under grouped-query
attention a value channel feeds several query heads and needs one s for all of them: the largest activation and weight
over the heads that share it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import nn

from calib.formats.hf import Shards
from calib.layers import Family, Smoothing

_TINY, _LIMIT = 1e-5, 1e4


def smoothing_factors(activation: torch.Tensor, weight: torch.Tensor, alpha: float) -> torch.Tensor:
    """s [in] from amax of the activation and of the readers' columns, centred so that its extremes are reciprocal."""
    return centred(activation.clamp(min=_TINY) ** alpha / weight.clamp(min=_TINY) ** (1 - alpha))


def centred(factors: torch.Tensor) -> torch.Tensor:
    """Factors whose largest and smallest are reciprocal, within bounds."""
    return (factors / (factors.max() * factors.min()).sqrt()).clamp(1 / _LIMIT, _LIMIT)


def fold(model: nn.Module, family: Family, amax: Mapping[str, torch.Tensor], alpha: float) -> dict[str, torch.Tensor]:
    """Fold strength ``alpha``, in place, into every pair whose readers are all in ``amax`` (module -> amax [in]).

    Returns module -> s [in] of every reader that was scaled: its input is now divided by s.
    """
    folded: dict[str, torch.Tensor] = {}
    if alpha == 0.0:
        return folded
    layers = cast(nn.ModuleList, model.get_submodule(family.layers))
    with torch.inference_mode():
        for index, layer in layers.named_children():
            for pair in family.smoothings:
                names = [f"{family.layers}.{index}.{reader}" for reader in pair.readers]
                if all(name in amax for name in names):
                    seen = torch.stack([amax[name] for name in names]).amax(0)
                    folded |= dict.fromkeys(names, _fold_pair(layer, pair, seen, alpha))
    return folded


def _weight(layer: nn.Module, name: str) -> torch.Tensor:
    return cast(torch.Tensor, layer.get_submodule(name).weight)


def _source(layer: nn.Module, pair: Smoothing, leaf: str = "weight") -> torch.Tensor | None:
    """The source's weight or bias, of which only the last rows are meant where several outputs are stacked; a view."""
    held = getattr(layer.get_submodule(pair.source), leaf, None)
    if held is None or not pair.stacked:
        return cast(torch.Tensor | None, held)
    wide = _weight(layer, pair.readers[0]).shape[1]
    rows = wide if pair.kind == "rows" else (held.shape[0] - wide) // 2
    return cast(torch.Tensor, held)[held.shape[0] - rows:]


def _fold_pair(layer: nn.Module, pair: Smoothing, seen: torch.Tensor, alpha: float) -> torch.Tensor:
    readers = [_weight(layer, reader) for reader in pair.readers]
    columns = torch.stack([reader.abs().amax(0) for reader in readers]).amax(0)
    seen, spread = shared_by_heads(layer, pair, seen)
    columns, _ = shared_by_heads(layer, pair, columns)
    factors = divide_source(layer, pair, smoothing_factors(seen, columns, alpha))[spread]
    for reader in readers:
        reader.mul_(factors)
    return factors


def divide_source(layer: nn.Module, pair: Smoothing, factors: torch.Tensor) -> torch.Tensor:
    """Divide the outputs of a pair's source by ``factors`` [source rows], in place. Returns the effective factors.

    A norm's weight is stored in bf16: what its rounding leaves is the effective factor.
    """
    source = cast(torch.Tensor, _source(layer, pair))
    if pair.kind == "norm":
        stored = ((source + pair.offset) / factors - pair.offset).to(torch.bfloat16).to(source.dtype)
        scaled = stored + pair.offset
        factors = torch.where(scaled != 0, (source + pair.offset) / scaled, torch.ones_like(scaled))
        source.copy_(torch.where(scaled != 0, stored, source))
        return factors
    source.div_(factors[:, None])
    bias = _source(layer, pair, "bias")
    if bias is not None:
        bias.div_(factors)
    return factors


def shared_by_heads(layer: nn.Module, pair: Smoothing, seen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A statistic [in] per source row (the largest over the heads that share it), and each reader column's source row.
    """
    rows = cast(torch.Tensor, _source(layer, pair)).shape[0]
    if pair.kind != "heads" or seen.numel() == rows:
        return seen, torch.arange(seen.numel())
    head_dim = int(layer.get_submodule(pair.source.rpartition(".")[0]).head_dim)  # type: ignore[arg-type]
    kv_heads, repeats = rows // head_dim, seen.numel() // rows
    spread = torch.arange(rows).view(kv_heads, 1, head_dim).expand(-1, repeats, -1).flatten()
    return seen.view(kv_heads, repeats, head_dim).amax(1).flatten(), spread


def restore(model: nn.Module, family: Family, shards: Shards) -> None:
    """Put back every weight that ``fold`` may have changed, from the model's own files."""
    touched = {name for pair in family.smoothings for name in (pair.source, *pair.readers)}
    with torch.inference_mode():
        for name, parameter in model.named_parameters():
            module, _, _ = name.rpartition(".")
            if name.startswith(f"{family.layers}.") and module.split(".", family.layers.count(".") + 2)[-1] in touched:
                parameter.copy_(shards.load(name))

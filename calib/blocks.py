"""Questions to a whole tensor, asked block by block: a mapped matrix of gigabytes is never copied to be looked at."""

from __future__ import annotations

from collections.abc import Iterator

import torch

#: Elements looked at together (64 MB in float32).
BLOCK = 1 << 24


def _blocks(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    yield from tensor.flatten().split(BLOCK) if tensor.numel() else ()


def all_finite(tensor: torch.Tensor) -> bool:
    """Whether a tensor of any dtype holds neither NaN nor infinity."""
    return not tensor.is_floating_point() or all(bool(torch.isfinite(block.float()).all()) for block in _blocks(tensor))


def any_nonzero(tensor: torch.Tensor) -> bool:
    """Whether any element differs from zero."""
    return any(bool(block.float().any()) for block in _blocks(tensor))

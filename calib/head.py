"""The output head on a grid of its own: weight only, one scale per vocabulary row.

A decode step reads the whole head for one row of logits (21 % of SmolLM2-135M's bytes), so it pays to halve it; its
input is left alone, because whatever is rounded there goes straight into the logits. A *tied* head is the embedding's
matrix: it is untied first, so that the embedding, a lookup that reads one row, stays as it is. The checkpoint then
holds both matrices (it grows by the head's codes; a decode step still reads less), and config.json says that they are
two.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from calib.apart import round_weight
from calib.scheme import Grid

HEAD = "lm_head"


def quantize_head(model: nn.Module, grid: Grid) -> dict[str, torch.Tensor]:
    """Put the head on ``grid``, in place, and untie it. Returns its canonical tensors by leaf name."""
    head: Any = model.get_submodule(HEAD)
    values, tensors = round_weight(head.weight, grid, HEAD)
    head.weight = nn.Parameter(values, requires_grad=False)
    config: Any = model.config
    config.tie_word_embeddings = False
    return tensors

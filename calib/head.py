"""The output head on a grid of its own: weight only, one scale per vocabulary row.

A decode step reads the whole head for one row of logits (21 % of SmolLM2-135M's bytes), so it pays to halve it; its
input is left alone, because whatever is rounded there goes straight into the logits. A *tied* head is the embedding's
matrix: it is untied first, so that the embedding, a lookup that reads one row, stays as it is. The checkpoint then
holds both matrices (it grows by the head's codes; a decode step still reads less), and config.json says that they are
two.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from calib.apart import round_weight
from calib.errors import CalibError
from calib.layers import is_tied
from calib.scheme import Grid

HEAD = "lm_head"
EMBEDDING = "model.embed_tokens"
#: Rows that are compared at once: two vocabularies in float32 would be gigabytes.
_ROWS = 4096


def check_tied(config: Mapping[str, Any], tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """CalibError where config.json ties head and embedding and ``tensors`` holds two matrices that differ.

    Whoever ties drops the stored head; whoever believes the files (transformers 5) computes with it: two models, and
    the files do not say which is meant. ``tensors`` is in natural order and is read no further than the embedding.
    """
    head: torch.Tensor | None = None
    for name, tensor in tensors if is_tied(config) else ():
        if name == f"{HEAD}.weight":
            head = tensor
        elif name == f"{EMBEDDING}.weight":
            if head is not None and not _equal(head, tensor):
                raise CalibError(
                    f"config.json ties {HEAD}.weight to {name}, and the files hold two different ones",
                    f"If the head is its own, set tie_word_embeddings to false; else delete {HEAD}.weight.")
            return


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Value for value, whatever the dtypes: a NaN in both is another check's business."""
    return one.shape == other.shape and all(
        torch.allclose(first.float(), second.float(), rtol=0.0, atol=0.0, equal_nan=True)
        for first, second in zip(one.split(_ROWS), other.split(_ROWS), strict=True))


def quantize_head(model: nn.Module, grid: Grid) -> dict[str, torch.Tensor]:
    """Put the head on ``grid``, in place, and untie it. Returns its canonical tensors by leaf name."""
    head: Any = model.get_submodule(HEAD)
    values, tensors = round_weight(head.weight, grid, HEAD)
    head.weight = nn.Parameter(values, requires_grad=False)
    config: Any = model.config
    config.tie_word_embeddings = False
    return tensors

"""One decoder layer as a whole model, and what stands before and after the layers: embedding, final norm and head.

The model of one layer is the family's own class with ``num_hidden_layers = 1``, under the layer's own name
(``model.layers.17``): what runs inside the whole model runs here unchanged, by the same names, on the same shapes, so
its numbers are the same bit for bit. Its embedding lets hidden states through in place of token ids. Weights are read
from mapped files; only the layer that is at work is held in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.initialization import no_init_weights

from calib.blocks import BLOCK, all_finite
from calib.errors import CalibError
from calib.formats.hf import Shards
from calib.layers import Family, natural_key

Sink = Callable[[torch.Tensor], None]


class _Entrance(nn.Module):
    """In place of the embedding: hidden states [b, s, h] pass; ids (a dry run's) become ones."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.passing: torch.Tensor | None = None

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        self.passing = given if given.is_floating_point() else None
        return given if given.is_floating_point() else torch.ones(*given.shape, self.width)


class _Reached(Exception):  # noqa: N818 (no error: the embedding has been seen)
    """The first layer was reached."""


def layer_config(folder: Path, layer: int) -> Any:
    """The model's configuration with one layer: layer number ``layer``, and a vocabulary of eight."""
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    kinds = getattr(config, "layer_types", None)
    config.num_hidden_layers = 1
    if kinds:
        config.layer_types = [kinds[layer]]
    config.vocab_size, config.pad_token_id, config.tie_word_embeddings = 8, None, False
    return config


def _skeleton(config: Any) -> PreTrainedModel:
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return cast(PreTrainedModel, model.eval())


def _body(model: nn.Module, family: Family) -> Any:
    return model.get_submodule(family.layers.rpartition(".")[0])


def one_layer(folder: Path, family: Family, shards: Shards, layer: int, sink: Sink) -> PreTrainedModel:
    """Layer number ``layer`` as a model in float32; ``model.model(hidden)`` runs it. ``sink`` gets its every output.

    CalibError that names a tensor with a NaN or an infinity, or one that is missing.
    """
    model = _skeleton(layer_config(folder, layer))
    body = _body(model, family)
    only = body.layers[0]
    body.layers = nn.ModuleList()
    body.layers.add_module(str(layer), only)
    entrance = _Entrance(model.config.hidden_size)
    body.embed_tokens = entrance
    prefix = f"{family.layers}.{layer}."
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.startswith(prefix):
                parameter.fill_(1.0)
                continue
            stored = shards.load(name)
            _check_finite(name, stored, shards)
            parameter.copy_(stored)

    def exact_input(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        passing, entrance.passing = entrance.passing, None  # once: methods also call the layer by itself
        return None if passing is None else (passing, *args[1:])

    def give(_: nn.Module, args: Any, output: Any) -> None:
        sink(output[0] if isinstance(output, tuple) else output)

    only.register_forward_pre_hook(exact_input)
    only.register_forward_hook(give)
    return model


def embedded(folder: Path, family: Family, shards: Shards, ids: torch.Tensor, *, rounded: bool) -> torch.Tensor:
    """Float32 [b, s, h]: what the first layer reads for token ids [b, s]; ``rounded``: of the embedding in bf16."""
    table = shards.load(f"{family.layers.rpartition('.')[0]}.embed_tokens.weight")
    used, places = ids.unique(return_inverse=True)
    config = layer_config(folder, 0)
    config.vocab_size = used.numel()
    model = _skeleton(config)
    body = _body(model, family)
    rows = table[used]
    _check_finite("the embedding", rows, shards)
    seen: list[torch.Tensor] = []

    def reached(_: nn.Module, args: tuple[Any, ...]) -> None:
        seen.append(args[0])
        raise _Reached

    body.layers[0].register_forward_pre_hook(reached)
    with torch.inference_mode():
        body.embed_tokens.weight.copy_(rows.to(torch.bfloat16) if rounded else rows)
        try:
            body(places, use_cache=False)
        except _Reached:
            return seen[0]
    raise CalibError(f"{folder}: no decoder layer ran", "This architecture arranges its layers differently.")


class _Head(nn.Module):
    """The output head over a mapped matrix [vocab, h], a block of rows at a time in float32."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, rounded: bool) -> None:
        super().__init__()
        self.stored, self.offset, self.rounded = weight, bias, rounded

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        out = hidden.new_empty(*hidden.shape[:-1], self.stored.shape[0])
        step = max(1, BLOCK // self.stored.shape[1])
        for start in range(0, self.stored.shape[0], step):
            block = self.stored[start:start + step]
            block = block.to(torch.bfloat16).float() if self.rounded else block.float()
            out[..., start:start + step] = functional.linear(hidden, block)
        return out if self.offset is None else out + self.offset.float()


def head_model(folder: Path, family: Family, shards: Shards, *, rounded: bool) -> PreTrainedModel:
    """Final norm and output head as a model: ``model(hidden [b, s, h]).logits``. ``rounded``: of weights in bf16."""
    model = _skeleton(layer_config(folder, 0))
    body = _body(model, family)
    prefix = family.layers.rpartition(".")[0]
    body.layers = nn.ModuleList()
    body.embed_tokens = _Entrance(model.config.hidden_size)
    with torch.no_grad():
        for name, parameter in body.norm.named_parameters():
            stored = shards.load(f"{prefix}.norm.{name}")
            parameter.copy_(stored.to(torch.bfloat16) if rounded else stored)
    name = "lm_head.weight" if "lm_head.weight" in shards else f"{prefix}.embed_tokens.weight"
    bias = shards.load("lm_head.bias") if "lm_head.bias" in shards else None
    model.lm_head = _Head(shards.load(name), bias, rounded)
    return model


def outside_names(folder: Path, family: Family) -> list[str]:
    """Parameters of the whole model that lie in no decoder layer, in natural order; a tied head is left out."""
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    config.num_hidden_layers = 1
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:1]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return sorted((name for name, _ in model.named_parameters() if not name.startswith(f"{family.layers}.")),
                  key=natural_key)


def outside_tensors(shards: Shards, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """The named tensors in bf16, one at a time. CalibError names one that holds a NaN or an infinity."""
    for name in names:
        stored = shards.load(name)
        _check_finite(name, stored, shards)
        yield name, stored.to(torch.bfloat16)


def _check_finite(name: str, tensor: torch.Tensor, shards: Shards) -> None:
    if not all_finite(tensor):
        raise CalibError(f"{shards.folder}: tensor {name} holds NaN or infinity",
                         "Copy or download the weights again; if they are the original's, the model is broken.")

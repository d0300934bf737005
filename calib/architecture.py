"""Do a folder's tensors belong to its config.json? Asked of headers only, before anything is loaded.

The expected names and shapes are those of the architecture's own module, built without memory (torch's meta device):
so the check knows every family that transformers knows. A tensor that is missing would be filled with random numbers by
a tolerant loader, one of another shape broadcast, one too many ignored; all three give a model that runs and is wrong.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from calib.errors import CalibError
from calib.formats.coherence import check_float
from calib.formats.hf import MissingWeightsError, Shards

_HEAD = "lm_head.weight"
#: Buffers that older checkpoints carry and that every loader computes.
_COMPUTED = re.compile(r"rotary_emb\.inv_freq$")
#: What quantization puts beside a weight; its shapes depend on the scheme, not on the architecture.
_QUANTIZATION = frozenset({"weight_scale", "weight_zero", "input_scale", "pre_quant_scale", "g_idx", "k_scale",
                           "v_scale"})


def expected_shapes(config: Mapping[str, Any], origin: str) -> dict[str, tuple[int, ...]] | None:
    """Parameter name -> shape of the architecture; None where transformers stores it under other names (experts).

    CalibError when no module can be built from the config.
    """
    try:
        settings = AutoConfig.for_model(**config)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(settings, trust_remote_code=False)
        if get_checkpoint_conversion_mapping(settings.model_type):
            return None
    except Exception as error:  # validation errors of many kinds, all of them config.json's
        said = " ".join(str(error).split())[:200]
        raise CalibError(f"{origin}: config.json describes no model that can be built: {said}",
                         "Copy or download config.json again.") from error
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    if config.get("tie_word_embeddings", getattr(settings, "tie_word_embeddings", False)):
        shapes.pop(_HEAD, None)
    return shapes


def differences(config: Mapping[str, Any], found: Mapping[str, tuple[int, ...]], origin: str
                ) -> Iterator[tuple[str, str, str]]:
    """(code, tensor, what is wrong) for every tensor that is missing, of another shape, or without a use."""
    expected = expected_shapes(config, origin)
    if expected is None:
        return
    for name, shape in expected.items():
        if name not in found:
            yield "missing_tensor", name, "is missing; config.json has this layer"
        elif found[name] != shape:
            yield "wrong_shape", name, f"has shape {list(found[name])}, config.json says {list(shape)}"
    for name in found:
        if name not in expected and name != _HEAD and not _COMPUTED.search(name) and (
                name.rpartition(".")[2] not in _QUANTIZATION):
            yield "extra_tensor", name, "belongs to no layer that config.json has"


def check_weights(config: Mapping[str, Any], shards: Shards) -> None:
    """MissingWeightsError that names the first tensor of an unquantized folder which does not belong to config.json."""
    for name, meta in shards.items():
        check_float(shards, name, meta)
    shapes = {name: meta.shape for name, meta in shards.items()}
    wrong = next(differences(config, shapes, str(shards.folder)), None)
    if wrong is not None:
        raise MissingWeightsError(f"{shards.folder}: {wrong[1]} {wrong[2]}",
                                  "Weights and config.json are of two models, or the copy is incomplete.")

"""From a folder to a module: the unquantized model, or a checkpoint as whoever judges it computes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.initialization import no_init_weights

from calib.architecture import check_weights
from calib.blocks import all_finite
from calib.checkpoint import QuantizedCheckpoint
from calib.config import read_config
from calib.errors import CalibError
from calib.formats.hf import Shards, without_progress_bars
from calib.grids import dequantize_weight, fake_quantize
from calib.head import check_tied
from calib.kv import FAKE_KV
from calib.layers import family_of
from calib.scheme import Grid, Scheme


def load_hf(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The unquantized model in eval mode. Checked before loading: every tensor is one of config.json's and finite, and
    a tied head is one matrix with the embedding."""
    config, shards = read_config(folder), Shards(folder)
    family_of(config, str(folder))
    check_weights(config, shards)
    check_finite(shards)
    check_tied(config, ((name, shards.load(name)) for name in shards))
    with without_progress_bars():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True,
                                                     trust_remote_code=False)
    return model.eval()


def check_finite(shards: Shards) -> None:
    """CalibError that names the first tensor with a NaN or an infinity."""
    for name in shards:
        if shards[name].dtype in ("F32", "F16", "BF16") and not all_finite(shards.load(name)):
            raise CalibError(f"{shards.folder}: tensor {name} holds NaN or infinity",
                             "Copy or download the weights again; if they are the original's, the model is broken.")


def load_model(checkpoint: QuantizedCheckpoint) -> PreTrainedModel:
    """The checkpoint as a plain Hugging Face module in float32: weights dequantized, activations and KV fake-quantized.

    It shares no code with modelopt and none with the engines, and so can judge both.
    """
    config = AutoConfig.for_model(**checkpoint.config)
    plain = "eager" if family_of(checkpoint.config, "the checkpoint").softcap else "sdpa"
    config._attn_implementation = FAKE_KV if checkpoint.kv.quantized else plain
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.tie_weights()
    held: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in checkpoint.tensors():
        module, _, leaf = name.rpartition(".")
        held.setdefault(module, {})[leaf] = tensor
    unset = set(dict(model.named_parameters()))
    with torch.no_grad():
        for module, tensors in held.items():
            unset -= place_module(model, module, tensors, checkpoint.schemes.get(module), checkpoint.kv)
    if unset:
        raise CalibError(f"{checkpoint.path} has no tensor {min(unset)}", "The checkpoint is incomplete.")
    return model.eval()


def place_module(model: torch.nn.Module, module: str, tensors: dict[str, torch.Tensor], scheme: Scheme | None, kv: Grid
                 ) -> set[str]:
    """Put one module's canonical tensors in place, its weight dequantized and its input fake-quantized by ``scheme``.

    An attention module takes its ``k_scale`` and ``v_scale``. Returns the names of the parameters that were set.
    """
    target: Any = model.get_submodule(module)
    if "k_scale" in tensors:
        target.kv_grid, target.k_scale, target.v_scale = kv, tensors["k_scale"], tensors["v_scale"]
        return set()
    values = dict(tensors)
    if scheme is not None:
        values = {leaf: tensor for leaf, tensor in tensors.items() if leaf == "bias"}
        values["weight"] = dequantize_weight(scheme.weight, tensors["weight"], tensors["weight_scale"],
                                             tensors.get("weight_zero"), tensors.get("g_idx"))
        pre, scale, grid = tensors.get("pre_quant_scale"), tensors.get("input_scale"), scheme.activation

        def prepare(_: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            x = args[0] if pre is None else args[0] * pre
            return (x if grid is None else fake_quantize(grid, x, scale), *args[1:])

        if pre is not None or grid is not None:
            target.register_forward_pre_hook(prepare)
    for leaf, value in values.items():
        getattr(target, leaf).copy_(value)
    return {f"{module}.{leaf}" for leaf in values}

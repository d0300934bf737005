"""Validate anybody's checkpoint: every byte, every scale, every shape; each fault named with its module.

A quantized checkpoint fails silently: a missing input_scale turns into infinity in one kernel, a NaN scale into "!!!!",
a zero scale into a dead layer. Everything that can be seen without running the model is looked at here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from calib.architecture import differences
from calib.artifact import MANIFEST, Artifact
from calib.blocks import all_finite, any_nonzero
from calib.checkpoint import FORMAT, KIND, QuantizedCheckpoint
from calib.errors import ToolkitError
from calib.grids import too_large
from calib.layers import attention_modules, family_of, scale_shape
from calib.scheme import Scheme
from calib.text import check_vocabulary

_SCALES = ("weight_scale", "input_scale", "pre_quant_scale", "k_scale", "v_scale")


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is wrong. ``code`` is a stable word, ``where`` a module, tensor or file."""

    code: str
    where: str
    message: str

    def __str__(self) -> str:
        return f"{self.where}: {self.message}"


def verify_checkpoint(path: Path | str) -> list[Fault]:
    """All faults of a checkpoint folder; an empty list means none was found. Reads every byte once or twice."""
    path = Path(path)
    faults: list[Fault] = []
    try:
        if (path / MANIFEST).is_file():
            faults += [Fault("changed_file", name, "its bytes are not those of the manifest")
                       for name in Artifact.open(path, KIND, FORMAT).verify()]
        return faults + verify_folder(QuantizedCheckpoint.open(path))
    except ToolkitError as error:
        return [*faults, Fault(error.code, str(path), error.message)]


def verify_folder(checkpoint: QuantizedCheckpoint) -> list[Fault]:
    """Faults of the tensors, names and tokenizer of an opened checkpoint."""
    faults: list[Fault] = []
    shapes: dict[str, tuple[int, ...]] = {}
    try:
        for name, tensor in checkpoint.tensors():
            shapes[name] = tuple(tensor.shape)
            faults += _tensor_faults(name, tensor, checkpoint.schemes)
    except ToolkitError as error:
        return [*faults, Fault(error.code, str(checkpoint.path), error.message)]
    return [*faults, *_missing(checkpoint, shapes), *_wrong_shapes(checkpoint, shapes), *_tokenizer_faults(checkpoint)]


def _tensor_faults(name: str, tensor: torch.Tensor, schemes: dict[str, Scheme]) -> Iterator[Fault]:
    leaf = name.rpartition(".")[2]
    module = name.rpartition(".")[0]
    if tensor.is_floating_point() and not all_finite(tensor):
        yield Fault("not_finite", name, "holds NaN or infinity")
    elif leaf == "weight" and tensor.dim() == 2 and not any_nonzero(tensor):
        yield Fault("all_zero", name, "is zero everywhere: the layer is dead")
    elif leaf in _SCALES and not (tensor > 0).all():
        count = int((tensor <= 0).sum())
        yield Fault("not_positive", name, f"{count} of {tensor.numel()} scales are zero or negative")
    elif leaf == "weight_scale" and module in schemes and (wrong := too_large(schemes[module].weight, tensor)):
        yield Fault("too_large", name, wrong)
    elif leaf == "weight_zero" and not ((tensor == tensor.round()) & (tensor >= 0) & (tensor <= 16)).all():
        yield Fault("off_grid", name, "holds zero points that are no codes (whole numbers from 0 to 16)")
    elif leaf == "g_idx" and module in schemes and (wrong := _wrong_groups(tensor, schemes[module])):
        yield Fault("off_grid", name, wrong)


def _wrong_groups(g_idx: torch.Tensor, scheme: Scheme) -> str:
    """What is wrong with the groups of a weight's columns; empty when nothing is."""
    kind = scheme.weight.granularity
    if kind.kind != "group":
        return f"names groups; the weight is on {scheme.weight}"
    groups = -(-g_idx.numel() // kind.size)
    low, high = int(g_idx.min()), int(g_idx.max())
    return "" if low >= 0 and high < groups else f"names groups {low} to {high}; there are {groups}"


def _missing(checkpoint: QuantizedCheckpoint, shapes: dict[str, tuple[int, ...]]) -> Iterator[Fault]:
    for module, scheme in checkpoint.schemes.items():
        needed = ["weight", "weight_scale"]
        needed += ["weight_zero"] if not scheme.weight.symmetric else []
        needed += ["input_scale"] if scheme.activation is not None and not scheme.activation.dynamic else []
        needed += ["pre_quant_scale"] if scheme.pre_quant_scale else []
        needed += ["g_idx"] if scheme.act_order else []
        for leaf in needed:
            if f"{module}.{leaf}" not in shapes:
                yield Fault("missing_tensor", f"{module}.{leaf}", f"is missing; the module is {scheme}")
    try:
        family = family_of(checkpoint.config, str(checkpoint.path))
        for code, name, message in differences(checkpoint.config, shapes, str(checkpoint.path)):
            yield Fault(code, name, message)
    except ToolkitError as error:
        yield Fault("architecture", str(checkpoint.path), error.message)
        return
    layers = checkpoint.config["num_hidden_layers"]
    for attention in attention_modules(family, layers) if checkpoint.kv.quantized else []:
        for leaf in ("k_scale", "v_scale"):
            if f"{attention}.{leaf}" not in shapes:
                yield Fault("missing_tensor", f"{attention}.{leaf}", f"is missing; the KV cache is {checkpoint.kv}")


def _wrong_shapes(checkpoint: QuantizedCheckpoint, shapes: dict[str, tuple[int, ...]]) -> Iterator[Fault]:
    for module, scheme in checkpoint.schemes.items():
        weight = shapes.get(f"{module}.weight")
        if weight is None or len(weight) != 2:
            continue
        wanted = {"weight_scale": scale_shape(scheme.weight, (weight[0], weight[1])), "input_scale": (),
                  "weight_zero": scale_shape(scheme.weight, (weight[0], weight[1])),
                  "pre_quant_scale": weight[1:], "g_idx": weight[1:]}
        for leaf, expected in wanted.items():
            found = shapes.get(f"{module}.{leaf}")
            if found is not None and found != expected:
                yield Fault("wrong_shape", f"{module}.{leaf}", f"has shape {list(found)}, {list(expected)} is needed")


def _tokenizer_faults(checkpoint: QuantizedCheckpoint) -> Iterator[Fault]:
    try:
        if "vocab_size" in checkpoint.config:  # its absence is a fault of the architecture
            check_vocabulary(checkpoint.tokenizer(), checkpoint.config["vocab_size"])
    except ToolkitError as error:
        yield Fault("tokenizer", str(checkpoint.path), error.message)

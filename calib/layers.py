"""Names of modules and tensors: natural order, and which supported family a model belongs to.

A ``Family`` says what calibration must know about an architecture: which modules of a decoder layer are linear and
quantized, and across which pairs a per-channel scale may be moved without changing the function (a norm's output
channels into its readers, ``up_proj`` rows into ``down_proj`` columns, ``v_proj`` rows into ``o_proj`` columns).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from calib.config import check_complete
from calib.errors import CalibError
from calib.scheme import Grid

NameKey = tuple[tuple[int, int | str], ...]


def natural_key(name: str) -> NameKey:
    """Sorts numbered names by number: layers.2 before layers.10."""
    return tuple((0, int(part)) if part.isdecimal() else (1, part) for part in re.split(r"(\d+)", name) if part)


@dataclass(frozen=True, slots=True)
class Smoothing:
    """Scale the outputs of ``source`` by 1/s and the input columns of ``readers`` by s; names within a layer.

    ``kind``: "norm" (source is a norm), "rows" (source's output rows are the readers' inputs), "heads" (source is
    v_proj: its rows are repeated to the query heads before o_proj reads them).
    """

    kind: str
    source: str
    readers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Family:
    """What calibration knows of an architecture. ``linears`` are names within a decoder layer."""

    name: str
    layers: str
    attention: str
    linears: tuple[str, ...]
    smoothings: tuple[Smoothing, ...]
    fused: tuple[tuple[str, ...], ...]


_ATTENTION = tuple(f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj"))
_MLP = tuple(f"mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj"))
LLAMA = Family(
    name="Llama", layers="model.layers", attention="self_attn", linears=(*_ATTENTION, *_MLP),
    smoothings=(Smoothing("norm", "input_layernorm", _ATTENTION[:3]),
                Smoothing("norm", "post_attention_layernorm", _MLP[:2]),
                Smoothing("heads", _ATTENTION[2], (_ATTENTION[3],)),
                Smoothing("rows", _MLP[1], (_MLP[2],))),
    fused=(_ATTENTION[:3], _MLP[:2]))

#: Architectures by the name in config.json.
FAMILIES: dict[str, Family] = {"LlamaForCausalLM": LLAMA}


def family_of(config: Mapping[str, Any], origin: str) -> Family:
    """The model's family, or a CalibError that names its architecture and the supported ones, or a missing key."""
    architectures = config.get("architectures") or []
    name = architectures[0] if architectures else f"model_type {config.get('model_type')!r}"
    if name not in FAMILIES:
        raise CalibError(f"{origin} is a {name}, which is not supported",
                         f"Supported architectures: {', '.join(sorted(FAMILIES))}.")
    check_complete(config, f"config.json of {origin}")
    return FAMILIES[name]


def planned_linears(family: Family, num_layers: int) -> list[str]:
    """Full names of every linear that a recipe may quantize, layer by layer."""
    return [f"{family.layers}.{layer}.{linear}" for layer in range(num_layers) for linear in family.linears]


def attention_modules(family: Family, num_layers: int) -> list[str]:
    return [f"{family.layers}.{layer}.{family.attention}" for layer in range(num_layers)]


def attention_names(tensors: Iterable[str]) -> list[str]:
    """Attention modules by their k_proj tensors, in natural order."""
    return sorted({name.rpartition(".k_proj.")[0] for name in tensors if ".k_proj." in name}, key=natural_key)


def scale_shape(grid: Grid, weight: tuple[int, ...]) -> tuple[int, ...]:
    """The shape that a weight scale on ``grid`` must have for a weight [out, in]."""
    rows, columns = weight
    granularity = grid.granularity
    if granularity.kind == "tensor":
        return ()
    if granularity.kind == "channel":
        return (rows,)
    if granularity.kind == "group":
        return (rows, -(-columns // granularity.size))
    if granularity.kind == "block":
        return (-(-rows // granularity.rows), -(-columns // granularity.cols))
    raise CalibError("a weight cannot be scaled per token", "Weight granularities: tensor, channel, group, block.")


def check_scale_shape(module: str, grid: Grid, weight: tuple[int, ...], scale: tuple[int, ...]) -> None:
    """CalibError when a weight scale does not fit its weight."""
    expected = scale_shape(grid, weight)
    if scale != expected:
        raise CalibError(f"{module}.weight_scale has shape {list(scale)}; a {grid} weight {list(weight)} needs "
                         f"{list(expected)}", "The checkpoint was written in another layout, or is damaged.")

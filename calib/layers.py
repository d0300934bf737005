"""Names of modules and tensors: natural order, and which supported family a model belongs to.

A ``Family`` says what calibration must know about an architecture: which modules of a decoder layer are linear and
quantized, and across which pairs a per-channel scale may be moved without changing the function (a norm's output
channels into its readers, ``up_proj`` rows into ``down_proj`` columns, ``v_proj`` rows into ``o_proj`` columns).

What lies between a pair's source and its readers must let a channel's factor through. A norm's weight and an untouched
linear do; an activation does not (``gate_proj`` is no source), nor does a norm of the source's own rows: so q and k are
never sources, and in Gemma, which normalises what ``o_proj`` and ``down_proj`` give, those norms feed no linear at all.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
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
    v_proj: its rows are repeated to the query heads before o_proj reads them). ``stacked``: only the last rows of the
    source are meant (v in a qkv_proj, up in a gate_up_proj). ``offset``: what a norm adds to its stored weight.
    """

    kind: str
    source: str
    readers: tuple[str, ...]
    stacked: bool = False
    offset: float = 0.0


@dataclass(frozen=True, slots=True)
class Family:
    """What calibration knows of an architecture. ``linears`` are names within a decoder layer.

    ``tied``: whether the output head is the embedding where config.json does not say. ``softcap``: attention caps its
    scores, which torch's fused attention cannot.
    """

    name: str
    layers: str
    attention: str
    linears: tuple[str, ...]
    smoothings: tuple[Smoothing, ...]
    fused: tuple[tuple[str, ...], ...]
    tied: bool = False
    softcap: bool = False


_ATTENTION = tuple(f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj"))
_MLP = tuple(f"mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj"))
LLAMA = Family(
    name="Llama", layers="model.layers", attention="self_attn", linears=(*_ATTENTION, *_MLP),
    smoothings=(Smoothing("norm", "input_layernorm", _ATTENTION[:3]),
                Smoothing("norm", "post_attention_layernorm", _MLP[:2]),
                Smoothing("heads", _ATTENTION[2], (_ATTENTION[3],)),
                Smoothing("rows", _MLP[1], (_MLP[2],))),
    fused=(_ATTENTION[:3], _MLP[:2]))

GEMMA = replace(
    LLAMA, name="Gemma", tied=True, smoothings=(
        Smoothing("norm", "input_layernorm", _ATTENTION[:3], offset=1.0),
        Smoothing("norm", "pre_feedforward_layernorm", _MLP[:2], offset=1.0), *LLAMA.smoothings[2:]))
_QKV, _OUT, _GATE_UP, _DOWN = "self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"
PHI3 = Family(
    name="Phi-3", layers="model.layers", attention="self_attn", linears=(_QKV, _OUT, _GATE_UP, _DOWN),
    smoothings=(Smoothing("norm", "input_layernorm", (_QKV,)),
                Smoothing("norm", "post_attention_layernorm", (_GATE_UP,)),
                Smoothing("heads", _QKV, (_OUT,), stacked=True), Smoothing("rows", _GATE_UP, (_DOWN,), stacked=True)),
    fused=())

#: Architectures by the name in config.json.
FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": LLAMA, "MistralForCausalLM": replace(LLAMA, name="Mistral"),
    "Qwen2ForCausalLM": replace(LLAMA, name="Qwen2"), "Qwen3ForCausalLM": replace(LLAMA, name="Qwen3"),
    "Gemma2ForCausalLM": replace(GEMMA, name="Gemma 2", softcap=True),
    "Gemma3ForCausalLM": replace(GEMMA, name="Gemma 3"), "Phi3ForCausalLM": PHI3}
#: What an unsupported model is, by signs in its name and in the keys of its config.json.
_SIGNS = (("a mixture of experts", ("Moe", "MoE", "Mixtral"), ("num_local_experts", "num_experts", "n_routed_experts")),
          ("a model of images or sound beside text", ("ConditionalGeneration", "Vision", "VL"),
           ("vision_config", "audio_config")),
          ("no causal language model", ("ForMaskedLM", "Classification", "Encoder", "ForQuestionAnswering"),
           ("is_encoder_decoder",)))


def kind_of(name: str, config: Mapping[str, Any]) -> str:
    """What an unsupported architecture is, in brackets, where its name or its config.json shows it; else nothing."""
    for words, parts, keys in _SIGNS:
        if any(part in name for part in parts) or any(config.get(key) for key in keys):
            return f" ({words})"
    return " (no language-model head)" if name.endswith("Model") else ""


def family_of(config: Mapping[str, Any], origin: str) -> Family:
    """The model's family, or a CalibError that names its architecture and the supported ones, or a missing key."""
    if not config.get("architectures"):
        raise CalibError(f"config.json of {origin} has no 'architectures'", architectures_hint(config))
    name = config["architectures"][0]
    if name not in FAMILIES:
        raise CalibError(f"{origin} is a {name}{kind_of(name, config)}, which is not supported",
                         f"Supported architectures: {', '.join(sorted(FAMILIES))}.")
    check_complete(config, f"config.json of {origin}")
    return FAMILIES[name]


def architectures_hint(config: Mapping[str, Any]) -> str:
    """What to add to a config.json that names no class: the one that its model_type stands for, where we know it."""
    kind = str(config.get("model_type") or "")
    plain = kind.removesuffix("_text").replace("_", "")
    known = next((name for name in FAMILIES if name.removesuffix("ForCausalLM").lower() == plain), None)
    if known is not None:
        return f'Add "architectures": ["{known}"] to it: its model_type is {kind!r}.'
    return f'Add "architectures": [...] with one of the supported: {", ".join(sorted(FAMILIES))}.'


def is_tied(config: Mapping[str, Any]) -> bool:
    """Whether the output head is the embedding's matrix: as config.json says, else as the family's models are."""
    family = FAMILIES.get((config.get("architectures") or [""])[0])
    return bool(config.get("tie_word_embeddings", family is not None and family.tied))


def planned_linears(family: Family, num_layers: int) -> list[str]:
    """Full names of every linear that a recipe may quantize, layer by layer."""
    return [f"{family.layers}.{layer}.{linear}" for layer in range(num_layers) for linear in family.linears]


def attention_modules(family: Family, num_layers: int) -> list[str]:
    return [f"{family.layers}.{layer}.{family.attention}" for layer in range(num_layers)]


def attention_names(tensors: Iterable[str]) -> list[str]:
    """Attention modules by their k_proj (or qkv_proj) tensors, in natural order."""
    return sorted({name.rpartition(part)[0] for name in tensors for part in (".k_proj.", ".qkv_proj.") if part in name},
                  key=natural_key)


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

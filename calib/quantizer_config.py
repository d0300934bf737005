"""Grids in modelopt's words: the ordered quantizer configuration. Plain dictionaries; modelopt itself is not needed.

Later entries win, so everything is switched off first and the planned modules are switched on. Whether the patterns met
exactly the planned modules is checked on the model afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from calib.scheme import Grid, Scheme

_BITS: dict[str, Any] = {"fp8_e4m3": (4, 3), "int8": 8, "int4": 4}


def _weight_attributes(grid: Grid) -> dict[str, Any]:
    """A weight grid in modelopt's words (axis 0 is the output channel; block_sizes -1 is along the input)."""
    kind = grid.granularity
    if kind.kind == "group":
        return {"num_bits": _BITS[grid.dtype], "block_sizes": {-1: kind.size, "type": "static"}}
    return {"num_bits": _BITS[grid.dtype], "axis": 0 if kind.kind == "channel" else None}


def activation_attributes(grid: Grid) -> dict[str, Any]:
    """An activation or KV grid. int8 codes stop at -127 (narrow): beyond a static scale both signs clip alike."""
    if not grid.dynamic:
        return {"num_bits": _BITS[grid.dtype], "axis": None, "narrow_range": grid.dtype == "int8"}
    size = grid.granularity.size if grid.granularity.kind == "group" else None  # None: the whole token
    return {"num_bits": _BITS[grid.dtype], "type": "dynamic", "block_sizes": {-1: size}}


#: Statistics per input channel, for smoothing: amax [in] of every linear's input.
CHANNEL_STATISTICS: dict[str, Any] = {"num_bits": 8, "axis": -1}


def quantizer_config(schemes: Mapping[str, Scheme], attentions: Sequence[str], kv: Grid, *,
                     channel_statistics: bool = False) -> list[dict[str, Any]]:
    """The quant_cfg list for ``schemes`` (module -> Scheme) and, on a quantized ``kv`` grid, keys and values.

    modelopt walks the whole model for each entry, so modules that have the same scheme in every layer (there is one
    attention a layer) share one pattern.
    """
    config: list[dict[str, Any]] = [{"quantizer_name": "*", "enable": False}]
    for pattern, scheme in _patterns(schemes, len(attentions)):
        config.append({"quantizer_name": f"{pattern}.weight_quantizer", "cfg": _weight_attributes(scheme.weight)})
        if channel_statistics:
            config.append({"quantizer_name": f"{pattern}.input_quantizer", "cfg": CHANNEL_STATISTICS})
        elif scheme.activation is not None:
            config.append({"quantizer_name": f"{pattern}.input_quantizer",
                           "cfg": activation_attributes(scheme.activation)})
    if kv.quantized:
        config.append({"quantizer_name": "*[kv]_bmm_quantizer", "cfg": activation_attributes(kv)})
    return config


def _patterns(schemes: Mapping[str, Scheme], num_layers: int) -> list[tuple[str, Scheme]]:
    """Name patterns with their scheme: "*.self_attn.q_proj" where all layers agree, else full names."""
    kinds: dict[str, dict[str, Scheme]] = {}
    for module, scheme in schemes.items():
        kinds.setdefault(".".join(module.split(".")[-2:]), {})[module] = scheme
    found: list[tuple[str, Scheme]] = []
    for kind, members in kinds.items():
        same = len(members) == num_layers and len(set(members.values())) == 1
        found += [(f"*.{kind}", next(iter(members.values())))] if same else list(members.items())
    return found

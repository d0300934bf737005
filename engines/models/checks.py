"""What no engine computes of facts that are well formed one by one: asked when a config.json is read.

Rotary embedding turns pairs of a head's dimensions, so their number is even; a stretched rope divides by what its
lengths and theta leave. Found here, such a model is refused by a plan and before a build; found later, by the first
prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from calib.errors import shown
from engines.errors import EngineError
from engines.models.facts import ModelFacts
from engines.models.rope import RopeFacts

_HINT = "Correct it in config.json; no engine of this toolkit computes it as it stands."


def check_facts(facts: ModelFacts) -> None:
    """EngineError names the value that no engine computes."""
    if facts.max_position < 2:
        raise EngineError(f"max_position_embeddings is {facts.max_position}: a prompt and its answer need two "
                          "positions", _HINT)
    for rope in (facts.rope, *((facts.local_rope,) if facts.local_rope else ())):
        _check_rope(rope, facts.head_dim)


def check_attention(config: Mapping[str, Any]) -> None:
    """EngineError for what config.json says of its layers' attention and no family's program heeds."""
    if config.get("is_causal") is False:
        raise EngineError("is_causal is false in config.json: attention that sees later tokens makes an encoder, which "
                          "is not supported", "Supported: causal text models.")
    types, layers = config.get("layer_types"), config["num_hidden_layers"]
    if types is not None and (not isinstance(types, list | tuple) or len(types) != layers):
        raise EngineError(f"config.json: layer_types is {shown(types)}, not a list of {layers} entries, one for each "
                          "of num_hidden_layers", "Correct it in config.json, or copy the model folder again.")


def checked_window(window: Any) -> int | None:
    """``sliding_window`` of a model whose layers have one. EngineError for what is no number of tokens: 0 would let a
    token see nothing, not even itself."""
    if window is not None and (type(window) is not int or window < 1):
        raise EngineError(f"config.json: sliding_window is {window!r}, not a number of tokens above 0",
                          "Write null where layers attend to all tokens.")
    return window


def _check_rope(rope: RopeFacts, head_dim: int) -> None:
    dim = rope.rotary_dim(head_dim)
    if dim < 2 or dim % 2:
        part = "" if rope.partial == 1.0 else f", of which partial_rotary_factor {rope.partial} rotates {dim}"
        raise EngineError(f"head_dim is {head_dim}{part}: rotary embedding turns pairs of dimensions, and {dim} are no "
                          "pairs", _HINT)
    if rope.kind == "dynamic" and dim == 2:
        raise EngineError(f"the dynamic rope of config.json has no exponent for head_dim {head_dim}", _HINT)
    if rope.kind == "yarn" and rope.theta <= 1.0:
        raise EngineError(f"the yarn rope of config.json has rope_theta {rope.theta}, which must be above 1", _HINT)
    if rope.kind == "longrope":
        _check_factors(rope, dim // 2)


def _check_factors(rope: RopeFacts, pairs: int) -> None:
    for name, factors in (("short_factor", rope.short_factor), ("long_factor", rope.long_factor)):
        if len(factors) != pairs:
            raise EngineError(f"longrope gives {len(factors)} factors in {name}, a head has {pairs} pairs",
                              "config.json belongs to another model.")
        if (wrong := next((factor for factor in factors if not factor > 0), None)) is not None:
            raise EngineError(f"longrope has the factor {wrong} in {name}, which must be above 0", _HINT)

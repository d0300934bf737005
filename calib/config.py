"""config.json: read strictly, so that a number of the wrong kind is named here and not met as a crash later.

Every value that decides shapes is looked at once, when a folder is opened: integers within what a model can have,
booleans that are booleans, sections that are objects, a way to stretch positions that the engines know: found here,
before hours of calibration, and not at the build. What a *family* makes of the other values (which activation, say) is
the business of whoever runs it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from calib.errors import CalibError, shown
from calib.json_text import parse_object

_HINT = "Copy or download config.json again."
#: Positive integers and the most that any model is believed to have: beyond it, a plan alone would fill the memory.
_COUNTS = {"vocab_size": 2**24, "hidden_size": 2**20, "intermediate_size": 2**22, "num_hidden_layers": 4096,
           "num_attention_heads": 2**16, "num_key_value_heads": 2**16, "head_dim": 2**16,
           "max_position_embeddings": 2**31}
_NEEDED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_OPTIONAL = ("num_key_value_heads", "head_dim")
_SWITCHES = ("tie_word_embeddings", "attention_bias", "mlp_bias", "is_causal")
#: How positions are stretched, where config.json says so; the engine's tables (engines/models/rope.py) know these.
RopeKind = Literal["default", "linear", "dynamic", "yarn", "llama3", "longrope"]
ROPE_KINDS: tuple[RopeKind, ...] = get_args(RopeKind)
_ROPE_NUMBERS = ("rope_theta", "factor", "attention_factor", "original_max_position_embeddings", "beta_fast",
                 "beta_slow", "low_freq_factor", "high_freq_factor")
_ROPES = ("rope_parameters", "rope_scaling")
_SECTIONS = ("rope_parameters", "rope_scaling", "quantization_config", "compression_config")


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a model folder. CalibError names the first key whose value cannot be meant."""
    path = folder / "config.json"
    try:
        config = parse_object(path.read_bytes(), str(path), CalibError)
    except FileNotFoundError as error:
        raise CalibError(f"{path} is missing", "A model folder holds config.json, weights and tokenizer files."
                         ) from error
    check_config(config, str(path))
    return config


def positions(config: Mapping[str, Any]) -> int | None:
    """Tokens of a text that the model knows positions for; None where config.json does not say.

    Rotary positions that are stretched (linear, dynamic, yarn) reach ``factor`` times as far as what is written; yarn
    as far as its original length says, where that is there.
    """
    most = config.get("max_position_embeddings")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type")
    factor = rope.get("factor") if kind in ("linear", "dynamic", "yarn") else None
    if most is None:
        return None
    original = rope.get("original_max_position_embeddings") if kind == "yarn" else None
    base = original if isinstance(original, int | float) and original > 0 else most
    return max(int(most), int(base * (factor if isinstance(factor, int | float) else 1.0)))


def check_config(config: Mapping[str, Any], where: str) -> None:
    """CalibError when a value that is there has another type or range than every architecture gives it."""
    for key, most in _COUNTS.items():
        _check_count(config, key, most, where)
    for key in _SWITCHES:
        if not isinstance(config.get(key, False), bool | None):
            raise CalibError(f"{where}: {key} is {shown(config[key])}, not true or false", _HINT)
    for key in _SECTIONS:
        if not isinstance(config.get(key), Mapping | None):
            raise CalibError(f"{where}: {key} is {shown(config[key])}, not an object", _HINT)
    names = config.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise CalibError(f"{where}: architectures is {shown(names)}, not a list of names", _HINT)
    if not isinstance(config.get("model_type"), str | None):
        raise CalibError(f"{where}: model_type is {shown(config['model_type'])}, not a name", _HINT)
    _check_positive(config, "rms_norm_eps", where)
    _check_positive(config, "rope_theta", where)
    for key in _ROPES:
        _check_rope(config.get(key) or {}, f"{where}: {key}")
    _check_heads(config, where)


def check_complete(config: Mapping[str, Any], where: str) -> None:
    """CalibError when a key is missing that every supported family needs."""
    absent = [key for key in _NEEDED if config.get(key) is None]
    if absent:
        raise CalibError(f"{where} has no {absent[0]!r}", _HINT)


def _check_count(config: Mapping[str, Any], key: str, most: int, where: str) -> None:
    value = config.get(key)
    if key not in config or (value is None and key in _OPTIONAL):
        return
    if type(value) is not int or not 1 <= value <= most:
        raise CalibError(f"{where}: {key} is {shown(value)}, not a whole number from 1 to {most:,}", _HINT)


def _check_positive(section: Mapping[str, Any], key: str, where: str) -> None:
    value = section.get(key)
    if value is None:
        return
    if type(value) not in (int, float) or not math.isfinite(value) or value <= 0:
        raise CalibError(f"{where}: {key} is {shown(value)}, not a number above 0", _HINT)


def _check_rope(section: Mapping[str, Any], where: str) -> None:
    """One way to stretch positions, or one for each type of layer."""
    for name, part in section.items():
        if isinstance(part, Mapping):
            _check_rope(part, f"{where}: {name}")
    for key in _ROPE_NUMBERS:
        _check_positive(section, key, where)
    key = "type" if "rope_type" not in section and "type" in section else "rope_type"
    if section.get(key, "default") not in ROPE_KINDS:
        raise CalibError(f"{where}: {key} is {shown(section[key])}, which is not supported",
                         f"Supported: {', '.join(ROPE_KINDS)}.")


def _check_heads(config: Mapping[str, Any], where: str) -> None:
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    groups = config.get("num_key_value_heads")
    if heads is not None and groups is not None and heads % groups:
        raise CalibError(f"{where}: {heads} attention heads cannot share {groups} key-value heads", _HINT)
    if heads is not None and hidden is not None and config.get("head_dim") is None and hidden % heads:
        raise CalibError(f"{where}: hidden_size {hidden} cannot be divided among {heads} attention heads", _HINT)

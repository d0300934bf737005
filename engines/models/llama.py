"""The Llama family (Llama 2 and 3, SmolLM2, TinyLlama, ...): the plain decoder, with optional biases and tying."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from calib.errors import UnknownNameError
from engines.errors import EngineError
from engines.models.decoder import ModelFacts, rope_facts


def llama_facts(config: Mapping[str, Any]) -> ModelFacts:
    """Facts of a LlamaForCausalLM config.json. EngineError names a setting that the program does not honour."""
    if (activation := config.get("hidden_act", "silu")) != "silu":
        raise EngineError(f"activation {activation!r} is not supported in a Llama", "Supported: silu.")
    heads = config["num_attention_heads"]
    return ModelFacts(
        family="Llama", vocab_size=config["vocab_size"], hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"], num_layers=config["num_hidden_layers"], num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        norm_eps=config.get("rms_norm_eps", 1e-6), rope=rope_facts(config),
        max_position=config.get("max_position_embeddings", 2048),
        tied_embeddings=config.get("tie_word_embeddings", False),
        attention_bias=config.get("attention_bias", False), mlp_bias=config.get("mlp_bias", False))


#: Architectures by the name in config.json.
FAMILIES: dict[str, Callable[[Mapping[str, Any]], ModelFacts]] = {"LlamaForCausalLM": llama_facts}


def model_facts(config: Mapping[str, Any]) -> ModelFacts:
    """Facts of any supported architecture; UnknownNameError lists the supported ones."""
    names = config.get("architectures") or [f"model_type {config.get('model_type')!r}"]
    if names[0] not in FAMILIES:
        raise UnknownNameError("architecture", names[0], FAMILIES)
    try:
        return FAMILIES[names[0]](config)
    except KeyError as error:
        raise EngineError(f"config.json has no {error.args[0]!r}", "Copy the model folder again.") from error

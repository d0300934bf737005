"""The Llama family (Llama 2 and 3, SmolLM2, TinyLlama, ...): the plain decoder, with optional biases and tying.

``plain_facts`` reads what all families share; the others are differences from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engines.errors import EngineError
from engines.models.checks import checked_window
from engines.models.facts import Activation, ModelFacts
from engines.models.rope import RopeFacts, rope_facts

#: Names in config.json -> the program's activation.
_ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


def activation_of(family: str, name: str, allowed: Activation) -> Activation:
    """The MLP's activation; EngineError for one that the family's program does not compute."""
    if _ACTIVATIONS.get(name) != allowed:
        raise EngineError(f"activation {name!r} is not supported in a {family}", f"Supported: {allowed}.")
    return allowed


def plain_facts(config: Mapping[str, Any], family: str, *, rope: RopeFacts | None = None, **changes: Any
                ) -> ModelFacts:
    """Facts of a decoder that differs from the plain one by ``changes`` (fields of ``ModelFacts``)."""
    heads = config["num_attention_heads"]
    rope = rope or rope_facts(config)
    facts: dict[str, Any] = {
        "family": family, "vocab_size": config["vocab_size"], "hidden_size": config["hidden_size"],
        "intermediate_size": config["intermediate_size"], "num_layers": config["num_hidden_layers"],
        "num_heads": heads, "num_kv_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
        "norm_eps": config.get("rms_norm_eps", 1e-6), "rope": rope,
        "max_position": rope.longest(config.get("max_position_embeddings", 2048)),
        "tied_embeddings": config.get("tie_word_embeddings", False)}
    if "activation" not in changes:
        facts["activation"] = activation_of(family, config.get("hidden_act", "silu"), "silu")
    return ModelFacts(**facts | changes)


def layer_windows(config: Mapping[str, Any], window: int | None, default: list[bool]) -> tuple[int, ...]:
    """The window of each layer from ``layer_types``; ``default`` says which are sliding where the list is absent."""
    types = config.get("layer_types")
    known = {"full_attention": False, "sliding_attention": True}
    for name in types or ():
        if name not in known:
            raise EngineError(f"a layer of type {name!r} is not supported", f"Supported: {', '.join(known)}.")
    sliding = [known[name] for name in types] if types else default
    if not any(sliding):
        return ()
    if (size := checked_window(window)) is None:
        raise EngineError("config.json has sliding layers and no sliding_window", "Copy the model folder again.")
    return tuple(size if slides else 0 for slides in sliding)


def llama_facts(config: Mapping[str, Any]) -> ModelFacts:
    """Facts of a LlamaForCausalLM config.json. EngineError names a setting that the program does not honour."""
    bias = config.get("attention_bias", False)
    return plain_facts(config, "Llama", qkv_bias=bias, output_bias=bias, mlp_bias=config.get("mlp_bias", False))

"""Gemma 2 and the text models of Gemma 3.

Both: embeddings times sqrt(hidden), norms that multiply by 1 + weight, four of them a layer (before and after attention
and MLP), gelu_tanh, q k over sqrt(query_pre_attn_scalar), tied embeddings, windows on most layers. Gemma 2 has softcaps
on scores and logits; Gemma 3 has none on scores, normalises q and k, and rotates layers with a window by frequencies of
their own. (transformers 5.24 reads ``attn_logit_softcapping`` of a Gemma 3 and does not apply it; a configuration that
sets it is refused here, for nobody knows what it was trained with.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from engines.errors import EngineError
from engines.models.facts import ModelFacts
from engines.models.llama import activation_of, layer_windows, plain_facts
from engines.models.rope import RopeFacts, rope_facts


def _gemma(config: Mapping[str, Any], family: str, rope: RopeFacts, sliding: list[bool], **changes: Any) -> ModelFacts:
    if config.get("use_bidirectional_attention"):
        raise EngineError("bidirectional attention makes an encoder, which is not supported",
                          "Supported: causal text models.")
    bias, scalar = config.get("attention_bias", False), config.get("query_pre_attn_scalar", 256)
    if type(scalar) not in (int, float) or not scalar > 0:
        raise EngineError(f"config.json: query_pre_attn_scalar is {scalar!r}, not a number above 0",
                          "Scores are divided by its root; correct it in config.json.")
    return plain_facts(
        config, family, rope=rope, head_dim=config.get("head_dim") or 256, qkv_bias=bias, output_bias=bias,
        activation=activation_of(family, config.get("hidden_activation") or "gelu_pytorch_tanh", "gelu_tanh"),
        windows=layer_windows(config, config.get("sliding_window", 4096), sliding), norm_offset=1.0, post_norms=True,
        embedding_scale=math.sqrt(config["hidden_size"]), tied_embeddings=config.get("tie_word_embeddings", True),
        attention_scale=scalar ** -0.5, **changes)


def gemma2_facts(config: Mapping[str, Any]) -> ModelFacts:
    """Facts of a Gemma2ForCausalLM config.json: every other layer has a window, the first one too."""
    sliding = [layer % 2 == 0 for layer in range(config["num_hidden_layers"])]
    return _gemma(config, "Gemma 2", rope_facts(config), sliding,
                  attention_softcap=config.get("attn_logit_softcapping", 50.0),
                  logit_softcap=config.get("final_logit_softcapping", 30.0))


def gemma3_facts(config: Mapping[str, Any]) -> ModelFacts:
    """Facts of a Gemma3ForCausalLM config.json (text only): all but every sixth layer have a window."""
    if config.get("attn_logit_softcapping") is not None:
        raise EngineError(f"attn_logit_softcapping {config['attn_logit_softcapping']} is not supported in a Gemma 3",
                          "Gemma 3 has no softcap on scores.")
    every = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or 6
    sliding = [(layer + 1) % every != 0 for layer in range(config["num_hidden_layers"])]
    nested = config.get("rope_parameters") or {}
    full = (nested.get("full_attention") or {}) | (config.get("rope_scaling") or {})
    local = nested.get("sliding_attention") or {}
    local = {"rope_theta": config.get("rope_local_base_freq", 10000.0)} | local
    return _gemma(config, "Gemma 3", rope_facts(config, theta=1e6, section=full), sliding, qk_norm=True,
                  local_rope=rope_facts(config, section=local), logit_softcap=config.get("final_logit_softcapping"),
                  max_position=config.get("max_position_embeddings", 131072))  # what scaling made of it already

"""Qwen2: a Llama with biases on q, k and v. Qwen3: without them, and q and k are normalised head by head before RoPE.

Both may have a window on the layers from ``max_window_layers`` on (``use_sliding_window``; off in published models).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engines.models.facts import ModelFacts
from engines.models.llama import layer_windows, plain_facts


def _windows(config: Mapping[str, Any]) -> tuple[int, ...]:
    window = config.get("sliding_window", 4096) if config.get("use_sliding_window", False) else None
    first = config.get("max_window_layers", 28)
    default = [window is not None and layer >= first for layer in range(config["num_hidden_layers"])]
    return layer_windows(config, window, default)


def qwen2_facts(config: Mapping[str, Any]) -> ModelFacts:
    """Facts of a Qwen2ForCausalLM config.json (Qwen2 and Qwen2.5)."""
    return plain_facts(config, "Qwen2", qkv_bias=True, windows=_windows(config))


def qwen3_facts(config: Mapping[str, Any]) -> ModelFacts:
    """Facts of a Qwen3ForCausalLM config.json."""
    bias = config.get("attention_bias", False)
    return plain_facts(config, "Qwen3", qk_norm=True, qkv_bias=bias, output_bias=bias, windows=_windows(config),
                       head_dim=config.get("head_dim") or 128)

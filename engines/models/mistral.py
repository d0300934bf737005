"""Mistral: a Llama whose layers all attend to the last ``sliding_window`` tokens (where that is not null)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engines.errors import EngineError
from engines.models.checks import checked_window
from engines.models.facts import ModelFacts
from engines.models.llama import plain_facts


def mistral_facts(config: Mapping[str, Any]) -> ModelFacts:
    """Facts of a MistralForCausalLM config.json."""
    if config.get("layer_types"):
        raise EngineError("a Mistral with layer_types is a Ministral, which is not supported",
                          "A Mistral's layers are all alike.")
    window = checked_window(config.get("sliding_window", 4096))
    return plain_facts(config, "Mistral", windows=(window,) * config["num_hidden_layers"] if window else ())

"""Phi-3 (and 3.5, and Phi-4-mini): a Llama whose checkpoint holds q, k, v as one matrix and gate, up as one.

Its rope may be longrope (also written "su" or "yarn" in older files) and may rotate only part of a head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engines.models.checks import checked_window
from engines.models.facts import ModelFacts
from engines.models.llama import plain_facts
from engines.models.rope import rope_facts


def phi3_facts(config: Mapping[str, Any]) -> ModelFacts:
    """Facts of a Phi3ForCausalLM config.json."""
    section = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    if section.get("rope_type", section.get("type")) in ("su", "yarn"):
        section["rope_type"] = "longrope"
    window = checked_window(config.get("sliding_window"))
    return plain_facts({"original_max_position_embeddings": 4096} | dict(config), "Phi-3", fused_weights=True,
                       rope=rope_facts({"original_max_position_embeddings": 4096} | dict(config), partial=True,
                                       section=section),
                       windows=(window,) * config["num_hidden_layers"] if window else ())

"""Which architectures there are, by the name in config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from calib.errors import UnknownNameError
from engines.errors import EngineError
from engines.models.facts import ModelFacts
from engines.models.gemma import gemma2_facts, gemma3_facts
from engines.models.llama import llama_facts
from engines.models.mistral import mistral_facts
from engines.models.phi import phi3_facts
from engines.models.qwen import qwen2_facts, qwen3_facts

FAMILIES: dict[str, Callable[[Mapping[str, Any]], ModelFacts]] = {
    "LlamaForCausalLM": llama_facts, "MistralForCausalLM": mistral_facts, "Qwen2ForCausalLM": qwen2_facts,
    "Qwen3ForCausalLM": qwen3_facts, "Gemma2ForCausalLM": gemma2_facts, "Gemma3ForCausalLM": gemma3_facts,
    "Phi3ForCausalLM": phi3_facts}


def model_facts(config: Mapping[str, Any]) -> ModelFacts:
    """Facts of any supported architecture; UnknownNameError lists the supported ones."""
    names = config.get("architectures") or [f"model_type {config.get('model_type')!r}"]
    if names[0] not in FAMILIES:
        raise UnknownNameError("architecture", names[0], FAMILIES)
    try:
        return FAMILIES[names[0]](config)
    except KeyError as error:
        raise EngineError(f"config.json has no {error.args[0]!r}", "Copy the model folder again.") from error

"""Which architectures there are, by the name in config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import ValidationError

from calib.errors import UnknownNameError
from calib.faults import fault_words
from calib.layers import architectures_hint
from engines.errors import EngineError
from engines.models.checks import check_attention, check_facts
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


#: Facts whose key in config.json has another name.
_KEYS = {"windows": "sliding_window", "attention_softcap": "attn_logit_softcapping", "norm_eps": "rms_norm_eps",
         "logit_softcap": "final_logit_softcapping", "attention_scale": "query_pre_attn_scalar",
         "max_position": "max_position_embeddings"}


def model_facts(config: Mapping[str, Any]) -> ModelFacts:
    """Facts of any supported architecture; UnknownNameError lists the supported ones.

    EngineError names a setting that no engine computes, or a value that nothing can be computed with.
    """
    names = config.get("architectures")
    if not names:
        hint, known = architectures_hint(config), ", ".join(sorted(FAMILIES))
        raise EngineError(f"config.json names no architectures (its model_type is {config.get('model_type')!r})",
                          hint if known in hint else f"{hint} Supported: {known}.")
    if names[0] not in FAMILIES:
        raise UnknownNameError("architecture", names[0], FAMILIES)
    hint = "Correct it in config.json, or copy the model folder again."
    try:
        check_attention(config)
        facts = FAMILIES[names[0]](config)
    except KeyError as error:
        raise EngineError(f"config.json has no {error.args[0]!r}", "Copy the model folder again.") from error
    except ValidationError as error:
        fault = error.errors()[0]
        place = [_KEYS.get(str(part), str(part)) for part in fault["loc"] if isinstance(part, str)]
        raise EngineError(f"config.json: {' '.join([*place, fault_words(fault)])}", hint) from error
    except (ArithmeticError, TypeError, ValueError) as error:
        raise EngineError(f"config.json describes no model that can be computed: {error}", hint) from error
    check_facts(facts)
    return facts

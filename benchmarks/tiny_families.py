"""Tiny random models of every supported family and rope variant, and transformers' own logits of them.

The models are real checkpoints (bf16 weights, config.json, a byte tokenizer), small enough that a test takes a second:
four layers, a window of 24 tokens where the family has one, an original context of 64 where a rope is stretched. Their
weights are large enough that softcaps bend, and logits lie far apart.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCAB = 272
WINDOW = 24
ORIGINAL = 64
LAYERS = 4
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": None,
    "eos_token_id": 256, "pad_token_id": None, "initializer_range": 0.12}


@dataclass(frozen=True, slots=True)
class Tiny:
    """One model: transformers' model type, what differs from the common sizes, and what that is in words."""

    model_type: str
    words: str
    changes: Mapping[str, Any] = field(default_factory=dict)


def _rope(kind: str, **settings: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **settings}}


def _longrope(pairs: int) -> dict[str, Any]:
    return _rope("longrope", short_factor=[1.0 + 0.05 * i for i in range(pairs)],
                 long_factor=[1.0 + 0.4 * i for i in range(pairs)]) | {"original_max_position_embeddings": ORIGINAL}


FAMILIES: dict[str, Tiny] = {
    "Llama": Tiny("llama", "the plain decoder; biases optional", {"attention_bias": True, "mlp_bias": True}),
    "Mistral": Tiny("mistral", "every layer has a window", {"sliding_window": WINDOW}),
    "Qwen2": Tiny("qwen2", "biases on q, k, v", {"tie_word_embeddings": True}),
    "Qwen2 with windows": Tiny("qwen2", "biases on q, k, v; the last layers have a window", {
        "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2}),
    "Qwen3": Tiny("qwen3", "q and k normalised head by head", {"head_dim": 32}),
    "Gemma 2": Tiny("gemma2", "1 + weight norms, four a layer; gelu_tanh; embeddings scaled; softcaps on scores and "
                    "logits; every other layer has a window", {
                        "head_dim": 32, "sliding_window": WINDOW, "query_pre_attn_scalar": 24,
                        "attn_logit_softcapping": 6.0, "final_logit_softcapping": 4.0}),
    "Gemma 3": Tiny("gemma3_text", "as Gemma 2 without the caps on scores; q and k normalised; layers with a window "
                    "have rotary frequencies of their own", {
                        "head_dim": 16, "sliding_window": WINDOW, "query_pre_attn_scalar": 24,
                        "sliding_window_pattern": 3, "final_logit_softcapping": 4.0}),
    "Phi-3": Tiny("phi3", "qkv and gate_up are one matrix each in the checkpoint; window", {"sliding_window": WINDOW}),
    "Phi-3 longrope": Tiny("phi3", "the same with longrope", _longrope(8)),
    "Phi-4-mini": Tiny("phi3", "the same with half of each head rotated", {
        **_longrope(4), "rope_parameters": _longrope(4)["rope_parameters"] | {"partial_rotary_factor": 0.5}}),
}
ROPES: dict[str, Tiny] = {
    "linear": Tiny("llama", "", _rope("linear", factor=4.0)),
    "dynamic": Tiny("llama", "", _rope("dynamic", factor=4.0) | {"max_position_embeddings": ORIGINAL}),
    "yarn": Tiny("llama", "", _rope("yarn", factor=4.0, original_max_position_embeddings=ORIGINAL)),
    "yarn, DeepSeek's factors": Tiny("llama", "", _rope(
        "yarn", factor=4.0, original_max_position_embeddings=ORIGINAL, mscale=0.7, mscale_all_dim=1.2, beta_fast=16,
        beta_slow=2, truncate=False)),
    "llama3": Tiny("llama", "", _rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                                      original_max_position_embeddings=ORIGINAL)),
    "longrope": Tiny("llama", "", _longrope(8)),
}
#: Tokens of a prompt that transformers gets in its first call, where that matters. It forgets the frequencies of an
#: earlier, longer text only in a call of fewer tokens than the original context; from there on one token at a time.
FIRST_CALL = {"dynamic": ORIGINAL - 1}


def byte_tokenizer(folder: Path) -> None:
    """A tokenizer.json of 256 bytes and 16 special tokens, ids 0..271."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([f"<|special_{index}|>" for index in range(VOCAB - 256)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|special_0|>"}))


def make(folder: Path, tiny: Tiny, *, seed: int = 0, **changes: Any) -> Path:
    """A random bf16 checkpoint in ``folder``."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(tiny.model_type, **{**_SIZES, **tiny.changes, **changes})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    low, high = (-0.5, 0.5) if "gemma" in tiny.model_type else (0.5, 1.5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.1)
            elif "norm" in name:
                parameter.uniform_(low, high)
            else:
                parameter.normal_(0, config.initializer_range)
    folder.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(folder)
    byte_tokenizer(folder)
    return folder


def reference(folder: Path) -> PreTrainedModel:
    """transformers in float32 on the same bf16 weights; attention as its text says (eager)."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def prompts(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    """Random token ids."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCAB, (length,), generator=generator).tolist() for length in lengths]


def greedy(model: PreTrainedModel, prompt: Sequence[int], count: int) -> list[int]:
    """transformers' own greedy continuation with its cache, end tokens ignored."""
    ids = torch.tensor([list(prompt)])
    with torch.inference_mode():
        out: Any = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count,  # type: ignore
                                  min_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0)
    return out[0, len(prompt):].tolist()


def step_logits(model: PreTrainedModel, prompt: Sequence[int], following: Sequence[int], *, first: int | None = None
                ) -> torch.Tensor:
    """Logits [1 + len(following), vocabulary] after the prompt and each following token, with transformers' cache.

    The prompt's first ``first`` tokens (all, if not given) are one call, every later token is a call of its own.
    """
    ids = [*prompt, *following]
    first = len(prompt) if first is None else min(first, len(prompt))
    rows, cache = [], None
    with torch.inference_mode():
        for begin, end in ((0, first), *((at, at + 1) for at in range(first, len(ids)))):
            out = model(torch.tensor([ids[begin:end]]), cache=cache, use_cache=True,
                        position_ids=torch.arange(begin, end)[None])
            cache = out.cache
            rows.append(out.logits[0, -1])
    return torch.stack(rows[len(rows) - 1 - len(following):])

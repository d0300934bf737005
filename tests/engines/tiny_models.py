"""Tiny random Llamas with a byte-level tokenizer: real checkpoints, real engines, no download."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB = 272
VARIANTS: dict[str, dict[str, Any]] = {
    "gqa": {},
    "mha": {"num_key_value_heads": 4},
    "mqa_untied": {"num_key_value_heads": 1, "tie_word_embeddings": False},
    "bias": {"attention_bias": True, "mlp_bias": True},
    "llama3_rope": {"rope_parameters": {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0,
                                        "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                                        "original_max_position_embeddings": 64}},
}


def byte_tokenizer(folder: Path) -> None:
    """A tokenizer.json of 256 bytes and 16 special tokens, ids 0..271."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: index for index, char in enumerate(alphabet)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([f"<|special_{index}|>" for index in range(VOCAB - 256)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|special_0|>"}))


def tiny_llama(folder: Path, *, seed: int = 0, **changes: Any) -> Path:
    """A random bf16 Llama of 3 layers in ``folder``; weights large enough that logits are far apart."""
    settings: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
        "tie_word_embeddings": True, "bos_token_id": None, "eos_token_id": 256, "initializer_range": 0.12} | changes
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**settings))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.1)
            elif "norm" in name:
                parameter.uniform_(0.5, 1.5)
    folder.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(folder)
    byte_tokenizer(folder)
    return folder


def reference(folder: Path) -> LlamaForCausalLM:
    """transformers in float32 on the same bf16 weights."""
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def greedy(model: LlamaForCausalLM, prompt: list[int], count: int) -> list[int]:
    """transformers' own greedy continuation, end tokens ignored."""
    with torch.inference_mode():
        ids = torch.tensor([prompt])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count,
                             do_sample=False, eos_token_id=None, pad_token_id=0)
    return out[0, len(prompt):].tolist()

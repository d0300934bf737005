"""Random Llamas of any size, written shard by shard, with a byte tokenizer and calibration texts.

What a rehearsal measures this machine on (``calib/rehearsal.py``), and what the calibration benchmarks run on. Weights
are normal with the usual spread; a few loud norm channels stand in for the outliers of trained models.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers

from calib.dataset import CalibrationSet
from calib.formats.hf import write_shards
from calib.text import Tokenizer

_WORDS = ("ash", "birch", "cedar", "delta", "ember", "flint", "grove", "heron", "iris", "juniper", "kelp", "larch")


@dataclass(frozen=True, slots=True)
class Shape:
    """A Llama's sizes."""

    hidden: int
    inter: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    tied: bool = True

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names and shapes, layer by layer."""
        width = self.hidden // self.heads
        yield "model.embed_tokens.weight", (self.vocab, self.hidden)
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}"
            for name, shape in (("self_attn.q_proj", (self.hidden, self.hidden)),
                                ("self_attn.k_proj", (self.kv_heads * width, self.hidden)),
                                ("self_attn.v_proj", (self.kv_heads * width, self.hidden)),
                                ("self_attn.o_proj", (self.hidden, self.hidden)),
                                ("mlp.gate_proj", (self.inter, self.hidden)),
                                ("mlp.up_proj", (self.inter, self.hidden)),
                                ("mlp.down_proj", (self.hidden, self.inter))):
                yield f"{prefix}.{name}.weight", shape
            for name in ("input_layernorm", "post_attention_layernorm"):
                yield f"{prefix}.{name}.weight", (self.hidden,)
        yield "model.norm.weight", (self.hidden,)
        if not self.tied:
            yield "lm_head.weight", (self.vocab, self.hidden)

    @property
    def layer_parameters(self) -> int:
        """Weights of one layer's matrices."""
        return sum(torch.Size(size).numel() for name, size in self.tensors()
                   if name.startswith("model.layers.0.") and len(size) == 2)

    @property
    def parameters(self) -> int:
        return sum(torch.Size(shape).numel() for _, shape in self.tensors())

    def config(self) -> dict[str, object]:
        return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": self.hidden,
                "intermediate_size": self.inter, "num_hidden_layers": self.layers, "num_attention_heads": self.heads,
                "num_key_value_heads": self.kv_heads, "vocab_size": self.vocab, "max_position_embeddings": 2048,
                "tie_word_embeddings": self.tied, "bos_token_id": self.vocab - 2, "eos_token_id": self.vocab - 1,
                "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu", "dtype": "bfloat16"}


def write_model(folder: Path, shape: Shape, shard_bytes: int, seed: int = 0) -> Path:
    """A bf16 folder; memory holds one shard."""
    generator = torch.Generator().manual_seed(seed)

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for name, size in shape.tensors():
            if len(size) == 1:
                tensor = torch.rand(size, generator=generator) + 0.5
                tensor[::17] *= 8
            else:
                tensor = torch.randn(size, generator=generator) * (0.5 / size[1] ** 0.5)
            yield name, tensor.to(torch.bfloat16)

    folder.mkdir(parents=True)
    write_shards(folder, tensors(), shard_bytes)
    (folder / "config.json").write_text(json.dumps(shape.config(), indent=1))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [shape.vocab - 1]}))
    write_tokenizer(folder, shape.vocab)
    return folder


def write_tokenizer(folder: Path, vocab: int) -> None:
    """Bytes are ids 0..255; words that no text contains fill it up; BOS and EOS come last."""
    words = sorted(pre_tokenizers.ByteLevel.alphabet()) + [f"<unused {index}>" for index in range(vocab - 258)]
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|bos|>", "<|eos|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<|bos|>", "eos_token": "<|eos|>",
                                                              "add_bos_token": False}))


def sentences(seed: int, count: int) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choice(_WORDS) for _ in range(60)) + "." for _ in range(count)]


def calibration_set(folder: Path, out: Path, rows: int, length: int) -> CalibrationSet:
    """Packed rows of random words for the model in ``folder``."""
    source = out.with_suffix(".jsonl")
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in sentences(1, rows * length // 200 + 8)))
    return CalibrationSet.build([source], Tokenizer.open(folder), out, rows=rows, length=length)

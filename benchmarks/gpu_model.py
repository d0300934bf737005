"""A random model of Llama-3.1-8B's shape, made on the GPU tensor by tensor: what the GPU benchmark builds engines from.

Speed depends on shapes and on bits that toggle, not on what a model knows, so random codes of realistic spread serve,
and 16 GB need not travel. The object has a checkpoint's face: the builder cannot tell.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers

from calib.artifact import canonical_json, sha256_hex
from calib.scheme import BF16, Grid, PerChannel, PerGroup, PerToken, Scheme
from calib.text import Tokenizer

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "hidden_act": "silu",
    "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                     "original_max_position_embeddings": 8192, "rope_type": "llama3"}, "tie_word_embeddings": False}
_INT4 = Grid(dtype="int4", granularity=PerGroup(size=128))
SCHEMES: dict[str, Scheme | None] = {
    "bf16": None,
    "fp8": Scheme(weight=Grid(dtype="fp8_e4m3"), activation=Grid(dtype="fp8_e4m3")),
    "int8": Scheme(weight=Grid(dtype="int8", granularity=PerChannel()),
                   activation=Grid(dtype="int8", granularity=PerToken(), dynamic=True)),
    "int4_awq": Scheme(weight=_INT4, pre_quant_scale=True),
    "int4_awq_a8": Scheme(weight=_INT4, pre_quant_scale=True,
                          activation=Grid(dtype="int8", granularity=PerGroup(size=128), dynamic=True)),
}
FP8_KV = Grid(dtype="fp8_e4m3")


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """A byte-level tokenizer with a text for every id: single bytes, then pairs and triples of bytes, 16 specials."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = list(alphabet) + [a + b for a in alphabet for b in alphabet]
    words += [word + alphabet[0] for word in words[256:]]
    vocab = {word: index for index, word in enumerate(words[:vocab_size - 16])}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([f"<|special_{index}|>" for index in range(16)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|special_0|>"}))


@dataclass
class RandomCheckpoint:
    """A quantized checkpoint that nobody calibrated. ``precision`` names one of ``SCHEMES``."""

    precision: str
    kv: Grid = BF16
    layers: int = 32
    seed: int = 7
    source_grid: str | None = None

    @property
    def config(self) -> dict[str, Any]:
        return CONFIG | {"num_hidden_layers": self.layers}

    @property
    def recipe(self) -> str:
        return self.precision

    @property
    def digest(self) -> str:
        return sha256_hex(canonical_json({"random": self.precision, "kv": str(self.kv), "layers": self.layers,
                                          "seed": self.seed}))

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        with tempfile.TemporaryDirectory() as folder:
            write_tokenizer(Path(folder), CONFIG["vocab_size"])
            return Tokenizer.open(folder)

    def tokenizer(self) -> Tokenizer:
        return self._tokenizer

    @cached_property
    def schemes(self) -> dict[str, Scheme]:
        scheme = SCHEMES[self.precision]
        return {} if scheme is None else {name: scheme for name, _, _ in self._linears()}

    def _linears(self) -> Iterator[tuple[str, int, int]]:
        hidden, inter, kv = CONFIG["hidden_size"], CONFIG["intermediate_size"], 1024
        for layer in range(self.layers):
            base = f"model.layers.{layer}"
            for name, n, k in (("self_attn.q_proj", hidden, hidden), ("self_attn.k_proj", kv, hidden),
                               ("self_attn.v_proj", kv, hidden), ("self_attn.o_proj", hidden, hidden),
                               ("mlp.gate_proj", inter, hidden), ("mlp.up_proj", inter, hidden),
                               ("mlp.down_proj", hidden, inter)):
                yield f"{base}.{name}", n, k

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The canonical stream; weights on the GPU, scales where the builder looks at them on the CPU."""
        generator = torch.Generator(device="cuda").manual_seed(self.seed)
        hidden, vocab = CONFIG["hidden_size"], CONFIG["vocab_size"]
        yield "model.embed_tokens.weight", self._normal(vocab, hidden, generator)
        for index, (name, n, k) in enumerate(self._linears()):
            layer = index // 7
            if index % 7 == 0:
                yield f"model.layers.{layer}.input_layernorm.weight", torch.ones(hidden, dtype=torch.bfloat16)
                yield f"model.layers.{layer}.post_attention_layernorm.weight", torch.ones(hidden, dtype=torch.bfloat16)
                if self.kv.quantized:
                    for kind in "kv":
                        yield f"model.layers.{layer}.self_attn.{kind}_scale", torch.tensor(0.02)
            yield from self._linear(name, n, k, generator)
        yield "model.norm.weight", torch.ones(hidden, dtype=torch.bfloat16)
        yield "lm_head.weight", self._normal(vocab, hidden, generator)

    @staticmethod
    def _normal(n: int, k: int, generator: torch.Generator) -> torch.Tensor:
        return torch.randn(n, k, device="cuda", dtype=torch.bfloat16, generator=generator).mul_(0.02)

    def _linear(self, name: str, n: int, k: int, generator: torch.Generator) -> Iterator[tuple[str, torch.Tensor]]:
        scheme = self.schemes.get(name)
        if scheme is None:
            yield f"{name}.weight", self._normal(n, k, generator)
            return
        if scheme.weight.dtype == "int4":
            yield f"{name}.weight", torch.randint(-8, 8, (n, k), device="cuda", dtype=torch.int8, generator=generator)
            scale = torch.full((n, k // 128), 0.02 / 4, dtype=torch.float16, device="cuda")
            yield f"{name}.weight_scale", scale.float()
        elif scheme.weight.dtype == "int8":
            codes = torch.randn(n, k, device="cuda", dtype=torch.bfloat16, generator=generator).mul_(40)
            yield f"{name}.weight", codes.round_().clamp_(-127, 127).to(torch.int8)
            yield f"{name}.weight_scale", torch.full((n,), 0.02 / 40, device="cuda")
        else:
            codes = torch.randn(n, k, device="cuda", dtype=torch.bfloat16, generator=generator).mul_(100)
            yield f"{name}.weight", codes.clamp_(-440, 440).to(torch.float8_e4m3fn)
            yield f"{name}.weight_scale", torch.tensor(0.02 / 100, device="cuda")
            yield f"{name}.input_scale", torch.tensor(0.02)
        if scheme.pre_quant_scale:
            yield f"{name}.pre_quant_scale", torch.ones(k)

"""Tiny random Llamas with a byte tokenizer and calibration texts; the demo model where `make test` prepared it."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

from calib.dataset import CalibrationSet
from calib.text import Tokenizer

VOCAB = 264
SPECIALS = ["<|bos|>", "<|eos|>", "<|user|>", "<|assistant|>", "<|a|>", "<|b|>", "<|c|>", "<|d|>"]
TEMPLATE = ("{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}"
            "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}")
DEMO = Path(__file__).parents[2] / ".home" / "models" / "SmolLM2-135M-Instruct"


def byte_tokenizer(folder: Path, *, add_bos: bool = False, template: str | None = TEMPLATE) -> None:
    """Bytes are ids 0..255, specials 256..263."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIALS)
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {"bos_token": "<|bos|>", "eos_token": {"content": "<|eos|>"}, "add_bos_token": add_bos}
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def tiny_llama(folder: Path, *, seed: int = 0, **changes: Any) -> Path:
    """A random bf16 Llama of 2 layers with a few loud channels, as real models have them."""
    settings: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
        "tie_word_embeddings": True, "bos_token_id": 256, "eos_token_id": 257, "initializer_range": 0.12} | changes
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**settings))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
                parameter[::17] *= 8
    folder.mkdir(parents=True)
    model.to(torch.bfloat16).save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [257, 259]}))
    byte_tokenizer(folder)
    return folder


WORDS = ["ash", "birch", "cedar", "delta", "ember", "flint", "grove", "heron", "iris", "juniper", "kelp", "larch",
         "moss", "nettle", "oak", "pine", "quartz", "reed", "sedge", "thorn", "umber", "vetch", "willow", "yarrow"]


def sentences(seed: int, count: int) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choice(WORDS) for _ in range(30)) + "." for _ in range(count)]


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="session")
def calibration(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> CalibrationSet:
    place = tmp_path_factory.mktemp("calibration")
    source = write_jsonl(place / "texts.jsonl", [{"text": text} for text in sentences(1, 40)])
    return CalibrationSet.build([source], Tokenizer.open(model_folder), place / "set", rows=6, length=64)


@pytest.fixture(scope="session")
def choose() -> list[str]:
    return sentences(2, 8)


@pytest.fixture(scope="session")
def demo_model() -> Path:
    if not (DEMO / "config.json").is_file():
        pytest.skip("the demo model is not in .home: make test prepares it")
    return DEMO

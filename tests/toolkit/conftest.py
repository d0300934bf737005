"""A tiny real model with a real tokenizer, and small data for it: the whole pipeline runs on it in seconds."""

import json
import random

import pytest

WORDS = ("river", "engine", "number", "library", "reader", "lamp", "town", "road", "figure", "book", "window", "garden")


def prose(seed, words=60):
    draw = random.Random(seed)
    return " ".join(draw.choice(WORDS) for _ in range(words)) + f" {seed}."


def write_model(folder):
    """A random bf16 Llama (2 layers, hidden 64) with a byte-level tokenizer trained on the prose."""
    import tokenizers
    import torch
    from tokenizers import decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM

    folder.mkdir(parents=True)
    trained = tokenizers.Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=["<s>", "</s>"], show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    trained.train_from_iterator([prose(n) for n in range(40)], trainer)
    trained.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps(
        {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template}))
    torch.manual_seed(1)
    config = LlamaConfig(vocab_size=trained.get_vocab_size(), hidden_size=64, intermediate_size=128,
                         num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, bos_token_id=0,
                         max_position_embeddings=256, eos_token_id=1, tie_word_embeddings=True, initializer_range=0.25)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def write_data(home):
    from evals.data import Source, write_folder

    def source(rows):
        return Source(rows, "made by the test", "Apache-2.0")

    for number, (name, count) in enumerate((("calibration", 40), ("choose", 24), ("evaluation", 24))):
        texts = [{"text": prose(1000 * number + n), "document": f"{name} {n}"} for n in range(count)]
        files = {"texts": source(texts)}
        if name == "evaluation":
            files["words"] = source([{"question": f"word {n}", "choices": [WORDS[n % 12], WORDS[(n + 5) % 12], "none"],
                                      "answer": n % 3} for n in range(12)])
        write_folder(home.data / name, files)


JOB = """
name: tiny
model: tiny
calibration: {rows: 8, length: 64}
engines:
  - {recipe: bf16}
  - {recipe: fp8}
  - {recipe: int8, kv_cache: fp8}
limits: {max_seq_len: 128, max_batch_size: 4, max_num_tokens: 256, tune: none}
evaluation: {texts: 22, tasks: [words], items: 6, window: 96}
sweep:
  cells: [[1, 8, 4], [2, 8, 4]]
  warmup: 0
  repeats: 1
policy: policy.yaml
"""
POLICY = "name: tiny\ndelta_nll: {margin: 0.5, min_documents: 20}\n"


@pytest.fixture(scope="session")
def tiny_home(tmp_path_factory):
    """A home with the tiny model and its data, nothing made yet."""
    from toolkit.home import Home

    home = Home(tmp_path_factory.mktemp("tiny") / "home")
    write_model(home.models / "tiny")
    write_data(home)
    return home


@pytest.fixture(scope="session")
def tiny_job(tmp_path_factory):
    folder = tmp_path_factory.mktemp("job")
    (folder / "job.yaml").write_text(JOB)
    (folder / "policy.yaml").write_text(POLICY)
    return folder / "job.yaml"

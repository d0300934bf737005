"""A real tokenizer and a real (tiny, random) Llama, and data for them. Nothing here stands in for our own parts."""

import copy
import json

import pytest
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM

from calib.checkpoint import QuantizedCheckpoint
from calib.text import Tokenizer
from engines.build.builder import build
from engines.plan import EngineSpec
from evals.data import Source, write_folder
from evals.module import ModuleScorer
from evals.target import describe

SUBJECTS = ["the river", "a small engine", "every second number", "the old library", "one careful reader"]
VERBS = ["moves past", "counts", "never forgets", "explains", "measures"]
OBJECTS = ["the quiet town", "seven lamps", "what was written", "a row of figures", "the longest road"]


def sentences(count, start=0):
    for i in range(start, start + count):
        yield f"{SUBJECTS[i % 5]} {VERBS[i // 5 % 5]} {OBJECTS[i // 25 % 5]} and then {SUBJECTS[(i * 7 + 3) % 5]} {i}."


def make_tokenizer(folder, *, bos=False):
    trained = tokenizers.Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<s>", "</s>"],
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    trained.train_from_iterator(sentences(125), trainer)
    folder.mkdir(parents=True, exist_ok=True)
    trained.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(
        {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": bos, "chat_template": "{{ messages[0].content }}"}))
    return Tokenizer.open(folder)


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer") / "plain")


@pytest.fixture(scope="session")
def bos_tokenizer(tmp_path_factory):
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer") / "bos", bos=True)


def make_model(tokenizer, seed=0):
    torch.manual_seed(seed)
    config = LlamaConfig(vocab_size=tokenizer.vocab_size, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
                         initializer_range=0.3)
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="session")
def model(tokenizer):
    return make_model(tokenizer)


@pytest.fixture(scope="session")
def scorer(model, tokenizer):
    return ModuleScorer(model, tokenizer)


@pytest.fixture(scope="session")
def near_scorer(model, tokenizer):
    """The same model with its weights slightly shaken: a mild quantization."""
    near = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in near.parameters():
            parameter += 0.01 * torch.randn(parameter.shape, generator=generator)
    return ModuleScorer(near, tokenizer)


@pytest.fixture(scope="session")
def target(tokenizer):
    return describe("tiny", "a" * 64, "cpu fp32 torch", tokenizer)


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    texts = [{"text": " ".join(sentences(4, start=4 * i)), "document": f"book {i // 2}"} for i in range(20)]
    facts = [{"question": f"What does {SUBJECTS[i % 5]} do with {i}?",
              "choices": [f"It {VERBS[(i + j) % 5]} {OBJECTS[j]}" for j in range(4)], "answer": i % 4}
             for i in range(24)]
    truth = [{"question": f"Is {i} {'even' if i % 3 else 'odd'}? It's \"so\" {{{{x}}}}", "choices": ["yes", "no"],
              "answer": (i % 2 == 0) ^ bool(i % 3)} for i in range(12)]
    return write_folder(tmp_path_factory.mktemp("data") / "eval", {
        "texts": Source(texts, "made here", "CC0-1.0"), "facts": Source(facts, "made here", "CC0-1.0"),
        "truth": Source([{**row, "answer": int(row["answer"])} for row in truth], "made here", "CC0-1.0")})


@pytest.fixture(scope="session")
def model_folder(tokenizer, tmp_path_factory):
    """The tiny Llama, rounded to bfloat16, as a Hugging Face folder with its tokenizer."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    copy.deepcopy(make_model(tokenizer)).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save(folder)
    return folder


@pytest.fixture(scope="session")
def engine(model_folder, tmp_path_factory):
    return build(QuantizedCheckpoint.open(model_folder), EngineSpec(tune="none", max_batch_size=8),
                 tmp_path_factory.mktemp("engine") / "bf16")

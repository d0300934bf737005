"""Calibration of every family: folding is exact, the checkpoint is the model that was inspected, refusals say why."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tiny_llamas import byte_tokenizer, sentences, write_jsonl

from benchmarks.tiny_families import FAMILIES, make
from calib.calibrate import quantize
from calib.dataset import CalibrationSet
from calib.errors import CalibError
from calib.layers import family_of, is_tied, planned_linears
from calib.model import load_hf, load_model
from calib.plan import make_plan
from calib.recipe import load_recipe
from calib.smoothing import fold
from calib.text import Tokenizer

LAYERS = 2
NAMES = ["Llama", "Mistral", "Qwen2", "Qwen3", "Gemma 2", "Gemma 3", "Phi-3"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One tiny model of every family, with the byte tokenizer of this room."""
    found = {}
    for name in NAMES:
        folder = make(tmp_path_factory.mktemp("families") / "model", FAMILIES[name], seed=7, vocab_size=264,
                      num_hidden_layers=LAYERS, eos_token_id=257)
        byte_tokenizer(folder)
        found[name] = folder
    return found


@pytest.fixture(scope="module")
def texts(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> CalibrationSet:
    place = tmp_path_factory.mktemp("texts")
    source = write_jsonl(place / "texts.jsonl", [{"text": text} for text in sentences(3, 30)])
    return CalibrationSet.build([source], Tokenizer.open(folders["Llama"]), place / "set", rows=4, length=48)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("alpha", [0.3, 0.8])
def test_folding_leaves_the_logits_equal(folders: dict[str, Path], name: str, alpha: float) -> None:
    """Every pair of the family is folded, by factors that differ at least fourfold; nothing changes but the weights."""
    model = load_hf(folders[name])
    family = family_of(json.loads((folders[name] / "config.json").read_text()), name)
    rows = torch.randint(0, 256, (2, 40), generator=torch.Generator().manual_seed(1))
    modules = planned_linears(family, LAYERS)
    generator = torch.Generator().manual_seed(2)
    amax = {module: 10 ** torch.empty(model.get_submodule(module).weight.shape[1]).uniform_(-2, 2, generator=generator)
            for module in modules}
    readers = {f"model.layers.{layer}.{reader}" for layer in range(LAYERS) for pair in family.smoothings
               for reader in pair.readers}
    assert readers == set(modules)
    before = {module: model.get_submodule(module).weight.detach().clone() for module in modules}
    with torch.inference_mode():
        wanted = model(rows, use_cache=False).logits
        folded = fold(model, family, amax, alpha)
        found = model(rows, use_cache=False).logits
    assert folded.keys() == readers
    for module in modules:
        assert (folded[module].max() / folded[module].min()) > 4, module
        assert not torch.allclose(model.get_submodule(module).weight, before[module], rtol=0.1), module
    assert (found - wanted).abs().max() < 3e-5 * wanted.abs().max()


@pytest.mark.parametrize(("recipe", "kv"), [("int8", "fp8"), ("int4_awq", "bf16"), ("fp8", "bf16")])
@pytest.mark.parametrize("name", NAMES)
def test_the_checkpoint_is_the_model_that_was_inspected(folders: dict[str, Path], texts: CalibrationSet, tmp_path: Path,
                                                        name: str, recipe: str, kv: str) -> None:
    rows = texts.batches()[0][:2]
    seen: list[torch.Tensor] = []

    def inspect(model: torch.nn.Module) -> None:
        with torch.inference_mode():
            seen.append(model(rows, use_cache=False).logits.clone())

    checkpoint = quantize(folders[name], load_recipe(recipe), tmp_path / "out", kv_cache=kv,  # type: ignore[arg-type]
                          calibration=texts, choose_texts=sentences(4, 6), inspect=inspect)
    linears = 4 if name == "Phi-3" else 7
    assert len(checkpoint.schemes) == linears * LAYERS
    assert checkpoint.kv.quantized == (kv == "fp8")
    with torch.inference_mode():
        written = load_model(checkpoint)(rows, use_cache=False).logits
        plain = load_hf(folders[name])(rows, use_cache=False).logits
    [inspected] = seen
    rms = float(inspected.pow(2).mean().sqrt())
    assert float((written - inspected).pow(2).mean().sqrt()) < 0.05 * rms  # ties of codes, as in test_quantize
    assert float((written - plain).pow(2).mean().sqrt()) < (0.6 if recipe == "int4_awq" else 0.25) * rms


@pytest.mark.parametrize(("architecture", "config", "what"), [
    ("MixtralForCausalLM", {"num_local_experts": 8}, r"MixtralForCausalLM \(a mixture of experts\)"),
    ("Qwen3MoeForCausalLM", {"num_experts": 128}, r"\(a mixture of experts\)"),
    ("DeepseekV3ForCausalLM", {"n_routed_experts": 256}, r"DeepseekV3ForCausalLM \(a mixture of experts\)"),
    ("Gemma3ForConditionalGeneration", {"vision_config": {"hidden_size": 8}}, r"\(a model of images or sound"),
    ("T5ForConditionalGeneration", {"is_encoder_decoder": True}, r"T5ForConditionalGeneration"),
    ("BertForMaskedLM", {}, r"\(no causal language model\)"),
    ("LlamaModel", {}, r"\(no language-model head\)"),
    ("FalconForCausalLM", {}, r"is a FalconForCausalLM, which is not supported"),
])
def test_unsupported_architectures_are_refused_by_plan(folders: dict[str, Path], tmp_path: Path, architecture: str,
                                                       config: dict, what: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for path in folders["Llama"].iterdir():
        (folder / path.name).symlink_to(path)
    (folder / "config.json").unlink()
    held = json.loads((folders["Llama"] / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(held | config | {"architectures": [architecture]}))
    with pytest.raises(CalibError, match=what) as caught:
        make_plan(folder, load_recipe("int8"))
    for name in ("MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM",
                 "Phi3ForCausalLM", "LlamaForCausalLM"):
        assert name in str(caught.value.hint)


def test_gemma_is_tied_where_config_json_does_not_say() -> None:
    assert is_tied({"architectures": ["Gemma2ForCausalLM"]})
    assert not is_tied({"architectures": ["Gemma2ForCausalLM"], "tie_word_embeddings": False})
    assert not is_tied({"architectures": ["Qwen2ForCausalLM"]})

"""config.json ties head and embedding: one matrix, or a fault that names both."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_llamas import tiny_llama

from calib.calibrate import quantize
from calib.checkpoint import QuantizedCheckpoint
from calib.errors import CalibError
from calib.head import check_tied
from calib.model import load_hf
from calib.plan import make_plan
from calib.recipe import load_recipe
from engines.build.builder import build
from engines.build.prepare import prepare
from engines.plan import EngineSpec

SAID = "config.json ties lm_head.weight to model.embed_tokens.weight, and the files hold two different ones"


def tied_with_a_head(folder, change):
    """A tied Llama whose files hold a head too: the embedding as ``change`` leaves it."""
    tiny_llama(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = change(tensors["model.embed_tokens.weight"].clone())
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is True
    return folder


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    def change(weight):
        weight[-1, -1] += 1.0
        return weight
    return tied_with_a_head(tmp_path_factory.mktemp("two") / "m", change)


@pytest.mark.parametrize(("recipe", "layerwise"), [("int8_weight_only", "off"), ("int8_weight_only", "on"),
                                                   ("bf16", "off")])
def test_two_matrices_are_no_tied_head(two, tmp_path, recipe, layerwise):
    with pytest.raises(CalibError, match=SAID) as error:
        quantize(two, load_recipe(recipe), tmp_path / "out", layerwise=layerwise)
    assert "set tie_word_embeddings to false; else delete lm_head.weight" in error.value.hint
    assert not list(tmp_path.iterdir())


def test_no_engine_and_no_reference_is_made_of_them(two, tmp_path):
    source = QuantizedCheckpoint.open(two)
    for make in (lambda: build(source, EngineSpec(tune="none"), tmp_path / "e"), lambda: load_hf(two),
                 lambda: prepare(source, EngineSpec(tune="none"), "cpu", tmp_path / "p")):
        with pytest.raises(CalibError, match=SAID):
            make()
    assert not list(tmp_path.iterdir())
    assert make_plan(two, load_recipe("int8_weight_only")).tied_embeddings, "a plan reads no weights"


def test_a_copy_is_the_tied_head(tmp_path):
    copied = tied_with_a_head(tmp_path / "m", lambda weight: weight)
    out, plain = (quantize(folder, load_recipe("int8_weight_only"), tmp_path / name) for name, folder in (
        ("out", copied), ("plain", tiny_llama(tmp_path / "p"))))
    assert (out.path / "model.safetensors").read_bytes() == (plain.path / "model.safetensors").read_bytes()
    tied_with_a_head(tmp_path / "wide", lambda weight: weight.float())
    load_hf(tmp_path / "wide")


def test_only_a_tied_config_is_asked():
    rows = torch.arange(10_000.0)[:, None]
    pair = [("lm_head.weight", rows), ("model.embed_tokens.weight", rows + 1)]
    check_tied({"tie_word_embeddings": False}, pair)
    check_tied({"architectures": ["LlamaForCausalLM"]}, pair)
    check_tied({"tie_word_embeddings": True}, pair[1:])
    with pytest.raises(CalibError, match="two different ones"):
        check_tied({"architectures": ["Gemma2ForCausalLM"]}, pair)
    with pytest.raises(CalibError, match="two different ones"):
        check_tied({"tie_word_embeddings": True}, [pair[0], (pair[1][0], rows[:-1])])

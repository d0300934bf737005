"""Faults that users of other tools reported, made small: each meets a named error or the right result.

docs/known-faults.md lists all of them and where each is tested; what is here has no nearer home.
"""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_llamas import tiny_llama

from calib.calibrate import quantize
from calib.checkpoint import QuantizedCheckpoint
from calib.errors import CalibError
from calib.hardware import HardwareError
from calib.model import load_model
from calib.plan import make_plan
from calib.recipe import load_recipe
from calib.verify import verify_checkpoint

#: transformers' save_pretrained raises on this one: sampling settings beside greedy decoding.
CONTRADICTORY = {"eos_token_id": [257, 259], "do_sample": False, "temperature": 0.6, "top_p": 0.9, "min_pixels": 3}
KEY = "model.layers.0.self_attn.k_proj.k_scale"


@pytest.fixture(scope="module")
def fp8(model_folder, calibration, tmp_path_factory):
    return quantize(model_folder, load_recipe("fp8"), tmp_path_factory.mktemp("faults") / "fp8", kv_cache="fp8",
                    calibration=calibration)


def test_a_contradictory_generation_config_travels_as_it_is(calibration, tmp_path):
    """GPTQModel 1291, transformers 29988: hours of work lost to the check of a side file while saving."""
    folder = tiny_llama(tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps(CONTRADICTORY))
    made = quantize(folder, load_recipe("fp8"), tmp_path / "out", calibration=calibration)
    assert json.loads((made.path / "generation_config.json").read_text()) == CONTRADICTORY


@pytest.mark.parametrize("name", ["generation_config.json", "tokenizer_config.json", "config.json"])
def test_a_broken_side_file_is_found_by_the_plan(tmp_path, name):
    folder = tiny_llama(tmp_path / "model")
    (folder / name).write_text('{"eos_token_id": ')
    with pytest.raises(CalibError, match=name):
        make_plan(folder, load_recipe("fp8"))


def test_tied_embeddings_stay_tied(fp8):
    """llm-compressor 2798, 2835: the head saved a second time, and no longer tied."""
    assert not any(name.startswith("lm_head") for name in fp8.shards)
    assert json.loads((fp8.path / "config.json").read_text())["tie_word_embeddings"] is True
    model = load_model(fp8)
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()


def renamed(fp8, folder, name):
    for path in fp8.path.iterdir():
        if path.name != "manifest.json" and path.is_file():
            (folder / path.name).write_bytes(path.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    tensors[name] = tensors.pop(KEY)
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_cache_scales_are_known_under_the_names_in_use(fp8, tmp_path):
    """vllm 15784, sglang 25792: the scale of a KV cache is spelled in many ways."""
    found = QuantizedCheckpoint.open(renamed(fp8, tmp_path, "model.layers.0.self_attn.attn.k_scale"))
    assert dict(found.tensors())["model.layers.0.self_attn.k_scale"] == load_file(
        fp8.path / "model.safetensors")[KEY]


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.k_proj.output_scale", "model.layers.0.self_attn.kv_scale"])
def test_cache_scales_under_another_name_are_a_named_fault(fp8, tmp_path, name):
    faults = verify_checkpoint(renamed(fp8, tmp_path, name))
    assert ("missing_tensor", "model.layers.0.self_attn.k_scale") in [(fault.code, fault.where) for fault in faults]


def test_cache_scales_are_measured_ones(fp8):
    """Model-Optimizer 20: every scale of the cache was one."""
    scales = [float(tensor) for name, tensor in fp8.tensors() if name.endswith(("k_scale", "v_scale"))]
    assert len(scales) == 4
    assert len(set(scales)) == 4
    assert all(0 < scale != 1.0 for scale in scales)


def test_the_result_says_what_it_was_made_with(fp8):
    """llm-compressor 2155, 1123: another environment, or other settings than one believed."""
    assert {"torch", "transformers", "nvidia-modelopt"} <= set(
        json.loads(fp8.artifact.file("calibration.json").read_text())["versions"])
    assert fp8.artifact.record["recipe_content"] == load_recipe("fp8").model_dump(mode="json")
    assert fp8.artifact.record["seed"] == 0


def test_a_model_that_overflows_half_precision_is_calibrated_in_float32(calibration, choose, tmp_path):
    """AutoAWQ 577, 535: NaN at layer 18 of 60 after four hours, in fp16."""
    folder = tiny_llama(tmp_path / "model")
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.0.mlp.up_proj.weight"] *= 3000
    tensors["model.layers.0.mlp.down_proj.weight"] *= 1 / 3000
    save_file(tensors, path, {"format": "pt"})
    made = quantize(folder, load_recipe("int4_awq"), tmp_path / "out", calibration=calibration, choose_texts=choose)
    assert all(torch.isfinite(tensor.float()).all() for _, tensor in made.tensors())


@pytest.mark.parametrize("recipe", ["fp8", "int4_gptq"])
def test_calibration_lies_on_one_device(model_folder, calibration, tmp_path, recipe):
    """optimum-quanto 393: parts of the model, or what is measured of it, on another device than the data."""
    seen = set()

    def inspect(model):
        seen.update(tensor.device for tensor in (*model.parameters(), *model.buffers()))

    quantize(model_folder, load_recipe(recipe), tmp_path / "out", kv_cache="fp8", calibration=calibration,
             inspect=inspect)
    assert seen == {batch.device for batch in calibration.batches()} == {torch.device("cpu")}


def test_another_default_device_is_refused_by_name(model_folder, calibration, tmp_path):
    """The way to two devices at once here: a program that has set torch's default device (a second GPU there)."""
    with torch.device("meta"), pytest.raises(HardwareError, match=r"default device is 'meta'.*the CPU") as error:
        quantize(model_folder, load_recipe("fp8"), tmp_path / "out", calibration=calibration)
    assert "set_default_device" in error.value.hint
    assert not (tmp_path / "out").exists()

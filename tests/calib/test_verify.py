"""Every fault of a checkpoint has a name; a sound one has none."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from calib.artifact import Artifact
from calib.calibrate import quantize
from calib.checkpoint import QuantizedCheckpoint
from calib.errors import ToolkitError
from calib.recipe import load_recipe
from calib.verify import verify_checkpoint

LINEAR, ATTENTION = "model.layers.1.mlp.up_proj", "model.layers.0.self_attn"


@pytest.fixture(scope="module")
def sound(model_folder, calibration, tmp_path_factory):
    out = tmp_path_factory.mktemp("sound") / "fp8"
    quantize(model_folder, load_recipe("fp8"), out, kv_cache="fp8", calibration=calibration)
    return out


@pytest.fixture
def foreign(sound, tmp_path):
    """The same folder as another tool would leave it: without our manifest."""
    folder = shutil.copytree(sound, tmp_path / "foreign")
    (folder / "manifest.json").unlink()
    return folder


def edit(folder, change):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def test_sound_checkpoints_have_no_fault(sound, foreign, model_folder):
    assert verify_checkpoint(sound) == verify_checkpoint(foreign) == verify_checkpoint(model_folder) == []
    assert QuantizedCheckpoint.open(foreign).recipe == "modelopt: fp8_e4m3 tensor"
    assert QuantizedCheckpoint.open(foreign).digest != QuantizedCheckpoint.open(sound).digest


@pytest.mark.parametrize(("change", "code", "where"), [
    (lambda t: t[f"{LINEAR}.weight_scale"].fill_(float("nan")), "not_finite", f"{LINEAR}.weight_scale"),
    (lambda t: t[f"{LINEAR}.input_scale"].zero_(), "not_positive", f"{LINEAR}.input_scale"),
    (lambda t: t.update({f"{LINEAR}.input_scale": torch.ones(3)}), "wrong_shape", f"{LINEAR}.input_scale"),
    (lambda t: t.pop(f"{ATTENTION}.k_proj.k_scale"), "missing_tensor", f"{ATTENTION}.k_scale"),
    (lambda t: [t.pop(f"{LINEAR}.{leaf}") for leaf in ("weight", "weight_scale", "input_scale")], "missing_tensor",
     f"{LINEAR}.weight"),
    (lambda t: t["model.norm.weight"].fill_(float("inf")), "not_finite", "model.norm.weight")])
def test_each_fault_is_named_with_its_place(foreign, change, code, where):
    edit(foreign, change)
    assert (code, where) in [(fault.code, fault.where) for fault in verify_checkpoint(foreign)]


def test_faults_that_keep_it_from_opening(foreign, tmp_path):
    edit(foreign, lambda tensors: tensors.pop(f"{LINEAR}.weight"))
    assert [fault.code for fault in verify_checkpoint(foreign)] == ["calibration"]
    weights = foreign / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    assert [fault.code for fault in verify_checkpoint(foreign)] == ["weights"]
    assert verify_checkpoint(tmp_path / "nothing")[0].message.startswith("there is no folder")


def test_a_wrong_tokenizer_is_a_fault(foreign):
    config = json.loads((foreign / "config.json").read_text())
    (foreign / "config.json").write_text(json.dumps(config | {"vocab_size": 1000}))
    assert [fault.code for fault in verify_checkpoint(foreign)] == ["wrong_shape", "tokenizer"]


def test_a_flipped_byte_is_found_by_its_hash(sound, tmp_path):
    folder = shutil.copytree(sound, tmp_path / "copy")
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    assert [(fault.code, fault.where) for fault in verify_checkpoint(folder)][:1] == [
        ("changed_file", "model.safetensors")]


@pytest.mark.parametrize("damage", [
    lambda folder: (folder / "extra.txt").write_text("x"), lambda folder: (folder / "config.json").unlink(),
    lambda folder: (folder / "link").symlink_to("config.json"),
    lambda folder: (folder / "config.json").write_text("{}"),
    lambda folder: (folder / "manifest.json").write_text((folder / "manifest.json").read_text().replace("fp8", "fp7"))])
def test_an_artifact_opens_strictly(sound, tmp_path, damage):
    folder = shutil.copytree(sound, tmp_path / "copy")
    Artifact.open(folder)
    damage(folder)
    with pytest.raises(ToolkitError):
        QuantizedCheckpoint.open(folder)
    assert len(verify_checkpoint(folder)) == 1

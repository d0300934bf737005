"""Layer by layer gives the whole pass's checkpoint, bit for bit; killed anywhere, it goes on to the same digest."""

import itertools
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from tiny_llamas import tiny_llama

from calib import layer_store, layer_work
from calib.calibrate import quantize
from calib.errors import CalibError
from calib.formats.compressed_tensors import CompressedTensorsLayout
from calib.formats.hf import write_shards
from calib.model import load_hf
from calib.plan import make_plan
from calib.recipe import load_recipe

CASES = [("fp8", "bf16"), ("fp8", "fp8"), ("bf16", "fp8"), ("int8", "bf16"), ("int8", "fp8"), ("int4_awq", "bf16"),
         ("int4_awq", "fp8"), ("int4_gptq", "bf16"), ("int4_gptq", "fp8"), ("int4_awq_clip", "bf16"),
         ("fp8_block", "fp8"), ("int8_static", "fp8")]


@pytest.fixture(scope="module")
def deeper(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("deeper") / "model", num_hidden_layers=3)


@pytest.mark.parametrize(("recipe", "kv"), CASES)
def test_layer_by_layer_is_the_whole_pass(deeper, calibration, choose, tmp_path, recipe, kv):
    made = [quantize(deeper, load_recipe(recipe), tmp_path / how, kv_cache=kv, calibration=calibration,
                     choose_texts=choose, layerwise=how) for how in ("off", "on")]
    whole, layers = ({name: entry.sha256 for name, entry in one.artifact.manifest.files.items() if not entry.evidence}
                     for one in made)
    assert layers == whole
    assert made[0].digest == made[1].digest


def test_layer_by_layer_works_in_far_less_memory_and_within_what_the_plan_says(calibration, tmp_path):
    """16 layers of 1 M parameters (63 MB as they are calibrated), each way in a process of its own; fp8 searches
    nothing, so what a layer at a time keeps is a layer, and the hidden states lie on disk."""
    model = tiny_llama(tmp_path / "model", num_hidden_layers=16, hidden_size=256, intermediate_size=1024)
    peaks = {}
    for how in ("off", "on"):
        out = tmp_path / how
        code = ("import sys\nfrom pathlib import Path\nfrom calib.calibrate import quantize\n"
                "from calib.dataset import CalibrationSet\nfrom calib.recipe import load_recipe\n"
                f"quantize(Path({str(model)!r}), load_recipe('fp8'), Path({str(out)!r}), layerwise={how!r}, "
                f"calibration=CalibrationSet.open(Path({str(calibration.artifact.path)!r})))")
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
        peaks[how] = json.loads((out / "calibration.json").read_text())["peak_anonymous_bytes"]
    weights = 16 * 4 * (3 * 256 * 1024 + 3 * 256 * 256)
    assert peaks["off"] - peaks["on"] > weights // 2, peaks
    length = calibration.tokens.shape[1]
    foreseen = {how: make_plan(model, load_recipe("fp8"), layerwise=how, length=length).memory_bytes
                for how in ("off", "on")}
    assert foreseen["off"] - foreseen["on"] > weights // 2, foreseen


def _killed_at(save, when, model, recipe, calibration, choose, out):
    """In a process of its own: quantize, and die by SIGKILL at the ``save``-th write, before or after its rename."""
    writes, save_one = itertools.count(1), layer_store._save

    def deadly(path, tensors):
        last = next(writes) == save
        if last and when == "before":
            path.parent.mkdir(parents=True, exist_ok=True)
            path.with_name(f".{path.name}.1.tmp").write_bytes(b"half")
            os.kill(os.getpid(), signal.SIGKILL)
        save_one(path, tensors)
        if last:
            os.kill(os.getpid(), signal.SIGKILL)

    layer_store._save = deadly
    quantize(model, recipe, out, kv_cache="fp8", calibration=calibration, choose_texts=choose, layerwise="on")


def _killed_while_writing(model, recipe, calibration, choose, out):
    def deadly(*args):
        os.kill(os.getpid(), signal.SIGKILL)
    CompressedTensorsLayout.write = deadly
    quantize(model, recipe, out, kv_cache="fp8", calibration=calibration, choose_texts=choose, layerwise="on")


def _killed_behind_layer_0(model, recipe, calibration, out):
    save_one = layer_store._save

    def deadly(path, tensors):
        save_one(path, tensors)
        if path.name == "layer-00000.safetensors":
            os.kill(os.getpid(), signal.SIGKILL)
    layer_store._save = deadly
    quantize(model, recipe, out, kv_cache="fp8", calibration=calibration, layerwise="on")


def _dies(target, *args):
    process = multiprocessing.get_context("fork").Process(target=target, args=args)
    process.start()
    process.join(240)
    assert process.exitcode == -signal.SIGKILL


def test_killed_anywhere_it_goes_on_to_the_same_digest(deeper, calibration, choose, tmp_path, monkeypatch):
    recipe = load_recipe("int8")  # both phases: statistics with three streams, then layers with a KV pass
    out, alone = tmp_path / "out", quantize(deeper, recipe, tmp_path / "alone", kv_cache="fp8", calibration=calibration,
                                            choose_texts=choose, layerwise="on")
    for save, when in ((2, "before"), (9, "after"), (5, "before"), (12, "before"), (4, "after"), (6, "before")):
        _dies(_killed_at, save, when, deeper, recipe, calibration, choose, out)
        assert not out.exists()
    _dies(_killed_while_writing, deeper, recipe, calibration, choose, out)
    models = []
    monkeypatch.setattr(layer_work, "one_layer", lambda *args: models.append(args))  # every layer is done: none is made
    made = quantize(deeper, recipe, out, kv_cache="fp8", calibration=calibration, choose_texts=choose, layerwise="on")
    assert made.digest == alone.digest
    assert not models
    assert not (tmp_path / ".out.work").exists()


def test_work_of_other_inputs_is_not_taken(deeper, calibration, choose, tmp_path):
    out = tmp_path / "out"
    _dies(_killed_at, 12, "after", deeper, load_recipe("fp8"), calibration, choose, out)
    made = quantize(deeper, load_recipe("int4_awq"), out, calibration=calibration, layerwise="on")
    again = quantize(deeper, load_recipe("int4_awq"), tmp_path / "again", calibration=calibration, layerwise="off")
    assert made.digest == again.digest


def test_progress_names_the_layer(deeper, calibration, tmp_path):
    events = []
    quantize(deeper, load_recipe("fp8"), tmp_path / "out", calibration=calibration, layerwise="on",
             report=events.append)
    layers = [event for event in events if event.stage == "calibrate layers"]
    assert [event.message for event in layers if ":" not in event.message] == [f"layer {n} of 3" for n in (1, 2, 3)]
    assert {event.total for event in layers} == {3}


def test_a_nan_in_a_later_layer_is_named(calibration, tmp_path):
    folder = tiny_llama(tmp_path / "m", num_hidden_layers=3)
    tensors = {name: tensor for name, tensor in load_hf(folder, torch.bfloat16).state_dict().items()
               if name != "lm_head.weight"}
    tensors["model.layers.2.mlp.up_proj.weight"][3, 5] = float("nan")
    write_shards(folder, tensors.items())
    with pytest.raises(CalibError, match=r"model\.layers\.2\.mlp\.up_proj\.weight holds NaN"):
        quantize(folder, load_recipe("fp8"), tmp_path / "out", calibration=calibration, layerwise="on")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("changes", [{"attention_bias": True, "mlp_bias": True}, {"tie_word_embeddings": False},
                                     {"num_key_value_heads": 4, "rope_parameters": {
                                         "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0,
                                         "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                                         "original_max_position_embeddings": 64}}])
def test_other_shapes_of_the_family(calibration, choose, tmp_path, changes):
    folder = tiny_llama(tmp_path / "m", **changes)
    made = [quantize(folder, load_recipe("int8"), tmp_path / how, calibration=calibration, choose_texts=choose,
                     layerwise=how).digest for how in ("off", "on")]
    assert made[0] == made[1]


def _flipped(path, where):
    data = bytearray(path.read_bytes())
    data[where] ^= 1
    path.write_bytes(data)


def _first(work, pattern):
    return min(work.glob(pattern))


DAMAGE = {"a bit of a finished layer": lambda work: _flipped(work / "layer-00000.safetensors", -3),
          "a bit of a header": lambda work: _flipped(work / "layer-00000.safetensors", 20),
          "a bit of hidden states": lambda work: _flipped(_first(work, "hidden-00001/data*"), -3),
          "a cut file": lambda work: os.truncate(work / "layer-00000.safetensors", 3000),
          "an empty file": lambda work: os.truncate(_first(work, "hidden-00001/data*"), 0),
          "a file of another place": lambda work: shutil.copy(max(work.glob("hidden-00001/data*")),
                                                              _first(work, "hidden-00001/data*")),
          "another key": lambda work: (work / "inputs.json").write_text('{"key": "k"}'),
          "no JSON": lambda work: (work / "inputs.json").write_bytes(b"[" * 100_000),
          "a bit of the key's file": lambda work: _flipped(work / "inputs.json", 20)}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_work_is_not_believed(tmp_path, damage):
    work, store = tmp_path / "work", layer_store.LayerStore(tmp_path / "work", "k")
    for batch in range(2):
        store.put_hidden("data-1", 1, batch, torch.randn(2, 3, 4))
    store.put("layer", 0, {"a.weight": torch.randn(40, 40, dtype=torch.bfloat16), "a.weight_scale": torch.tensor(2.0)})
    assert layer_store.LayerStore(work, "k").has("layer", 0)
    DAMAGE[damage](work)
    again = layer_store.LayerStore(work, "k")
    assert not again.has("layer", 0)
    assert not again.has_hidden("data-1", 1)


def test_a_run_over_damaged_work_gives_the_same_digest(deeper, calibration, tmp_path):
    out = tmp_path / "out"
    whole = quantize(deeper, load_recipe("fp8"), tmp_path / "whole", kv_cache="fp8", calibration=calibration,
                     layerwise="off")
    _dies(_killed_behind_layer_0, deeper, load_recipe("fp8"), calibration, out)
    _flipped(tmp_path / ".out.work" / "layers" / "layer-00000.safetensors", -3)
    made = quantize(deeper, load_recipe("fp8"), out, kv_cache="fp8", calibration=calibration, layerwise="on")
    assert made.digest == whole.digest


def test_a_tensor_that_changes_under_a_run_is_named(tmp_path):
    store = layer_store.LayerStore(tmp_path / "work", "k")
    store.put("layer", 3, {"a.weight": torch.arange(6, dtype=torch.bfloat16), "a.weight_scale": torch.tensor(2.0)})
    assert set(store.names("layer", 3)) == {"a.weight", "a.weight_scale"}
    assert store.get("layer", 3, "a.weight_scale").item() == 2
    _flipped(tmp_path / "work" / "layer-00003.safetensors", -1)  # safetensors puts the wider dtype first
    assert store.get("layer", 3, "a.weight_scale").item() == 2
    with pytest.raises(layer_store.DamagedWorkError, match=r"a\.weight is not as it was written"):
        store.get("layer", 3, "a.weight")
    assert not layer_store.LayerStore(tmp_path / "work", "k").has("layer", 3)

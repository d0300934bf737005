"""Layer by layer gives the whole pass's checkpoint, bit for bit; killed anywhere, it goes on to the same digest."""

import pytest
from tiny_llamas import tiny_llama

from calib.calibrate import quantize
from calib.recipe import load_recipe

CASES = [("fp8", "bf16"), ("fp8", "fp8"), ("bf16", "fp8"), ("int8", "bf16"), ("int8", "fp8"), ("int4_awq", "bf16"),
         ("int4_awq", "fp8")]


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

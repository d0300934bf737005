"""Recipes that need no calibration data are made without any, and come out the same beside data."""

import pytest
from tiny_llamas import sentences

from calib.calibrate import quantize
from calib.errors import CalibrationDataError
from calib.recipe import load_recipe, ordinary_recipes
from calib.verify import verify_checkpoint

FREE = ("bf16", "fp8_block", "fp8_dynamic", "fp8_weight_only", "int8_weight_only")


def test_what_needs_data_is_known(tmp_path):
    assert tuple(name for name in ordinary_recipes() if not load_recipe(name).needs_data()) == FREE
    assert load_recipe("bf16").needs_data("fp8"), "a KV cache has measured scales"
    path = tmp_path / "p.yaml"
    path.write_text("extends: fp8_dynamic\nname: p\nprotect: 1\n")
    assert load_recipe(path).needs_data(), "protected layers are measured"


@pytest.mark.parametrize("recipe", FREE)
def test_without_data_it_is_the_checkpoint_that_it_is_with_data(model_folder, calibration, tmp_path, recipe):
    alone = quantize(model_folder, load_recipe(recipe), tmp_path / "alone")
    beside = quantize(model_folder, load_recipe(recipe), tmp_path / "beside", calibration=calibration,
                      choose_texts=sentences(2, 8))
    assert alone.digest == beside.digest
    assert alone.artifact.parents == []
    assert (alone.artifact.record["calibration"], alone.artifact.record["calibration_rows"]) == (None, 0)
    assert verify_checkpoint(alone.path) == []


def test_a_seed_without_rows_to_draw_is_no_part_of_the_checkpoint(model_folder, calibration, tmp_path):
    """Data-free, and a set that is used whole: the record names the seed that chose the rows, not one that did not."""
    plain, seeded = (quantize(model_folder, load_recipe("fp8_dynamic"), tmp_path / f"free{seed}", seed=seed)
                     for seed in (0, 7))
    assert plain.digest == seeded.digest
    assert plain.artifact.record["seed"] is None
    whole = [quantize(model_folder, load_recipe("fp8").model_copy(update={"rows": calibration.rows}),
                      tmp_path / f"whole{seed}", calibration=calibration, seed=seed) for seed in (0, 7)]
    assert whole[0].digest == whole[1].digest
    assert whole[0].artifact.record["seed"] == calibration.artifact.record["seed"]
    drawn = [quantize(model_folder, load_recipe("fp8").model_copy(update={"rows": 2, "seed": 3}),
                      tmp_path / f"drawn{seed}", calibration=calibration, seed=seed) for seed in (0, 7)]
    assert drawn[0].digest != drawn[1].digest
    assert [one.artifact.record["seed"] for one in drawn] == [3, 10]


@pytest.mark.parametrize("recipe", ["fp8_block", "fp8_dynamic"])
def test_without_data_layer_by_layer_is_the_whole_pass(model_folder, tmp_path, recipe):
    whole = quantize(model_folder, load_recipe(recipe), tmp_path / "whole", layerwise="off")
    layers = quantize(model_folder, load_recipe(recipe), tmp_path / "layers", layerwise="on")
    assert whole.digest == layers.digest


@pytest.mark.parametrize(("recipe", "cache"), [("int8", "bf16"), ("bf16", "fp8")])
def test_data_that_are_needed_and_missing_are_said_at_once(tmp_path, recipe, cache):
    with pytest.raises(CalibrationDataError, match=f"recipe {recipe} with a {cache} KV cache is calibrated on text"):
        quantize(tmp_path / "no model is looked for", load_recipe(recipe), tmp_path / "out", kv_cache=cache)

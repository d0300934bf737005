"""Layers raised to eight bits: what is written has that scheme there, and is the model that was inspected."""

import pytest
import torch
from tiny_llamas import tiny_llama

from calib.calibrate import quantize
from calib.checkpoint import QuantizedCheckpoint
from calib.errors import CalibError
from calib.formats.hf import write_shards
from calib.grids import amax_scale, dequantize_weight, quantize_weight
from calib.model import load_hf, load_model
from calib.plan import make_plan
from calib.recipe import EIGHT_BITS, explain, load_recipe
from calib.sizes import module_bytes

CASES = [("int4_awq", "int8", "modelopt"), ("int4_awq_clip", "int8", "compressed-tensors"),
         ("int4_gptq_ct", "fp8", "compressed-tensors"), ("w4a8_fp8", "fp8", "compressed-tensors")]
#: Layer 1, and of layer 0 one linear.
PATTERNS = ["model.layers.1.*", "model.layers.0.mlp.down_proj"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("raised") / "model", num_hidden_layers=3)


def recipe_of(tmp_path, base, to, patterns=PATTERNS, more=""):
    """``base`` with modules raised; int4_gptq writes a layout of one grid, so ``_ct`` asks for another one."""
    layout = "layout: compressed-tensors\n" if base.endswith("_ct") else ""
    path = tmp_path / "r.yaml"
    path.write_text(f"extends: {base.removesuffix('_ct')}\nname: r\n{layout}raised: {{{to}: {patterns}}}\n{more}")
    return load_recipe(path)


@pytest.mark.parametrize(("base", "to", "layout"), CASES)
def test_a_raised_layer_has_its_scheme_in_the_checkpoint(model, calibration, choose, tmp_path, base, to, layout):
    recipe, seen = recipe_of(tmp_path, base, to), []
    rows = calibration.batches()[0][:2]

    def look(inside):
        with torch.inference_mode():
            seen.append(inside(rows, use_cache=False).logits.clone())

    made = quantize(model, recipe, tmp_path / "out", calibration=calibration, choose_texts=choose, inspect=look)
    assert made.layout.name == layout
    raised = {name for name, scheme in made.schemes.items() if scheme.weight == EIGHT_BITS[to]}
    assert raised == {name for name in made.schemes if ".layers.1." in name or name.endswith("0.mlp.down_proj")}
    assert len(raised) == 8
    assert all(made.schemes[name].activation is None and not made.schemes[name].pre_quant_scale for name in raised)
    assert {scheme.weight.dtype for name, scheme in made.schemes.items() if name not in raised} == {"int4"}
    assert made.size_bytes == make_plan(model, recipe).size_bytes
    with torch.inference_mode():
        logits = load_model(made)(rows, use_cache=False).logits
    assert (logits - seen[0]).pow(2).mean() <= 0.05**2 * seen[0].pow(2).mean()


@pytest.mark.parametrize("base", ["int4_awq", "int4_gptq_ct"])
def test_raised_codes_are_those_of_the_largest_magnitudes(model, calibration, tmp_path, base):
    """No neighbour of a raised layer folds anything into it: its codes are those of the source's own weights."""
    made = quantize(model, recipe_of(tmp_path, base, "int8"), tmp_path / "out", calibration=calibration)
    held, grid = dict(made.tensors()), EIGHT_BITS["int8"]
    for name in ("model.layers.1.self_attn.v_proj", "model.layers.1.mlp.up_proj", "model.layers.1.mlp.down_proj"):
        weight = QuantizedCheckpoint.open(model).shards.load(f"{name}.weight").float()
        scale = amax_scale(grid, weight)
        assert torch.equal(held[f"{name}.weight_scale"], scale), name
        assert torch.equal(held[f"{name}.weight"], quantize_weight(grid, weight, scale)), name
        error = (dequantize_weight(grid, held[f"{name}.weight"], scale) - weight).abs()
        assert (error <= scale[:, None] / 2 * 1.0001).all()


@pytest.mark.parametrize(("base", "kv"), [("int4_awq", "fp8"), ("int4_awq_clip", "bf16"), ("int4_gptq_ct", "int8")])
def test_layer_by_layer_gives_the_same(model, calibration, choose, tmp_path, base, kv):
    recipe = recipe_of(tmp_path, base, "int8")
    made = [quantize(model, recipe, tmp_path / how, kv_cache=kv, calibration=calibration, choose_texts=choose,
                     layerwise=how) for how in ("off", "on")]
    assert made[0].digest == made[1].digest
    assert made[0].schemes["model.layers.1.mlp.up_proj"].weight == EIGHT_BITS["int8"]


def test_a_head_and_a_raised_layer_go_together(model, calibration, tmp_path):
    recipe = recipe_of(tmp_path, "int4_gptq_ct", "int8", more="lm_head: fp8\n")
    made = quantize(model, recipe, tmp_path / "out", calibration=calibration)
    assert made.schemes["lm_head"].weight == EIGHT_BITS["fp8"]
    assert made.schemes["model.layers.1.mlp.up_proj"].weight == EIGHT_BITS["int8"]
    assert {scheme.weight.dtype for scheme in made.schemes.values()} == {"int4", "int8", "fp8_e4m3"}


def test_the_plan_prices_a_raised_layer_and_doubts_other_loaders(model, tmp_path):
    plain, recipe = make_plan(model, load_recipe("int4_awq")), recipe_of(tmp_path, "int4_awq", "int8")
    plan = make_plan(model, recipe)
    assert set(plan.raised_schemes) & set(plan.layer_schemes) == set()
    more = sum(module_bytes("modelopt", plan.schemes[name], module.shape) - module_bytes(
        "modelopt", plain.schemes[name], module.shape) for module in plan.modules
        if (name := module.name) in plan.raised_schemes)
    assert abs(plan.size_bytes - plain.size_bytes - more) < 4096  # headers
    assert not any(loader.loads for loader in plan.loaders)
    assert {setting.key: (setting.value, setting.origin) for setting in explain(tmp_path / "r.yaml")}["raised"] == (
        {"int8": PATTERNS}, "r.yaml")
    assert {setting.key: setting.value for setting in explain("int4_awq")}["raised"] == {}
    assert "raised" not in load_recipe("int4_awq").model_dump(mode="json")  # digests of other recipes stay


@pytest.mark.parametrize(("base", "to", "patterns", "more", "what"), [
    ("int4_awq", "int8", ["*.nothing"], "", "raised int8 pattern '\\*.nothing' matches no module"),
    ("int4_awq", "int8", ["*.1.*"], "keep: ['*.1.mlp.down_proj']\n", "is named by keep and by raised int8"),
    ("int4_awq", "int8", ["*.1.self_attn.q_proj"], "", "which reads the same input"),
    ("int4_awq", "int8", ["*"], "", "none is left in int4"),
    ("int4_awq", "int8", [], "", "names no module for int8"), ("int4_awq", "int6", ["*.1.*"], "", "int6"),
    ("int4_awq", "fp8", ["*.1.*"], "", "can hold modules raised to int8"),
    ("int4_gptq", "int8", ["*.1.*"], "", "one grid for all modules"),
    ("int4_asym", "int8", ["*.1.*"], "", "one grid for all modules"),
    ("int8", "int8", ["*.1.*"], "", "are not int4"), ("bf16", "int8", ["*.1.*"], "", "are not int4"),
    ("int4_awq", "int8", ["*.1.*"], "protect: 1\n", "use keep beside raised")])
def test_what_makes_no_sense_is_refused(model, tmp_path, base, to, patterns, more, what):
    with pytest.raises(CalibError, match=what):
        make_plan(model, recipe_of(tmp_path, base, to, patterns, more))


def test_one_module_is_raised_to_one_format(model, tmp_path):
    (tmp_path / "r.yaml").write_text("extends: int4_awq_clip\nname: r\n"
                                     "raised: {int8: ['*.1.*'], fp8: ['*.1.mlp.down_proj']}\n")
    with pytest.raises(CalibError, match="is named by raised int8 and by raised fp8"):
        make_plan(model, load_recipe(tmp_path / "r.yaml"))


def test_a_raised_weight_of_zeros_is_named(calibration, tmp_path):
    folder = tiny_llama(tmp_path / "model")
    tensors = {name: tensor for name, tensor in load_hf(folder, torch.bfloat16).state_dict().items()
               if name != "lm_head.weight"}
    tensors["model.layers.1.mlp.down_proj.weight"].zero_()
    write_shards(folder, tensors.items())
    recipe = recipe_of(tmp_path, "int4_gptq_ct", "int8", ["*.1.mlp.down_proj"])
    with pytest.raises(CalibError, match=r"model\.layers\.1\.mlp\.down_proj is all zero"):
        quantize(folder, recipe, tmp_path / "out", calibration=calibration)

"""Every recipe of the second set on a tiny Llama: written as planned, read back as it was in memory, twice the same."""

import json

import pytest
import torch
from tiny_llamas import tiny_llama

from calib.calibrate import quantize
from calib.checkpoint import QuantizedCheckpoint
from calib.errors import CalibError
from calib.hardware import HardwareError
from calib.model import load_model
from calib.plan import make_plan
from calib.recipe import explain, load_recipe
from calib.scheme import Grid
from calib.verify import verify_checkpoint

#: recipe -> layout that other runtimes read, module tensors that lie there.
MADE = {"fp8_dynamic": ("compressed-tensors", {"weight", "weight_scale"}),
        "fp8_block": ("compressed-tensors", {"weight", "weight_scale"}),
        "fp8_weight_only": ("compressed-tensors", {"weight", "weight_scale"}),
        "int8_weight_only": ("compressed-tensors", {"weight_packed", "weight_scale", "weight_shape"}),
        "int8_static": ("compressed-tensors", {"weight", "weight_scale", "input_scale"}),
        "int4_awq_clip": ("compressed-tensors", {"weight_packed", "weight_scale", "weight_shape"}),
        "int4_awq_a8": ("compressed-tensors", {"weight_packed", "weight_scale", "weight_shape"}),
        "int4_asym": ("awq", {"qweight", "qzeros", "scales"}),
        "int4_gptq": ("gptq", {"qweight", "qzeros", "scales", "g_idx"}),
        "w4a8_fp8": ("compressed-tensors", {"weight_packed", "weight_scale", "weight_shape"})}
#: Logits, RMS over RMS. Zero where memory and checkpoint share their arithmetic; modelopt's may break a tie otherwise.
BOUND = 0.01
MODULE = "model.layers.1.mlp.down_proj"


def logits(model, rows):
    with torch.inference_mode():
        return model(rows, use_cache=False).logits.clone()


@pytest.fixture(scope="module")
def made(model_folder, calibration, choose, tmp_path_factory):
    place, cache = tmp_path_factory.mktemp("made"), {}

    def make(recipe, kv="bf16", source=None, **options):
        key = (str(recipe), kv, source)
        if key not in cache:
            seen = []
            found = quantize(source or model_folder, load_recipe(recipe), place / str(len(cache)), kv_cache=kv,
                             calibration=calibration, choose_texts=choose,
                             inspect=lambda model: seen.append(logits(model, calibration.batches()[0][:2])), **options)
            cache[key] = found, seen[0]
        return cache[key]

    return make


def difference(found, expected):
    return ((found - expected).pow(2).mean() / expected.pow(2).mean()).sqrt().item()


@pytest.mark.parametrize("recipe", MADE)
def test_the_checkpoint_is_the_model_in_memory_in_a_layout_that_others_read(made, model_folder, calibration, recipe):
    checkpoint, seen = made(recipe)
    layout, leaves = MADE[recipe]
    assert checkpoint.layout.name == layout
    assert {name.rpartition(".")[2] for name in checkpoint.shards if name.startswith(MODULE)} == leaves
    assert difference(logits(load_model(checkpoint), calibration.batches()[0][:2]), seen) < BOUND
    assert verify_checkpoint(checkpoint.path) == []
    plan = make_plan(model_folder, load_recipe(recipe))
    assert checkpoint.schemes == plan.schemes
    assert checkpoint.size_bytes == plan.size_bytes


@pytest.mark.parametrize("recipe", MADE)
def test_the_same_inputs_give_the_same_bytes(made, model_folder, calibration, choose, tmp_path, recipe):
    again = quantize(model_folder, load_recipe(recipe), tmp_path / "again", calibration=calibration,
                     choose_texts=choose)
    assert again.digest == made(recipe)[0].digest


@pytest.mark.parametrize("recipe", ["int4_gptq", "int4_asym", "int4_awq_clip"])
def test_the_canonical_stream_survives_writing_it_again(made, tmp_path, recipe):
    checkpoint, _ = made(recipe)
    checkpoint.layout.write(tmp_path, checkpoint.config, checkpoint.schemes, checkpoint.kv, checkpoint.tensors())
    first, second = checkpoint.path / "model.safetensors", tmp_path / "model.safetensors"
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.parametrize(("recipe", "layout"), [("bf16", "compressed-tensors"), ("fp8", "modelopt"),
                                               ("int4_awq", "modelopt"), ("int8", "compressed-tensors"),
                                               ("int4_gptq", "compressed-tensors")])
def test_an_int8_kv_cache_has_a_scale_each_in_every_layout(made, calibration, recipe, layout):
    checkpoint, seen = made(recipe, "int8")
    assert (checkpoint.kv, checkpoint.layout.name) == (Grid(dtype="int8"), layout)
    scales = {name: tensor for name, tensor in checkpoint.tensors() if name.endswith(("k_scale", "v_scale"))}
    assert len(scales) == 4
    assert all(tensor.shape == () and tensor > 0 for tensor in scales.values())
    assert difference(logits(load_model(checkpoint), calibration.batches()[0][:2]), seen) < 0.05
    assert verify_checkpoint(checkpoint.path) == []


def test_values_beyond_a_static_int8_range_clip_alike_on_both_sides():
    from modelopt.torch.quantization.config import QuantizerAttributeConfig
    from modelopt.torch.quantization.nn import TensorQuantizer

    from calib.grids import fake_quantize
    from calib.quantizer_config import activation_attributes
    quantizer = TensorQuantizer(QuantizerAttributeConfig(**activation_attributes(Grid(dtype="int8"))))
    quantizer.amax = torch.tensor(1.27)
    values = torch.tensor([-3.0, -1.28, 1.28, 3.0, 0.5])
    torch.testing.assert_close(quantizer(values), fake_quantize(Grid(dtype="int8"), values, torch.tensor(0.01)))


@pytest.mark.parametrize(("base", "head", "tied"), [("int8_weight_only", "int8", True), ("fp8_dynamic", "fp8", True),
                                                   ("int4_awq_clip", "fp8", False), ("int8", "int8", True)])
def test_a_quantized_head_is_untied_and_counted(made, calibration, tmp_path, base, head, tied):
    folder = tiny_llama(tmp_path / "m", tie_word_embeddings=tied)
    path = tmp_path / "r.yaml"
    path.write_text(f"extends: {base}\nname: headed\nlm_head: {head}\n")
    checkpoint, seen = made(path, source=folder)
    plan = make_plan(folder, load_recipe(path))
    assert str(checkpoint.schemes["lm_head"].weight) == ("int8 channel" if head == "int8" else "fp8_e4m3 channel")
    assert checkpoint.schemes["lm_head"].activation is None
    assert checkpoint.config["tie_word_embeddings"] is False
    assert checkpoint.size_bytes == plan.size_bytes
    assert any("untied" in warning for warning in plan.warnings) == tied
    stored = dict(checkpoint.tensors())
    assert torch.equal(stored["model.embed_tokens.weight"],
                       dict(QuantizedCheckpoint.open(folder).tensors())["model.embed_tokens.weight"])
    model = load_model(checkpoint)
    assert model.lm_head.weight.data_ptr() != model.model.embed_tokens.weight.data_ptr()
    assert difference(logits(model, calibration.batches()[0][:2]), seen) < BOUND


@pytest.mark.parametrize("name", ["nvfp4", "mxfp8"])
def test_formats_of_other_chips_can_be_planned_and_are_refused_in_words(model_folder, calibration, tmp_path, name):
    recipe = load_recipe(name)
    plan = make_plan(model_folder, recipe)
    assert len(plan.schemes) == 14
    assert plan.size_bytes < make_plan(model_folder, load_recipe("bf16")).size_bytes
    assert any("Blackwell" in warning for warning in plan.warnings)
    with pytest.raises(HardwareError, match=r"Blackwell GPU .compute capability 10") as error:
        quantize(model_folder, recipe, tmp_path / "out", calibration=calibration)
    assert "Use " in error.value.hint
    assert not (tmp_path / "out").exists()


def test_a_recipes_values_say_where_they_come_from(tmp_path):
    (tmp_path / "gentle.yaml").write_text("keep: ['*.down_proj']\nseed: 7\n")
    path = tmp_path / "mine.yaml"
    path.write_text("extends: [w4a8_fp8, gentle.yaml]\nname: mine\n")
    found = {setting.key: (setting.value, setting.origin) for setting in explain(path)}
    assert found["name"] == ("mine", "mine.yaml")
    assert found["seed"] == (7, "gentle.yaml")
    assert found["layout"] == ("compressed-tensors", "w4a8_fp8.yaml")
    assert found["method"] == ("gptq", "int4_gptq.yaml")
    assert found["protect"] == (0, "default")
    assert found["keep"] == (["*.down_proj"], "gentle.yaml")
    (tmp_path / "base.yaml").write_text("extends: int8\nalphas: 3\n")
    (tmp_path / "bad.yaml").write_text("extends: base.yaml\nname: bad\n")
    with pytest.raises(CalibError, match=r"recipe bad\.yaml: alphas: .*\(from base\.yaml\)"):
        load_recipe(tmp_path / "bad.yaml")


def test_the_recipes_seed_picks_the_rows(model_folder, calibration, tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text("extends: int4_gptq\nname: r\nrows: 2\nseed: 3\n")
    base = tmp_path / "s.yaml"
    base.write_text("extends: int4_gptq\nname: r\nrows: 2\n")
    made = [quantize(model_folder, load_recipe(one), tmp_path / str(at), calibration=calibration, seed=seed)
            for at, (one, seed) in enumerate([(path, 0), (base, 3), (base, 0)])]
    weights = [(one.path / "model.safetensors").read_bytes() for one in made]
    assert weights[0] == weights[1] != weights[2]


@pytest.mark.parametrize(("text", "what"), [
    ("extends: fp8\nlm_head: fp8", "no place for a quantized lm_head"), ("extends: bf16\nlm_head: fp8", "no effect"),
    ("extends: fp8_block\nmethod: smooth\nalphas: [0]", "blocks are fp8"),
    ("extends: int4_gptq\ndamping: null", "damping"),
    ("extends: int8\nact_order: static", "act_order"), ("extends: int4_asym\nlayout: gptq", "symmetric"),
    ("extends: int4_awq_clip\nlayout: awq", "asymmetric"), ("extends: int4_gptq\nactivation: {dtype: int8}", "static"),
    ("extends: int8\nactivation: {dtype: int8, dynamic: true, granularity: {kind: group, size: 32}}", "groups"),
    ("extends: int4_awq_a8\nprotect: 1", "protect"), ("extends: nvfp4\nweight: {dtype: nvfp4}", "groups of 16")])
def test_a_combination_without_meaning_is_refused(tmp_path, text, what):
    path = tmp_path / "r.yaml"
    path.write_text(f"{text}\nname: r\n")
    with pytest.raises(CalibError, match=what):
        load_recipe(path)


def test_blocks_at_the_far_edges_are_smaller(calibration, tmp_path):
    """192 x 192 and 320-wide matrices under 128 x 128 tiles: 2 x 2 and 3-wide scales, each the amax of its own part."""
    folder = tiny_llama(tmp_path / "m", hidden_size=192, intermediate_size=320, num_attention_heads=4,
                        num_key_value_heads=4, num_hidden_layers=1)
    made = quantize(folder, load_recipe("fp8_block"), tmp_path / "out", calibration=calibration)
    stored, source = dict(made.tensors()), dict(QuantizedCheckpoint.open(folder).tensors())
    weight = source["model.layers.0.mlp.down_proj.weight"].float()
    scale = stored["model.layers.0.mlp.down_proj.weight_scale"]
    assert scale.shape == (2, 3)
    assert scale[1, 2] == weight[128:, 256:].abs().max() / 448
    assert scale[0, 0] == weight[:128, :128].abs().max() / 448
    assert any("vLLM" in warning for warning in make_plan(folder, load_recipe("fp8_block")).warnings)
    group = json.loads((made.path / "config.json").read_text())["quantization_config"]["config_groups"]["group_0"]
    assert group["weights"]["block_structure"] == [128, 128]
    assert (group["input_activations"]["strategy"], group["input_activations"]["group_size"]) == ("group", 128)


@pytest.mark.parametrize("order", ["none", "static", "groups"])
def test_gptq_in_every_order_loads_as_it_was(made, calibration, tmp_path, order):
    path = tmp_path / "r.yaml"
    path.write_text(f"extends: int4_gptq\nname: r\ngroup_sizes: [32]\nact_order: {order}\n")
    checkpoint, seen = made(path)
    assert {scheme.act_order for scheme in checkpoint.schemes.values()} == {order == "groups"}
    assert difference(logits(load_model(checkpoint), calibration.batches()[0][:2]), seen) < 1e-6
    section = json.loads((checkpoint.path / "config.json").read_text())["quantization_config"]
    assert (section["desc_act"], section["sym"], section["bits"]) == (order == "groups", True, 4)


def test_wrong_zero_points_and_group_numbers_are_named(made, tmp_path):
    from calib.verify import verify_folder
    path = tmp_path / "r.yaml"
    path.write_text("extends: int4_gptq\nname: r\ngroup_sizes: [32]\nact_order: groups\n")
    wrong = (("int4_asym", "weight_zero", 0.5, "no codes"), (path, "g_idx", 99, "groups 0 to 99"))
    for recipe, leaf, value, what in wrong:
        checkpoint, _ = made(recipe)
        tensors = dict(checkpoint.tensors())
        tensors[f"{MODULE}.{leaf}"].view(-1)[3] = value
        broken = QuantizedCheckpoint.open(checkpoint.path)
        broken.tensors = lambda tensors=tensors: iter(tensors.items())
        faults = verify_folder(broken)
        assert [(fault.code, fault.where) for fault in faults] == [("off_grid", f"{MODULE}.{leaf}")]
        assert what in faults[0].message

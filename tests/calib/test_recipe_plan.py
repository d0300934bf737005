"""Recipes (composition, refusals) and the dry run: coverage, divisibility, and what must be refused up front."""

import json
import shutil

import pytest
import torch
from tiny_llamas import byte_tokenizer, tiny_llama

from calib.calibrate import quantize
from calib.errors import CalibError, UnknownNameError
from calib.formats.hf import MissingWeightsError, write_shards
from calib.model import load_hf
from calib.plan import DiskSpaceError, check_disk, make_plan
from calib.recipe import load_recipe, recipe_names
from calib.source import ModelNotFoundError, resolve_model

INT4 = {"name": "mine", "extends": "int4_awq"}


def written(path, text):
    path.write_text(text)
    return path


def test_the_built_in_recipes_load():
    assert recipe_names() == ("bf16", "fp8", "fp8_block", "fp8_dynamic", "fp8_weight_only", "int4_asym", "int4_awq",
                              "int4_awq_a8", "int4_awq_clip", "int4_gptq", "int8", "int8_static", "int8_weight_only",
                              "mxfp8", "nvfp4", "w4a8_fp8")
    assert {load_recipe(name).name for name in recipe_names()} == set(recipe_names())


def test_a_near_match_is_named():
    with pytest.raises(UnknownNameError, match="int4_awk") as error:
        load_recipe("int4_awk")
    assert "'int4_awq'" in error.value.hint


def test_extends_changes_only_the_lines_that_differ(tmp_path):
    mine = load_recipe(written(tmp_path / "mine.yaml", "extends: int8\nname: mine\nalphas: [0]\n"))
    assert mine == load_recipe("int8").model_copy(update={"name": "mine", "alphas": (0.0,)})
    (tmp_path / "loop.yaml").write_text("extends: loop.yaml\nname: loop\n")
    with pytest.raises(CalibError, match="extends itself"):
        load_recipe(tmp_path / "loop.yaml")


@pytest.mark.parametrize(("text", "what"), [
    ("extends: fp8\nsurprise: 1", "surprise"), ("extends: fp8\nalphas: [0.5]", "alphas"),
    ("extends: int8\nalphas: [0.5, 1.5]", "alphas"), ("extends: fp8\ngroup_sizes: [64]", "group_sizes"),
    ("extends: int8\nlayout: modelopt", "modelopt"), ("extends: bf16\nprotect: 2", "protect"),
    ("extends: int4_awq\nlayout: compressed-tensors", "pre_quant_scale"), ("- a", "mapping"), ("a: [", "not YAML"),
    ("extends: int8\nactivation: null", "smooth")])
def test_a_wrong_or_ineffective_setting_is_refused(tmp_path, text, what):
    with pytest.raises(CalibError, match=what):
        load_recipe(written(tmp_path / "mine.yaml", text))


def test_the_plan_names_every_matrix_and_writes_nothing(model_folder, tmp_path):
    before = sorted(model_folder.iterdir())
    plan = make_plan(model_folder, load_recipe("int4_awq"), "fp8", out=tmp_path / "out")
    assert len(plan.schemes) == 2 * 7
    assert plan.group_size == 64
    assert set(plan.left) == {"model.embed_tokens", "lm_head"}
    assert "tied" in plan.left["lm_head"]
    assert {name for name, scheme in plan.schemes.items() if scheme.pre_quant_scale} == {
        f"model.layers.{layer}.{name}" for layer in (0, 1) for name in ("self_attn.o_proj", "mlp.down_proj")}
    assert any("group size 64 instead of 128" in warning for warning in plan.warnings)
    assert plan.disk_free_bytes > plan.size_bytes > 0
    assert plan.size_bytes < plan.bf16_bytes
    assert plan.seconds is None
    assert plan.memory_bytes > plan.bf16_bytes
    assert {loader.runtime: loader.loads for loader in plan.loaders}["vLLM"] is False
    assert sorted(model_folder.iterdir()) == before
    assert not (tmp_path / "out").exists()


def test_an_untied_head_is_left_with_its_reason(tmp_path):
    plan = make_plan(tiny_llama(tmp_path / "m", tie_word_embeddings=False), load_recipe("fp8"))
    assert not plan.tied_embeddings
    assert "output head" in plan.left["lm_head"]


def test_a_group_size_that_fits_nothing_names_the_module(tmp_path):
    folder = tiny_llama(tmp_path / "m", hidden_size=48, num_attention_heads=3, num_key_value_heads=3)
    with pytest.raises(CalibError, match=r"128, 64, 32.*layers\.0\.self_attn\.q_proj has 48"):
        make_plan(folder, load_recipe("int4_awq"))
    narrower = written(tmp_path / "r.yaml", "extends: int4_awq\nname: r\ngroup_sizes: [128, 16]\n")
    assert make_plan(folder, load_recipe(narrower)).group_size == 16


@pytest.mark.parametrize(("keep", "what"), [
    ("['*.nothing']", "matches no module"), ("['*.q_proj']", "others that read its input"), ("['*']", "every module")])
def test_keep_patterns_must_make_sense(model_folder, tmp_path, keep, what):
    recipe = load_recipe(written(tmp_path / "r.yaml", f"extends: fp8\nname: r\nkeep: {keep}\n"))
    with pytest.raises(CalibError, match=what):
        make_plan(model_folder, recipe)


def test_keep_leaves_a_module_with_the_pattern_as_reason(model_folder, tmp_path):
    recipe = load_recipe(written(tmp_path / "r.yaml", "extends: fp8\nname: r\nkeep: ['*.1.mlp.down_proj']\n"))
    plan = make_plan(model_folder, recipe)
    assert "*.1.mlp.down_proj" in plan.left["model.layers.1.mlp.down_proj"]
    assert len(plan.schemes) == 13


def copy_of(model_folder, tmp_path):
    return shutil.copytree(model_folder, tmp_path / "copy")


def changed_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_an_unsupported_architecture_is_named_with_the_list(model_folder, tmp_path):
    folder = copy_of(model_folder, tmp_path)
    changed_config(folder, architectures=["MambaForCausalLM"])
    with pytest.raises(CalibError, match="MambaForCausalLM") as error:
        make_plan(folder, load_recipe("fp8"))
    assert "LlamaForCausalLM" in error.value.hint


def test_missing_truncated_and_incomplete_weights_are_named(model_folder, tmp_path):
    folder = copy_of(model_folder, tmp_path)
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-100])
    with pytest.raises(MissingWeightsError, match="truncated"):
        make_plan(folder, load_recipe("fp8"))
    weights.unlink()
    with pytest.raises(MissingWeightsError, match=r"model\.safetensors is missing"):
        make_plan(folder, load_recipe("fp8"))
    weights.write_bytes(whole)
    changed_config(folder, num_hidden_layers=3)
    with pytest.raises(MissingWeightsError, match=r"model\.layers\.2\.self_attn\.q_proj\.weight"):
        make_plan(folder, load_recipe("fp8"))


def test_another_models_tokenizer_is_refused_before_anything(model_folder, tmp_path):
    folder = copy_of(model_folder, tmp_path)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["added_tokens"].append(tokenizer["added_tokens"][-1] | {"id": 264, "content": "<|one too many|>"})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(CalibError, match="265 tokens"):
        make_plan(folder, load_recipe("fp8"))


def test_a_nan_weight_is_named(model_folder, tmp_path):
    folder = copy_of(model_folder, tmp_path)
    tensors = {name: tensor for name, tensor in load_hf(folder, torch.bfloat16).state_dict().items()
               if name != "lm_head.weight"}
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = float("nan")
    write_shards(folder, tensors.items())
    with pytest.raises(CalibError, match=r"model\.layers\.1\.mlp\.up_proj\.weight holds NaN"):
        load_hf(folder)


def test_a_full_disk_is_foreseen(model_folder, calibration, tmp_path, monkeypatch):
    plan = make_plan(model_folder, load_recipe("fp8"), out=tmp_path / "out")
    check_disk(plan)
    with pytest.raises(DiskSpaceError, match="0 MiB are free"):
        check_disk(plan.model_copy(update={"disk_free_bytes": 5}))
    monkeypatch.setattr("calib.plan.free_bytes", lambda out: 5)
    with pytest.raises(DiskSpaceError):
        quantize(model_folder, load_recipe("bf16"), tmp_path / "out", calibration=calibration)
    assert not any(tmp_path.iterdir())


def test_references_that_lead_nowhere(tmp_path):
    for ref in (tmp_path / "no.gguf", "no/such/model/name", tmp_path / "nothing"):
        with pytest.raises(ModelNotFoundError):
            resolve_model(ref, offline=True)
    (tmp_path / "empty").mkdir()
    with pytest.raises(CalibError, match=r"config\.json"):
        resolve_model(tmp_path / "empty")
    byte_tokenizer(tmp_path)

"""Plans that keep their word: config.json alone, cuts over devices, layer by layer above a bound, rehearsals."""

import json

import pytest
from tiny_llamas import tiny_llama

from calib import rehearsal
from calib.calibrate import quantize
from calib.errors import CalibError
from calib.estimates import MemoryBoundError, activation_bytes, working_bytes
from calib.foresee import foresee
from calib.formats.hf import MissingWeightsError
from calib.kept import read_kept, write_kept
from calib.parallel import ShardingError
from calib.plan import make_plan
from calib.recipe import load_recipe
from calib.rehearsal import Rehearsal, RehearsalError, estimate

LLAMA_8B = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096,
            "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
            "vocab_size": 128256, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "hidden_act": "silu",
            "tie_word_embeddings": False, "bos_token_id": 128000, "eos_token_id": 128001,
            "rope_theta": 500000.0}
LLAMA_70B = LLAMA_8B | {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
                        "num_attention_heads": 64}


def config_only(folder, config):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def eight(tmp_path_factory):
    return config_only(tmp_path_factory.mktemp("plans") / "llama-8b", LLAMA_8B)


def test_config_json_alone_will_do(eight):
    plan = make_plan(eight, load_recipe("fp8"), memory=16 * 10**9)
    assert plan.parameters == 8_030_261_248  # the published count
    assert not plan.weights_here
    assert plan.basis.startswith("config.json alone")
    linear = 32 * (4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 14336)
    payload = linear + 2 * (8_030_261_248 - linear) + 2 * 4 * 7 * 32
    assert payload < plan.size_bytes < payload + 2**17
    assert plan.layerwise
    assert "16.0 GB" in plan.layerwise_reason
    assert plan.memory_bytes < 8 * 10**9 < 4 * plan.parameters


def test_it_is_as_exact_as_with_weights(model_folder, tmp_path):
    bare = config_only(tmp_path / "bare", json.loads((model_folder / "config.json").read_text()))
    for recipe in ("bf16", "fp8", "int8", "int4_awq", "int4_gptq", "fp8_block"):
        with_weights, without = (make_plan(folder, load_recipe(recipe)) for folder in (model_folder, bare))
        assert without.size_bytes == with_weights.size_bytes
        assert without.modules == with_weights.modules


@pytest.mark.parametrize("left", ["model.safetensors/", "model.safetensors.index.json/", "tokenizer.json",
                                  "model-00001-of-00002.safetensors", "pytorch_model.bin", "weights.gguf"])
def test_what_says_that_weights_were_lost_is_no_config_alone(eight, tmp_path, left):
    folder = config_only(tmp_path / "m", LLAMA_8B)
    if left.endswith("/"):
        (folder / left).mkdir()
    else:
        (folder / left).write_bytes(b"")
    with pytest.raises(MissingWeightsError, match=left.rstrip("/")) as error:
        make_plan(folder, load_recipe("fp8"))
    assert "config.json alone" in error.value.hint
    assert "\n" not in error.value.message + error.value.hint


def test_an_index_without_its_shards_names_the_shard(tmp_path):
    folder = config_only(tmp_path / "m", LLAMA_8B)
    placed = {"lm_head.weight": "model-00001-of-00001.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    with pytest.raises(MissingWeightsError, match=r"model-00001-of-00001\.safetensors is missing"):
        make_plan(folder, load_recipe("fp8"))


def test_a_model_without_weights_is_not_calibrated(model_folder, calibration, tmp_path):
    bare = config_only(tmp_path / "bare", json.loads((model_folder / "config.json").read_text()))
    with pytest.raises(MissingWeightsError, match=r"model\.safetensors is missing"):
        quantize(bare, load_recipe("fp8"), tmp_path / "out", calibration=calibration)


@pytest.mark.parametrize(("name", "kind"), [("DeepseekV3ForCausalLM", "deepseek_v3"),
                                            ("Qwen3MoeForCausalLM", "qwen3_moe"), ("MambaForCausalLM", "mamba")])
def test_what_is_not_supported_is_refused_by_name_with_the_list(tmp_path, name, kind):
    folder = config_only(tmp_path / "m", LLAMA_8B | {"architectures": [name], "model_type": kind})
    with pytest.raises(CalibError, match=name) as error:
        make_plan(folder, load_recipe("fp8"))
    assert "LlamaForCausalLM" in error.value.hint


def test_groups_are_chosen_so_that_the_cut_divides(tmp_path):
    assert make_plan(config_only(tmp_path / "seventy", LLAMA_70B), load_recipe("int4_awq"), tp=8).group_size == 128
    odd = config_only(tmp_path / "odd", LLAMA_8B | {"intermediate_size": 11008})  # 11008 / 2 = 43 * 128, / 4 = 43 * 64
    assert [make_plan(odd, load_recipe("int4_awq"), tp=tp).group_size for tp in (1, 2, 4, 8)] == [128, 128, 64, 32]


def test_a_cut_through_a_group_or_a_head_is_refused_with_what_fits(tmp_path, eight):
    odd = config_only(tmp_path / "odd", LLAMA_8B | {"intermediate_size": 11008})
    (tmp_path / "r.yaml").write_text("extends: int4_awq\nname: r\ngroup_sizes: [128]\n")
    with pytest.raises(CalibError, match=r"down_proj has 11008 inputs, 2752 on each of 4 devices"):
        make_plan(odd, load_recipe(tmp_path / "r.yaml"), tp=4)
    with pytest.raises(ShardingError, match="32 heads and 8 key-value heads") as error:
        make_plan(eight, load_recipe("fp8"), tp=3)
    assert "1, 2, 4, 8, 16, 32" in error.value.hint
    with pytest.raises(ShardingError, match=r"tiles of 128") as error:
        make_plan(odd, load_recipe("fp8_block"), tp=4)
    assert "--tp 2" in error.value.hint


def test_layer_by_layer_is_chosen_by_the_bound(model_folder):
    recipe = load_recipe("int8")
    assert make_plan(model_folder, recipe, memory=10**6).layerwise
    assert "once per candidate" in make_plan(model_folder, recipe, memory=10**6).layerwise_reason
    assert not make_plan(model_folder, recipe, memory=10**12).layerwise
    assert make_plan(model_folder, recipe, layerwise="on").layerwise
    assert not make_plan(model_folder, recipe, memory=10**6, layerwise="off").layerwise
    plan = make_plan(model_folder, load_recipe("bf16"), memory=1)
    assert not plan.layerwise
    assert "one by one" in plan.layerwise_reason


@pytest.mark.parametrize(("text", "why"), [("extends: fp8\nname: r\nprotect: 1\n", "whole model's loss"),
                                           ("extends: bf16\nname: r\n", "calibrates nothing")])
def test_what_cannot_go_layer_by_layer_says_why(model_folder, tmp_path, text, why):
    (tmp_path / "r.yaml").write_text(text)
    with pytest.raises(CalibError, match=why):
        make_plan(model_folder, load_recipe(tmp_path / "r.yaml"), layerwise="on")
    plan = make_plan(model_folder, load_recipe(tmp_path / "r.yaml"), memory=1)
    assert not plan.layerwise


def test_the_bound_alone_makes_it_go_layer_by_layer(model_folder, calibration, tmp_path):
    least = make_plan(model_folder, load_recipe("fp8"), length=calibration.tokens.shape[1], layerwise="on").memory_bytes
    made = quantize(model_folder, load_recipe("fp8"), tmp_path / "out", calibration=calibration, memory=least)
    evidence = json.loads(made.artifact.file("calibration.json").read_text())
    assert evidence["layerwise"] is True
    assert evidence["peak_anonymous_bytes"] > 0


@pytest.mark.parametrize(("layerwise", "more", "way", "hint"), [
    ("auto", "", "layer by layer", "Give --memory"), ("on", "", "layer by layer", "Give --memory"),
    ("off", "", "the whole model at once", "Go layer by layer (--layerwise on). Give --memory"),
    ("auto", "protect: 1\n", "the whole model at once", "Give --memory")])
def test_a_bound_that_cannot_be_kept_is_refused_with_both_figures(model_folder, tmp_path, layerwise, more, way, hint):
    (tmp_path / "r.yaml").write_text(f"extends: fp8\nname: r\n{more}")
    recipe = load_recipe(tmp_path / "r.yaml")
    needed = make_plan(model_folder, recipe, layerwise=layerwise, memory=1000).memory_bytes
    with pytest.raises(MemoryBoundError) as error:
        foresee(model_folder, recipe, layerwise=layerwise, memory=1000)
    assert error.value.message == f"calibrating {way} works in {needed:,} bytes; the bound is 1,000"
    assert error.value.hint.startswith(hint)
    enough = error.value.hint.removesuffix(" or more.").rpartition(" ")[2]
    foresee(model_folder, recipe, layerwise=layerwise, memory=int(enough.removesuffix("MB")) * 10**6)


def test_a_bound_that_nobody_asked_for_warns_and_goes_on(model_folder, calibration, tmp_path, monkeypatch):
    monkeypatch.setattr("calib.estimates.available_bytes", lambda: 1000)
    heard = []
    made = quantize(model_folder, load_recipe("fp8"), tmp_path / "out", calibration=calibration, report=heard.append)
    [warning] = [event.message for event in heard if event.stage == "memory is short"]
    assert warning.startswith("calibrating layer by layer works in ")
    assert warning.endswith(" bytes; the bound is 600, a share of what is free now")
    assert made.recipe == "fp8"


def test_runtimes_are_named_with_version_and_source(eight):
    found = {loader.runtime: loader for loader in make_plan(eight, load_recipe("fp8")).loaders}
    assert (found["vLLM"].since, found["SGLang"].since, found["TensorRT-LLM"].since) == ("0.10.1", "0.4.10", "1.2.0")
    assert all(loader.source for loader in found.values())
    int4 = {loader.runtime: loader.loads for loader in make_plan(eight, load_recipe("int4_awq")).loaders}
    assert (int4["vLLM"], int4["TensorRT-LLM"]) == (False, True)
    int8 = {loader.runtime: loader.loads for loader in make_plan(eight, load_recipe("int8")).loaders}
    assert (int8["vLLM"], int8["TensorRT-LLM"]) == (True, False)
    assert "this toolkit" not in int8, "calib knows no engine; toolkit/foreseeing.py asks them"


def test_grids_that_no_source_speaks_of_are_loaded_by_nobody(eight, tmp_path):
    (tmp_path / "r.yaml").write_text("extends: int8\nname: r\n"
                                     "activation: {dtype: fp8_e4m3, granularity: {kind: token}, dynamic: true}\n")
    found = make_plan(eight, load_recipe(tmp_path / "r.yaml")).loaders
    assert not any(loader.loads for loader in found)
    assert {loader.note for loader in found if loader.runtime != "TensorRT-LLM"} == {
        "no kernel known for this pair of grids"}
    (tmp_path / "r.yaml").write_text("extends: int8_weight_only\nname: r\nweight: {dtype: int8, granularity: "
                                     "{kind: token}}\n")
    with pytest.raises(CalibError, match="a weight has no tokens"):
        load_recipe(tmp_path / "r.yaml")


def test_protect_must_leave_a_layer(model_folder, tmp_path):
    (tmp_path / "r.yaml").write_text("extends: fp8\nname: r\nprotect: 2\n")
    with pytest.raises(CalibError, match="r protects 2 layers, and the model has 2: none is left") as error:
        make_plan(model_folder, load_recipe(tmp_path / "r.yaml"))
    assert error.value.hint == "Protect at most 1, or use the recipe bf16."


def test_protect_counts_layers_that_keep_leaves(tmp_path):
    """One layer has something left, and protecting it would leave a bf16 model under the recipe's name."""
    folder = tiny_llama(tmp_path / "m", num_hidden_layers=4)
    for protect, kept, hint in ((1, "[0-2]", "Keep less, or leave protect out."),
                                (3, "[01]", "Keep less, or protect at most 1.")):
        (tmp_path / "r.yaml").write_text(f"extends: int8\nprotect: {protect}\nkeep: ['model.layers.{kept}.*']\n")
        left = 1 if protect == 1 else 2
        with pytest.raises(CalibError, match=f"protects {protect} layers, .* in {left} of the model's 4") as error:
            make_plan(folder, load_recipe(tmp_path / "r.yaml"))
        assert error.value.hint == hint
    (tmp_path / "r.yaml").write_text("extends: int8\nprotect: 1\nkeep: ['model.layers.[01].*', '*.2.mlp.*']\n")
    assert make_plan(folder, load_recipe(tmp_path / "r.yaml")).recipe.protect == 1


def test_rows_are_as_long_as_the_model_goes_and_no_longer(model_folder):
    usual, whole = (make_plan(model_folder, load_recipe("int8"), length=length) for length in (None, 128))
    assert usual.memory_bytes == whole.memory_bytes
    with pytest.raises(CalibError, match="129 tokens, the model knows 128 positions"):
        make_plan(model_folder, load_recipe("int8"), length=129)
    make_plan(model_folder, load_recipe("fp8_dynamic"), length=129)  # reads no text


def test_a_rehearsal_is_kept_by_what_it_depends_on(model_folder, tmp_path, monkeypatch):
    plan = make_plan(model_folder, load_recipe("bf16"))  # quick to rehearse: nothing is calibrated
    first = estimate(plan, 2, 32, tmp_path)
    assert first.seconds > 0
    assert first.memory_bytes > plan.memory_bytes
    [path] = tmp_path.glob("*.json")
    kept = rehearsal.kept_at(plan, 2, 32, tmp_path)
    assert kept[0] == path
    held = Rehearsal.model_validate(read_kept(*kept))
    write_kept(*kept, held.model_copy(update={"fixed": 1000.0}).model_dump())
    assert estimate(plan, 2, 32, tmp_path).seconds >= 1000
    path.write_bytes(path.read_bytes().replace(b"1000.0", b"1001.0"))  # not what was sealed: rehearsed again
    monkeypatch.setattr(rehearsal, "MODULE", "calib.no_such_module")
    with pytest.raises(RehearsalError, match="no_such_module"):
        estimate(plan, 2, 32, tmp_path)
    monkeypatch.setattr(rehearsal, "_sources", lambda: "other")
    assert rehearsal.kept_at(plan, 2, 32, tmp_path) != kept


def test_memory_counts_the_rows_of_one_batch(eight):
    sizes = make_plan(eight, load_recipe("fp8")).sizes
    few, batch, many = (activation_bytes(sizes, rows, 64) for rows in (2, 8, 512))
    assert 4 * few == batch == many == 4 * 8 * 64 * (6 * 4096 + 3 * 14336)


def test_memory_of_a_whole_model_that_is_scored_counts_logits_beside_what_calibration_left(eight):
    int8, fp8 = load_recipe("int8"), load_recipe("fp8")
    sizes = make_plan(eight, int8).sizes.model_copy(update={"largest": 0, "result_bytes": 0})
    inside, logits = activation_bytes(sizes, int8.rows, 64), 3 * 4 * 4 * 256 * sizes.vocab
    assert working_bytes(sizes, int8, 64, layerwise=False) == 4 * sizes.parameters + inside + logits
    unscored = max(inside, 3 * 4 * 64 * sizes.vocab)
    assert working_bytes(sizes, fp8, 64, layerwise=False) == 4 * sizes.parameters + unscored


def test_costs_are_told_apart():
    """Seconds that follow the law exactly give its four costs back; noise gives no negative ones."""
    def seconds(name):
        shape = rehearsal.SHAPES[name]
        return (2.0 + 0.25 * shape.layers + 3e-8 * shape.layers * shape.layer_parameters
                + 1e-7 * shape.vocab * shape.hidden)

    one, four, wide, narrow = (seconds(name) for name in ("one", "four", "wide", "narrow"))
    found = rehearsal._costs(one + 5, one, four, wide, narrow)
    assert found == pytest.approx({"fixed": 7.0, "per_layer": 0.25, "per_weight": 3e-8, "per_head": 1e-7})
    for noisy in ((1.0, 2.0, 1.5, 1.0, 3.0), (5.0, 2.0, 3.0, 2.5, 0.1)):
        assert min(rehearsal._costs(*noisy).values()) >= 0


def test_a_time_that_cannot_be_rehearsed_is_not_said(model_folder, tmp_path, monkeypatch):
    (tmp_path / "r.yaml").write_text("extends: fp8\nname: r\nprotect: 1\n")
    plan = make_plan(model_folder, load_recipe(tmp_path / "r.yaml"), length=32)
    held = Rehearsal(fixed=1.0, per_layer=1.0, per_weight=1.0, per_head=0.0, base_bytes=5, took=1.0)
    monkeypatch.setattr(rehearsal, "rehearsal_of", lambda *args: held)
    assert estimate(plan, 2, 32).seconds is None
    assert estimate(plan, plan.recipe.rows, 32).memory_bytes == plan.memory_bytes + 5


def test_a_tied_and_an_untied_model_are_counted_alike(tmp_path):
    tied, apart = (make_plan(tiny_llama(tmp_path / str(tie), tie_word_embeddings=tie), load_recipe("fp8"))
                   for tie in (True, False))
    assert apart.parameters - tied.parameters == 264 * 64
    assert apart.size_bytes - tied.size_bytes == pytest.approx(2 * 264 * 64, abs=128)

"""A plan keeps its word: what it says of this toolkit's engines is what a build says, and it is said before anything is
calibrated. No weight is needed for either answer, so recipes, caches and families are asked one with another.
"""

import itertools
import json
import shutil

import pytest
from transformers import AutoConfig

from benchmarks.tiny_families import _SIZES, FAMILIES, ROPES, byte_tokenizer, make
from calib.checkpoint import QuantizedCheckpoint
from calib.config import read_config
from calib.errors import ToolkitError
from calib.plan import make_plan
from calib.recipe import load_recipe, ordinary_recipes, recipe_names
from calib.text import Tokenizer
from engines.build import prepare
from engines.build.builder import build, plan_for
from engines.llm import LLM
from engines.plan import EngineSpec
from engines.request import SamplingParams
from toolkit import cli
from toolkit.foreseeing import OURS, planned
from toolkit.home import Home

pytestmark = pytest.mark.timeout(600)
SPEC = EngineSpec(tune="none", max_batch_size=2, max_num_tokens=32, max_seq_len=64)
#: Grids that a recipe may ask for; which of them an engine multiplies is the builder's table's business.
MIXED = {
    "int8 by fp8": "extends: int8\nactivation: {dtype: fp8_e4m3, granularity: {kind: token}, dynamic: true}",
    "fp8 by int8": "extends: fp8_dynamic\nactivation: {dtype: int8, granularity: {kind: token}, dynamic: true}",
    "fp8 groups": "extends: fp8_weight_only\nweight: {dtype: fp8_e4m3, granularity: {kind: group, size: 32}}\n"
                  "group_sizes: [32]",
    "fp8 tiles by token": "extends: fp8_block\n"
                          "activation: {dtype: fp8_e4m3, granularity: {kind: token}, dynamic: true}",
    "int8 groups": "extends: int8_weight_only\nweight: {dtype: int8, granularity: {kind: group, size: 32}}\n"
                   "group_sizes: [32]",
    "int4 channel": "extends: int8_weight_only\nweight: {dtype: int4, granularity: {kind: channel}}",
    "int4 by static int8": "extends: int8_weight_only\nweight: {dtype: int4, granularity: {kind: group, size: 32}}\n"
                           "group_sizes: [32]\nactivation: {dtype: int8}",
    "zero points by int8": "extends: int4_asym\nlayout: compressed-tensors\n"
                           "activation: {dtype: int8, granularity: {kind: token}, dynamic: true}",
    "act_order": "extends: int4_gptq\nact_order: groups",
    "head": "extends: int8\nlm_head: int8",
    "raised": "extends: int4_awq\nraised: {int8: ['*.down_proj']}"}


class Unwritten:
    """A checkpoint without its tensors: all that a build looks at before it packs."""

    recipe, source_grid, digest = "r", None, "0" * 64

    def __init__(self, plan, folder):
        self.schemes, self.kv, self.config, self._folder = plan.schemes, plan.kv, read_config(folder), folder

    def tokenizer(self):
        return Tokenizer.open(self._folder)

    def tensors(self):
        return iter(())


def config_only(folder, tiny, **changes):
    """config.json as transformers writes it, and beside the folder a tokenizer, which a build asks for."""
    AutoConfig.for_model(tiny.model_type, **{**_SIZES, **tiny.changes, **changes},
                         architectures=[{"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM",
                                         "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM",
                                         "gemma2": "Gemma2ForCausalLM", "gemma3_text": "Gemma3ForCausalLM",
                                         "phi3": "Phi3ForCausalLM"}[tiny.model_type]]).save_pretrained(folder / "bare")
    shutil.copytree(folder / "bare", folder / "whole")
    byte_tokenizer(folder / "whole")
    return folder / "bare", folder / "whole"


def row_of(plan):
    [row] = [row for row in plan.loaders if row.runtime == OURS]
    return row


def word(ask, *arguments):
    """Empty where it is done, else what it was refused for."""
    try:
        ask(*arguments)
    except ToolkitError as error:
        return error.message
    return ""


def recipes(folder):
    for name, text in MIXED.items():
        path = folder / f"{name.replace(' ', '-')}.yaml"
        path.write_text(f"{text}\nname: mixed\n")
        yield name, load_recipe(path)
    for name in recipe_names():
        yield name, load_recipe(name)


@pytest.mark.parametrize("family", [*FAMILIES, "yarn", "longrope"])
def test_a_plan_says_of_every_recipe_and_cache_what_the_build_says(tmp_path, family):
    bare, whole = config_only(tmp_path, (FAMILIES | ROPES)[family])
    said = {}
    kinds = ("bf16", "fp8", "int8") if family in ("Llama", "Gemma 2", "Phi-3") else ("bf16",)
    for (name, recipe), kv in itertools.product(recipes(tmp_path), kinds):
        plan = planned(make_plan(bare, recipe, kv), read_config(bare))
        row, described = row_of(plan), Unwritten(plan, whole)
        cpu, gpu = word(plan_for, described, SPEC), word(prepare.foresee, described, SPEC, "sm_90")
        assert row.loads == (not cpu or not gpu), (name, kv, row, cpu, gpu)
        assert ("a GPU" in row.note.partition("not on")[0]) == (not gpu), (name, kv, row, gpu)
        assert row.loads or row.note in (cpu, gpu)
        assert any("no engine of this toolkit" in warning for warning in plan.warnings) == (not row.loads)
        said[name] = row.loads
    no = {name for name, loads in said.items() if not loads}
    assert no == {"nvfp4", "mxfp8", "int8 by fp8", "fp8 by int8", "fp8 groups", "fp8 tiles by token",
                  "int4 by static int8", "zero points by int8"}
    assert set(ordinary_recipes()) <= said.keys() - no


def rope(kind, **settings):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, **settings}}


#: family, what config.json says, and whether an engine runs it.
ODD = [
    ("Llama", {"hidden_act": "relu"}, False), ("Gemma 2", {"hidden_activation": "gelu"}, False),
    ("Llama", rope("default", partial_rotary_factor=0.5), False),
    ("Phi-3", rope("default", partial_rotary_factor=0.5), True),
    ("Llama", {"head_dim": 3}, False), ("Llama", {"head_dim": 6}, True),
    ("Phi-3", {"sliding_window": 0}, False),
    ("Mistral", {"sliding_window": 0}, False), ("Mistral", {"sliding_window": -1}, False),
    ("Mistral", {"sliding_window": None}, True), ("Mistral", {"sliding_window": 1}, True),
    ("Mistral", {"layer_types": ["sliding_attention"] * 4}, False),
    ("Qwen2 with windows", {"sliding_window": 0}, False), ("Qwen2", {"layer_types": ["chunked_attention"] * 4}, False),
    ("Gemma 3", {"sliding_window": None}, False), ("Gemma 3", {"attn_logit_softcapping": 5.0}, False),
    ("Gemma 3", {"use_bidirectional_attention": True}, False), ("Gemma 2", {"attn_logit_softcapping": 0.0}, False),
    ("Gemma 2", {"final_logit_softcapping": -1.0}, False), ("Gemma 2", {"query_pre_attn_scalar": -1}, False),
    ("Gemma 2", {"tie_word_embeddings": False, "attention_bias": True}, True),
    ("Phi-3 longrope", rope("longrope", short_factor=[0.0] * 8, long_factor=[1.0] * 8), False),
    ("Qwen2", {"num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 16}, True),
    ("Llama", {"max_position_embeddings": 1}, False),
    ("Llama", {"intermediate_size": 95, "hidden_size": 36, "head_dim": 16}, True)]


@pytest.mark.parametrize(("family", "changes", "runs"), ODD, ids=lambda value: value if isinstance(value, str) else "")
def test_a_plan_says_of_odd_models_what_the_build_says_and_what_is_built_answers(tmp_path, family, changes, runs):
    folder = make(tmp_path / "model", FAMILIES[family], **changes)
    plan = planned(make_plan(folder, load_recipe("fp8_dynamic")), read_config(folder))
    assert row_of(plan).loads == runs, row_of(plan)
    spec = SPEC.model_copy(update={"max_seq_len": None})
    said = word(build, QuantizedCheckpoint.open(folder), spec, tmp_path / "engine")
    assert said == ("" if runs else row_of(plan).note)
    if runs:
        with LLM(tmp_path / "engine") as llm:
            [answer] = llm.generate("ab", SamplingParams(max_tokens=3, ignore_eos=True))
            assert len(answer.outputs[0].token_ids) == 3


@pytest.fixture
def call(capfd, tiny_home, tmp_path):
    """The command line in a home whose models are `tiny` and `relu`, which no engine runs."""
    home = Home(tmp_path / "home")
    for part in ("models", "data"):
        shutil.copytree(tiny_home.path / part, home.path / part)
    shutil.copytree(home.models / "tiny", home.models / "relu")
    path = home.models / "relu" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"hidden_act": "relu"}))

    def run(*arguments):
        code = cli.run_command([*map(str, arguments), "--home", str(home.path)])
        shown = capfd.readouterr()
        return code, shown.out, shown.err
    run.home = home
    return run


def test_plan_and_quantize_say_that_no_engine_runs_the_result(call, tmp_path):
    code, out, _ = call("plan", "relu", "--recipe", "fp8_dynamic", "--json")
    assert code == 0
    plan = json.loads(out)
    [ours] = [row for row in plan["loaders"] if row["runtime"] == OURS]
    assert (ours["loads"], ours["note"]) == (False, "activation 'relu' is not supported in a Llama")
    assert "vLLM" in plan["warnings"][-1]
    code, out, err = call("quantize", "relu", "--recipe", "fp8_dynamic", "--out", tmp_path / "made")
    assert code == 0, err
    assert "no engine of this toolkit runs the result (activation 'relu'" in " ".join(err.split())
    assert err.index("no engine") < err.index("load model")
    assert "toolkit build" not in out
    code, out, err = call("quantize", "tiny", "--recipe", "fp8_dynamic", "--out", tmp_path / "other", "--json")
    assert json.loads(out)["warnings"] == []
    assert "look at" not in err


@pytest.mark.parametrize(("arguments", "message"), [
    (("generate", "relu", "-p", "x"), "'relu' is not supported"),
    (("build", "relu", "--out", "OUT"), "'relu' is not supported"),
    (("build", "tiny", "--max-seq-len", 999, "--out", "OUT"), "max_seq_len 999 is beyond the model's 256"),
    (("build", "tiny", "--memory", 70000, "--out", "OUT"), "of KV cache"),
    (("build", "relu", "--target", "sm_90", "--out", "OUT"), "'relu' is not supported"),
    (("build", "tiny", "--target", "sm_80", "--out", "OUT"), "compute capability 8.9")])
def test_what_no_engine_can_be_is_refused_before_it_is_calibrated(call, tmp_path, arguments, message):
    arguments = [tmp_path / "engine" if one == "OUT" else one for one in arguments]
    code, _, err = call(*arguments, "--recipe", "fp8")
    assert code == 2
    assert message in err
    assert "load model" not in err
    assert not list(call.home.artifacts("calibration-set").glob("*"))
    assert not list(call.home.artifacts("quantized-checkpoint").glob("*"))


def test_a_job_is_refused_before_anything_of_it_runs(call, tiny_job, tmp_path):
    job = tmp_path / "job" / "job.yaml"
    shutil.copytree(tiny_job.parent, job.parent)
    job.write_text(tiny_job.read_text().replace("model: tiny", "model: relu"))
    code, _, err = call("run", job)
    assert code == 2
    assert "'relu' is not supported" in err
    job.write_text(tiny_job.read_text().replace("length: 64", "length: 300"))
    code, _, err = call("run", job)
    assert code == 2
    assert "rows have 300 tokens, the model knows 256 positions" in err
    assert not call.home.artifacts("calibration-set").exists()


@pytest.mark.parametrize("verb", ["plan", "quantize"])
def test_rows_and_layers_that_the_model_does_not_have_are_refused_by_both(call, tmp_path, verb):
    out = ["--out", tmp_path / "made"] if verb == "quantize" else []
    code, _, err = call(verb, "tiny", "--recipe", "int8", "--length", 300, *out)
    assert code == 2
    assert "calibration rows have 300 tokens, the model knows 256 positions" in err
    assert "at most 256" in err
    mine = tmp_path / "mine.yaml"
    for protect in (2, 99):
        mine.write_text(f"extends: fp8\nname: mine\nprotect: {protect}\n")
        code, _, err = call(verb, "tiny", "--recipe", mine, *out)
        assert code == 2
        assert f"protects {protect} layers, and the model has 2" in err
        assert "Protect at most 1" in err
    assert not call.home.artifacts("calibration-set").exists()


def test_what_a_plan_cannot_say_it_says_why(call, tmp_path):
    for recipe in ("nvfp4", "mxfp8"):
        code, out, err = call("plan", "tiny", "--recipe", recipe)
        assert code == 0, err
        assert "not said: it cannot be rehearsed here" in out
        code, _, err = call("plan", "tiny", "--recipe", recipe, "--rehearse")
        assert code == 2
        assert "which cannot be done here" in err
        assert "Leave --rehearse out" in err
    mine = tmp_path / "mine.yaml"
    mine.write_text("extends: fp8\nname: mine\nprotect: 1\n")
    code, out, err = call("plan", "tiny", "--recipe", mine)
    assert code == 0, err
    assert "1 of 2 layers stay in 16 bits; which ones is measured by quantize" in " ".join(out.split())
    assert "--rehearse" not in out
    assert "square of the layers" in " ".join(out.split())


def test_a_model_of_few_positions_is_taken_as_far_as_it_goes(call):
    code, _, err = call("generate", "tiny", "-p", "river town", "--max-tokens", 2)
    assert code == 0, err
    [manifest] = call.home.artifacts("engine").glob("*/manifest.json")
    assert json.loads(manifest.read_text())["record"]["plan"]["limits"]["max_seq_len"] == 256

"""What a wrong recipe file is told: the value that was found, and what to write instead."""

import json
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError
from tiny_llamas import tiny_llama

from calib import recipe as recipe_module
from calib.errors import CalibError, UnknownNameError
from calib.plan import make_plan
from calib.recipe import WRITTEN, Recipe, load_recipe

BUILT_IN = Path(recipe_module.__file__).parent / "recipes"


def refused(folder, text, name="mine.yaml"):
    path = folder / name
    path.write_text(text)
    with pytest.raises(CalibError) as error:
        load_recipe(path)
    return error.value.message, error.value.hint


@pytest.mark.parametrize(("line", "message", "hint"), [
    ("seed: -1", "recipe mine.yaml: seed: must be at least 0, not -1", "Write it like `seed: 0`."),
    ("alphas: nope", "recipe mine.yaml: alphas: must be a list, not 'nope'", "Write it like `alphas: [0, 0.5, 0.7]`."),
    ("group_sizes: [0]", "recipe mine.yaml: group_sizes.0: must be at least 1, not 0", "`group_sizes: [128, 64, 32]`"),
    ("alphas: [0, x]", "recipe mine.yaml: alphas.1: must be a number, not 'x'", "`alphas: [0, 0.5, 0.7]`"),
    ("alphas: [0, 3]", "alphas are distinct numbers from 0 to 1, like [0, 0.5, 0.7], not [0.0, 3.0]",
     "Change alphas (in mine.yaml)"),
    ("alphas: []", "method 'smooth' needs alphas, and there is none", "method (in int8.yaml)"),
    (f"alphas: {[number / 200 for number in range(101)]}", "alphas holds 101 candidates, each of which rounds the "
     "model anew; at most 100 are tried", "Change alphas (in mine.yaml)"),
    ("rows: 1.5", "rows: must be a whole number, not 1.5", "`rows: 16`"),
    ("method: magic", "method: must be 'none', 'max', 'smooth', 'awq_lite', 'awq' or 'gptq', not 'magic'", "`method:"),
    ("weight: int8", "weight: must be a mapping of keys to values, not 'int8'", "`weight: {dtype: int8"),
    ("weight: {dtype: int8, granularity: {kind: row}}", "'kind' must be one of 'tensor', 'channel'", "`weight:"),
    ("alfas: [0]", "recipe mine.yaml: alfas: is not a known key", "Did you mean 'alphas'?")])
def test_a_value_is_named_with_what_to_write(tmp_path, line, message, hint):
    said = refused(tmp_path, f"extends: int8\nname: mine\n{line}\n")
    assert message in said[0]
    assert hint in said[1]
    assert "tuple" not in said[0]


@pytest.mark.parametrize(("line", "message"), [
    ("alpha_step: 1e-9", "alpha_step 1e-09 is a search of 1,000,000,000 candidates, each of which rounds the model "
     "anew; 0.01 is the finest"), ("alpha_step: 2", "alpha_step: must be at most 1, not 2"),
    ("clip_ratios: [1.0e-300]", "clip_ratios lie in [0.1, 1] and belong to methods"),
    (f"clip_ratios: {[1 - number / 200 for number in range(101)]}", "clip_ratios holds 101 candidates")])
def test_a_search_without_an_end_is_refused_with_its_size(tmp_path, line, message):
    found, hint = refused(tmp_path, f"extends: int4_awq\nname: mine\n{line}\n")
    assert message in found
    assert line.partition(":")[0] in hint
    (tmp_path / "fine.yaml").write_text("extends: int4_awq\nname: fine\nalpha_step: 0.01\n")
    assert load_recipe(tmp_path / "fine.yaml").alpha_step == 0.01


def test_an_unknown_key_is_told_the_keys_with_extends(tmp_path):
    message, hint = refused(tmp_path, "extend: int8\nname: mine\n")
    assert message == "recipe mine.yaml: extend: is not a known key"
    assert hint.startswith("Did you mean 'extends'? Known: ")
    assert "extends, group_sizes" in hint


@pytest.mark.parametrize(("said", "message", "hint"), [
    ("nosuch", "extends: 'nosuch' is unknown: no recipe has that name", "Known: bf16, fp8"),
    ("int9", "extends: 'int9' is unknown", "Did you mean 'int8'?"),
    ("[int8, nosuch]", "extends: 'nosuch' is unknown", "ends in .yaml"),
    ("gone.yaml", "extends: 'gone.yaml' is unknown: there is no file", "Known: bf16"),
    ("int8,int4_gptq", "extends: 'int8,int4_gptq' is unknown", "Several are a list, like `extends: [int8, mine.yaml]`"),
    ("[int8, 3]", "extends: must name recipes, not 3", "`extends: [int8, mine.yaml]`"),
    ("{a: b}", "extends: must name recipes, not {'a': 'b'}", "`extends: int8`"),
    ("[]", "extends: must name recipes, not []", "`extends: int8`"),
    ("", "extends: must name recipes, not None", "`extends: int8`"),
    ("[int8, null]", "extends: must name recipes, not None", "`extends: int8`")])
def test_a_parent_that_is_none_is_named_with_the_known_ones(tmp_path, said, message, hint):
    found = refused(tmp_path, f"extends: {said}\nname: mine\n")
    assert found[0].startswith(f"recipe mine.yaml: {message}")
    assert hint in found[1]


def test_two_parents_that_do_not_combine_are_both_named_with_the_reason(tmp_path):
    clash = ("extends int8 (method 'smooth') and int4_gptq (method 'gptq'), which do not combine: alphas [0.0, 0.5, "
             "0.7] only has a use in method 'smooth', and the method here is 'gptq'")
    assert refused(tmp_path, "extends: [int8, int4_gptq]\nname: two\n", "two.yaml")[0] == f"recipe two.yaml {clash}"
    assert refused(tmp_path, "extends: two.yaml\nname: mine\n")[0] == f"recipe mine.yaml {clash}"
    mended = tmp_path / "mended.yaml"
    mended.write_text("extends: two.yaml\nname: mended\nalphas: []\n"
                      "activation: {dtype: int8, granularity: {kind: token}, dynamic: true}\n")
    with pytest.raises(CalibError, match="not for weight int4 g128 with activation int8 token dynamic") as error:
        load_recipe(mended)
    assert "activation (in mended.yaml)" in error.value.hint
    mended.write_text("extends: two.yaml\nname: mended\nalphas: []\n")
    assert load_recipe(mended).method == "gptq"
    message, hint = refused(tmp_path, "extends: mended.yaml\nname: mine\nact_order: none\ndamping: null\n")
    assert message.startswith("recipe mine.yaml: damping belongs to method 'gptq'"), "its own fault, not the parents'"
    assert "damping (in mine.yaml)" in hint


def test_a_recipe_that_is_not_there_is_told_what_is(tmp_path):
    with pytest.raises(CalibError, match=r"there is no recipe file .*gone\.yaml") as error:
        load_recipe(tmp_path / "gone.yaml")
    assert "built-in recipe: bf16, fp8" in error.value.hint
    with pytest.raises(UnknownNameError) as unknown:
        load_recipe("mine")
    assert "ends in .yaml" in unknown.value.hint


def faulty_keys(values):
    """Keys whose own value is wrong; a rule between keys is none of theirs."""
    try:
        Recipe.model_validate(values)
    except ValidationError as error:
        return {fault["loc"][0] for fault in error.errors() if fault["loc"]}
    return set()


def test_every_key_has_an_example_that_is_read(tmp_path):
    assert set(WRITTEN) == set(Recipe.model_fields)
    base = load_recipe("int8").model_dump()
    for key, written in WRITTEN.items():
        value = yaml.safe_load(written)
        assert key not in faulty_keys(base | {key: value})


def test_an_empty_list_of_names_says_what_to_do_instead():
    assert UnknownNameError("alias", "x", []).hint == "There is none here yet."
    assert UnknownNameError("alias", "x", [], "Make one.").hint == "Make one."
    assert UnknownNameError("alias", "xy", ["xyz"], "Make one.").hint == "Did you mean 'xyz'? Known: xyz. Make one."


@pytest.mark.parametrize(("kind", "hint"), [
    ("llama", 'Add "architectures": ["LlamaForCausalLM"] to it: its model_type is \'llama\'.'),
    ("gemma3_text", '"Gemma3ForCausalLM"'), ("mamba", "one of the supported: Gemma2ForCausalLM"),
    (None, "one of the supported")])
def test_a_config_without_architectures_says_what_to_add(tmp_path, kind, hint):
    folder = tiny_llama(tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    del config["architectures"]
    (folder / "config.json").write_text(json.dumps(config | {"model_type": kind}))
    with pytest.raises(CalibError, match="has no 'architectures'") as error:
        make_plan(folder, load_recipe("fp8"))
    assert hint in error.value.hint
    if kind == "llama":
        (folder / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaForCausalLM"]}))
        assert make_plan(folder, load_recipe("fp8")).architecture == "LlamaForCausalLM"


def test_of_two_built_in_recipes_the_later_one_says_what_is_rounded(tmp_path):
    """Where two combine, weights and activations are the later one's, also where it leaves activations in 16 bits."""
    names, loaded = sorted(path.stem for path in BUILT_IN.glob("*.yaml")), 0
    for first in names:
        for last in names:
            if first == last:
                continue
            (tmp_path / "both.yaml").write_text(f"extends: [{first}, {last}]\n")
            try:
                both, alone = load_recipe(tmp_path / "both.yaml"), load_recipe(last)
            except CalibError:
                continue
            loaded += 1
            assert (both.weight, both.activation) == (alone.weight, alone.activation), (first, last)
    assert loaded > 100

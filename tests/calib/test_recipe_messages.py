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
from calib.recipe import Recipe, explain, load_recipe
from calib.recipe_words import WRITTEN
from calib.yaml_text import read_yaml

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
    ("weight: {dtype: int8, granularity: {}}", "weight.granularity: 'kind' is missing in {}",
     "Kinds: `{kind: tensor}`, `{kind: channel}`, `{kind: token}`, `{kind: group, size: 128}`, `{kind: block, rows: "),
    ("weight: {dtype: int8, granularity: {kind: group, size: 0}}", "weight.granularity.size: must be above 0, not 0",
     "Write it like `granularity: {kind: group, size: 128}`."),
    ("weight: {dtype: int8, granularity: {kind: group, size: -128}}", "size: must be above 0, not -128", "size: 128}"),
    ("weight: {dtype: int8, granularity: {kind: group, size: 1.5}}", "size: must be a whole number, not 1.5", "`gran"),
    ("weight: {dtype: fp8_e4m3, granularity: {kind: block, row: 1, cols: 2}}",
     "recipe mine.yaml: weight.granularity.row: is not a known key of kind 'block'",
     "Did you mean 'rows'? Known: cols, kind, rows. Write it like `granularity: {kind: block, rows: 128, cols: 128}`."),
    ("weight: {dtype: fp8_e4m3, granularity: {kind: block, cols: 2}}",
     "recipe mine.yaml: weight.granularity.rows: is missing in kind 'block'", "`granularity: {kind: block, rows: 128,"),
    ("weight: {dtype: fp8_e4m3, granularity: {kind: block, rows: yes, cols: 2}}",
     "weight.granularity.rows: must be a whole number, not True", "{kind: block, rows: 128, cols: 128}`."),
    ("weight: {dtyp: int8}", "recipe mine.yaml: weight.dtyp: is not a known key",
     "Did you mean 'dtype'? Known: dtype, dynamic, granularity, symmetric. Write it like `weight: {dtype: int8"),
    ("weight: {1: 2, dtype: int8}", "weight.1: a key must be text, not 1", "Write it like `weight:"),
    ("activation: {dtype: bf16}", "an activation that is not quantized is written as null, not as bf16", "activation"),
    ("raised: {int9: [x]}", "raised.int9: must be 'fp8' or 'int8', not 'int9'", "`raised: {int8: "),
    ("rows: yes", "recipe mine.yaml: rows: must be a whole number, not True", "`rows: 16`"),
    ("rows: '16'", "rows: must be a whole number, not '16'", "`rows: 16`"),
    ("alphas: [0, yes]", "alphas.1: must be a number, not True", "`alphas: [0, 0.5, 0.7]`"),
    ("seed: 99999999999999999999", "seed: must be below 9,223,372,036,854,775,808, not 9", "seed: 0"),
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


def test_a_variant_without_a_name_is_called_by_its_file(tmp_path):
    for file, name in (("mine.yaml", "mine"), ("My Recipe (2).yml", "my-recipe-2-"), ("_x.yaml", "x")):
        (tmp_path / file).write_text("extends: int8\nalphas: [0]\n")
        assert load_recipe(tmp_path / file).name == name
    name = next(setting for setting in explain(tmp_path / "mine.yaml") if setting.key == "name")
    assert (name.value, name.origin) == ("mine", "mine.yaml")
    (tmp_path / "two.yaml").write_text("extends: mine.yaml\nrows: 4\n")
    assert load_recipe(tmp_path / "two.yaml").name == "two"


@pytest.mark.parametrize(("file", "text", "odd"), [
    ("mine.yaml", "name: int8\nalphas: [0]\n", "alphas: [0.0] (from mine.yaml), not [0.0, 0.5, 0.7]"),
    ("mine.yaml", "name: int8\nrows: 4\n", "rows: 4 (from mine.yaml), not 16"),
    ("mine.yaml", "name: int8\nseed: 7\n", "seed: 7 (from mine.yaml), not 0"),
    ("int8.yaml", "keep: ['*.down_proj']\n", "keep: ['*.down_proj'] (from int8.yaml), not []"),
    ("mine.yaml", "name: fp8\n", "method: 'smooth' (from int8.yaml), not 'max'")])
def test_no_file_passes_for_a_built_in_recipe(tmp_path, file, text, odd):
    name = "fp8" if "fp8" in text else "int8"
    message, hint = refused(tmp_path, f"extends: int8\n{text}", file)
    assert message == f"recipe {file} has the built-in recipe's name {name!r} and another {odd}"
    assert hint == f"Give it a name of its own, like `name: my-{name}`."
    with pytest.raises(CalibError, match="has the built-in recipe's name"):
        explain(tmp_path / file)


def test_the_same_values_may_have_the_same_name(tmp_path):
    (tmp_path / "mine.yaml").write_text("extends: int8\nname: int8\nsummary: ours\n")
    assert load_recipe(tmp_path / "mine.yaml").name == "int8"


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


@pytest.mark.parametrize(("text", "key"), [
    ("extends: fp8\nchoose_tokens: 4096", "choose_tokens 4096 has no effect"),
    ("extends: bf16\nchoose_tokens: 64", "choose_tokens 64 has no effect"),
    ("extends: int8\nalphas: [0.5]\nchoose_tokens: 64", "choose_tokens 64 has no effect"),
    ("extends: int4_awq\nclip_ratios: [1, 1]", "clip_ratios are distinct numbers, not [1.0, 1.0]"),
    ("extends: int4_awq\ngroup_sizes: [128, 64, 64]", "group_sizes are distinct numbers, not [128, 64, 64]")])
def test_what_changes_nothing_is_refused(tmp_path, text, key):
    message, hint = refused(tmp_path, text)
    assert key in message
    assert f"{key.split()[0]} (in mine.yaml)" in hint


def test_choose_text_may_be_sized_where_something_is_chosen(tmp_path):
    for text in ("extends: fp8\nprotect: 1\n", "extends: int8\n"):
        (tmp_path / "mine.yaml").write_text(f"{text}choose_tokens: 4096\n")
        assert load_recipe(tmp_path / "mine.yaml").choose_tokens == 4096


@pytest.mark.parametrize("line", ["rows: 8", "seed: 3"])
@pytest.mark.parametrize("base", ["bf16", "fp8_dynamic"])
def test_rows_and_seed_are_refused_where_no_text_is_read(tmp_path, base, line):
    """With a KV cache of eight bits the same recipe reads text, and they have their effect."""
    folder = tiny_llama(tmp_path / "m")
    (tmp_path / "mine.yaml").write_text(f"extends: {base}\n{line}\n")
    mine, said = load_recipe(tmp_path / "mine.yaml"), line.replace(":", "")
    with pytest.raises(CalibError, match=f"{said} of recipe mine would have no effect: with a bf16 KV cache") as error:
        make_plan(folder, mine)
    assert line.partition(":")[0] in error.value.hint
    assert make_plan(folder, mine, "fp8").kv.dtype == "fp8_e4m3"


@pytest.mark.parametrize(("text", "message"), [
    ("010", "write 8 or 10,"), ("1_0", "write 10,"), ("0x10", "write 16,"), ("0b11", "write 3,"), ("1:30", "write 90,"),
    ("-010", "write -8 or -10,"), ("1_0.5", "write its digits alone"), ("1:30.5", "write its digits alone")])
def test_numbers_that_readers_of_yaml_differ_over_are_refused(tmp_path, text, message):
    (tmp_path / "mine.yaml").write_text(f"extends: fp8\nprotect: {text}\n")
    with pytest.raises(CalibError) as error:
        load_recipe(tmp_path / "mine.yaml")
    assert f"line 2, column 10: {text} is no decimal number" in error.value.message
    assert message in error.value.message


@pytest.mark.parametrize(("pattern", "hint"), [
    ("*.donw_proj", "Did you mean '*.down_proj'? Modules are named like model.layers.0.self_attn.q_proj"),
    ("model.layers.9.mlp.down_proj", "Did you mean 'model.layers."), ("x", "and end in q_proj, k_proj, v_proj")])
def test_a_pattern_that_matches_nothing_is_told_what_would(tmp_path, pattern, hint):
    folder = tiny_llama(tmp_path / "m")
    (tmp_path / "mine.yaml").write_text(f"extends: int8\nkeep: ['{pattern}']\n")
    with pytest.raises(CalibError, match="matches no module") as error:
        make_plan(folder, load_recipe(tmp_path / "mine.yaml"))
    assert hint in error.value.hint


@pytest.mark.parametrize(("text", "value"), [("1e-3", 0.001), ("-2E+5", -2e5), ("1.5e3", 1500.0), ("'1e-3'", "1e-3"),
                                             ("1e", "1e"), ("0", 0), ("+7", 7), ("-10", -10), ("'010'", "010")])
def test_numbers_are_what_they_look_like(tmp_path, text, value):
    (tmp_path / "x.yaml").write_text(f"a: {text}\n")
    assert read_yaml(tmp_path / "x.yaml", CalibError, "") == {"a": value}

"""``quantize`` and ``build`` as a user meets them where data or weights are missing, and what is printed when."""

import json
import shutil

import pytest

from calib.artifact import Artifact
from toolkit import cli
from toolkit.home import Home

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def bare(tiny_home, tmp_path):
    """A home with the model alone: no data were prepared."""
    shutil.copytree(tiny_home.models, tmp_path / "home" / "models")
    return Home(tmp_path / "home")


@pytest.fixture
def call(capfd, bare):
    def run(*arguments):
        code = cli.run_command([*map(str, arguments), "--home", str(bare.path)])
        shown = capfd.readouterr()
        return code, shown.out, shown.err
    return run


@pytest.mark.parametrize("recipe", ["bf16", "fp8_dynamic", "int8_weight_only", "fp8_block"])
def test_a_recipe_without_data_works_in_a_home_without_data(call, tmp_path, recipe):
    code, out, err = call("quantize", "tiny", "--recipe", recipe, "--out", tmp_path / "made", "--json")
    assert code == 0, err
    made = Artifact.open(tmp_path / "made", "quantized-checkpoint")
    assert json.loads(out)["digest"] == made.digest
    assert made.parents == []


def test_build_by_a_recipe_without_data_works_in_a_home_without_data(call, tmp_path):
    code, _, err = call("build", "tiny", "--recipe", "fp8_dynamic", "--out", tmp_path / "engine", "--tune", "none",
                        "--max-seq-len", 64)
    assert code == 0, err


@pytest.mark.parametrize(("arguments", "message"), [
    (("int8",), "calibrating tiny by int8 (KV cache bf16) needs text, and "),
    (("bf16", "--kv-cache", "fp8"), "calibrating tiny by bf16 (KV cache fp8) needs text, and ")])
def test_data_that_are_missing_are_said_with_the_recipes_that_need_none(call, tmp_path, arguments, message):
    code, out, _ = call("quantize", "tiny", "--recipe", *arguments, "--out", tmp_path / "made", "--json")
    said = json.loads(out)["error"]
    assert code == 4
    assert said["message"].startswith(message)
    assert "data/calibration is not there" in said["message"]
    assert "bf16, fp8_block, fp8_dynamic, fp8_weight_only, int8_weight_only" in said["hint"]


@pytest.mark.parametrize("option", ["--data calibration", "--chat", "--rows 16", "--length 64", "--seed 7",
                                    "--seed 0"])
def test_text_for_a_recipe_that_reads_none_is_refused(call, tmp_path, option):
    code, _, err = call("quantize", "tiny", "--recipe", "bf16", "--out", tmp_path / "made", *option.split())
    assert code == 2
    assert f"{option} would have no effect: recipe bf16 with a bf16 KV cache" in err
    assert not (tmp_path / "made").exists()
    if option.split()[0] in ("--rows", "--length"):
        assert call("plan", "tiny", "--recipe", "fp8_dynamic", *option.split())[0] == 2


@pytest.mark.parametrize("left", ["config.json", "tokenizer.json"])
@pytest.mark.parametrize("verb", ["quantize", "build"])
def test_missing_weights_are_said_before_data_are_looked_for(call, bare, tmp_path, verb, left):
    for path in (bare.models / "tiny").iterdir():
        if path.name not in ("config.json", left):
            path.unlink()
    code, out, _ = call(verb, "tiny", "--recipe", "int8", "--out", tmp_path / "made", "--json")
    assert code != 0
    assert "model.safetensors is missing" in json.loads(out)["error"]["message"]


def test_the_recipes_seed_and_the_commands_draw_the_rows_together(tiny_home, tmp_path, capfd):
    """Other seeds are other rows, the same sum is the same rows, and the same command the same bytes."""
    def made(name, text, *options):
        (tmp_path / "mine.yaml").write_text(f"extends: fp8\n{text}")
        code = cli.run_command(["quantize", "tiny", "--recipe", str(tmp_path / "mine.yaml"), "--out",
                                str(tmp_path / name), "--rows", "4", "--length", "32", *options, "--home",
                                str(tiny_home.path), "--json"])
        shown = capfd.readouterr()
        assert code == 0, shown.err
        artifact = Artifact.open(tmp_path / name, "quantized-checkpoint")
        return artifact, json.loads(shown.out)

    plain, _ = made("plain", "")
    seven, _ = made("seven", "seed: 7\n")
    again, _ = made("again", "seed: 7\n")
    option, said = made("option", "", "--seed", "7", "--explain")
    both, _ = made("both", "seed: 3\n", "--seed", "4")
    assert plain.parents != seven.parents == again.parents == option.parents == both.parents
    assert seven.digest == again.digest != plain.digest
    assert [one.record["seed"] for one in (plain, seven, option, both)] == [0, 7, 7, 7]
    assert said["origins"]["seed"] == "0 (default) + --seed 7"


def test_explained_values_are_printed_before_anything_is_calibrated(call, tmp_path):
    """Where calibration is refused the values stand there already; with --json there is one document, as ever."""
    arguments = ("quantize", "tiny", "--recipe", "int8", "--out", tmp_path / "made", "--explain")
    code, out, err = call(*arguments)
    assert code == 4
    assert "needs text" in err
    assert "int8.yaml" in out
    assert "[0.0, 0.5, 0.7]" in out
    assert json.loads(call(*arguments, "--json")[1])["error"]["code"]
    arguments = ("quantize", "tiny", "--recipe", "bf16", "--out", tmp_path / "plain", "--explain")
    code, out, err = call(*arguments)
    assert code == 0, err
    assert out.count("bf16.yaml") == 4
    assert out.index("bf16.yaml") < out.index("next: toolkit build")


@pytest.mark.parametrize(("arguments", "message", "hint"), [
    (("plan", "tiny", "--recipe", "fp8", "--tp", "0"), "'--tp': must be at least 1, not '0'", "toolkit plan --help"),
    (("plan", "tiny", "--recipe", "fp8", "--tp", "x"), "'--tp': must be a whole number, not 'x'", "plan --help"),
    (("plan", "/no/where", "--recipe", "fp8"), "'/no/where'", "Give a folder that exists"),
    (("plan", "nowhere", "--recipe", "fp8"), "'nowhere'", "toolkit data prepare"),
    (("generate", "alias:gone", "-p", "x"), "unknown alias 'gone'", "toolkit publish ENGINE --to TARGET --alias NAME"),
    (("jobs", "logs", "gone"), "unknown job 'gone'", "This home has none yet")])
def test_a_name_or_number_that_is_none_is_told_what_to_do(call, arguments, message, hint):
    code, _, err = call(*arguments)
    assert code == 2
    assert message in err
    assert hint in " ".join(err.split())
    assert "none." not in err

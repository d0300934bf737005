"""The recipe that the Layers page exports, through quantize, build and generate: the engine has eight bits there."""

import json

import pytest

from calib.checkpoint import QuantizedCheckpoint
from calib.recipe import EIGHT_BITS
from engines.engine import Engine
from toolkit import cli, layers


@pytest.fixture
def call(tiny_home, capsys):
    """(exit code, stdout, stderr) of a command line on the tiny home."""
    def run(*arguments):
        capsys.readouterr()
        code = cli.run_command([*map(str, arguments), "--home", str(tiny_home.path)])
        return code, *capsys.readouterr()
    return run


@pytest.fixture
def exported(tmp_path):
    name = layers.recipe_name("int4_awq", [], [1])
    (tmp_path / f"{name}.yaml").write_text(layers.recipe_text("int4_awq", [], [1]) + "group_sizes: [32]\n")
    return tmp_path / f"{name}.yaml"


def test_a_raised_layer_comes_out_in_the_engine_and_speaks(call, exported, tmp_path):
    code, _, err = call("quantize", "tiny", "--recipe", exported, "--out", tmp_path / "made", "--rows", 4,
                        "--length", 64)
    assert code == 0, err
    checkpoint = QuantizedCheckpoint.open(tmp_path / "made")
    bits = {name: scheme.weight.dtype for name, scheme in checkpoint.schemes.items()}
    assert bits == {name: "int8" if ".layers.1." in name else "int4" for name in bits}
    assert len(bits) == 14
    assert call("verify", tmp_path / "made")[0] == 0
    code, _, err = call("build", tmp_path / "made", "--out", tmp_path / "engine", "--tune", "none", "--max-seq-len", 64)
    assert code == 0, err
    linears = Engine.open(tmp_path / "engine").plan.program.linears()
    raised = [op for op in linears if op.parts[0].startswith("model.layers.1.")]
    assert len(raised) == 4
    assert all(op.weight == EIGHT_BITS["int8"] and op.activation is None for op in raised)
    assert {op.weight.dtype for op in linears if op.parts[0].startswith("model.layers.0.")} == {"int4"}
    code, out, err = call("generate", tmp_path / "engine", "-p", "river", "--max-tokens", 4, "--json")
    assert code == 0, err
    assert json.loads(out)


def test_explain_and_plan_say_what_is_raised(call, exported, tmp_path):
    code, out, _ = call("plan", "tiny", "--recipe", exported, "--no-rehearse", "--explain", "--json")
    said = json.loads(out)
    assert (code, said["origins"]["raised"]) == (0, exported.name)
    assert said["recipe"]["raised"] == {"int8": ["model.layers.1.*"]}
    schemes = {module["name"]: module["scheme"] for module in said["modules"]}
    assert schemes["model.layers.1.mlp.up_proj"]["weight"]["dtype"] == "int8"
    assert schemes["model.layers.0.mlp.up_proj"]["weight"]["dtype"] == "int4"
    exported.write_text(exported.read_text().replace("layers.1", "layers.7"))
    code, _, err = call("plan", "tiny", "--recipe", exported, "--no-rehearse")
    assert code == 2
    assert "raised int8 pattern 'model.layers.7.*' matches no module" in err

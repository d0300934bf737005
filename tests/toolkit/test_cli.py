"""The command line as a user meets it: one JSON document, two-line errors, exit codes, no heavy start."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from toolkit import cli, health

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def call(capsys, tmp_path):
    """Run a command line in this process: (exit code, stdout, stderr)."""
    def run(*arguments, home=tmp_path / "home"):
        code = cli.run_command([*map(str, arguments), "--home", str(home)])
        shown = capsys.readouterr()
        return code, shown.out, shown.err
    return run


VERBS = [("doctor",), ("data", "prepare"), ("plan",), ("quantize",), ("build",), ("inspect",), ("verify",),
         ("generate",), ("eval",), ("sweep",), ("gate",), ("run",), ("runs", "ls"), ("runs", "show"),
         ("runs", "compare"), ("runs", "export"), ("publish",), ("releases", "ls"), ("releases", "verify"), ("ui",),
         ("pack",), ("unpack",)]


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
def test_every_verb_has_help_with_the_common_options(verb, capsys):
    assert cli.run_command([*verb, "--help"]) == 0
    shown = capsys.readouterr().out
    for option in ("--home", "--json", "--quiet", "--offline"):
        assert option in shown


def test_later_verbs_are_not_listed(capsys):
    cli.run_command(["--help"])
    listed = capsys.readouterr().out
    for name in ("search", "convert"):
        assert f"\n  {name} " not in listed


def test_starting_loads_nothing_heavy():
    script = ("import sys, toolkit, toolkit.cli; "
              "bad = {'torch', 'transformers', 'pandas', 'plotly', 'lm_eval', 'modelopt', 'streamlit', 'pydantic', "
              "'numpy'} & set(sys.modules); sys.exit(f'loaded: {bad}' if bad else 0)")
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_package_gives_llm_lazily():
    script = "import sys, toolkit; assert 'torch' not in sys.modules; from toolkit import SamplingParams; print(" \
             "SamplingParams(max_tokens=3).max_tokens); assert 'torch' not in sys.modules; toolkit.nothing"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "3\n"
    assert "has no attribute 'nothing'" in done.stderr


@pytest.mark.parametrize(("arguments", "code", "message", "hint"), [
    (("qantize",), 2, "No such command", "Did you mean 'quantize'"),
    (("plan",), 2, "Missing argument", "toolkit plan --help"),
    (("plan", "m", "--recpe", "fp8"), 2, "No such option", "toolkit plan --help"),
    (("plan", "nowhere", "--recipe", "fp9"), 2, "unknown recipe 'fp9'", "'fp8'"),
    (("plan", "nowhere", "--recipe", "fp8"), 2, "'nowhere'", ""),
    (("plan", "m", "--recipe", "fp8", "--kv-cache", "int3"), 2, "int3", ""),
    (("run", "nothing.yaml"), 2, "no job file", "examples/demo.yaml"),
    (("runs", "show"), 4, "no finished run", "toolkit run"),
    (("inspect", "abcdef123456"), 2, "abcdef123456", ""),
    (("inspect", "alias:production"), 2, "production", ""),
    (("releases", "ls", "--to", "/nonexistent-folder"), 2, "no folder", "publish"),
    (("sweep", "x", "--cells", "1x2"), 2, "not a cell", "8x64x32"),
    (("build", "x", "--out", "y", "--memory", "lots"), 2, "'lots' is not a size", "2GB"),
    (("generate", "x", "-p", "y", "--max-tokens", "0"), 2, "max-tokens", ""),
    (("generate", "x", "-p", "y", "--seed", "5"), 2, "--seed has no effect at temperature 0", "--temperature"),
    (("generate", "x", "-p", "y", "--top-p", "0.5"), 2, "--top-p has no effect at temperature 0", "--temperature"),
    (("generate", "x", "-p", "y", "--temperature", "1", "--top-k", str(2**31)), 2,
     "top_k must be below 2,147,483,648, not 2147483648", ""),
    (("serve", "x", "--drain", "inf"), 2, "'--drain': must be at most 86400, not 'inf'", ""),
    (("serve", "x", "--watchdog", "1e309"), 2, "'--watchdog': must be at most 86400, not '1e309'", ""),
    (("serve", "x", "--request-timeout", "1e18"), 2, "'--request-timeout': must be at most 86400, not '1e18'", ""),
    (("serve", "x", "--max-queue", str(10**12)), 2, "'--max-queue': must be at most 100,000, not '1000000000000'", ""),
    (("runs", "ls", "--json", "--quiet"), 2, "exclude each other", ""),
])
def test_mistakes_get_two_lines_and_a_code(call, arguments, code, message, hint):
    as_json = "--json" in arguments
    found, out, err = call(*arguments)
    assert found == code
    if as_json:
        assert message in json.loads(out)["error"]["message"]
        return
    assert out == ""
    lines = err.strip().splitlines()
    assert len(lines) <= 2
    assert lines[0].startswith("error: ")
    assert message in lines[0]
    assert hint in err
    assert "Traceback" not in err


def test_json_errors_are_one_document_on_stdout(call):
    code, out, err = call("runs", "show", "nothing", "--json")
    assert code == 4
    assert err == ""
    assert set(json.loads(out)["error"]) == {"code", "message", "hint"}


def test_rows_as_json_are_the_contract(call, stored_home):
    code, out, err = call("runs", "show", "--json", home=stored_home.path)
    assert (code, err) == (0, "")
    document = json.loads(out)
    assert set(document) == {"run", "job", "rows"}
    assert (document["run"], document["job"], len(document["rows"])) == ("demo-0123456789ab", "demo", 5)
    row = document["rows"][2]
    assert {"recipe", "kv_cache", "device", "emulated", "engine_digest", "checkpoint_digest", "source_grid",
            "size_bytes", "accuracy", "delta_nll", "kl_mean", "same_top1", "flips", "ttft_ms", "tpot_ms", "out_tok_s",
            "batch_size", "isl", "osl", "peak_memory_bytes", "verdict", "verdict_reason", "cells"} == set(row)
    assert set(row["delta_nll"]) == {"value", "ci_low", "ci_high", "n"}


def test_quiet_prints_ids_only(call, stored_home, report_rows):
    _, out, err = call("runs", "show", "-q", home=stored_home.path)
    assert out.split() == [row.engine_digest for row in report_rows]
    assert err == ""
    assert call("runs", "ls", "-q", home=stored_home.path)[1] == "demo-0123456789ab\n"


def test_a_job_name_names_its_newest_run(call, stored_home):
    assert call("runs", "show", "demo", "-q", home=stored_home.path)[0] == 0
    code, _, err = call("runs", "show", "dem", home=stored_home.path)
    assert code == 0, err
    assert call("runs", "show", "dmeo", home=stored_home.path)[0] == 4


@pytest.mark.parametrize("format", ["html", "csv", "md", "json"])
def test_export_writes_one_file(call, stored_home, tmp_path, format):
    path = tmp_path / f"out.{format}"
    code, out, _ = call("runs", "export", "--format", format, "--out", path, "-q", home=stored_home.path)
    assert (code, out) == (0, f"{path}\n")
    assert path.stat().st_size > 100


def test_compare_a_run_with_itself(call, stored_home):
    code, out, _ = call("runs", "compare", "demo", "demo-0123", "--json", home=stored_home.path)
    assert code == 0
    assert all(engine["same_engine"] for engine in json.loads(out)["engines"])


def test_home_comes_from_the_environment_for_the_command_line(stored_home):
    done = subprocess.run([sys.executable, "-m", "toolkit", "runs", "ls", "-q"], cwd=ROOT, capture_output=True,
                          text=True, env={"PATH": "", "TOOLKIT_HOME": str(stored_home.path)})
    assert done.stdout == "demo-0123456789ab\n", done.stderr


def test_an_unforeseen_error_is_one_line_and_a_log(call, monkeypatch, tmp_path):
    def explode(self, limit=0, offset=0):
        raise RuntimeError("the unforeseen")
    monkeypatch.setattr("toolkit.store.RunStore.runs", explode)
    code, out, err = call("runs", "ls")
    assert (code, out) == (4, "")
    assert err.splitlines()[0] == "error: unexpected RuntimeError: the unforeseen"
    [log] = (tmp_path / "home" / "logs").iterdir()
    assert "Traceback" in log.read_text()
    assert str(log) in err.replace("\n", "")


def test_ctrl_c_is_130(call, monkeypatch):
    def interrupt(self, limit=0, offset=0):
        raise KeyboardInterrupt
    monkeypatch.setattr("toolkit.store.RunStore.runs", interrupt)
    code, _, err = call("runs", "ls")
    assert code == 130
    assert "goes on" in err


def test_a_full_disk_is_an_environment_error(call, monkeypatch):
    def full(self, limit=0, offset=0):
        raise OSError(28, "No space left on device", "/data/x")
    monkeypatch.setattr("toolkit.store.RunStore.runs", full)
    code, out, _ = call("runs", "ls", "--json")
    assert code == 4
    assert json.loads(out)["error"]["message"] == "No space left on device (/data/x)"


def test_doctor_says_what_is_missing(call):
    code, out, _ = call("doctor", "--json")
    assert code == 0
    states = {check["name"]: check["state"] for check in json.loads(out)["checks"]}
    assert states["torch"] == "ok"
    assert states["demo model"] == "missing"


def test_doctor_names_each_package_that_lacks_and_what_it_is_for(call, monkeypatch):
    known = health.metadata.version

    def version(name):
        if name in ("nvidia-modelopt", "triton"):
            raise health.metadata.PackageNotFoundError(name)
        return known(name)
    monkeypatch.setattr(health.metadata, "version", version)
    checks = {check["name"]: check for check in json.loads(call("doctor", "--json")[1])["checks"]}
    assert checks["nvidia-modelopt"]["state"] == "missing"
    assert "needed for" in checks["nvidia-modelopt"]["found"]
    assert checks["nvidia-modelopt"]["mend"] == "pip install nvidia-modelopt"
    if not torch.cuda.is_available():
        assert "Triton is not installed" in checks["gpu"]["found"]
        assert checks["gpu"]["mend"] == "pip install 'llm-quant-toolkit[gpu]'"


def test_data_prepare_offline_says_what_to_bring(call):
    code, out, _ = call("data", "prepare", "--offline", "--json")
    assert code == 4
    error = json.loads(out)["error"]
    assert error["code"] == "missing_data"
    assert ".whl" in error["hint"]

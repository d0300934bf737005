"""From a model's name to tokens without a build by hand: made once, found again, made anew when the model changes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from calib.artifact import Artifact
from calib.progress import Progress
from toolkit import LLM, SamplingParams, cli
from toolkit.errors import UsageError
from toolkit.home import Home
from toolkit.stages import Workshop
from toolkit.store import RunStore
from toolkit.turns import alone

ROOT = Path(__file__).parent.parent.parent
LIMITS = {"max_seq_len": 64, "max_batch_size": 2, "max_num_tokens": 64, "tune": "none"}
pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def home(tiny_home: Home, tmp_path: Path) -> Home:
    """A home of its own with model and data, nothing made."""
    for name in ("models", "data"):
        shutil.copytree(tiny_home.path / name, tmp_path / "home" / name)
    return Home(tmp_path / "home")


def made(home: Home, kind: str) -> list[str]:
    return sorted(path.name for path in home.artifacts(kind).glob("*") if not path.name.startswith("."))


def answer(home: Home, events: list[Progress] | None = None, **options: object) -> tuple[str, list[int]]:
    heard: list[Progress] = [] if events is None else events
    with LLM("tiny", home=home.path, offline=True, report=heard.append, **(LIMITS | options)) as llm:
        [out] = llm.generate("river town", SamplingParams(max_tokens=6, ignore_eos=True))
        return llm.engine.digest, out.outputs[0].token_ids


def test_made_once_then_found(home: Home) -> None:
    events: list[Progress] = []
    first = answer(home, events)
    assert {"tune", "pack weights"} <= {event.stage for event in events}
    assert any(event.total and event.done for event in events), "progress says how much there is"
    again: list[Progress] = []
    assert answer(home, again) == first
    assert again == []
    assert len(made(home, "engine")) == 1


def test_a_changed_model_is_another_engine(home: Home) -> None:
    from safetensors.torch import load_file, save_file

    first, _ = answer(home)
    path = home.models / "tiny" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"] = tensors["model.norm.weight"] * 1.5
    stamp = path.stat()
    save_file(tensors, path, {"format": "pt"})
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))  # same size, same time: only the content differs
    second, _ = answer(home)
    assert first != second
    assert len(made(home, "engine")) == 2


@pytest.mark.parametrize(("limits", "length"), [({}, 256), ({"max_seq_len": 96}, 96)], ids=["not said", "said"])
def test_a_model_of_few_positions_gets_an_engine_of_its_length(home: Home, limits: dict[str, int], length: int) -> None:
    with LLM("tiny", home=home.path, offline=True, report=lambda event: None, tune="none", **limits) as llm:
        assert llm.engine.plan.limits.max_seq_len == length


@pytest.mark.parametrize("arguments", [
    ["generate", "tiny", "-p", "x", "--recipe", "int8"], ["serve", "tiny", "--recipe", "int8", "--port", "0"],
    ["build", "tiny", "--recipe", "int8", "--out", "OUT"],
    ["build", "tiny", "--recipe", "int8", "--target", "sm_90", "--out", "OUT"]], ids=" ".join)
def test_a_length_beyond_the_model_is_refused_before_it_is_calibrated(
        home: Home, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    out = str(tmp_path / "out")
    code = cli.run_command([out if word == "OUT" else word for word in arguments] + [
        "--max-seq-len", "257", "--offline", "--json", "--home", str(home.path)])
    said = json.loads(capsys.readouterr().out)["error"]
    assert (code, said["message"]) == (2, "max_seq_len 257 is beyond the model's 256 positions")
    assert said["hint"] == "Ask for at most 256."
    assert made(home, "quantized-checkpoint") == made(home, "calibration-set") == made(home, "engine") == []


def test_a_batch_or_a_cap_that_cannot_be_is_refused_before_it_is_calibrated(
        home: Home, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for options, words in ((["--max-batch-size", "99999999999"], "less than max_batch_size 99,999,999,999"),
                           (["--memory", "1KB"], "bytes of KV cache; 0 are left"),
                           (["--memory", "1", "--target", "sm_90"], "a cap of 1 bytes is less than"),
                           (["--target", "sm_999"], "unknown target 'sm_999'")):
        code = cli.run_command(["build", "tiny", "--recipe", "int8", "--out", str(tmp_path / "out"), *options,
                                "--offline", "--json", "--home", str(home.path)])
        said = json.loads(capsys.readouterr().out)["error"]
        assert code == 2, options
        assert words in said["message"], options
    assert made(home, "quantized-checkpoint") == made(home, "calibration-set") == []


def test_a_length_for_what_is_an_engine_is_an_error(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    digest, _ = answer(home)
    for verb in (["generate", digest, "-p", "x"], ["serve", digest, "--port", "0"]):
        code = cli.run_command([*verb, "--max-seq-len", "64", "--json", "--home", str(home.path)])
        said = json.loads(capsys.readouterr().out)["error"]
        assert (code, said["message"]) == (2, f"{digest} is an engine: its recipe and limits are fixed")
        assert "--max-seq-len" in said["hint"]


def test_two_processes_at_once_build_once(home: Home) -> None:
    code = (f"from toolkit import LLM\nwith LLM('tiny', home={str(home.path)!r}, offline=True, "
            f"**{LIMITS}) as llm:\n    print(llm.engine.digest)")
    running = [subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                text=True) for _ in range(2)]
    ends = [process.communicate() for process in running]
    assert [process.returncode for process in running] == [0, 0], [error[-2000:] for _, error in ends]
    assert len({out for out, _ in ends}) == 1
    assert sum("pack weights" in error for _, error in ends) == 1, "one of them packed, the other found it packed"
    assert len(made(home, "engine")) == 1


def test_who_waits_says_so_and_the_dead_hold_nothing(tmp_path: Path) -> None:
    place = tmp_path / "kind" / "thing"
    code = (f"import time\nfrom pathlib import Path\nfrom toolkit.turns import alone\nwith alone(Path({str(place)!r}), "
            "print):\n    print('held', flush=True)\n    time.sleep(60)")
    holder = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    said: list[Progress] = []

    def report(event: Progress) -> None:
        said.append(event)
        holder.kill()  # an interrupted build must not block the next one

    start = time.monotonic()
    with alone(place, report):
        assert time.monotonic() - start < 20
    assert [(event.stage, event.message) for event in said] == [("wait for another process", "it makes thing")]
    holder.communicate()


def test_made_is_checked_again_after_the_wait(home: Home) -> None:
    with RunStore(home.store) as store:
        shop = Workshop(home, store)
        place = shop.place("engine", "x", a=1)
        with pytest.raises(AssertionError):
            shop.made(place, "engine", lambda: None)


def test_missing_calibration_data_is_said_with_what_to_run(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(home.data / "calibration")
    code = cli.run_command(["generate", "tiny", "-p", "x", "--recipe", "int8", "--offline", "--json", "--home",
                            str(home.path)])
    said = json.loads(capsys.readouterr().out)["error"]
    assert code == 4
    assert said["message"].startswith("calibrating tiny by int8 (KV cache bf16) needs text, and ")
    assert "toolkit data prepare" in said["hint"]


@pytest.mark.parametrize(("arguments", "rows", "origin"), [
    (["--rows", "20"], 20, "--rows"), (["--rows", "3"], 3, "--rows"), ([], 8, "int4_awq.yaml")], ids=str)
def test_as_many_rows_as_are_asked_for_are_used(home: Home, tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                                arguments: list[str], rows: int, origin: str) -> None:
    def call(verb: str, *more: str) -> dict:
        assert cli.run_command([verb, "tiny", "--recipe", "int4_awq", "--length", "16", *arguments, *more, "--explain",
                                "--json", "--home", str(home.path)]) == 0
        return json.loads(capsys.readouterr().out)

    made = call("quantize", "--out", str(tmp_path / "made"))
    record = Artifact.open(tmp_path / "made", "quantized-checkpoint").record
    assert (record["calibration_rows"], record["recipe_content"]["rows"]) == (rows, rows)
    planned = call("plan", "--no-rehearse", "--layerwise", "on")
    assert planned["recipe"]["rows"] == rows
    assert planned["work_bytes"] == planned["size_bytes"] + 2 * 4 * 64 * rows * 16 * 2, "what is on disk meanwhile"
    assert made["origins"]["rows"] == planned["origins"]["rows"] == origin


def test_rows_are_as_many_as_the_recipe_has_and_as_long_as_the_model_reads(
        home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, packed = tmp_path / "mine.yaml", []
    own.write_text("extends: fp8\nname: mine\nrows: 20\n")

    def material(*given: object) -> None:
        packed.append((given[4].rows, given[4].length))  # type: ignore[attr-defined]
        raise KeyboardInterrupt

    monkeypatch.setattr("toolkit.stages.material", material)
    config = home.models / "tiny" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 96}))
    for recipe in (str(own), "fp8"):
        with pytest.raises(KeyboardInterrupt):
            LLM("tiny", home=home.path, offline=True, recipe=recipe, report=lambda event: None, **LIMITS)
    assert packed == [(20, 96), (16, 96)]


@pytest.mark.parametrize("verb", ["plan", "quantize"])
def test_a_recipe_is_explained(home: Home, tmp_path: Path, capsys: pytest.CaptureFixture[str], verb: str) -> None:
    own = tmp_path / "mine.yaml"
    own.write_text("extends: int8\nname: mine\nrows: 4\nalphas: [0, 0.5]\n")
    arguments = (["--out", str(tmp_path / "made"), "--rows", "4", "--length", "64"] if verb == "quantize" else
                 ["--no-rehearse"])
    assert cli.run_command([verb, "tiny", "--recipe", str(own), *arguments, "--explain", "--json", "--home",
                            str(home.path)]) == 0
    origins = json.loads(capsys.readouterr().out)["origins"]
    assert (origins["rows"], origins["method"], origins["keep"]) == ("mine.yaml", "int8.yaml", "default")


@pytest.mark.parametrize(("arguments", "words"), [
    ({"ref": 3}, "ref is 3, not a text or a path"), ({"ref": ""}, "ref is an empty text"),
    ({"recipe": 3}, "recipe is 3, not"),
    ({"kv_cache": "zz"}, "LLM: kv_cache must be 'bf16', 'fp8' or 'int8', not 'zz'"),
    ({"max_seq_len": 64.0}, "LLM: max_seq_len must be a whole number, not 64.0"),
    ({"max_seq_length": 64}, "LLM: max_seq_length is not a known key"), ({"offline": "yes"}, "offline is 'yes', not"),
    ({"max_seq_len": 1}, "LLM: max_seq_len must be at least 2, not 1"), ({"report": 3}, "report is 3, which cannot"),
    ({"home": 3}, "home is 3, not")])
def test_what_the_constructor_cannot_mean_is_told(tmp_path: Path, arguments: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError) as error:
        LLM(**({"ref": "tiny", "home": tmp_path} | arguments))
    assert error.value.message.startswith(words)
    assert error.value.hint

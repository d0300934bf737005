"""The whole pipeline on a tiny real model: one table, resumable, the same digests, and each verb on its own."""

import json
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from toolkit import cli, pipeline
from toolkit.home import Home
from toolkit.job import EngineJob, load_job
from toolkit.stages import Workshop
from toolkit.store import RunStore

ROOT = Path(__file__).parent.parent.parent
pytestmark = pytest.mark.timeout(900)


def command(*arguments, home):
    return [sys.executable, "-m", "toolkit", *map(str, arguments), "--home", str(home.path)]


@pytest.fixture(scope="session")
def finished(tiny_home, tiny_job):
    """The job run to its end, as one command: (home, its JSON)."""
    done = subprocess.run(command("run", tiny_job, "--json", home=tiny_home), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return tiny_home, json.loads(done.stdout)


@pytest.fixture
def call(capsys, finished):
    def run(*arguments):
        code = cli.run_command([*map(str, arguments), "--home", str(finished[0].path)])
        shown = capsys.readouterr()
        return code, shown.out, shown.err
    return run


def test_every_engine_has_measured_figures(finished):
    _, document = finished
    assert [(row["recipe"], row["kv_cache"], row["emulated"]) for row in document["rows"]] == [
        ("bf16", "bf16", False), ("fp8", "bf16", True), ("int8", "fp8", True)]
    for row in document["rows"]:
        for name in ("delta_nll", "accuracy", "kl_mean", "same_top1", "flips", "peak_memory_bytes", "size_bytes",
                     "verdict", "verdict_reason"):
            assert row[name] is not None, name
        headline, _ = row["cells"]
        assert (headline["batch_size"], headline["isl"], headline["osl"]) == (1, 8, 4)
        # on a busy machine one token of so small a model can take longer than four: the cell is marked, not used
        for name in ("ttft_ms", "tpot_ms", "out_tok_s"):
            assert (row[name] is None) == (headline["invalid"] is not None), name
    assert document["rows"][0]["verdict"] == "BASELINE"
    assert abs(document["rows"][0]["delta_nll"]["value"]) < 1e-3, "our engine of the unquantized model adds nothing"


def test_the_engine_adds_no_loss_of_its_own(finished):
    home, document = finished
    with RunStore(home.store) as store:
        rows = store.rows(document["run"])
    for stored in rows:
        assert abs(stored.row.delta_nll.value - stored.model_delta.value) < 0.01


def test_the_report_lies_where_it_says(finished):
    _, document = finished
    assert Path(document["report"]).read_text(encoding="utf-8").startswith("<!doctype html>")


def test_again_does_nothing_and_says_the_same(finished, tiny_job, call):
    home, document = finished
    stamps = {path: path.stat().st_mtime_ns for path in home.artifacts("engine").rglob("manifest.json")}
    code, out, err = call("run", tiny_job, "--json")
    assert code == 0, err
    assert json.loads(out)["rows"] == document["rows"]
    assert stamps == {path: path.stat().st_mtime_ns for path in home.artifacts("engine").rglob("manifest.json")}
    assert call("runs", "ls", "-q")[1].split() == [document["run"]]


def test_killed_anywhere_it_goes_on_to_the_same_digests(finished, tiny_job, tmp_path):
    """Killed three times at different stages, then left to end; in another home, from the same model and data."""
    import shutil

    first, document = finished
    home = Home(tmp_path / "home")
    shutil.copytree(first.models, home.models)
    shutil.copytree(first.data, home.data)
    for kind in ("baseline", "quantized-checkpoint", "eval-report"):
        process = subprocess.Popen(command("run", tiny_job, "-q", home=home), cwd=ROOT, stderr=subprocess.DEVNULL,
                                   stdout=subprocess.DEVNULL, start_new_session=True)
        seen = len(list(home.artifacts(kind).glob("[!.]*")))
        while process.poll() is None and len(list(home.artifacts(kind).glob("[!.]*"))) == seen:
            time.sleep(0.02)
        assert process.poll() is None, "it ended before it could be killed"
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    with RunStore(home.store) as store:
        assert store.running() == []
    done = subprocess.run(command("run", tiny_job, "--json", home=home), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    after = json.loads(done.stdout)
    assert after["run"] == document["run"]
    for name in ("engine_digest", "checkpoint_digest", "delta_nll", "kl_mean", "accuracy", "flips"):
        assert [row[name] for row in after["rows"]] == [row[name] for row in document["rows"]], name


def test_a_damaged_artifact_is_made_again(finished, tiny_job, call):
    home, _ = finished
    [place] = home.artifacts("engine").glob("fp8-*")
    before = json.loads((place / "manifest.json").read_text())["digest"]
    next(place.rglob("*.safetensors")).write_bytes(b"")
    code, _, err = call("run", tiny_job, "--json")
    assert code == 0, err
    assert json.loads((place / "manifest.json").read_text())["digest"] == before
    assert "damaged" in err


def test_run_gate_exits_by_the_worst_verdict(finished, tiny_job, call, tmp_path):
    strict = tmp_path / "job.yaml"
    strict.write_text(tiny_job.read_text())
    (tmp_path / "policy.yaml").write_text("name: strict\ndelta_nll: {margin: 0.00001, min_documents: 20}\n")
    code, out, _ = call("run", strict, "--gate", "--json")
    words = {row["verdict"] for row in json.loads(out)["rows"]}
    assert code == (1 if "FAIL" in words else 3)
    assert call("run", strict, "--json")[0] == 0, "without --gate a finished run is 0 whatever the verdicts"
    call("run", tiny_job, "-q")


def test_gate_publish_verify_and_generate(finished, tiny_job, call, tmp_path):
    """The README's tour behind a finished run."""
    _, document = finished
    engine = document["rows"][2]["engine_digest"]
    policy = tiny_job.parent / "policy.yaml"
    judged = ("--texts", 22, "--items", 6)
    papers = ("--junit-xml", tmp_path / "gate.xml", "--markdown", tmp_path / "gate.md")
    code, out, err = call("gate", engine[:12], "--baseline", "tiny", "--policy", policy, *judged, *papers, "--json")
    assert (code, json.loads(out)["word"]) == (0, "PASS"), err
    suites = ElementTree.parse(tmp_path / "gate.xml").getroot()
    assert int(suites.get("tests")) >= 1
    assert suites.get("failures") == suites.get("errors") == "0"
    assert "Gate PASS" in (tmp_path / "gate.md").read_text()
    target = tmp_path / "releases"
    assert call("publish", document["rows"][0]["engine_digest"], "--to", target, "--alias", "base")[0] == 2
    code, _, err = call("publish", engine, "--to", target, "--alias", "production")
    assert (code, "is not approved" in err) == (2, True)
    code, out, err = call("releases", "approve", engine, "--reason", "it passed", "--json")
    assert (code, json.loads(out)["word"]) == (0, "PASS"), err
    assert json.loads(call("releases", "approvals", "--json")[1])["approvals"] == [json.loads(out)]
    assert json.loads(call("releases", "approvals", "--at", "2020-01-01", "--json")[1])["approvals"] == []
    code, out, err = call("publish", engine, "--to", target, "--alias", "production", "--json")
    assert code == 0, err
    assert json.loads(out)["engine"] == engine
    pulled = tmp_path / "pulled"
    assert call("releases", "pull", "production", "--to", target, "--out", pulled)[0] == 0
    card = (pulled / "README.md").read_text()
    assert engine in card
    assert "Apache-2.0" in card
    assert "calibration-set" in (pulled / "provenance.json").read_text()
    assert {path.name for path in (pulled / ".eval_results").iterdir()} == {"words.yaml", "delta_nll.yaml"}
    assert call("releases", "verify", "--to", target, "-q")[0] == 0
    code, out, _ = call("generate", "alias:production", "-p", "river engine", "--max-tokens", 4, "--json")
    assert code == 0
    assert len(json.loads(out)["token_ids"]) <= 4
    weights = max((target / "blobs" / "sha256").iterdir(), key=lambda path: path.stat().st_size)
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(bytes(content))
    code, out, _ = call("releases", "verify", "--to", target, "--json")
    assert code == 4
    assert json.loads(out)["error"]["code"] == "release_damaged"


def test_an_override_is_a_marked_release_and_is_rolled_back(finished, call, tmp_path):
    _, document = finished
    base, target = document["rows"][0]["engine_digest"], tmp_path / "releases"
    first = call("publish", document["rows"][1]["engine_digest"], "--to", target, "--alias", "production", "--reason",
                 "it passed", "-q")
    assert first[0] == 0, first[2]
    assert call("publish", base, "--to", target, "--alias", "production", "--override")[0] == 2, "it needs a reason"
    code, out, err = call("publish", base, "--to", target, "--alias", "production", "--override", "--reason",
                          "a baseline for the demo", "--part", "checkpoint", "--json")
    assert code == 0, err
    marked = json.loads(out)
    assert marked["verdict"] == "NOT JUDGED (override)"
    code, out, _ = call("releases", "ls", "--to", target, "--json")
    assert {release["verdict"] for release in json.loads(out)["releases"]} == {"PASS", "NOT JUDGED (override)"}
    code, out, _ = call("generate", "alias:production", "-p", "x", "--json")
    assert code == 4, "a release of the checkpoint alone has no engine to serve"
    assert call("releases", "rollback", "production", "--to", target)[0] == 2, "a rollback needs a reason"
    code, out, err = call("releases", "rollback", "production", "--to", target, "--reason", "not judged", "-q")
    assert (code, out) == (0, first[1]), err
    code, out, _ = call("releases", "log", "--to", target, "--json")
    assert [entry["action"] for entry in json.loads(out)["entries"]] == ["publish", "alias", "publish", "alias",
                                                                         "rollback"]
    code, out, _ = call("releases", "log", "--to", target, "--at", "2999-01-01", "--json")
    assert json.loads(out)["aliases"]["production"]["digest"] == first[1].strip()
    assert call("releases", "verify", "--to", target)[0] == 0
    code, out, _ = call("jobs", "ls", "--json")
    assert {work["state"] for work in json.loads(out)["jobs"]} <= {"finished", "failed", "cancelled"}


def test_requests_and_answers_travel_as_files(finished, call, tmp_path):
    """Written here, answered there, judged here: the same figures as asking directly."""
    _, document = finished
    engine = document["rows"][0]["engine_digest"]
    asked = ("--texts", 3, "--items", 2, "--baseline", "tiny")
    assert call("eval", engine, *asked, "--requests", tmp_path / "q.jsonl", "-q")[0] == 0
    assert call("eval", engine, "--answer", tmp_path / "q.jsonl", "--responses", tmp_path / "a.jsonl", "-q")[0] == 0
    code, out, err = call("eval", engine, *asked, "--responses", tmp_path / "a.jsonl", "--json")
    assert code == 0, err
    direct = json.loads(call("eval", engine, *asked, "--json")[1])
    recorded = json.loads(out)
    assert recorded["delta_nll"]["value"] == pytest.approx(direct["delta_nll"]["value"], abs=1e-6)
    assert [item["choice"] for item in recorded["items"]] == [item["choice"] for item in direct["items"]]
    assert recorded["samples"] == direct["samples"]
    assert recorded["target"] == direct["target"]
    code, out, _ = call("eval", document["rows"][1]["engine_digest"], *asked, "--responses", tmp_path / "a.jsonl",
                        "--json")
    assert json.loads(out)["target"] == direct["target"], "the report is about who answered, not about who asked"
    (tmp_path / "a.jsonl").write_text((tmp_path / "a.jsonl").read_text().replace(
        direct["target"]["tokenizer_digest"], "f" * 64))
    code, _, err = call("eval", engine, *asked, "--responses", tmp_path / "a.jsonl")
    assert (code, "answered with tokenizer ffffffffffff" in err) == (2, True)


def test_written_answers_travel_too(finished, call, tmp_path):
    """Exact match: the questions are written here, continued there, and read here."""
    engine = finished[1]["rows"][0]["engine_digest"]
    path = tmp_path / "sums.jsonl"
    path.write_text("".join(json.dumps({"question": f"What is {n} and {n}?", "answer": str(2 * n)}) + "\n"
                            for n in range(5)))
    asked = ("--data", path, "--kind", "exact")
    code, out, err = call("eval", engine, *asked, "--requests", tmp_path / "q.jsonl", "--json")
    assert (code, json.loads(out)["requests"]) == (0, 5), err
    lines = [json.loads(line) for line in (tmp_path / "q.jsonl").read_text().splitlines()]
    assert {line["params"]["max_tokens"] for line in lines} == {64}
    assert call("eval", engine, "--answer", tmp_path / "q.jsonl", "--responses", tmp_path / "a.jsonl", "-q")[0] == 0
    code, out, err = call("eval", engine, *asked, "--responses", tmp_path / "a.jsonl", "--json")
    assert code == 0, err
    direct = json.loads(call("eval", engine, *asked, "--json")[1])
    assert json.loads(out)["items"] == direct["items"]
    assert any(item["answer"] for item in direct["items"])
    cut = (tmp_path / "a.jsonl").read_text().splitlines()[0] + "\n"
    (tmp_path / "none.jsonl").write_text(cut)
    code, _, err = call("eval", engine, *asked, "--responses", tmp_path / "none.jsonl")
    assert (code, "holds no responses" in err) == (2, True)


def test_own_questions(finished, call, tmp_path):
    _, document = finished
    path = tmp_path / "mine.jsonl"
    path.write_text('{"question": "river", "choices": ["lamp", "town"], "answer": 1}\n')
    code, out, err = call("eval", document["rows"][0]["engine_digest"], "--data", path, "--kind", "choice", "--json")
    assert code == 0, err
    assert json.loads(out)["accuracy"]["n"] == 1
    assert call("eval", "tiny", "--data", path)[0] == 2, "--kind is needed"


def test_each_engine_is_calibrated_on_rows_of_its_recipes_seed(tiny_home, tiny_job, tmp_path):
    (tmp_path / "mine.yaml").write_text("extends: fp8\nseed: 7\n")
    job = load_job(tiny_job)
    engines = [*job.engines, EngineJob(recipe=str(tmp_path / "mine.yaml")), EngineJob(recipe="fp8"),
               EngineJob(recipe="fp8_dynamic")]
    job = job.model_copy(update={"engines": list(dict.fromkeys(engines)), "seed": 2})
    with RunStore(tiny_home.store) as store:
        shop = Workshop(tiny_home, store, offline=True)
        found = pipeline._materials(shop, pipeline.prepare(shop, job, tiny_job.parent))
    seeds = {Path(engine.recipe).name: None if stuff.calibration is None else stuff.calibration.artifact.record["seed"]
             for engine, stuff in found.items() if engine.kv_cache == "bf16"}
    assert (seeds["mine.yaml"], seeds["fp8"], seeds["bf16"], seeds["fp8_dynamic"]) == (9, 2, None, None)
    assert {stuff.seed for stuff in found.values() if stuff.calibration is not None} == {2}


def test_plan_inspect_verify(finished, call):
    _, document = finished
    row = document["rows"][1]
    code, out, _ = call("plan", "tiny", "--recipe", "int8", "--no-rehearse", "--tp", 2, "--json")
    assert code == 0
    assert json.loads(out)["modules"]
    for ref in ("tiny", row["checkpoint_digest"], row["engine_digest"]):
        assert call("inspect", ref)[0] == 0
        assert call("verify", ref)[0] == 0
    assert "stack_linears" in call("inspect", row["engine_digest"], "--plan")[1]
    assert call("inspect", row["checkpoint_digest"], "--plan")[0] == 2


def test_quantize_build_sweep_alone(finished, call, tmp_path):
    assert call("quantize", "tiny", "--recipe", "bf16", "--out", tmp_path / "ckpt", "-q")[0] == 0
    code, out, err = call("build", tmp_path / "ckpt", "--out", tmp_path / "engine", "--max-seq-len", 64, "--json",
                          "--tune", "none")
    assert code == 0, err
    assert json.loads(out)["limits"]["max_seq_len"] == 64
    code, out, err = call("sweep", tmp_path / "engine", "--cells", "1x8x4", "--repeats", 1, "--out", tmp_path / "s",
                          "--json")
    assert code == 0, err
    for wrong, words in (("999999999x1x1", "the engine takes 16 sequences in one step"),
                         ("1x999999999x1", "a sequence of 1,000,000,000 tokens, the engine takes 64")):
        for verb in (("sweep", tmp_path / "engine", "--cells"),
                     ("gate", "speed", tmp_path / "engine", "--baseline", tmp_path / "engine", "--cell")):
            refused, _, err = call(*verb, wrong)
            assert (refused, words in err) == (2, True), err
    [cell] = json.loads(out)["cells"]
    assert cell["invalid"] or cell["tpot_ms"] > 0
    code, _, err = call("generate", tmp_path / "engine", "-p", "river " * 100)
    assert code == 2
    assert "64" in err
    assert call("generate", tmp_path / "engine", "-p", "")[0] == 2, "an empty prompt"
    assert call("build", tmp_path / "ckpt", "--out", tmp_path / "engine")[0] == 4, "the folder is taken"
    assert call("build", tmp_path / "ckpt", "--out", tmp_path / "other", "--recipe", "fp8")[0] == 2


def test_python_face(finished):
    home, document = finished
    from toolkit import LLM, SamplingParams
    from toolkit.errors import UsageError

    engine = document["rows"][0]["engine_digest"]
    with LLM(engine, home=home.path) as llm:
        [output] = llm.generate("river engine", SamplingParams(max_tokens=3, ignore_eos=True))
        assert len(output.outputs[0].token_ids) == 3
        [score] = llm.loglikelihood([output.prompt_token_ids])
        assert len(score.logprobs) == len(output.prompt_token_ids) - 1
    with pytest.raises(UsageError, match="fixed"):
        LLM(engine, home=home.path, recipe="fp8")

"""``eval`` and ``sweep`` through the command line: own data, other tools' files, endpoints, and every bad input."""

import json
import socket

import pytest

from tests.evals.sse_server import Server
from tests.toolkit.conftest import prose
from toolkit import cli
from toolkit.home import Home
from toolkit.layers import sensitivities

TINY = ["--max-seq-len", "256", "--tune", "none"]


@pytest.fixture(scope="module")
def built(tiny_home, tmp_path_factory):
    """A calibrated int8 engine of the tiny model."""
    home = Home(tiny_home.path)
    place = tmp_path_factory.mktemp("engine")
    assert cli.run_command(["quantize", "tiny", "--recipe", "int8", "--out", str(place / "ckpt"), "--rows", "4",
                            "--length", "64", "--home", str(home.path)]) == 0
    assert cli.run_command(["build", str(place / "ckpt"), "--out", str(place / "engine"), *TINY, "--home",
                            str(home.path)]) == 0
    return home, str(place / "engine")


@pytest.fixture
def call(built, capsys):
    """(exit code, the JSON document) of a command line on that home."""
    def run(*arguments):
        capsys.readouterr()
        code = cli.run_command([*map(str, arguments), "--json", "--home", str(built[0].path)])
        return code, json.loads(capsys.readouterr().out)
    return run


@pytest.fixture(autouse=True)
def calm(monkeypatch):
    """A busy machine holds the client up, which marks a cell (as it should); that is tested in tests/evals."""
    monkeypatch.setattr("evals.endpoint.lag_p99", lambda lags, wall: 0.0)


def lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


CHOICE = [{"question": f"Which word is number {n}?", "choices": ["lamp", "town"], "answer": n % 2} for n in range(6)]
EXACT = [{"question": f"What is {n} and {n}?", "answer": str(2 * n)} for n in range(6)]
TEXTS = [{"text": prose(70000 + n)} for n in range(6)]


@pytest.mark.parametrize(("kind", "rows"), [("choice", CHOICE), ("exact", EXACT), ("text", TEXTS)])
def test_own_examples(call, built, tmp_path, kind, rows):
    code, found = call("eval", built[1], "--data", lines(tmp_path / "my.jsonl", rows), "--kind", kind)
    assert code == 0, found
    assert (len(found["items"]), len(found["texts"])) == ((0, 6) if kind == "text" else (6, 0))
    if kind == "exact":
        assert found["unparsed"] == sum(item["answer"] is None for item in found["items"]) / 6
    else:
        assert found["unparsed"] is None


@pytest.mark.parametrize(("kind", "rows", "code", "words"), [
    ("choice", [], "usage", "holds no examples"), ("choice", EXACT, "usage", "not of kind choice"),
    ("exact", CHOICE, "usage", "not of kind exact"), ("choice", 2 * CHOICE, "evaluation_data", "more than once"),
    ("text", [{"words": "x"}], "usage", "not of kind text"),
    ("choice", [{"question": "q", "choices": ["a", "b"], "answer": 5}], "evaluation_data", "answer 5")])
def test_bad_own_examples_are_typed_errors(call, built, tmp_path, kind, rows, code, words):
    exit_code, found = call("eval", built[1], "--data", lines(tmp_path / "my.jsonl", rows), "--kind", kind)
    assert (exit_code, found["error"]["code"]) == (2, code)
    assert words in found["error"]["message"]


def test_examples_that_were_calibrated_on_are_refused(call, built, tmp_path):
    stolen = (built[0].data / "calibration" / "texts.jsonl").read_text().splitlines()
    rows = [{"text": json.loads(line)["text"]} for line in stolen]
    exit_code, found = call("eval", built[1], "--data", lines(tmp_path / "my.jsonl", rows), "--kind", "text")
    assert (exit_code, found["error"]["code"]) == (2, "calibration_text")
    assert "calibration and evaluation share" in found["error"]["message"]


def harness_folder(place, *, version="0.4.13", wrong=(), prompt="p"):
    """What lm-eval writes for 260 questions of one task; ``wrong`` are answered wrong."""
    place.mkdir()
    rows = [{"doc_id": n, "doc": {}, "target": 0, "filter": "none",
             "filtered_resps": [[-1.0 - 2.0 * (n in wrong), True], [-2.0, False]],
             "doc_hash": f"d{n}", "prompt_hash": f"{prompt}{n}", "acc": 0.0 if n in wrong else 1.0} for n in range(260)]
    (place / "results_2026-01-01.json").write_text(json.dumps(
        {"results": {"quiz": {"acc,none": 0.9}}, "lm_eval_version": version, "model_name": f"model{len(wrong)}"}))
    lines(place / "samples_quiz_2026-01-01.jsonl", rows)
    return place


def test_two_runs_of_the_harness_are_gated_question_by_question(call, tmp_path):
    policy = tmp_path / "policy.yaml"
    policy.write_text("name: p\naccuracy: {margin: 5}\n")
    digests = {}
    for name, options in (("base", {}), ("same", {"wrong": {3}}), ("worse", {"wrong": set(range(0, 260, 4))}),
                          ("other", {"prompt": "q"}), ("newer", {"version": "0.4.99"})):
        code, found = call("eval", "import", harness_folder(tmp_path / name, **options), "--from", "lm-eval")
        assert (code, found["kind"]) == (0, "eval-report"), found
        digests[name] = found["digest"]
    for name, expected in (("same", 0), ("worse", 1)):
        code, found = call("gate", digests[name], "--baseline", digests["base"], "--policy", policy)
        assert (code, found["word"]) == (expected, "FAIL" if expected else "PASS")
        flips = found["worst_flips"]
        assert len(flips) == (10 if expected else 1)
        assert {(flip["baseline"]["margin"], flip["candidate"]["margin"]) for flip in flips} == {(1.0, -1.0)}
    for name, words in (("other", "prompts of 260 questions"), ("newer", "harness lm_eval: 0.4.13 against 0.4.99")):
        code, found = call("gate", digests[name], "--baseline", digests["base"], "--policy", policy)
        assert (code, found["error"]["code"]) == (2, "not_comparable")
        assert words in found["error"]["message"]


def test_a_folder_of_another_harness_is_refused(call, tmp_path):
    code, found = call("eval", "import", harness_folder(tmp_path / "old", version="0.3.0"), "--from", "lm-eval")
    assert (code, found["error"]["code"]) == (2, "foreign_format")
    assert "written by lm-eval 0.3.0" in found["error"]["message"]
    code, found = call("eval", "import", tmp_path / "old" / "results_2026-01-01.json", "--from", "vllm")
    assert (code, found["error"]["code"]) == (2, "foreign_format")


def test_a_sweep_of_an_endpoint_and_its_files(call, tmp_path, unhurried):
    with Server() as server:
        options = ("sweep", "--url", server.url, "--model", "m", "--tokenizer", "tiny", "--lengths", "8x4",
                   "--concurrency", "1,2", "--requests", "6", "--repeats", "2", "--warmup", "1", "--slo", "ttft=5000")
        code, plan = call(*options, "--dry-run")
        assert (code, len(plan["cells"]), len(server.seen)) == (0, 2, 0)
        code, found = call(*options)
        assert code == 0, found
        sent = len(server.seen)
        assert call(*options)[1] == found
        assert len(server.seen) == sent, "what was measured is not measured again"
        place = tmp_path / "kept"
        assert call(*options, "--out", place)[0] == 0
        code, refused = call(*options, "--seed", 5, "--out", place)
        assert (code, "exists already" in refused["error"]["message"]) == (2, True), "it is not taken for this sweep"
    [sweep] = found["sweeps"]
    assert [(cell["mode"], cell["batch_size"], cell["n"]) for cell in sweep["cells"]] == [("closed", 1, 2),
                                                                                         ("closed", 2, 2)]
    assert all(cell["goodput_req_s"] == cell["req_s"] for cell in sweep["cells"])
    code, files = call("eval", "export", sweep["digest"], "--to", "vllm", "--out", tmp_path / "vllm")
    assert (code, len(files["files"])) == (0, 4)
    code, brought = call("eval", "import", files["files"][0], "--from", "vllm")
    assert (code, brought["kind"]) == (0, "latency-sweep")
    assert brought["cells"][0]["ttft_ms"] == pytest.approx(sweep["loads"][0]["ttft_ms"]["p50"])
    assert (brought["cells"][0]["isl"], brought["cells"][0]["osl"]) == (8, 4)
    code, found = call("eval", "export", sweep["digest"], "--to", "lm-eval", "--out", tmp_path / "no")
    assert (code, "no layout for" in found["error"]["message"]) == (2, True)


@pytest.mark.parametrize(("options", "message"), [
    ("--concurrency 1000000000000", "loads.0: concurrency 1,000,000,000,000 is more than the 10,000 connections"),
    ("--rate nan", "loads.0: rate nan is no rate that can be measured"),
    ("--rate 1e309", "loads.0: rate inf is no rate that can be measured: 0.001 to 1,000,000 requests a second are"),
    ("--rate 1e-300", "loads.0: rate 1e-300 is no rate"),
    ("--rate 1 --burstiness 1e309", "loads.0.burstiness: must be at most 1000, not inf"),
    ("--rate 1 --requests 1000000000000", "loads.0.requests: must be at most 10,000,000, not 1000000000000"),
    (f"--rate 1 --slo ttft={'9' * 400}", "objectives.ttft_ms: must be at most 8.64e+07, not inf"),
    ("--find-rate nan:1 --slo ttft=5", "--find-rate 'nan:1' gives no search"),
    ("--find-rate 5:1 --slo ttft=5", "--find-rate '5:1' gives no search"),
    ("--find-rate 1:1e309 --slo ttft=5", "--find-rate '1:1e309' gives no search"),
    ("--rate 1 --repeats 1000000000000", "'--repeats': must be at most 10,000, not '1000000000000'")], ids=str)
def test_a_load_that_nobody_can_make_is_refused_even_dry(call, options, message):
    code, found = call("sweep", "--url", "http://127.0.0.1:9", "--model", "m", "--tokenizer", "tiny", "--lengths",
                       "8x4", "--dry-run", *options.split())
    assert code == 2
    assert message in found["error"]["message"]


def test_a_search_that_measured_nothing_says_so(call):
    """A dead port is no verdict on the rate that a server keeps."""
    with socket.socket() as gone:
        gone.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{gone.getsockname()[1]}"
        code, found = call("sweep", "--url", url, "--model", "m", "--tokenizer", "tiny", "--lengths", "8x4",
                           "--requests", "5", "--slo", "ttft=5000", "--find-rate", "1000:2000")
    assert (code, found["rate"]) == (3, None)
    assert all("refused" in tried["invalid"] for tried in found["tried"])


def test_a_dead_target_beside_a_living_one_is_said(call, tmp_path, capsys, built, unhurried):
    """Side by side with a server that was down nothing is compared: exit 3, and the living one's figures are kept."""
    with Server() as one, socket.socket() as gone:
        gone.bind(("127.0.0.1", 0))
        plan = tmp_path / "plan.yaml"
        plan.write_text(json.dumps({
            "name": "two", "tokenizer": "tiny", "loads": [{"isl": 9, "osl": 4, "concurrency": [2], "requests": 6}],
            "targets": [{"name": "ours", "url": one.url, "model": "m"},
                        {"name": "theirs", "url": f"http://127.0.0.1:{gone.getsockname()[1]}", "model": "m"}]}))
        code, found = call("sweep", "--plan", plan)
        assert (code, found["unmeasured"]) == (3, ["theirs"])
        assert [sweep["cells"][0]["answered"] for sweep in found["sweeps"]] == [4, 0]
        asked = len(one.seen)
        assert cli.run_command(["sweep", "--plan", str(plan), "--home", str(built[0].path)]) == 3
        assert len(one.seen) == asked, "what answered is not asked again"
    shown = " ".join(capsys.readouterr().out.split())
    assert "nothing of theirs may be used" in shown


def test_several_endpoints_side_by_side_from_one_file(call, tmp_path, capsys, built, unhurried):
    with Server() as one, Server("nodone", framing="close") as other:
        plan = tmp_path / "plan.yaml"
        plan.write_text(json.dumps({
            "name": "two", "tokenizer": "tiny", "loads": [{"isl": 8, "osl": 4, "concurrency": [2], "requests": 6}],
            "targets": [{"name": "ours", "url": one.url, "model": "m"},
                        {"name": "theirs", "url": other.url, "model": "m", "ignore_eos": False}]}))
        code, found = call("sweep", "--plan", plan)
        assert code == 0, found
        assert [sweep["target"]["name"] for sweep in found["sweeps"]] == ["ours", "theirs"]
        assert sorted(body["prompt"] for _, body in one.seen) == sorted(body["prompt"] for _, body in other.seen)
        assert cli.run_command(["sweep", "--plan", str(plan), "--home", str(built[0].path)]) == 0
    table = capsys.readouterr().out
    assert table.index("ours") < table.index("theirs")
    assert "isl=8 osl=4 concurrency=2" in table.replace("\n", " ") or "isl=8" in table


@pytest.mark.parametrize(("arguments", "words"), [
    (("sweep",), "what is to be measured"), (("sweep", "--url", "http://h"), "--url needs --model"),
    (("sweep", "tiny", "--rate", "1"), "--rate does not go with REF"),
    (("sweep", "--url", "127.0.0.1:8000", "--model", "m", "--lengths", "8x8", "--rate", "1"), "not the address of"),
    (("sweep", "--url", "http://h:x", "--model", "m", "--lengths", "8x8", "--rate", "1"), "not the address of"),
    (("sweep", "--url", "http://h", "--model", "m", "--cells", "1x1x1"), "--cells does not go with --url"),
    (("sweep", "--url", "http://h", "--model", "m", "--lengths", "8", "--rate", "1"), "not input x output"),
    (("sweep", "--url", "http://h", "--model", "m", "--lengths", "8x8", "--rate", "fast"), "no list of numbers"),
    (("sweep", "--url", "http://h", "--model", "m", "--lengths", "8x8", "--rate", "1", "--slo", "ttft"),
     "no service level"),
    (("sweep", "--url", "http://h", "--model", "m", "--lengths", "8x8", "--rate", "1", "--api-key-env", "NO_SUCH_KEY"),
     "no environment variable NO_SUCH_KEY"),
    (("sweep", "--url", "http://h", "--model", "m", "--preset", "chta", "--rate", "1"), "unknown preset 'chta'"),
    (("sweep", "--url", "http://h", "--model", "m", "--lengths", "8x8"), "concurrency")])
def test_mistakes_of_a_sweep(call, arguments, words):
    code, found = call(*arguments, *(() if arguments == ("sweep",) else ("--dry-run",)))
    assert code == 2
    assert words in found["error"]["message"]


def test_sensitivity_of_a_model(call, built):
    code, found = call("sensitivity", "tiny", "--format", "int8", "--format", "int4_awq", "--rows", 1, "--length", 64)
    assert code == 0, found
    assert len(found["losses"]) == 2 * 2
    assert len(found["modules"]) == 2 * 7 * 2
    [shown], faults = sensitivities(built[0])
    assert (faults, shown.layers, sorted(shown.formats)) == ([], [0, 1], ["int4_awq", "int8"])
    assert call("sensitivity", "tiny", "--format", "int8", "--format", "int4_awq", "--rows", 1, "--length",
                64)[1] == found


YAML = """
task: mine
dataset_path: json
test_split: test
output_type: {kind}
dataset_kwargs: {{data_files: {{test: "{file}"}}, cache_dir: "{cache}"}}
doc_to_text: "{{{{question}}}}"
doc_to_target: "{target}"
{more}
metric_list: [{{metric: {metric}, aggregation: mean, higher_is_better: true}}]
"""


def yaml_task(tmp_path, kind, metric, target, more):
    folder = tmp_path / "tasks"
    folder.mkdir()
    file = lines(tmp_path / "rows.jsonl", [{**row, "reply": "x"} for row in CHOICE])
    (folder / "mine.yaml").write_text(YAML.format(kind=kind, file=file, cache=tmp_path / "cache", metric=metric,
                                                  target=target, more=more))
    return folder


def test_a_task_written_for_the_harness(call, built, tmp_path):
    folder = yaml_task(tmp_path, "multiple_choice", "acc", "answer", "doc_to_choice: choices")
    options = ("eval", "harness", built[1], "--task", "mine", "--include", folder)
    code, found = call(*options, "--items", 4)
    assert code == 0, found
    assert len(found["items"]) == 4
    assert found["items"][0]["n_choices"] == 2
    assert found["accuracy"]["value"] == sum(item["correct"] for item in found["items"]) / 4
    policy = tmp_path / "policy.yaml"
    policy.write_text("name: p\naccuracy: {margin: 5}\n")
    code, verdict = call("gate", found["digest"], "--baseline", found["digest"], "--policy", policy)
    assert (code, verdict["word"]) == (3, "INCONCLUSIVE")
    code, found = call("eval", "harness", built[1], "--task", "mein", "--include", folder)
    assert (code, "unknown lm-eval task 'mein'" in found["error"]["message"]) == (2, True)
    (folder / "bad.yaml").write_text("task: bad\ndoc_to_text: !function x.y\n")
    code, found = call(*options)
    assert (code, "runs Python of its own" in found["error"]["message"]) == (2, True)


def test_a_generating_task_of_the_harness(call, built, tmp_path):
    more = "generation_kwargs: {until: ['.'], max_gen_toks: 6, do_sample: false}\nprocess_results: null"
    folder = yaml_task(tmp_path, "generate_until", "exact_match", "{{reply}}", more.replace(
        "\nprocess_results: null", ""))
    code, found = call("eval", "harness", built[1], "--task", "mine", "--include", folder, "--metric", "exact_match")
    assert code == 0, found
    assert [item["correct"] for item in found["items"]] == [False] * 6
    assert all("." not in item["answer"] for item in found["items"])


@pytest.mark.parametrize("verb", [("gate", "update-reference"), ("gate", "noise"), ("gate", "speed"), ("sensitivity",),
                                  ("eval", "harness"), ("eval", "import"), ("eval", "export")], ids=" ".join)
def test_every_verb_has_help_with_the_common_options(verb, capsys):
    assert cli.run_command([*verb, "--help"]) == 0
    shown = capsys.readouterr().out
    assert all(option in shown for option in ("--home", "--json", "--quiet", "--offline"))


def test_the_latency_guides_commands_parse(tmp_path):
    """Each command of docs/latency.md, comments cut off, against the real command line."""
    import re
    import shlex
    from pathlib import Path

    import typer

    text = (Path(__file__).parents[2] / "docs" / "latency.md").read_text().replace("\\\n", " ")
    lines = [re.split(r"\s{3,}(?!-)", line.strip())[0] for line in text.splitlines()
             if line.startswith("    toolkit ")]
    assert len(lines) == 6
    group = typer.main.get_command(cli.app)
    for line in lines:
        words = shlex.split(line.replace("--url ...", "--url http://h --model m"))[1:]
        context = group.make_context("toolkit", words)
        _, command, rest = group.resolve_command(context, [*context._protected_args, *context.args])
        command.make_context(command.name, rest, parent=context)

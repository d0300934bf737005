"""Files of other tools: read into our columns, written back, and refused when they are something else."""

import json
from datetime import UTC, datetime

import pytest

from evals.errors import DataError, MeasureError
from evals.foreign import aiperf, github_benchmark, guidellm, lm_eval_files, vllm_bench
from evals.foreign.record import ForeignFormatError
from evals.gate import flip_counts
from evals.report import Cell, EvalReport, Item, LatencySweep, Target

TARGET = Target(name="base", digest="b" * 64, numerics="cpu fp32", tokenizer_digest="t" * 64, template_sha256="c" * 64,
                bos=False)
VLLM = {"date": "20260801-120000", "endpoint_type": "openai", "model_id": "m", "num_prompts": 52, "request_rate": "inf",
        "max_concurrency": 8, "duration": 10.0, "completed": 50, "failed": 2, "total_input_tokens": 6400,
        "total_output_tokens": 3200, "request_throughput": 5.0, "request_goodput": None, "output_throughput": 320.0,
        "total_token_throughput": 960.0, "mean_ttft_ms": 80.0, "median_ttft_ms": 75.0, "std_ttft_ms": 9.0,
        "p99_ttft_ms": 120.0, "mean_tpot_ms": 11.0, "median_tpot_ms": 10.5, "mean_itl_ms": 10.9, "median_itl_ms": 10.0}
AIPERF = {"schema_version": "1.5", "aiperf_version": "0.13.0", "was_cancelled": False,
          "request_count": {"unit": "requests", "avg": 20.0},
          "request_throughput": {"unit": "requests/sec", "avg": 1.5},
          "request_latency": {"unit": "ms", "avg": 2620.0, "p50": 2500.0, "p90": 3000.0, "p99": 3371.0, "count": 20},
          "time_to_first_token": {"unit": "ms", "avg": 50.0, "p50": 48.0, "p99": 90.0},
          "inter_token_latency": {"unit": "ms", "avg": 5.2, "p50": 5.0, "p99": 7.0},
          "inter_chunk_latency": {"unit": "ms", "avg": 5.6, "p50": 5.1, "p99": 12.0},
          "output_sequence_length": {"unit": "tokens", "avg": 500.0}, "goodput": {"unit": "requests/sec", "avg": 1.2},
          "input_config": {"endpoint": {"model_names": ["m"]}}}


def broken_down(mean, **percentiles):
    good = {"mean": mean, "median": mean, "percentiles": percentiles, "count": 10}
    return {"successful": good, "errored": {**good, "mean": 999.0}, "incomplete": None, "total": good}


GUIDELLM = {"metadata": {"version": 1, "guidellm_version": "0.8.1"}, "args": {}, "benchmarks": [{
    "config": {"strategy": {"type_": "concurrent", "streams": 4}}, "duration": 30.0, "metrics": {
        "request_totals": {"successful": 10, "errored": 1, "incomplete": 0, "total": 11},
        "requests_per_second": broken_down(0.5), "request_latency": broken_down(2.0, p90=2.5, p99=3.0),
        "prompt_token_count": broken_down(128.0), "output_token_count": broken_down(64.0),
        "time_to_first_token_ms": broken_down(60.0, p90=80.0, p99=95.0),
        "time_per_output_token_ms": broken_down(31.0), "inter_token_latency_ms": broken_down(30.0),
        "output_tokens_per_second": broken_down(32.0), "tokens_per_second": broken_down(96.0)}}]}


def saved(tmp_path, content):
    path = tmp_path / "file.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_vllm_bench(tmp_path):
    found = vllm_bench.read(saved(tmp_path, VLLM))
    assert (found.completed, found.failed, found.isl, found.osl) == (50, 2, 128.0, 64.0)
    assert (found.concurrency, found.request_rate, found.goodput_req_s) == (8.0, None, None)
    assert (found.ttft_ms.p50, found.ttft_ms.p99, found.ttft_ms.p90) == (75.0, 120.0, None)
    assert (found.tpot_ms.mean, found.itl_gap_ms.mean, found.e2e_ms.mean) == (11.0, 10.9, None)
    older = {key: value for key, value in VLLM.items() if key != "failed"}
    assert vllm_bench.read(saved(tmp_path, {**older, "request_rate": 4.0})).failed == 2


def test_aiperf(tmp_path):
    found = aiperf.read(saved(tmp_path, AIPERF))
    assert (found.completed, found.failed, found.model, found.version) == (20, None, "m", "0.13.0")
    assert (found.tpot_ms.p50, found.itl_gap_ms.p99, found.ttft_ms.p90) == (5.0, 12.0, None)
    assert (found.isl, found.osl, found.goodput_req_s, found.e2e_ms.p90) == (None, 500.0, 1.2, 3000.0)


def test_guidellm_reads_successful_requests_and_not_its_own_tpot(tmp_path):
    [found] = guidellm.read(saved(tmp_path, GUIDELLM))
    assert (found.completed, found.failed, found.concurrency, found.duration_s) == (10, 1, 4.0, 30.0)
    assert (found.tpot_ms.mean, found.ttft_ms.p99) == (30.0, 95.0)
    assert (found.e2e_ms.mean, found.e2e_ms.p90, found.e2e_ms.p99) == (2000.0, 2500.0, 3000.0)
    assert (found.isl, found.osl, found.out_tok_s) == (128.0, 64.0, 32.0)


@pytest.mark.parametrize(("reader", "content", "words"), [
    (vllm_bench, {"avg_latency": 1.0, "latencies": [1.0]}, "has no duration, completed"),
    (vllm_bench, {**VLLM, "completed": -1}, "not a count"),
    (vllm_bench, {**VLLM, "mean_ttft_ms": "fast"}, "not a finite number"),
    (vllm_bench, '{"duration": NaN', "is not JSON"),
    (vllm_bench, [], "is list, not an object"),
    (vllm_bench, json.dumps({**VLLM, "mean_ttft_ms": float("nan")}), "not a finite number"),
    (vllm_bench, {**VLLM, "request_rate": "fast"}, "request_rate is 'fast'"),
    (aiperf, {**AIPERF, "schema_version": "2.0"}, "schema '2.0', 1.x"),
    (aiperf, {**AIPERF, "time_to_first_token": {"unit": "s", "avg": 0.05}}, "time_to_first_token is in 's'"),
    (aiperf, {**AIPERF, "was_cancelled": True}, "cancelled run"),
    (aiperf, VLLM, "has no request_count"),
    (guidellm, {**GUIDELLM, "metadata": {"version": 2}}, "report version 2, 1 can be read"),
    (guidellm, {"benchmarks": []}, "has no metadata"),
    (guidellm, {**GUIDELLM, "benchmarks": []}, "holds no benchmarks"),
    (guidellm, {**GUIDELLM, "benchmarks": [{"metrics": {}}]}, "has no request_totals"),
    (github_benchmark, {"name": "x"}, "no list of entries"),
    (github_benchmark, [{"name": "x", "unit": "ms", "value": "1"}, {"name": "x"}], "Field required"),
    (github_benchmark, [{"name": "x", "unit": "ms", "value": 1}] * 2, "'x' twice"),
])
def test_other_layouts_are_refused_by_name(tmp_path, reader, content, words):
    with pytest.raises(ForeignFormatError, match=words) as refusal:
        reader.read(saved(tmp_path, content))
    assert refusal.value.exit_code == 2
    with pytest.raises(ForeignFormatError, match="cannot read"):
        reader.read(tmp_path / "absent.json")


def sweep(invalid=None):
    cell = Cell(batch_size=1, isl=64, osl=8, n=3, ttft_ms=10.0, ttft_ms_spread=1.0, tpot_ms=None, tpot_ms_spread=None,
                e2e_ms=45.0, out_tok_s=177.0, total_tok_s=1600.0, invalid=invalid)
    bad = cell.model_copy(update={"batch_size": 8, "invalid": "clock jumped"})
    return LatencySweep(target=TARGET, device="cpu", cells=[cell, bad], peak_memory_bytes=None, warmup=1, repeats=3)


def test_github_benchmark_parts_figures_by_direction_and_comes_back(tmp_path):
    written = github_benchmark.write(sweep(), tmp_path / "out")
    lower = github_benchmark.read(written["customSmallerIsBetter"])
    higher = github_benchmark.read(written["customBiggerIsBetter"])
    assert [(entry.name, entry.value, entry.range) for entry in lower] == [
        ("TTFT: batch batch=1 isl=64 osl=8", 10.0, "± 0.5"), ("End to end: batch batch=1 isl=64 osl=8", 45.0, None)]
    assert [entry.value for entry in higher] == [177.0, 1600.0]
    with pytest.raises(MeasureError, match="none of 2 cells"):
        github_benchmark.write(sweep("hot"), tmp_path / "out")


def sample(number, right, prompt="p"):
    scores = [["-1.0", "True"], ["-2.5", "False"], ["-3.0", "False"]]  # the harness writes numbers as text here
    return {"doc_id": number, "doc": {"q": "?"}, "target": "0" if right else "1", "resps": [scores],
            "filtered_resps": scores, "filter": "none", "doc_hash": f"d{number}", "prompt_hash": f"{prompt}{number}",
            "target_hash": "t", "acc": float(right)}


def harness_folder(tmp_path, rows, version="0.4.13", name="run"):
    folder = tmp_path / name
    folder.mkdir()
    date = "2026-08-01T12-00-00.5"
    (folder / f"results_{date}.json").write_text(json.dumps({
        "results": {"quiz": {"alias": "quiz", "acc,none": 0.5, "acc_stderr,none": "N/A"}}, "lm_eval_version": version,
        "model_name": "m"}))
    (folder / f"samples_quiz_{date}.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    return folder


def test_lm_eval_samples_become_items_that_can_be_paired(tmp_path):
    run = lm_eval_files.read(harness_folder(tmp_path, [sample(0, True), sample(1, False)]))
    assert (run.version, run.model, run.metrics) == ("0.4.13", "m", {"quiz": {"acc,none": 0.5}})
    first, second = run.items
    assert (first.task, first.id, first.correct, first.choice, first.target) == ("quiz", "d0", True, 0, 0)
    assert (first.margin, second.margin, first.n_choices) == (1.5, -1.5, 3)
    other = lm_eval_files.read(harness_folder(tmp_path, [sample(0, False), sample(1, True)], name="other"))
    before = {item.id: item.correct for item in run.items}
    assert flip_counts([(item, before[item.id]) for item in other.items]) == (1, 1)


def test_lm_eval_choice_is_read_only_where_the_plain_sum_decided(tmp_path):
    """acc_norm divides by lengths that the file does not hold: no choice or margin is made up."""
    rows = [{**sample(0, True), "acc_norm": 0.0}]
    [item] = lm_eval_files.read(harness_folder(tmp_path, rows), "acc_norm").items
    assert (item.correct, item.choice, item.margin, item.target, item.n_choices) == (False, None, None, 0, 3)


def test_lm_eval_generated_answers(tmp_path):
    row = {**sample(0, True), "filtered_resps": ["42"], "exact_match": 1.0, "target": "42"}
    [item] = lm_eval_files.read(harness_folder(tmp_path, [row]), "exact_match").items
    assert (item.answer, item.choice, item.target, item.correct) == ("42", None, None, True)


def test_lm_eval_refusals(tmp_path):
    rows = [sample(0, True)]
    with pytest.raises(ForeignFormatError, match=r"written by lm-eval 0.3.0, 0.4.x"):
        lm_eval_files.read(harness_folder(tmp_path, rows, "0.3.0", "old"))
    with pytest.raises(ForeignFormatError, match="0 results files"):
        lm_eval_files.read(tmp_path)
    with pytest.raises(ForeignFormatError, match="has no exact_match"):
        lm_eval_files.read(harness_folder(tmp_path, rows, name="metric"), "exact_match")
    with pytest.raises(DataError, match="1 questions twice"):
        lm_eval_files.read(harness_folder(tmp_path, rows * 2, name="twice"))
    with pytest.raises(DataError, match="no samples under filter 'strict'"):
        lm_eval_files.read(harness_folder(tmp_path, rows, name="filter"), filter_name="strict")
    cut = harness_folder(tmp_path, rows, name="cut")
    path = next(cut.glob("samples_*"))
    path.write_text(path.read_text()[:-20])
    with pytest.raises(ForeignFormatError, match="is not JSON"):
        lm_eval_files.read(cut)


def test_lm_eval_folder_written_and_read_back(tmp_path):
    items = [Item(id=f"{i:064d}", task=f"t{i % 2}", prompt_sha256=f"p{i}", choice=0, target=i % 3, correct=i % 3 == 0,
                  answer=f"answer {i}", n_choices=4) for i in range(10)]
    report = EvalReport(target=TARGET, baseline_digest=None, data_digest="d", harness={"lm_eval": "0.4.13"}, seed=0,
                        texts=[], items=items, accuracy=None, delta_nll=None, kl_mean=None, same_top1=None, flips=None)
    written = lm_eval_files.write(report, tmp_path / "out", when=datetime(2026, 8, 1, tzinfo=UTC))
    assert len(written) == 3
    run = lm_eval_files.read(tmp_path / "out")
    def key(item):
        return item.task, item.id, item.prompt_sha256, item.correct, item.answer
    assert sorted(map(key, run.items)) == sorted(map(key, items))
    assert run.metrics["t0"]["acc,none"] == 2 / 5
    assert run.metrics["t0"]["acc_stderr,none"] == pytest.approx((0.4 * 0.6 / 4) ** 0.5)
    for field, words in (("items", "answered no questions"), ("harness", "names no lm_eval version")):
        bare = report.model_copy(update={field: type(getattr(report, field))()})
        with pytest.raises(DataError, match=words):
            lm_eval_files.write(bare, tmp_path, when=datetime(2026, 8, 1, tzinfo=UTC))

"""Other tools' results as artifacts, and ours in their layouts.

An imported report says of itself only what its files say. Its questions carry the harness's own hashes of document and
prompt, so two imported runs can be gated question by question, and another template, or another version of the harness,
is refused; it is never comparable with a report that was judged here (their tokenizer digests cannot agree).
"""

from __future__ import annotations

import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from calib.artifact import Artifact, canonical_json, sha256_hex
from toolkit import making, stages
from toolkit.errors import UsageError
from toolkit.refs import resolve
from toolkit.stages import Workshop

if TYPE_CHECKING:
    from evals.loads import LoadResult
    from evals.report import Cell, EvalReport, LatencySweep, Target

IMPORTED = "imported"


def bring_in(shop: Workshop, path: Path, source: str, out: Path | None, metric: str, filter_name: str
             ) -> tuple[EvalReport | LatencySweep, Artifact]:
    """The record a foreign file holds, kept at ``out`` or in home under its content's hash."""
    from evals.foreign import aiperf, guidellm, vllm_bench
    from evals.records import save_record

    record: EvalReport | LatencySweep
    if source == "lm-eval":
        kind, record = "eval-report", _harness_report(path, metric, filter_name)
    else:
        readers = {"vllm": lambda: [vllm_bench.read(path)], "aiperf": lambda: [aiperf.read(path)],
                   "guidellm": lambda: guidellm.read(path)}
        kind, record = "latency-sweep", _sweep(readers[source]())
    place = out or shop.place(kind, IMPORTED, content=sha256_hex(canonical_json(record.model_dump(mode="json"))))
    artifact = (shop.standing(place, kind) if out is None else None) or save_record(record, place)
    shop.store.remember(artifact)
    return record, artifact


def _target(name: str, content: object, numerics: str) -> Target:
    from evals.report import Target

    return Target(name=name, digest=sha256_hex(canonical_json(content)), numerics=numerics, tokenizer_digest=IMPORTED,
                  template_sha256=IMPORTED, bos=False)


def _harness_report(path: Path, metric: str, filter_name: str) -> EvalReport:
    from evals.accuracy import pooled_accuracy
    from evals.foreign.lm_eval_files import read
    from evals.report import EvalReport

    run = read(path, metric, filter_name)
    ids = sorted(f"{item.task} {item.id}" for item in run.items)
    name = run.model or "unnamed"
    return EvalReport(
        target=_target(name, [name, run.date, [item.model_dump(mode="json") for item in run.items]], IMPORTED),
        baseline_digest=None, data_digest=sha256_hex(canonical_json(ids)), seed=0, texts=[], items=run.items,
        harness={"lm_eval": run.version, "metric": metric, "filter": filter_name, "imported from": "lm-eval"},
        accuracy=pooled_accuracy(run.items), delta_nll=None, kl_mean=None, same_top1=None, flips=None)


def judge_tasks(shop: Workshop, name: str, tasks: list[str], include: Path | None, items: int, seed: int, metric: str,
                filter_name: str, allow_code: bool) -> tuple[EvalReport, Artifact]:
    """Judge an engine on tasks that are written for lm-eval, kept in home. Two such reports can be gated."""
    from engines.llm import LLM
    from evals.accuracy import HARNESS, pooled_accuracy, run_tasks
    from evals.foreign.lm_eval_files import item_of
    from evals.records import save_record
    from evals.report import EvalReport

    if include is None and shop.offline:
        raise UsageError(f"task {tasks[0]} of lm-eval may fetch its data, and --offline is set",
                         "Give --include FOLDER with tasks whose data is local.")
    built = making.engine_of(shop, name)
    with LLM(built) as llm, tempfile.TemporaryDirectory() as scratch:
        target = stages.target_of(llm, built.recipe)
        rows = run_tasks(llm, llm.tokenizer, tasks, include=include, limit=items, seed=seed, scratch=Path(scratch),
                         key=target.digest, allow_code=allow_code, report=shop.report)
    found = [item_of(row, task, metric, f"{task} sample {n}") for task, each in sorted(rows.items())
             for n, row in enumerate(each) if row.get("filter", "none") == filter_name]
    if not found:
        raise UsageError(f"no sample of {', '.join(tasks)} is under filter {filter_name!r}", "Give --filter.")
    record = EvalReport(
        target=target, baseline_digest=None, seed=seed, texts=[], items=found, accuracy=pooled_accuracy(found),
        data_digest=sha256_hex(canonical_json(sorted(f"{item.task} {item.id}" for item in found))),
        harness={"lm_eval": HARNESS["lm_eval"], "metric": metric, "filter": filter_name}, delta_nll=None, kl_mean=None,
        same_top1=None, flips=None)
    place = shop.place("eval-report", "harness", content=sha256_hex(canonical_json(record.model_dump(mode="json"))))
    artifact = shop.standing(place, "eval-report") or save_record(record, place, [target.digest])
    shop.store.remember(artifact)
    return record, artifact


def _sweep(results: list[LoadResult]) -> LatencySweep:
    from evals.report import LatencySweep

    first = results[0]
    name = f"{first.tool}: {first.model or 'unnamed'}"
    target = _target(name, [result.model_dump(mode="json") for result in results], f"{first.tool} {first.version}")
    return LatencySweep(target=target, device=f"told by {first.tool}", cells=[_cell(result) for result in results],
                        peak_memory_bytes=None, warmup=0, repeats=1)


def _cell(result: LoadResult) -> Cell:
    """One foreign load as a cell. It is one run, so nothing is known of its spread over repeats."""
    from evals.load_sweep import whole_tokens
    from evals.report import Cell

    missing = [name for name in ("isl", "osl") if getattr(result, name) is None]
    reasons = [f"{result.failed} requests failed"] if result.failed else []
    reasons += [f"{result.tool} does not tell {' and '.join(missing)}"] if missing else []
    reasons += ["nothing was completed"] if not result.completed else []
    def middle(name: str) -> float | None:
        spread = getattr(result, name)
        return spread.p50 if spread.p50 is not None else spread.mean
    return Cell(
        mode="closed" if result.concurrency else "open", batch_size=max(1, round(result.concurrency or 1)), n=1,
        isl=whole_tokens(result.isl), osl=whole_tokens(result.osl), answered=result.completed,
        request_rate=result.request_rate, ttft_ms=middle("ttft_ms"), ttft_ms_spread=None,
        tpot_ms=middle("tpot_ms"), tpot_ms_spread=None, e2e_ms=middle("e2e_ms"), out_tok_s=result.out_tok_s,
        total_tok_s=result.total_tok_s, req_s=result.req_s, goodput_req_s=result.goodput_req_s,
        invalid="; ".join(reasons) or None)


def write_out(shop: Workshop, name: str, target: str, out: Path) -> list[Path]:
    """Write a report as an lm-eval folder, a sweep as github-action-benchmark files, or its loads as vLLM's."""
    from evals.foreign import github_benchmark, lm_eval_files, vllm_bench
    from evals.records import load_record
    from evals.report import EvalReport, LatencySweep

    ref = resolve(name, shop.home, shop.store, offline=shop.offline).of_kind("eval-report", "latency-sweep")
    if (ref.kind == "eval-report") != (target == "lm-eval"):
        raise UsageError(f"{name} is a {ref.kind}, which {target} has no layout for",
                         "A report goes --to lm-eval; a sweep --to github-action-benchmark or vllm.")
    if ref.kind == "eval-report":
        return lm_eval_files.write(load_record(ref.path, EvalReport), out, when=datetime.now(UTC).replace(tzinfo=None))
    sweep = load_record(ref.path, LatencySweep)
    if target == "vllm":
        return vllm_bench.write(sweep.loads, out)
    return list(github_benchmark.write(sweep, out).values())

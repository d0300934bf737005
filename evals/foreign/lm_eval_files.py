"""lm-eval's result folders (0.4): ``results_<date>.json`` and one ``samples_<task>_<date>.jsonl`` a task.

Reading gives ``Item`` records, so runs that others made with lm-eval can be gated question by question. An item's id is
the harness's ``doc_hash`` and its prompt's hash is ``prompt_hash``: a different template gives different hashes, and
the gate refuses the pair. Figures are keyed "metric,filter"; a missing standard error is the text "N/A".

Writing gives a folder that ``read`` and other readers of the layout take. The questions' own text is not in an
``EvalReport``, so ``doc`` holds the id only, and ``arguments`` are left out rather than made up. A failed write raises
(the harness itself logs a warning and exits 0).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from calib.artifact import sha256_hex, write_atomic
from calib.json_text import parse_json
from calib.scheme import Frozen
from evals.errors import DataError
from evals.foreign.record import ForeignFormatError, mapping, number, read_json, require
from evals.report import EvalReport, Item

TOOL = "lm-eval"
#: The layout that is read and written; the version field of a results file must begin with it.
SERIES = "0.4."


class HarnessRun(Frozen):
    """``metrics``: {task: {"metric,filter": value}}, standard errors included where they are numbers."""

    version: str
    model: str | None
    date: str
    metrics: dict[str, dict[str, float]]
    items: list[Item]


def read(folder: Path | str, metric: str = "acc", filter_name: str = "none") -> HarnessRun:
    """The one run in a folder; ``metric`` (0 or 1 a question) of the samples under ``filter_name`` becomes ``correct``.

    ForeignFormatError for another series, several runs in one folder, or samples without that metric.
    """
    folder = Path(folder)
    files = sorted(folder.glob("results_*.json"))
    if len(files) != 1:
        raise ForeignFormatError(f"{folder} holds {len(files)} results files, expected one",
                                 "Give the folder of one run; move others away.")
    where, found = str(files[0]), mapping(read_json(files[0], TOOL), str(files[0]), TOOL)
    require(found, ("results", "lm_eval_version"), where, TOOL)
    version = str(found["lm_eval_version"])
    if not version.startswith(SERIES):
        raise ForeignFormatError(f"{where} was written by lm-eval {version}, {SERIES}x can be read",
                                 "Run the evaluation again with that series.")
    date = files[0].stem.removeprefix("results_")
    results = mapping(found["results"], f"{where}: results", TOOL)
    metrics = {task: _figures(mapping(values, f"{where}: {task}", TOOL), where) for task, values in results.items()}
    items: list[Item] = []
    for path in sorted(folder.glob(f"samples_*_{date}.jsonl")):
        items += _samples(path, path.stem.removeprefix("samples_").removesuffix(f"_{date}"), metric, filter_name)
    keys = [(item.task, item.id) for item in items]
    if len(set(keys)) < len(keys):
        raise DataError(f"{folder} answers {len(keys) - len(set(keys))} questions twice", "Remove doubled documents.")
    return HarnessRun(version=version, model=found.get("model_name"), date=date, metrics=metrics, items=items)


def _figures(values: dict[str, Any], where: str) -> dict[str, float]:
    numbers = {name: number(values, name, where) for name, value in values.items()
               if "," in name and not isinstance(value, str)}
    return {name: value for name, value in numbers.items() if value is not None}


def _samples(path: Path, task: str, metric: str, filter_name: str) -> list[Item]:
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ForeignFormatError(f"cannot read {path}: {error.strerror}", "Give the harness's samples file.") from error
    rows = [mapping(parse_json(line, f"{path} line {i}", ForeignFormatError, "The file is cut off or damaged."),
                    f"{path} line {i}", TOOL) for i, line in enumerate(lines, 1) if line.strip()]
    chosen = [row for row in rows if row.get("filter", "none") == filter_name]
    if not chosen:
        raise DataError(f"{path} has no samples under filter {filter_name!r}", "Run the harness with --log_samples.")
    return [item_of(row, task, metric, f"{path} sample {i}") for i, row in enumerate(chosen)]


def item_of(row: dict[str, Any], task: str, metric: str, where: str) -> Item:
    """One sample row, from a file or from the harness itself; ForeignFormatError when ``metric`` is not right/wrong."""
    require(row, ("doc_hash", "prompt_hash", "filtered_resps", metric), where, TOOL)
    correct = number(row, metric, where)
    if correct not in (0.0, 1.0):
        raise ForeignFormatError(f"{where}: {metric} is {row[metric]!r}, not 0 or 1", "Choose a metric of right/wrong.")
    scores = _choice_scores(row["filtered_resps"])
    target = row.get("target")
    index = int(target) if scores and isinstance(target, (int, str)) and re.fullmatch(r"\d+", str(target)) else None
    if scores is None:
        reply = row["filtered_resps"]
        return Item(id=row["doc_hash"], task=task, prompt_sha256=row["prompt_hash"], correct=bool(correct),
                    answer=str(reply[0] if isinstance(reply, list) and reply else reply))
    choice = margin = None
    if metric == "acc":  # other metrics divide by lengths that are not in the file
        choice = max(range(len(scores)), key=scores.__getitem__)
        if index is not None and index < len(scores):
            margin = scores[index] - max(score for i, score in enumerate(scores) if i != index)
    return Item(id=row["doc_hash"], task=task, prompt_sha256=row["prompt_hash"], correct=bool(correct), choice=choice,
                target=index, margin=margin, n_choices=len(scores))


def _choice_scores(replies: Any) -> list[float] | None:
    """The log-probabilities of a multiple-choice sample [[logprob, is_greedy], ...], or None for generated text."""
    if not isinstance(replies, list) or len(replies) < 2:
        return None
    try:
        scores = [float(reply[0]) for reply in replies]
    except (TypeError, ValueError, IndexError):
        return None
    return scores if all(math.isfinite(score) for score in scores) else None


def write(report: EvalReport, folder: Path | str, *, when: datetime) -> list[Path]:
    """Write a report's questions as an lm-eval folder; the files' paths. DataError for a report without questions."""
    if not report.items:
        raise DataError(f"{report.target.name} answered no questions", "Judge it on a task first.")
    if "lm_eval" not in report.harness:
        raise DataError(f"the report of {report.target.name} names no lm_eval version", "It was not judged by it.")
    folder, date = Path(folder), when.isoformat().replace(":", "-")
    tasks = {task: [item for item in report.items if item.task == task]
             for task in sorted({item.task for item in report.items})}
    results = {task: _summary(task, items) for task, items in tasks.items()}
    document = {"results": results, "n-samples": {task: {"original": len(items), "effective": len(items)}
                                                  for task, items in tasks.items()},
                "higher_is_better": {task: {"acc": True} for task in tasks}, "config": {"model": report.target.name},
                "model_name": report.target.name, "chat_template_sha": report.target.template_sha256,
                "lm_eval_version": report.harness["lm_eval"],
                "task_hashes": {task: sha256_hex("".join(i.id + i.prompt_sha256 for i in items).encode())
                                for task, items in tasks.items()}}
    folder.mkdir(parents=True, exist_ok=True)
    written = [folder / f"results_{date}.json"]
    write_atomic(written[0], json.dumps(document, ensure_ascii=False, indent=2, allow_nan=False).encode())
    for task, items in tasks.items():
        written.append(folder / f"samples_{task}_{date}.jsonl")
        rows = [json.dumps(_row(number, item), ensure_ascii=False, allow_nan=False) for number, item in
                enumerate(items)]
        write_atomic(written[-1], ("\n".join(rows) + "\n").encode())
    return written


def _summary(task: str, items: Sequence[Item]) -> dict[str, Any]:
    n, share = len(items), sum(item.correct for item in items) / len(items)
    error: float | str = math.sqrt(share * (1 - share) / (n - 1)) if n > 1 else "N/A"
    return {"alias": task, "acc,none": share, "acc_stderr,none": error}


def _row(index: int, item: Item) -> dict[str, Any]:
    return {"doc_id": index, "doc": {"id": item.id}, "target": item.target, "filtered_resps": [item.answer],
            "filter": "none", "metrics": ["acc"], "doc_hash": item.id, "prompt_hash": item.prompt_sha256,
            "target_hash": sha256_hex(str(item.target).encode()), "acc": float(item.correct)}

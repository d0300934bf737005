"""``vllm bench serve --save-result``: one flat JSON object a run.

Its ``tpot`` is (e2e - ttft)/(n - 1) a request and becomes ``tpot_ms``; its ``itl`` pools the gaps between chunks and
becomes ``itl_gap_ms``. An unlimited rate is the text "inf". Percentiles that were not asked for are absent; the median
is always there. What is written can be read by tools that take this layout, and by ``read``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from calib.artifact import write_atomic
from evals.errors import MeasureError
from evals.foreign.record import (
    ForeignFormatError,
    count,
    mapping,
    number,
    positive,
    read_json,
    require,
)
from evals.loads import LoadResult, Spread

TOOL = "vLLM bench serve"
_KEYS = ("duration", "completed", "total_input_tokens", "total_output_tokens", "request_throughput",
         "output_throughput", "mean_ttft_ms", "median_ttft_ms")


def read(path: Path | str) -> LoadResult:
    """The run in one file. ForeignFormatError for another layout (``vllm bench latency`` and ``throughput`` too)."""
    where, found = str(path), mapping(read_json(path, TOOL), str(path), TOOL)
    require(found, _KEYS, where, TOOL)
    completed = count(found, "completed", where)
    def mean(key: str) -> float | None:
        return count(found, key, where) / completed if completed else None
    return LoadResult(
        tool=TOOL, version=found.get("vllm_version"), model=found.get("model_id"), completed=completed,
        failed=_failed(found, where, completed), duration_s=positive(number(found, "duration", where)),
        concurrency=positive(number(found, "max_concurrency", where)), request_rate=_rate(found, where),
        isl=mean("total_input_tokens"), osl=mean("total_output_tokens"), ttft_ms=_spread(found, "ttft", where),
        tpot_ms=_spread(found, "tpot", where), itl_gap_ms=_spread(found, "itl", where),
        e2e_ms=_spread(found, "e2el", where), req_s=number(found, "request_throughput", where),
        out_tok_s=number(found, "output_throughput", where), total_tok_s=number(found, "total_token_throughput", where),
        goodput_req_s=number(found, "request_goodput", where))


def _failed(found: dict[str, Any], where: str, completed: int) -> int | None:
    if "failed" in found:
        return count(found, "failed", where)
    asked = number(found, "num_prompts", where)
    return None if asked is None else max(0, int(asked) - completed)


def _rate(found: dict[str, Any], where: str) -> float | None:
    rate = found.get("request_rate")
    if isinstance(rate, str):
        if rate != "inf":
            raise ForeignFormatError(f"{where}: request_rate is {rate!r}", "The file is damaged.")
        return None
    return positive(number(found, "request_rate", where))


def _spread(found: dict[str, Any], name: str, where: str) -> Spread:
    return Spread(mean=number(found, f"mean_{name}_ms", where), p50=number(found, f"median_{name}_ms", where),
                  p90=number(found, f"p90_{name}_ms", where), p99=number(found, f"p99_{name}_ms", where))


def write(loads: Sequence[LoadResult], folder: Path | str) -> list[Path]:
    """Write each load as ``bench_<number>.json``. MeasureError without loads, or for one that completed nothing."""
    folder = Path(folder)
    if not loads:
        raise MeasureError("the sweep holds no loads of an endpoint", "Sweep an endpoint with --url.")
    documents = [_document(load, number) for number, load in enumerate(loads)]
    folder.mkdir(parents=True, exist_ok=True)
    written = [folder / f"bench_{number}.json" for number in range(len(documents))]
    for path, document in zip(written, documents, strict=True):
        write_atomic(path, json.dumps(document, ensure_ascii=False, indent=1, allow_nan=False).encode())
    return written


def _document(load: LoadResult, number: int) -> dict[str, Any]:
    if not load.completed or load.isl is None or load.osl is None:
        raise MeasureError(f"load {number} completed {load.completed} requests, or of unknown lengths",
                           "This layout cannot say that; export without it.")
    document: dict[str, Any] = {
        "backend": "openai", "model_id": load.model, "completed": load.completed, "failed": load.failed or 0,
        "num_prompts": load.completed + (load.failed or 0), "duration": load.duration_s,
        "request_rate": load.request_rate or "inf", "max_concurrency": load.concurrency,
        "total_input_tokens": round(load.isl * load.completed), "total_output_tokens": round(load.osl * load.completed),
        "request_throughput": load.req_s, "output_throughput": load.out_tok_s, "total_token_throughput":
        load.total_tok_s, "request_goodput": load.goodput_req_s}
    for name, spread in (("ttft", load.ttft_ms), ("tpot", load.tpot_ms), ("itl", load.itl_gap_ms),
                         ("e2el", load.e2e_ms)):
        document |= {f"mean_{name}_ms": spread.mean, f"median_{name}_ms": spread.p50, f"p90_{name}_ms": spread.p90,
                     f"p99_{name}_ms": spread.p99}
    return document

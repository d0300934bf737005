"""``vllm bench serve --save-result``: one flat JSON object a run.

Its ``tpot`` is (e2e - ttft)/(n - 1) a request and becomes ``tpot_ms``; its ``itl`` pools the gaps between chunks and
becomes ``itl_gap_ms``. An unlimited rate is the text "inf". Percentiles that were not asked for are absent; the median
is always there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from evals.foreign.record import (
    ForeignFormatError,
    LoadResult,
    Spread,
    count,
    mapping,
    number,
    positive,
    read_json,
    require,
)

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

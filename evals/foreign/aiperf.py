"""AIPerf's ``profile_export_aiperf.json`` (schema 1.x): one object a run, one entry {unit, avg, p50, ...} a metric.

AIPerf's ``inter_token_latency`` is (latency - ttft)/(n - 1) and becomes ``tpot_ms``; its ``inter_chunk_latency`` is the
gap between chunks and becomes ``itl_gap_ms``. Units are in the file and are checked: a metric in another unit is
refused, not rescaled by guess.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from evals.foreign.record import ForeignFormatError, mapping, number, positive, read_json, require
from evals.loads import LoadResult, Spread

TOOL = "AIPerf"
_UNITS = {"time_to_first_token": "ms", "inter_token_latency": "ms", "inter_chunk_latency": "ms",
          "request_latency": "ms", "request_throughput": "requests/sec", "output_token_throughput": "tokens/sec",
          "total_token_throughput": "tokens/sec", "goodput": "requests/sec", "request_count": "requests",
          "error_request_count": "requests", "input_sequence_length": "tokens", "output_sequence_length": "tokens",
          "benchmark_duration": "sec"}


def read(path: Path | str) -> LoadResult:
    """The run in one file. ForeignFormatError for another layout, schema or unit, or a cancelled run."""
    where, found = str(path), mapping(read_json(path, TOOL), str(path), TOOL)
    schema = found.get("schema_version")
    if schema is not None and str(schema).split(".")[0] != "1":
        raise ForeignFormatError(f"{where} has schema {schema!r}, 1.x can be read", "Export it with another AIPerf.")
    require(found, ("request_count", "request_throughput", "request_latency"), where, TOOL)
    if found.get("was_cancelled"):
        raise ForeignFormatError(f"{where} is a cancelled run", "Its averages cover only what had finished; run again.")
    def average(name: str) -> float | None:
        return number(_metric(found, name, where), "avg", where)
    completed, failed = average("request_count"), average("error_request_count")
    if completed is None:
        raise ForeignFormatError(f"{where}: request_count has no avg", "The file is damaged.")
    return LoadResult(
        tool=TOOL, version=found.get("aiperf_version"), model=_model(found), completed=int(completed),
        failed=None if failed is None else int(failed), duration_s=positive(average("benchmark_duration")),
        isl=average("input_sequence_length"), osl=average("output_sequence_length"),
        ttft_ms=_spread(found, "time_to_first_token", where), tpot_ms=_spread(found, "inter_token_latency", where),
        itl_gap_ms=_spread(found, "inter_chunk_latency", where), e2e_ms=_spread(found, "request_latency", where),
        req_s=average("request_throughput"), out_tok_s=average("output_token_throughput"),
        total_tok_s=average("total_token_throughput"), goodput_req_s=average("goodput"))


def _metric(found: dict[str, Any], name: str, where: str) -> dict[str, Any]:
    if found.get(name) is None:
        return {}
    metric = mapping(found[name], f"{where}: {name}", TOOL)
    if metric.get("unit") != _UNITS[name]:
        raise ForeignFormatError(f"{where}: {name} is in {metric.get('unit')!r}, expected {_UNITS[name]!r}",
                                 "Export it with AIPerf's display units.")
    return metric


def _spread(found: dict[str, Any], name: str, where: str) -> Spread:
    metric = _metric(found, name, where)
    return Spread(mean=number(metric, "avg", where), p50=number(metric, "p50", where),
                  p90=number(metric, "p90", where), p99=number(metric, "p99", where))


def _model(found: dict[str, Any]) -> str | None:
    config = found.get("input_config")
    endpoint = config.get("endpoint") if isinstance(config, dict) else None
    names = endpoint.get("model_names") if isinstance(endpoint, dict) else None
    return str(names[0]) if isinstance(names, list) and names else None

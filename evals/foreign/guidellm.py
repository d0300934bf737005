"""A GuideLLM report (``benchmarks.json``, report version 1): a list of benchmarks, each a load with distributions.

Each metric is broken down by the fate of the requests; only ``successful`` ones are read, as all other tools do. Its
``time_per_output_token_ms`` is e2e/n and *includes the first token*, so it is not ours and is not read;
``inter_token_latency_ms`` is (e2e - ttft)/(n - 1) a request and becomes ``tpot_ms``. Request latency is in seconds.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

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

TOOL = "GuideLLM"
VERSION = 1


def read(path: Path | str) -> list[LoadResult]:
    """Every benchmark of one report. ForeignFormatError for another layout or report version, or an empty report."""
    where, found = str(path), mapping(read_json(path, TOOL), str(path), TOOL)
    require(found, ("metadata", "benchmarks"), where, TOOL)
    metadata = mapping(found["metadata"], f"{where}: metadata", TOOL)
    if metadata.get("version") != VERSION:
        raise ForeignFormatError(f"{where} has report version {metadata.get('version')!r}, {VERSION} can be read",
                                 "Export it with another GuideLLM.")
    benchmarks = found["benchmarks"]
    if not isinstance(benchmarks, list) or not benchmarks:
        raise ForeignFormatError(f"{where} holds no benchmarks", "Give a finished report.")
    return [_benchmark(mapping(one, f"{where}: benchmark {i}", TOOL), metadata, f"{where}: benchmark {i}")
            for i, one in enumerate(benchmarks)]


def _benchmark(found: dict[str, Any], metadata: dict[str, Any], where: str) -> LoadResult:
    require(found, ("metrics",), where, TOOL)
    metrics = mapping(found["metrics"], f"{where}: metrics", TOOL)
    require(metrics, ("request_totals", "request_latency", "time_to_first_token_ms"), where, TOOL)
    totals = mapping(metrics["request_totals"], f"{where}: request_totals", TOOL)
    def mean(name: str) -> float | None:
        return number(_good(metrics, name, where), "mean", where)
    strategy = _strategy(found)
    return LoadResult(
        tool=TOOL, version=metadata.get("guidellm_version"), completed=count(totals, "successful", where),
        failed=count(totals, "errored", where), duration_s=positive(number(found, "duration", where)),
        concurrency=positive(number(strategy, "streams", where)),
        request_rate=positive(number(strategy, "rate", where)), isl=mean("prompt_token_count"),
        osl=mean("output_token_count"), ttft_ms=_spread(metrics, "time_to_first_token_ms", where),
        tpot_ms=_spread(metrics, "inter_token_latency_ms", where),
        e2e_ms=_spread(metrics, "request_latency", where, 1e3), req_s=mean("requests_per_second"),
        out_tok_s=mean("output_tokens_per_second"), total_tok_s=mean("tokens_per_second"))


def _good(metrics: dict[str, Any], name: str, where: str) -> dict[str, Any]:
    if metrics.get(name) is None:
        return {}
    metric = mapping(metrics[name], f"{where}: {name}", TOOL)
    require(metric, ("successful",), f"{where}: {name}", TOOL)
    return mapping(metric["successful"], f"{where}: {name}", TOOL) if metric["successful"] is not None else {}


def _spread(metrics: dict[str, Any], name: str, where: str, scale: float = 1.0) -> Spread:
    metric = _good(metrics, name, where)
    percentiles = mapping(metric.get("percentiles") or {}, f"{where}: {name}", TOOL)
    values = {"mean": number(metric, "mean", where), "p50": number(metric, "median", where),
              "p90": number(percentiles, "p90", where), "p99": number(percentiles, "p99", where)}
    return Spread(**{key: None if value is None else value * scale for key, value in values.items()})


def _strategy(found: dict[str, Any]) -> dict[str, Any]:
    config = found.get("config")
    strategy = config.get("strategy") if isinstance(config, dict) else None
    return strategy if isinstance(strategy, dict) else {}

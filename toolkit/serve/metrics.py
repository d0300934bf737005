"""Figures for Prometheus, all with the prefix ``toolkit_``. The loop's own counts are asked for by each scrape.

The registry is the server's own, so two servers in one process (tests) do not mix.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
#: The loop's counts that only grow -> what they are.
_COUNTS = {"steps": "Engine steps.", "preemptions": "Sequences that gave their blocks back.",
           "prefix_tokens": "Prompt tokens looked up in the prefix cache.",
           "prefix_hit_tokens": "Prompt tokens found there.", "evictions": "Kept blocks that were taken back.",
           "faults": "Sequences that ended in an error.", "tokens_computed": "Tokens that went through the model.",
           "compiles_while_loading": "Kernels that the build left to be compiled (a bug when not 0).",
           "compiles_after_loading": "Kernels compiled while serving (a bug when not 0)."}


class _Loop:
    """A collector over the newest counts of the engine."""

    def __init__(self) -> None:
        self.counts: Mapping[str, Any] = {}
        self.up = False
        self.tasks = 0

    def collect(self) -> Iterable[Metric]:
        yield GaugeMetricFamily("toolkit_server_tasks", "Tasks of the front end; no request leaves one behind.",
                                value=float(self.tasks))
        yield GaugeMetricFamily("toolkit_engine_up", "1 while the engine answers.", value=float(self.up))
        counts = self.counts
        if not counts:
            return
        yield GaugeMetricFamily("toolkit_requests_running", "Sequences in the batch.", value=counts["running"])
        yield GaugeMetricFamily("toolkit_requests_waiting", "Sequences that wait for a place.",
                                value=counts["waiting"])
        blocks = GaugeMetricFamily("toolkit_kv_blocks", "KV blocks by state.", labels=["state"])
        for state in ("free", "used", "cached"):
            blocks.add_metric([state], counts[f"{state}_blocks"])
        yield blocks
        for name, what in _COUNTS.items():
            if name in counts:
                yield CounterMetricFamily(f"toolkit_{name}", what, value=counts[name])


class Metrics:
    """What one server counts."""

    def __init__(self, model: str, info: Mapping[str, Any]) -> None:
        self.registry = CollectorRegistry()
        self._loop = _Loop()
        self.registry.register(self._loop)
        self.answers = Counter("toolkit_http_requests", "Answers by route and status.", ["route", "status"],
                               registry=self.registry)
        self.dropped = Counter("toolkit_dropped", "Requests whose client went away.", registry=self.registry)
        self.prompt_tokens = Counter("toolkit_prompt_tokens", "Prompt tokens of finished requests.",
                                     registry=self.registry)
        self.generated_tokens = Counter("toolkit_generation_tokens", "Tokens generated for finished requests.",
                                        registry=self.registry)
        self.cached_tokens = Counter("toolkit_cached_prompt_tokens", "Prompt tokens that were not computed.",
                                     registry=self.registry)
        self.ttft = self._histogram("toolkit_ttft_seconds", "From admission to the first token.", _SECONDS)
        self.e2e = self._histogram("toolkit_e2e_seconds", "From admission to the last token.", _SECONDS)
        self.queue = self._histogram("toolkit_queue_seconds", "From admission to the first step.", _SECONDS)
        self.tpot = self._histogram("toolkit_tpot_seconds", "Per token after the first.", _TOKEN_SECONDS)
        engine = Gauge("toolkit_engine_info", "The engine that serves.", ["model", "digest", "recipe", "kv_cache"],
                       registry=self.registry)
        engine.labels(model, info["digest"], info["recipe"], info["kv_cache"]).set(1)

    def _histogram(self, name: str, what: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, what, buckets=buckets, registry=self.registry)

    def finished(self, prompt_tokens: int, ends: Iterable[Mapping[str, Any]]) -> None:
        """Count one prompt whose continuations have all ended."""
        self.prompt_tokens.inc(prompt_tokens)
        for index, end in enumerate(ends):
            self.generated_tokens.inc(end["generated"])
            if index == 0:
                self.cached_tokens.inc(end["cached"])
            for histogram, value in ((self.ttft, end["ttft_s"]), (self.e2e, end["e2e_s"]),
                                     (self.queue, end["queue_s"])):
                if value is not None:
                    histogram.observe(value)
            if end["generated"] > 1 and end["e2e_s"] is not None and end["ttft_s"] is not None:
                self.tpot.observe((end["e2e_s"] - end["ttft_s"]) / (end["generated"] - 1))

    def render(self, counts: Mapping[str, Any] | None) -> bytes:
        """The exposition, with the loop's counts (None: it did not answer). Called within the event loop."""
        self._loop.up, self._loop.counts = counts is not None, counts or {}
        self._loop.tasks = len(asyncio.all_tasks())
        return generate_latest(self.registry)

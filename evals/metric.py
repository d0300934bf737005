"""The one dictionary of figures: name, formula, unit, direction, and what other tools call it.

Names clash between tools: vLLM's "TPOT" is AIPerf's "ITL", vLLM's "ITL" is AIPerf's "ICL", GuideLLM's "time per output
token" includes the first token. So a figure's formula stands beside it wherever it is shown; terminal, page, report and
card take it from here.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from calib.errors import UnknownNameError
from calib.scheme import Frozen


class Metric(Frozen):
    """``better`` is the direction; ``none`` marks figures that raise alarms and rank nothing."""

    name: str
    title: str
    formula: str
    unit: str
    better: Literal["lower", "higher", "none"]
    elsewhere: dict[str, str] = Field(default_factory=dict)


_ALL = (
    Metric(name="accuracy", title="Accuracy", unit="share", better="higher",
           formula="right answers / questions; Wilson interval, 95 %",
           elsewhere={"lm-eval": "acc_norm (acc where all questions share one set of choices)"}),
    Metric(name="delta_nll", title="ΔNLL", unit="nats/token", better="lower",
           formula="mean per token of NLL - baseline's NLL on the same text; interval clustered by document, 95 %",
           elsewhere={"llama.cpp": "ln(PPL(Q)/PPL(base))", "perplexity ratio": "exp(delta_nll)"}),
    Metric(name="kl_mean", title="KL", unit="nats/token", better="none",
           formula="mean of sum over the baseline's top k and one bucket for the rest of p ln(p/q): a lower bound of "
                   "KL(baseline || engine)",
           elsewhere={"llama.cpp": "Mean KLD (over the whole vocabulary)"}),
    Metric(name="kl_p99", title="KL p99", unit="nats", better="none",
           formula="99th percentile over tokens of the same", elsewhere={"llama.cpp": "99.0% KLD"}),
    Metric(name="same_top1", title="Same top-1", unit="share", better="none",
           formula="tokens whose most probable next token is the baseline's / tokens",
           elsewhere={"llama.cpp": "Same top p"}),
    Metric(name="flips", title="Flips", unit="share", better="none",
           formula="questions answered right by exactly one of baseline and engine / questions"),
    Metric(name="unparsed", title="Unread answers", unit="share", better="lower",
           formula="generated answers that hold no answer to read / exact-match questions",
           elsewhere={"AIPerf": "unparsed"}),
    Metric(name="sqnr_db", title="SQNR", unit="dB", better="higher",
           formula="10 log10(sum y^2 / sum (y - y')^2) of an output y, y' with weights and inputs rounded"),
    Metric(name="ttft_ms", title="TTFT", unit="ms", better="lower",
           formula="first token - start of the request; in batch mode until the whole batch has one",
           elsewhere={"vLLM": "ttft", "AIPerf": "TTFT", "TensorRT-LLM": "TTFT"}),
    Metric(name="tpot_ms", title="TPOT", unit="ms/token", better="lower",
           formula="(e2e - ttft) / (output tokens - 1); in batch mode (T(n) - T(1)) / (n - 1)",
           elsewhere={"vLLM": "tpot", "AIPerf": "ITL", "TensorRT-LLM": "intertoken_latency"}),
    Metric(name="itl_gap_ms", title="Chunk gap", unit="ms", better="lower",
           formula="every gap between consecutive chunks, pooled over all requests",
           elsewhere={"vLLM": "itl", "AIPerf": "ICL"}),
    Metric(name="e2e_ms", title="End to end", unit="ms", better="lower", formula="last token - start of the request",
           elsewhere={"vLLM": "e2el", "AIPerf": "request_latency"}),
    Metric(name="out_tok_s", title="Output tokens/s", unit="tok/s", better="higher",
           formula="output tokens of all requests / wall time", elsewhere={"vLLM": "output_throughput"}),
    Metric(name="total_tok_s", title="Total tokens/s", unit="tok/s", better="higher",
           formula="input and output tokens of all requests / wall time",
           elsewhere={"vLLM": "total_token_throughput"}),
    Metric(name="req_s", title="Requests/s", unit="req/s", better="higher", formula="completed requests / wall time",
           elsewhere={"vLLM": "request_throughput"}),
    Metric(name="goodput_req_s", title="Goodput", unit="req/s", better="higher",
           formula="requests that meet every objective (ttft, tpot, e2e) / wall time",
           elsewhere={"vLLM": "request_goodput", "AIPerf": "goodput"}),
    Metric(name="joules_per_token", title="Energy", unit="J/token", better="lower",
           formula="the GPU's energy counter over the cell, warm-up included / output tokens",
           elsewhere={"AIPerf": "energy per token"}),
    Metric(name="peak_memory_bytes", title="Peak memory", unit="bytes", better="lower",
           formula="CPU: peak anonymous resident memory of a fresh process that generates, minus that after its "
                   "imports (mapped files are not in it); CUDA: reserved by the allocator and graphs"),
    Metric(name="size_bytes", title="Size", unit="bytes", better="lower", formula="all files of the engine's folder"),
)

METRICS: dict[str, Metric] = {metric.name: metric for metric in _ALL}


def metric(name: str) -> Metric:
    """UnknownNameError names the near match."""
    if name not in METRICS:
        raise UnknownNameError("metric", name, METRICS)
    return METRICS[name]

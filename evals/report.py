"""Records of judgement: what was measured, on which items, with which numerics. Records only, no logic.

A figure that was not measured is ``None``, never 0. Intervals are two-sided 95 % unless a field says otherwise.
``Row`` is the contract that the terminal table, ``runs show --json``, the dashboard, the HTML report and the model
card all read.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from calib.scheme import Frozen
from evals.gpu_state import GpuState
from evals.loads import EndpointCell

VerdictWord = Literal["PASS", "FAIL", "INCONCLUSIVE", "ANOMALOUS", "BASELINE"]


class Estimate(Frozen):
    """A mean with its interval over ``n`` items (documents for text, questions for tasks)."""

    value: float
    ci_low: float
    ci_high: float
    n: int = Field(ge=1)


class Accuracy(Estimate):
    """Share of right answers (0..1) over the named tasks."""

    tasks: list[str]


class Item(Frozen):
    """One judged question: ``id`` is the sha256 of its content, ``prompt_sha256`` of the token ids it became."""

    id: str
    task: str
    prompt_sha256: str
    choice: int | None = None
    target: int | None = None
    correct: bool
    margin: float | None = Field(default=None, description="score of the target minus the best other choice's, in "
                                 "unit of the task's deciding metric (evals/accuracy.py)")
    answer: str | None = None
    n_choices: int | None = Field(default=None, ge=2, description="1/n_choices is the chance of a blind guess")
    document: str | None = Field(default=None, description="the passage it shares with other items, if it does")
    exact: bool = Field(default=False, description="the answer was generated; None there means it could not be read")


class TextScore(Frozen):
    """One scored document: summed NLL (nats) over ``tokens`` predicted tokens, and sums against the baseline."""

    id: str
    tokens: int = Field(ge=1)
    nll: float
    kl: float | None = Field(default=None, description="summed KL(baseline || this), nats")
    same_top1: int | None = Field(default=None, description="tokens whose most probable next token agrees")
    document: str | None = Field(default=None, description="its cluster; None: the text stands alone")


class Sample(Frozen):
    """A short greedy continuation of one text's beginning, for the sanity check and for reading side by side."""

    id: str
    prompt: str
    text: str
    token_ids: list[int]


class Target(Frozen):
    """Who was judged, and everything that must match before two reports may be compared."""

    name: str
    digest: str
    numerics: str = Field(description="device, compute dtype and operator tag; a different tag is a different target")
    tokenizer_digest: str
    template_sha256: str
    bos: bool


class EvalReport(Frozen):
    """Accuracy and fidelity of one target over fixed items. ``data_digest`` binds texts and questions."""

    target: Target
    baseline_digest: str | None
    data_digest: str
    harness: dict[str, str]
    seed: int
    texts: list[TextScore]
    items: list[Item]
    accuracy: Accuracy | None
    delta_nll: Estimate | None
    kl_mean: float | None
    same_top1: float | None
    flips: float | None
    faults: list[str] = Field(default_factory=list, description="NaN, empty or looping output; each one is a FAIL")
    kl_p99: float | None = Field(default=None, description="99th percentile over tokens of the coarse-grained KL, nats")
    flips_to_wrong: int | None = Field(default=None, description="items the baseline answered right and this wrong")
    flips_to_right: int | None = Field(default=None, description="items the baseline answered wrong and this right")
    samples: list[Sample] = Field(default_factory=list)
    unparsed: float | None = Field(default=None, description="share of generated answers that could not be read")


class Cell(Frozen):
    """One measured point of a sweep. Times in ms; percentiles by linear interpolation over ``n`` repeats.

    ``isl`` and ``osl`` are what was achieved; where nothing answered (``answered`` 0), what was asked for; None where
    nobody says (another tool's file, a trace that nothing answered).
    """

    mode: Literal["batch", "closed", "open"] = "batch"
    batch_size: int = Field(ge=1)
    isl: int | None = Field(ge=1)
    osl: int | None = Field(ge=1)
    n: int = Field(ge=1)
    ttft_ms: float | None
    ttft_ms_spread: float | None = Field(description="max - min over the repeats")
    tpot_ms: float | None
    tpot_ms_spread: float | None
    e2e_ms: float | None
    out_tok_s: float | None
    total_tok_s: float | None
    request_rate: float | None = Field(default=None, description="requests a second that an open loop sent")
    req_s: float | None = None
    goodput_req_s: float | None = None
    cached_share: float | None = Field(default=None, description="prompt tokens from the server's prefix cache")
    gpu: GpuState | None = None
    waited: float | None = Field(default=None, description="share of its time in which this process, ready to run, "
                                 "waited for a processor")
    answered: int | None = Field(default=None, description="requests of an endpoint that answered, over all repeats")
    invalid: str | None = Field(default=None, description="why the cell must not be used, if so")


class LatencySweep(Frozen):
    """Latency and throughput of one target. ``peak_memory_bytes``: see the metric dictionary."""

    target: Target
    device: str
    cells: list[Cell]
    peak_memory_bytes: int | None
    warmup: int
    repeats: int
    seed: int = 0
    loads: list[EndpointCell] = Field(default_factory=list, description="every run behind the cells of an endpoint")


class Reason(Frozen):
    """One line of a verdict: which check, what was found, what was allowed."""

    check: str
    word: VerdictWord
    found: str
    allowed: str


class Verdict(Frozen):
    """The outcome of a gate for exactly one engine digest under one named policy."""

    word: VerdictWord
    reason: str
    reasons: list[Reason]
    candidate_digest: str
    baseline_digest: str
    policy: str
    policy_sha256: str
    detectable: float | None = Field(default=None, description="smallest loss that the first check (the reasons' "
                                     "order) sees with 80 % power at this n, in that check's unit")
    warnings: list[str] = Field(default_factory=list, description="what should be looked at and does not decide")


class Row(Frozen):
    """One engine in one run: accuracy and speed side by side."""

    recipe: str
    kv_cache: str
    device: str
    emulated: bool
    engine_digest: str
    checkpoint_digest: str
    source_grid: str | None
    size_bytes: int
    accuracy: Accuracy | None
    delta_nll: Estimate | None
    kl_mean: float | None
    same_top1: float | None
    flips: float | None
    ttft_ms: float | None
    tpot_ms: float | None
    out_tok_s: float | None
    batch_size: int | None
    isl: int | None
    osl: int | None
    peak_memory_bytes: int | None
    verdict: VerdictWord | None
    verdict_reason: str | None
    cells: list[Cell] = Field(default_factory=list)

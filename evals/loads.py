"""Records of measured load: what any tool says about one load against one endpoint, and what ours says beyond it."""

from __future__ import annotations

from pydantic import Field, model_validator

from calib.scheme import Frozen


class Spread(Frozen):
    """A distribution over requests, in ms: each figure as the tool reports it, None where it does not."""

    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None


class LoadResult(Frozen):
    """One load against one endpoint, measured by ``tool``. Definitions are ``evals.metric``'s.

    ``tpot_ms`` excludes the first token; ``itl_gap_ms`` pools the gaps between chunks. ``isl`` and ``osl`` are achieved
    means; ``concurrency`` and ``request_rate`` what was asked for (None: not limited, or not told).
    """

    tool: str
    version: str | None = None
    model: str | None = None
    completed: int = Field(ge=0)
    failed: int | None = Field(default=None, ge=0)
    duration_s: float | None = Field(default=None, gt=0)
    concurrency: float | None = Field(default=None, gt=0)
    request_rate: float | None = Field(default=None, gt=0)
    isl: float | None = Field(default=None, ge=0)
    osl: float | None = Field(default=None, ge=0)
    ttft_ms: Spread = Spread()
    tpot_ms: Spread = Spread()
    itl_gap_ms: Spread = Spread()
    e2e_ms: Spread = Spread()
    req_s: float | None = Field(default=None, ge=0)
    out_tok_s: float | None = Field(default=None, ge=0)
    total_tok_s: float | None = Field(default=None, ge=0)
    goodput_req_s: float | None = Field(default=None, ge=0)


class Objectives(Frozen):
    """Service levels in ms (up to a day); a good request meets all that are given."""

    ttft_ms: float | None = Field(default=None, gt=0, le=86_400_000)
    tpot_ms: float | None = Field(default=None, gt=0, le=86_400_000)
    e2e_ms: float | None = Field(default=None, gt=0, le=86_400_000)

    @model_validator(mode="after")
    def _some(self) -> Objectives:
        if self.ttft_ms is self.tpot_ms is self.e2e_ms is None:
            raise ValueError("objectives without a limit: give ttft_ms, tpot_ms or e2e_ms")
        return self

    def met(self, ttft: float, tpot: float | None, e2e: float) -> bool:
        """Times in ms; a request of one token has no tpot and cannot miss it."""
        pairs = ((ttft, self.ttft_ms), (tpot, self.tpot_ms), (e2e, self.e2e_ms))
        return all(value is None or limit is None or value <= limit for value, limit in pairs)


class EndpointCell(LoadResult):
    """A load and what came back. ``failures`` by kind (``evals.sse``); ``good_share`` of all counted requests."""

    failures: dict[str, int] = Field(default_factory=dict)
    good_share: float | None = Field(default=None, ge=0, le=1)
    cached_share: float | None = Field(default=None, description="prompt tokens the server took from its prefix cache")
    peak_in_flight: int | None = Field(default=None, ge=0, description="most requests open at one time")
    lateness_ms: float | None = Field(default=None, description="99th percentile of sending after the due time")
    client_lag_ms: float = Field(ge=0, description="hold-up of the client's event loop that 1 % of the time exceeds")
    invalid: str | None = None

"""A sweep of endpoints as a file: which loads, against whom, how often. Everything is expanded before anything is sent.

    name: side-by-side
    tokenizer: SmolLM2-135M-Instruct      # prompts are made of its tokens
    loads:
      - {preset: chat, concurrency: [1, 4, 16]}
      - {isl: 512, osl: 64, rate: [0.5, 1], burstiness: 0.5}
      - {trace: monday.jsonl}
    targets:
      - {name: ours, url: "http://127.0.0.1:8000", model: demo}
      - {name: transformers, url: "http://127.0.0.1:8001", model: demo, prompts: text, ignore_eos: false}
    repeats: 3
    objectives: {ttft_ms: 500, tpot_ms: 50}

``preset`` names lengths (``evals.presets``); ``concurrency`` makes closed loops, ``rate`` open ones (requests a second,
gamma gaps), a trace brings its own times. Every target meets the very same prompts at the same offsets.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, ValidationError, field_validator, model_validator

from calib.scheme import Frozen
from calib.yaml_text import read_yaml
from evals.endpoint import Prompting
from evals.errors import LoadError
from evals.loads import Objectives
from evals.presets import preset
from evals.sse import Endpoint

#: What one client can do and anybody can wait for: sockets that a process may open, requests of a day and more, and
#: open loops of one request in a quarter of an hour up to more than a client can send.
MOST_USERS, MOST_REQUESTS, MOST_REPEATS = 10_000, 10_000_000, 10_000
SLOWEST, FASTEST = 0.001, 1e6


class Point(Frozen):
    """One cell: lengths, and a closed loop of ``concurrency``, an open one of ``rate``, or a ``trace``."""

    isl: int | None = None
    osl: int | None = None
    concurrency: int | None = None
    rate: float | None = None
    burstiness: float = 1.0
    requests: int | None = None
    trace: str | None = None

    @property
    def name(self) -> str:
        if self.trace is not None:
            return f"trace {Path(self.trace).name}"
        load = f"concurrency={self.concurrency}" if self.concurrency else f"rate={self.rate:g}/s"
        burst = "" if self.concurrency or self.burstiness == 1.0 else f" burstiness={self.burstiness:g}"
        return f"isl={self.isl} osl={self.osl} {load}{burst} n={self.requests}"


class LoadSpec(Frozen):
    """Cells in short: lengths (one pair, or a preset's) times concurrencies, or rates; or a trace."""

    preset: str | None = None
    isl: int | None = Field(default=None, ge=1)
    osl: int | None = Field(default=None, ge=1)
    concurrency: tuple[int, ...] = ()
    rate: tuple[float, ...] = ()
    burstiness: float = Field(default=1.0, gt=0, le=1000)
    requests: int | None = Field(default=None, ge=1, le=MOST_REQUESTS,
                                 description="null: ten times the concurrency, 50 in an open loop")
    trace: str | None = None

    @model_validator(mode="after")
    def _whole(self) -> LoadSpec:
        lengths = (self.isl, self.osl)
        if self.trace is not None:
            if self.preset or any(lengths) or self.concurrency or self.rate or self.requests:
                raise ValueError("a trace has its own lengths and times: give nothing beside it")
            return self
        if self.preset is not None and lengths != (None, None):
            raise ValueError("a preset has its own lengths: leave isl and osl out")
        if self.preset is None and None in lengths:
            raise ValueError("give a preset, or isl and osl")
        if not self.concurrency and not self.rate:
            raise ValueError("give concurrency (closed loop) or rate (open loop)")
        if min((*self.concurrency, *self.rate)) <= 0:
            raise ValueError("concurrency and rate must be positive")
        if max(self.concurrency, default=1) > MOST_USERS:
            raise ValueError(f"concurrency {max(self.concurrency):,} is more than the {MOST_USERS:,} connections that "
                             "one client can hold")
        if strange := [rate for rate in self.rate if not SLOWEST <= rate <= FASTEST]:
            raise ValueError(f"rate {strange[0]:g} is no rate that can be measured: {SLOWEST:g} to {FASTEST:,.0f} "
                             "requests a second are")
        if self.burstiness != 1.0 and not self.rate:
            raise ValueError("burstiness shapes an open loop: give rate")
        return self

    def points(self) -> list[Point]:
        if self.trace is not None:
            return [Point(trace=self.trace)]
        lengths = preset(self.preset) if self.preset else ((self.isl, self.osl),)
        found = []
        for isl, osl in lengths:
            found += [Point(isl=isl, osl=osl, concurrency=users, requests=self.requests or 10 * users)
                      for users in self.concurrency]
            found += [Point(isl=isl, osl=osl, rate=rate, burstiness=self.burstiness, requests=self.requests or 50)
                      for rate in self.rate]
        return found


class TargetSpec(Frozen):
    """An OpenAI endpoint. ``ignore_eos`` and token-id prompts are extensions that not every server knows."""

    name: str = Field(min_length=1)
    url: str
    model: str = Field(min_length=1)
    prompts: Prompting = "ids"
    ignore_eos: bool = True

    @field_validator("url")
    @classmethod
    def _address(cls, url: str) -> str:
        Endpoint.of(url)  # a LoadError that says what is wrong with it
        return url


class LoadPlan(Frozen):
    name: str = Field(min_length=1)
    tokenizer: str = Field(min_length=1)
    loads: tuple[LoadSpec, ...] = Field(min_length=1)
    targets: tuple[TargetSpec, ...] = Field(min_length=1)
    repeats: int = Field(default=1, ge=1, le=MOST_REPEATS)
    warmup: int = Field(default=2, ge=0)
    cooldown: int = Field(default=0, ge=0)
    timeout_s: float = Field(default=600.0, gt=0, le=86_400)
    objectives: Objectives | None = None
    seed: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _distinct(self) -> LoadPlan:
        names = [target.name for target in self.targets]
        if len(set(names)) < len(names):
            raise ValueError(f"targets {names} need different names")
        points = [point.name for point in self.points()]
        if len(set(points)) < len(points):
            raise ValueError("a load is listed twice")
        for point in self.points():
            if point.requests is not None and point.requests <= self.warmup + self.cooldown:
                raise ValueError(f"{point.name}: {self.warmup} warm-up and {self.cooldown} cool-down requests leave "
                                 "none")
        return self

    def points(self) -> list[Point]:
        return [point for load in self.loads for point in load.points()]


def load_plan(path: Path) -> LoadPlan:
    """LoadError names the key and the value that is wrong."""
    try:
        return LoadPlan.model_validate(read_yaml(path, LoadError, "Give a YAML file; see examples/sweep.yaml."))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "plan"
        raise LoadError(f"{path}: {place}: {first['msg']}", "See examples/sweep.yaml.") from error

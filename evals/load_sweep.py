"""A sweep of one endpoint: every load of a plan, repeated, resumable cell by cell, as a LatencySweep.

Repeats are summed up like an engine's: the median of each run's median, and max - min as spread; a cell is invalid when
any of its runs was, with the first reason. Every run itself is kept (``loads``), in order. A cell's ``batch_size`` is
the number of users of a closed loop; in an open loop, the most requests that were open at one time.
"""

from __future__ import annotations

import hashlib
import shutil
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from calib.artifact import canonical_json, sha256_hex
from calib.progress import Progress, Report, silent
from calib.text import Tokenizer
from evals.arrivals import offsets, read_trace
from evals.endpoint import Ask, Load, fixed_asks, highest_rate, measure, trace_asks
from evals.errors import LoadError
from evals.journal import Journal
from evals.load_plan import LoadPlan, Point, TargetSpec
from evals.loads import EndpointCell
from evals.records import save_record
from evals.report import Cell, LatencySweep, Target
from evals.target import describe


def endpoint_target(target: TargetSpec, tokenizer: Tokenizer) -> Target:
    """Who is measured: an address and a model's name are all that is known of a server."""
    digest = sha256_hex(canonical_json({"url": target.url, "model": target.model}))
    return describe(target.name, digest, f"endpoint {target.url}", tokenizer)


def asks_of(point: Point, plan: LoadPlan, target: TargetSpec, tokenizer: Tokenizer, repeat: int, folder: Path
            ) -> list[Ask]:
    """A cell's requests; other prompts in every repeat, the same for every target. Traces lie below ``folder``."""
    name = f"{plan.seed} {point.name} {repeat}"  # no prompt comes twice, in whichever load: servers cache prefixes
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big")
    if point.trace is not None:
        return trace_asks(tokenizer, read_trace(folder / point.trace), seed=seed, prompting=target.prompts)
    assert point.isl is not None
    assert point.osl is not None
    assert point.requests is not None
    times = None if point.rate is None else offsets(point.requests, point.rate, burstiness=point.burstiness, seed=seed)
    return fixed_asks(tokenizer, point.isl, point.osl, point.requests, times=None if times is None else times.tolist(),
                      seed=seed, prompting=target.prompts)


def sweep_endpoint(plan: LoadPlan, target: TargetSpec, tokenizer: Tokenizer, out: Path, *, folder: Path = Path(),
                   key: str | None = None, report: Report = silent) -> LatencySweep:
    """Measure every load of the plan at one target and write the latency-sweep artifact at ``out``; resumes per run."""
    who, points = endpoint_target(target, tokenizer), plan.points()
    identity = sha256_hex(canonical_json([who.model_dump(mode="json"), target.model_dump(mode="json"),
                                          plan.model_dump(mode="json", exclude={"loads", "targets", "name"})]))
    work = out.absolute().with_name(f".{out.name}.work")
    runs: list[list[EndpointCell]] = []
    with Journal(work / "runs.jsonl", identity) as journal:
        for number, point in enumerate(points):
            runs.append([])
            for repeat in range(plan.repeats):
                report(Progress("load", number * plan.repeats + repeat, len(points) * plan.repeats, "run",
                                f"{target.name}: {point.name}"))
                name = f"{point.name} repeat={repeat}"
                if name not in journal.done:
                    asks = asks_of(point, plan, target, tokenizer, repeat, folder)
                    found = measure(target.url, asks, load_of(point, plan, target), key=key)
                    journal.add({name: found.model_dump(mode="json")})
                runs[-1].append(EndpointCell.model_validate(journal.done[name]))
        report(Progress("load", len(points) * plan.repeats, len(points) * plan.repeats, "run"))
    record = LatencySweep(target=who, device=f"endpoint {target.url}", peak_memory_bytes=None, warmup=plan.warmup,
                          cells=[cell_of(point, each) for point, each in zip(points, runs, strict=True)],
                          repeats=plan.repeats, seed=plan.seed, loads=[cell for each in runs for cell in each])
    save_record(record, out, [])
    shutil.rmtree(work)
    return record


def load_of(point: Point, plan: LoadPlan, target: TargetSpec) -> Load:
    return Load(model=target.model, concurrency=point.concurrency, warmup=plan.warmup, cooldown=plan.cooldown,
                timeout_s=plan.timeout_s, ignore_eos=target.ignore_eos, objectives=plan.objectives)


def cell_of(point: Point, runs: Sequence[EndpointCell]) -> Cell:
    """One cell of repeated runs; figures that no run has are None. Lengths are the plan's where nothing answered."""
    def middle(value: Callable[[EndpointCell], float | None]) -> tuple[float | None, float | None]:
        known = [found for run in runs if (found := value(run)) is not None]
        return (statistics.median(known), max(known) - min(known)) if known else (None, None)
    ttft, ttft_spread = middle(lambda run: run.ttft_ms.p50)
    tpot, tpot_spread = middle(lambda run: run.tpot_ms.p50)
    isl, osl = (middle(pick)[0] for pick in (lambda run: run.isl, lambda run: run.osl))
    in_flight = max(run.peak_in_flight or 1 for run in runs)
    reasons = [run.invalid for run in runs if run.invalid]
    return Cell(
        mode="closed" if point.concurrency else "open", batch_size=point.concurrency or in_flight, n=len(runs),
        isl=whole_tokens(isl or point.isl), osl=whole_tokens(osl or point.osl),
        request_rate=point.rate or middle(lambda run: run.request_rate)[0], ttft_ms=ttft, ttft_ms_spread=ttft_spread,
        tpot_ms=tpot, tpot_ms_spread=tpot_spread, e2e_ms=middle(lambda run: run.e2e_ms.p50)[0],
        out_tok_s=middle(lambda run: run.out_tok_s)[0], total_tok_s=middle(lambda run: run.total_tok_s)[0],
        req_s=middle(lambda run: run.req_s)[0], goodput_req_s=middle(lambda run: run.goodput_req_s)[0],
        cached_share=middle(lambda run: run.cached_share)[0], invalid=reasons[0] if reasons else None,
        answered=sum(run.completed for run in runs))


def whole_tokens(mean: float | None) -> int | None:
    """A mean length as a cell's whole number, at least 1; None stays None."""
    return None if mean is None else max(1, round(mean))


def find_rate(plan: LoadPlan, target: TargetSpec, tokenizer: Tokenizer, bounds: tuple[float, float], *,
              share: float = 0.9, key: str | None = None, report: Report = silent
              ) -> tuple[float | None, list[tuple[float, EndpointCell]]]:
    """The highest rate at which ``share`` of requests meets the plan's objectives; its one load gives the lengths."""
    lengths = {(point.isl, point.osl) for point in plan.points()}
    if len(lengths) != 1 or plan.objectives is None or None in next(iter(lengths)):
        raise LoadError("a search for the highest rate needs one pair of lengths, and objectives",
                           "Give one isl and osl, and a limit like ttft=500.")
    tried = 0

    def measured(rate: float) -> EndpointCell:
        nonlocal tried
        tried += 1
        report(Progress("search", tried, None, "rate", f"{rate:.3g} requests/s"))
        isl, osl = next(iter(lengths))
        count = max(20, plan.points()[0].requests or 50)
        point = Point(isl=isl, osl=osl, rate=rate, requests=count + plan.warmup + plan.cooldown)
        return measure(target.url, asks_of(point, plan, target, tokenizer, tried, Path()),
                       load_of(point, plan, target), key=key)
    return highest_rate(measured, *bounds, share=share)

"""``sweep`` of endpoints: from a command line or a plan file to one artifact a target, and the table side by side."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calib.artifact import Artifact
from toolkit.errors import UsageError
from toolkit.refs import resolve
from toolkit.stages import Workshop

if TYPE_CHECKING:
    from calib.text import Tokenizer
    from evals.load_plan import LoadPlan, TargetSpec
    from evals.report import LatencySweep

_TOKENIZER_KINDS = ("model", "quantized-checkpoint", "engine")


@dataclass(frozen=True, slots=True)
class EndpointOptions:
    """What a command line says about one endpoint; text as it was typed."""

    url: str
    model: str
    tokenizer: str
    preset: str | None
    lengths: str | None
    concurrency: str | None
    rate: str | None
    burstiness: float
    requests: int | None
    trace: Path | None
    slo: str | None
    prompts: str
    ignore_eos: bool
    warmup: int
    repeats: int
    seed: int


def plan_of(options: EndpointOptions) -> LoadPlan:
    """The plan that the options spell. UsageError or pydantic's ValidationError for what is no load."""
    from evals.load_plan import LoadPlan

    load: dict[str, Any] = {"trace": str(options.trace)} if options.trace else {
        "preset": options.preset, "concurrency": _numbers(options.concurrency, int, "--concurrency"),
        "rate": _numbers(options.rate, float, "--rate"), "burstiness": options.burstiness,
        "requests": options.requests}
    if options.lengths:
        parts = re.fullmatch(r"([0-9]{1,9})x([0-9]{1,9})", options.lengths.strip().lower())
        if not parts:
            raise UsageError(f"--lengths {options.lengths!r} is not input x output tokens", "Write it like 512x64.")
        load |= {"isl": int(parts[1]), "osl": int(parts[2])}
    return LoadPlan.model_validate({
        "name": "sweep", "tokenizer": options.tokenizer, "loads": [load], "repeats": options.repeats,
        "warmup": options.warmup, "seed": options.seed, "objectives": objectives_of(options.slo),
        "targets": [{"name": options.model, "url": options.url, "model": options.model, "prompts": options.prompts,
                     "ignore_eos": options.ignore_eos}]})


def _numbers(text: str | None, kind: type[int] | type[float], option: str) -> list[int] | list[float]:
    try:
        return [kind(part) for part in text.split(",")] if text else []
    except ValueError as error:
        raise UsageError(f"{option} {text!r} is no list of numbers", "Write it like 1,4,16.") from error


def objectives_of(text: str | None) -> dict[str, float] | None:
    """``ttft=500,tpot=50,e2e=4000`` in ms."""
    if text is None:
        return None
    found = {}
    for part in text.split(","):
        match = re.fullmatch(r"(ttft|tpot|e2e)=(\d+(?:\.\d+)?)", part.strip())
        if not match:
            raise UsageError(f"{part!r} is no service level", "Write it like ttft=500,tpot=50 (ms).")
        found[f"{match[1]}_ms"] = float(match[2])
    return found


def bounds_of(text: str) -> tuple[float, float]:
    """``0.5:20``: where the highest rate is looked for."""
    from evals.load_plan import FASTEST, SLOWEST

    first, _, last = text.partition(":")
    try:
        low, high = float(first), float(last)
    except ValueError as error:
        raise UsageError(f"--find-rate {text!r} is no range", "Write it like 0.5:20 (requests a second).") from error
    if not SLOWEST <= low < high <= FASTEST:
        raise UsageError(f"--find-rate {text!r} gives no search: the first is below the second, and both lie within "
                         f"{SLOWEST:g} and {FASTEST:,.0f}", "Write it like 0.5:20 (requests a second).")
    return low, high


def tokenizer_of(shop: Workshop, name: str) -> Tokenizer:
    from calib.checkpoint import QuantizedCheckpoint
    from calib.text import Tokenizer
    from engines.engine import Engine

    ref = resolve(name, shop.home, shop.store, offline=shop.offline).of_kind(*_TOKENIZER_KINDS)
    if ref.kind == "engine":
        return Engine.open(ref.path).tokenizer()
    return Tokenizer.open(ref.path) if ref.kind == "model" else QuantizedCheckpoint.open(ref.path).tokenizer()


def run_plan(shop: Workshop, plan: LoadPlan, folder: Path, out: Path | None, key: str | None
             ) -> list[tuple[LatencySweep, Artifact]]:
    """Measure every target of a plan in turn. What was measured is kept in home (or below ``out``) and not repeated."""
    from evals.load_sweep import sweep_endpoint
    from evals.records import load_record
    from evals.report import LatencySweep

    tokenizer, done = tokenizer_of(shop, plan.tokenizer), []
    for target in plan.targets:
        place = _place(shop, plan, target, tokenizer, out)
        if out is not None and place.exists():
            raise UsageError(f"{place} exists already", "Choose another folder with --out.")
        artifact = shop.standing(place, "latency-sweep")
        if artifact is not None and failed(load_record(place, LatencySweep)):
            shutil.rmtree(place)  # a server that was down is asked again
            artifact = None
        if artifact is None:
            sweep_endpoint(plan, target, tokenizer, place, folder=folder, key=key, report=shop.report)
            artifact = Artifact.open(place, "latency-sweep")
            shop.store.remember(artifact)
        done.append((load_record(place, LatencySweep), artifact))
    return done


def failed(sweep: LatencySweep) -> bool:
    """Whether no cell has a figure that may be used."""
    return all(cell.invalid for cell in sweep.cells)


def unmeasured(sweeps: Sequence[LatencySweep]) -> list[str]:
    """The targets of which nothing may be used: side by side with them nothing is compared."""
    return [sweep.target.name for sweep in sweeps if failed(sweep)]


def _place(shop: Workshop, plan: LoadPlan, target: TargetSpec, tokenizer: Tokenizer, out: Path | None) -> Path:
    label = re.sub(r"[^A-Za-z0-9._-]", "-", target.name)
    if out is not None:
        return out if len(plan.targets) == 1 else out / label
    settings = plan.model_dump(mode="json", exclude={"targets", "name"})
    return shop.place("latency-sweep", f"endpoint-{label}", plan=settings, target=target.model_dump(mode="json"),
                      tokenizer=tokenizer.digest)

"""A GPU engine's Plan with its kernels chosen: linears alone first, then every kernel inside whole decode steps.

Both stages keep what they chose in the folder of tuning caches, so that a second build makes the same engine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from calib.artifact import canonical_json, sha256_hex, write_atomic
from calib.progress import Report
from calib.scheme import Frozen, Grid, Scheme
from engines.build.plan_gpu import check_gpu, check_linears, make_gpu_plan
from engines.build.tune_gpu import tune_gpu
from engines.build.tune_step import StepTiming, few_layers, tune_step
from engines.device import Device
from engines.errors import EngineError
from engines.models.decoder import ActivationKeys
from engines.plan import EngineSpec, KernelChoice, Plan, fused_program
from engines.runtime.cuda.memory import release


class StepChoices(Frozen):
    """What tuning whole steps chose, and how much it gained."""

    kernels: tuple[KernelChoice, ...]
    timings: tuple[StepTiming, ...]


_Cache = TypeAdapter(dict[str, StepChoices])


def choose_gpu(config: Mapping[str, Any], schemes: Mapping[str, Scheme], kv: Grid, spec: EngineSpec, device: Device,
               keys: ActivationKeys, tuning: Path | None, report: Report) -> tuple[Plan, tuple[Frozen, ...]]:
    """The Plan and the timings behind it. ``tuning``: the folder of tuning caches.

    EngineError before anything is timed when the device or the memory cap cannot take the engine.
    """
    check_gpu(spec, schemes, kv, device)
    program = fused_program(config, schemes, keys)[2]
    check_linears(program, device)
    first = tune_gpu(program, device, "none", spec.max_num_tokens, spec.deterministic, None, report)
    plan = make_gpu_plan(config, schemes, kv, spec, device, keys, first.choices)
    if spec.tune == "none" or device.kind != "cuda":
        return plan, tuple(first.timings)
    tuned = tune_gpu(program, device, spec.tune, spec.max_num_tokens, spec.deterministic, tuning, report)
    small = make_gpu_plan(few_layers(config), schemes, kv, spec, device, keys, tuned.choices)
    path = None if tuning is None else tuning / f"tuning-step-{sha256_hex(device.model_dump_json().encode())[:16]}.json"
    known = _read(path)
    key = sha256_hex(canonical_json([small.model_dump(mode="json"), spec.tune]))
    if key not in known:
        if not tuned.tops:  # deterministic: first choices are constrained, nothing competes
            return make_gpu_plan(config, schemes, kv, spec, device, keys, tuned.choices), tuple(tuned.timings)
        kernels, timings = tune_step(small, spec.tune, tuned.tops, report)
        known[key] = StepChoices(kernels=tuple(kernels), timings=tuple(timings))
        _write(path, known)
    release()
    chosen = known[key]
    linears = [choice for choice in chosen.kernels if choice.op == "linear"]
    others = [choice for choice in chosen.kernels if choice.op != "linear"]
    plan = make_gpu_plan(config, schemes, kv, spec, device, keys, linears, others)
    return plan, (*tuned.timings, *chosen.timings)


def _read(path: Path | None) -> dict[str, StepChoices]:
    if path is None or not path.is_file():
        return {}
    try:
        return _Cache.validate_json(path.read_bytes())
    except ValidationError as error:
        raise EngineError(f"the tuning cache {path} is damaged", "Remove it; it is made again.") from error


def _write(path: Path | None, known: Mapping[str, StepChoices]) -> None:
    if path is None:
        return
    data = {key: its.model_dump(mode="json") for key, its in sorted((_read(path) | dict(known)).items())}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps(data, indent=1).encode())
    except OSError as error:
        raise EngineError(f"cannot write the tuning cache {path}: {error.strerror}", "Choose a writable folder."
                          ) from error

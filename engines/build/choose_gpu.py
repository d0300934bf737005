"""A GPU engine's Plan with its kernels chosen: linears alone first, then every kernel inside whole decode steps.

Both stages keep what they chose in the folder of tuning caches, so that a second build makes the same engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from calib.artifact import canonical_json, sha256_hex
from calib.progress import Report
from calib.scheme import Frozen, Grid, Scheme
from engines.build.plan_gpu import check_gpu, check_linears, make_gpu_plan
from engines.build.tune_gpu import tune_gpu
from engines.build.tune_step import StepTiming, few_layers, tune_step
from engines.build.tuning_cache import TuningCache
from engines.device import Device
from engines.models.decoder import ActivationKeys
from engines.plan import EngineSpec, KernelChoice, Plan, fused_program
from engines.runtime.cuda.memory import release


class StepChoices(Frozen):
    """What tuning whole steps chose, and how much it gained."""

    kernels: tuple[KernelChoice, ...]
    timings: tuple[StepTiming, ...]


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
    if spec.deterministic:  # first choices are constrained, nothing competes
        return make_gpu_plan(config, schemes, kv, spec, device, keys, tuned.choices), tuple(tuned.timings)
    small = make_gpu_plan(few_layers(config), schemes, kv, spec, device, keys, tuned.choices)
    kept = TuningCache(tuning, "tuning-step", device, StepChoices)
    key = sha256_hex(canonical_json([small.model_dump(mode="json"), spec.tune]))
    chosen = kept.read().get(key)
    if chosen is None:
        kernels, timings = tune_step(small, spec.tune, tuned.tops, report)
        chosen = StepChoices(kernels=tuple(kernels), timings=tuple(timings))
        kept.add({key: chosen})
    release()
    linears = [choice for choice in chosen.kernels if choice.op == "linear"]
    others = [choice for choice in chosen.kernels if choice.op != "linear"]
    plan = make_gpu_plan(config, schemes, kv, spec, device, keys, linears, others)
    return plan, (*tuned.timings, *chosen.timings)

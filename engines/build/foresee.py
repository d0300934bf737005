"""What of a build can be refused before there is a checkpoint: asked before hours of calibration, not after.

A model's config.json and the EngineSpec decide whether the lengths, the batch and the memory can be had at all; weights
only take more of the memory. So the same questions are asked twice: with no weights before anything is calibrated, and
with the least that the fused program's weights can take before anything is timed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from calib.scheme import Grid
from engines.device import Device, detect, nominal
from engines.models.facts import ModelFacts
from engines.models.families import model_facts
from engines.plan import EngineSpec, check_batch, check_cap, check_step, cpu_limits, least_weight_bytes
from engines.program import Program


def foresee(config: Mapping[str, Any], kv: Grid, spec: EngineSpec, target: str | None = None) -> None:
    """Refuse what no checkpoint of this model could be built for, here or (``target``) elsewhere.

    UnknownNameError for an architecture or a device, NoDeviceError, EngineError in words and numbers for a length, a
    batch or a memory cap.
    """
    device = detect(spec.device) if target is None else nominal(target)
    facts = model_facts(config)
    check_step(spec, facts)
    check_batch(spec)
    check_room(spec, facts, kv, device, here=target is None)


def check_room(spec: EngineSpec, facts: ModelFacts, kv: Grid, device: Device, program: Program | None = None, *,
               here: bool = True) -> None:
    """EngineError when one sequence does not fit into the cap (or the device, where it is ``here``) beside the weights
    of ``program``; None counts no weights."""
    if here:
        check_cap(spec.memory, device)
    if device.runs_triton:
        from engines.build.plan_gpu import check_least, stored_bytes  # Triton is an optional dependency

        check_least(spec, facts, kv, 0 if program is None else stored_bytes(program), device)
        return
    cpu_limits(spec, facts, kv, 0 if program is None else least_weight_bytes(program), device if here else None)

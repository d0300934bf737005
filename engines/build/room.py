"""Whether one sequence, and a step, fit beside the weights: asked before anything is timed, and before calibration.

The weights are counted as the least that any kernel's layout takes; the plan itself knows them exactly, and later.
"""

from __future__ import annotations

from calib.scheme import Grid
from engines.device import Device
from engines.models.facts import ModelFacts
from engines.plan import EngineSpec, check_cap, cpu_limits, least_weight_bytes
from engines.program import Program


def check_room(spec: EngineSpec, facts: ModelFacts, kv: Grid, device: Device, program: Program, *, here: bool = True
               ) -> None:
    """EngineError when one sequence does not fit into the cap (or the device, where it is ``here``) beside the weights
    of ``program``."""
    if here:
        check_cap(spec.memory, device)
    if device.runs_triton:
        from engines.build.plan_gpu import check_least, stored_bytes  # Triton is an optional dependency

        check_least(spec, facts, kv, stored_bytes(program), device)
        return
    cpu_limits(spec, facts, kv, least_weight_bytes(program), device if here else None)

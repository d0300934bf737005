"""What ``quantize`` would be refused for, found from headers alone.

Apart from ``calibrate`` because that brings modelopt, which takes seconds to import: whoever only wants to know, or
finds the checkpoint made, does not wait for it.
"""

from __future__ import annotations

from pathlib import Path

from calib.checkpoint import QuantizedCheckpoint
from calib.choices import KvChoice
from calib.estimates import check_bound
from calib.hardware import check_default_device, check_hardware
from calib.plan import CalibrationPlan, LayerwiseChoice, check_disk, layerwise_obstacle, make_plan
from calib.recipe import Recipe
from calib.source import resolve_model


def foresee(model: str | Path, recipe: Recipe, kv_cache: KvChoice = "bf16", *, out: Path | None = None,
            length: int | None = None, offline: bool = False, tp: int = 1, layerwise: LayerwiseChoice = "auto",
            memory: int | None = None) -> tuple[CalibrationPlan, QuantizedCheckpoint]:
    """The plan and the opened model, or whatever ``quantize`` would be refused for before it reads data.

    Cheap: headers only. HardwareError, DiskSpaceError, MemoryBoundError, MissingWeightsError, and the errors of
    ``make_plan``.
    """
    check_hardware(recipe)
    check_default_device()
    plan = make_plan(model, recipe, kv_cache, out=out, length=length, offline=offline, tp=tp, layerwise=layerwise,
                     memory=memory)
    check_disk(plan)
    check_memory(plan, asked=memory is not None)
    return plan, QuantizedCheckpoint.open(resolve_model(model, offline=offline))


def check_memory(plan: CalibrationPlan, *, asked: bool) -> str:
    """A warning, or MemoryBoundError, where even the way that ``plan`` goes needs more than its bound."""
    way = "layer by layer" if plan.layerwise else "the whole model at once"
    other = not plan.layerwise and not layerwise_obstacle(plan.recipe) and plan.recipe.method != "none"
    return check_bound(plan.memory_bytes, plan.memory_bound_bytes, asked=asked, way=way,
                       remedy="Go layer by layer (--layerwise on). " if other else "")

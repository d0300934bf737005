"""What ``quantize`` would be refused for, found from headers alone.

Apart from ``calibrate`` because that brings modelopt, which takes seconds to import: whoever only wants to know, or
finds the checkpoint made, does not wait for it.
"""

from __future__ import annotations

from pathlib import Path

from calib.checkpoint import QuantizedCheckpoint
from calib.choices import KvChoice
from calib.hardware import check_default_device, check_hardware
from calib.plan import CalibrationPlan, LayerwiseChoice, check_disk, make_plan
from calib.recipe import Recipe
from calib.source import resolve_model


def foresee(model: str | Path, recipe: Recipe, kv_cache: KvChoice = "bf16", *, out: Path | None = None,
            length: int | None = None, offline: bool = False, tp: int = 1, layerwise: LayerwiseChoice = "auto",
            memory: int | None = None) -> tuple[CalibrationPlan, QuantizedCheckpoint]:
    """The plan and the opened model, or whatever ``quantize`` would be refused for before it reads data.

    Cheap: headers only. HardwareError, DiskSpaceError, MissingWeightsError, and the errors of ``make_plan``.
    """
    check_hardware(recipe)
    check_default_device()
    plan = make_plan(model, recipe, kv_cache, out=out, length=length, offline=offline, tp=tp, layerwise=layerwise,
                     memory=memory)
    check_disk(plan)
    return plan, QuantizedCheckpoint.open(resolve_model(model, offline=offline))

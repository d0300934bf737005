"""What engines will say of a calibration's result, asked before it begins.

``calib`` knows what it writes and may not know engines; engines need no more than config.json and schemes to answer. So
they meet here: ``planned`` puts this toolkit's own row among a plan's loaders (and a warning where it says no),
``refuse_for_engine`` stops whoever wants an engine at what its build would be refused for, before hours of calibration.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calib.errors import ToolkitError
from calib.loaders import Loader
from calib.plan import CalibrationPlan

if TYPE_CHECKING:
    from calib.checkpoint import QuantizedCheckpoint
    from calib.choices import KvChoice
    from calib.recipe import Recipe
    from calib.scheme import Grid, Scheme
    from calib.text import Tokenizer
    from engines.build.builder import Described
    from toolkit.job import Limits

OURS = "this toolkit"
#: A device of each kind that engines are built for; the GPU stands for those with all number formats.
_PLACES = {"a CPU": "cpu", "a GPU": "sm_90"}


@dataclass(frozen=True, slots=True)
class Foreseen:
    """A checkpoint before there is one: what an engine's plan needs to know of it."""

    plan: CalibrationPlan
    source: QuantizedCheckpoint

    @property
    def schemes(self) -> dict[str, Scheme]:
        return self.plan.schemes

    @property
    def kv(self) -> Grid:
        return self.plan.kv

    @property
    def config(self) -> dict[str, Any]:
        return self.source.config

    def tokenizer(self) -> Tokenizer:
        return self.source.tokenizer()


def planned(plan: CalibrationPlan, config: Mapping[str, Any]) -> CalibrationPlan:
    """The plan with the engines' own answer: a row among its loaders, a warning where none of ours runs the result."""
    from engines.device import NoDeviceError

    said, unasked = {}, []
    for place, target in _PLACES.items():
        try:
            said[place] = _obstacle(plan, config, target)
        except NoDeviceError as error:  # a missing package says nothing of the checkpoint
            unasked.append(f"{place} was not asked: {error.message}")
    where = [place for place, reason in said.items() if not reason]
    reasons = list(dict.fromkeys(reason for reason in said.values() if reason))
    note = "; ".join([*([f"on {' and '.join(where)}"] if where else []),
                      *(f"not on {place}: {reason}" for place, reason in said.items() if where and reason),
                      *([] if where else reasons[:1]), *unasked])
    ours = Loader(runtime=OURS, loads=bool(where), note=note, source="its engine builder, asked")
    rows, warnings = (ours, *plan.loaders), plan.warnings
    if not where:
        others = ", ".join(row.runtime for row in plan.loaders if row.loads)
        warnings = (*warnings, f"no engine of this toolkit runs the result ({reasons[0]}); " + (
            f"its format is one that {others} can load" if others else "no other runtime is known to load it either"))
    return plan.model_copy(update={"loaders": rows, "warnings": warnings})


def runs_here(plan: CalibrationPlan) -> bool:
    """What a ``planned`` plan says of this toolkit's own engines."""
    return any(row.runtime == OURS and row.loads for row in plan.loaders)


def _obstacle(plan: CalibrationPlan, config: Mapping[str, Any], target: str) -> str:
    """Why no engine on such a device runs the result, whatever its limits; empty where one does. NoDeviceError where
    what would answer is not installed."""
    from engines.build.builder import check_runs
    from engines.device import nominal

    device = nominal(target)
    try:
        check_runs(config, plan.schemes, plan.kv, device)
    except ToolkitError as error:
        return error.message
    return ""


def refuse_for_engine(model: Path, recipe: Recipe, kv_cache: KvChoice, check: Callable[[Described], None], *,
                      length: int, offline: bool = False) -> None:
    """Whatever calibrating ``model`` would be refused for, and then what ``check`` (an engine's build) would refuse."""
    from calib.foresee import foresee

    check(Foreseen(*foresee(model, recipe, kv_cache, length=length, offline=offline)))


def build_with(limits: Limits) -> Callable[[Described], None]:
    """The check of an engine that is built here with these limits."""
    from engines.build.builder import foresee

    return lambda checkpoint: foresee(checkpoint, limits.spec(checkpoint.config))

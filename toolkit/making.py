"""From any REF to what a verb needs: an engine, a baseline, a report. What is missing is made once, in home."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit import stages
from toolkit.errors import UsageError
from toolkit.foreseeing import build_with, refuse_for_engine
from toolkit.job import Calibration, EngineJob, Limits
from toolkit.refs import ENGINES, Ref, resolve
from toolkit.stages import Workshop

if TYPE_CHECKING:
    from calib.checkpoint import QuantizedCheckpoint
    from calib.choices import KvChoice
    from calib.recipe import Recipe
    from engines.build.builder import Described
    from engines.engine import Engine
    from evals.data import EvalData


def data_folder(shop: Workshop, name: str) -> EvalData:
    """A prepared data folder of home (``calibration``, ``choose``, ``evaluation``) or any path."""
    from evals.data import EvalData

    path = Path(name)
    return EvalData.load(path if path.is_dir() else shop.home.data / name)


def material(shop: Workshop, model: Path, recipe: Recipe, kv_cache: KvChoice, settings: Calibration, seed: int
             ) -> stages.Material:
    """The model with home's calibration data, refused where that overlaps home's evaluation data; a recipe that needs
    no data gets none.

    DataMissingError says what to run when there is no data, before anything is read.
    """
    from calib.recipe import load_recipe, ordinary_recipes
    from evals.errors import DataMissingError

    if not recipe.needs_data(kv_cache):
        return stages.Material(model, stages.model_digest(model), None, [], seed)
    for name in (settings.data, settings.choose):
        if not (Path(name).is_dir() or (shop.home.data / name).is_dir()):
            free = ", ".join(name for name in ordinary_recipes() if not load_recipe(name).needs_data())
            raise DataMissingError(f"calibrating {model.name} by {recipe.name} (KV cache {kv_cache}) needs text, and "
                                   f"{shop.home.data / name} is not there", "Run `toolkit data prepare` (with the same "
                                   f"--home), or take a recipe that needs none: {free}.")
    judged = data_folder(shop, "evaluation") if (shop.home.data / "evaluation").is_dir() else None
    return stages.material(shop, model, data_folder(shop, settings.data), data_folder(shop, settings.choose), settings,
                           seed, judged)


def model_folder(shop: Workshop, ref: Ref) -> Path:
    from calib.source import resolve_model

    return resolve_model(ref.of_kind("model").path, offline=shop.offline)


def checkpoint_of(shop: Workshop, ref: Ref, engine: EngineJob, check: Callable[[Described], None], seed: int = 0
                  ) -> QuantizedCheckpoint:
    """The checkpoint a REF is, or the one a model becomes by a recipe. ``check`` is what will be built of it: what that
    is refused for is said before a model is calibrated."""
    from calib.checkpoint import QuantizedCheckpoint

    if ref.kind == "quantized-checkpoint":
        return QuantizedCheckpoint.open(ref.path)
    model = model_folder(shop, ref)
    if engine == EngineJob(recipe="bf16"):
        return QuantizedCheckpoint.open(model)
    from calib.config import positions, read_config
    from calib.recipe import load_recipe

    recipe, usual = load_recipe(engine.recipe), Calibration()
    length = min(usual.length, positions(read_config(model)) or usual.length)
    # Nobody said how much text: as many rows as the recipe asks for, as long as the model reads.
    settings = usual.model_copy(update={"rows": max(usual.rows, recipe.rows), "length": length})
    refuse_for_engine(model, recipe, engine.kv_cache, check, length=length, offline=shop.offline)
    drawn = material(shop, model, recipe, engine.kv_cache, settings, seed + recipe.seed)
    return stages.checkpoint(shop, replace(drawn, seed=seed), engine)


def engine_of(shop: Workshop, name: str, engine: EngineJob | None = None, limits: Limits | None = None) -> Engine:
    """The engine a REF is, or the one built for this device from the checkpoint or model it is.

    ``engine`` and ``limits`` say how what is missing is made; UsageError when they are given for an engine, which is
    what it is.
    """
    from engines.engine import Engine

    ref = resolve(name, shop.home, shop.store, offline=shop.offline)
    if ref.kind in ENGINES:
        if engine is not None or limits is not None:
            raise UsageError(f"{name} is an engine: its recipe and limits are fixed",
                             "Leave --recipe, --kv-cache and --max-seq-len out, or name a model.")
        return Engine.open(ref.path) if ref.kind == "engine" else stages.finished(shop, ref.path)
    ref.of_kind("model", "quantized-checkpoint")
    if ref.kind == "quantized-checkpoint" and engine is not None:
        raise UsageError(f"{name} is a checkpoint: its recipe is fixed", "Leave --recipe and --kv-cache out.")
    wanted, limits = engine or EngineJob(recipe="bf16"), limits or Limits()
    source = checkpoint_of(shop, ref, wanted, build_with(limits))
    label = stages.label_of(wanted) if ref.kind == "model" else "engine"
    return stages.engine(shop, source, limits, label)

"""``plan``: what a calibration would do, before anything runs."""

from __future__ import annotations

from typing import Annotated

import typer

from toolkit.calibrating import (
    BoundOption,
    LayerwiseOption,
    LengthOption,
    RowsOption,
    TpOption,
    bound_of,
    explain,
    text_size,
    with_rows,
)
from toolkit.options import ExplainOption, KvOption, ModelArgument, RecipeOption
from toolkit.session import Session, verb


def register(app: typer.Typer) -> None:
    @verb(app, "plan")
    def plan(session: Session, model: ModelArgument, recipe: RecipeOption, kv_cache: KvOption = "bf16",
             layerwise: LayerwiseOption = "auto", memory: BoundOption = None, tp: TpOption = 1,
             rows: RowsOption = None, length: LengthOption = None,
             rehearse: Annotated[bool, typer.Option("--rehearse/--no-rehearse", help="Measure this machine on small "
                                                    "models to say time and memory (some seconds, once a recipe); "
                                                    "without it no time is said.")] = False,
             explained: ExplainOption = False) -> None:
        """Say what calibrating would do. Nothing is calibrated.

        Coverage module by module, group sizes, cuts over devices, bytes on disk, time, memory, and which runtimes can
        load the result. A folder with config.json alone will do: no weights, no tokenizer.
        """
        from rich.text import Text

        from calib.config import read_config
        from calib.hardware import obstacle
        from calib.plan import make_plan
        from calib.recipe import load_recipe
        from toolkit.errors import UsageError
        from toolkit.foreseeing import planned
        from toolkit.making import model_folder
        from toolkit.refs import resolve
        from toolkit.report.judged import plan_parts, recipe_parts
        from toolkit.stages import Workshop
        from toolkit.store import RunStore

        chosen, bound = with_rows(load_recipe(recipe), rows), bound_of(memory)
        if rehearse and (reason := obstacle(chosen)):
            raise UsageError(f"--rehearse calibrates small models by recipe {chosen.name}, which cannot be done here: "
                             f"{reason}", "Leave --rehearse out: all but time is planned without it.")
        rows, length = text_size(chosen, kv_cache, rows, length)
        with RunStore(session.home.store) as store:
            shop = Workshop(session.home, store, offline=session.offline)
            folder = model_folder(shop, resolve(model, session.home, store, offline=session.offline))
            found = planned(make_plan(folder, chosen, kv_cache=kv_cache, length=length, tp=tp, layerwise=layerwise,
                                      memory=bound), read_config(folder))
        if rehearse:
            from calib.rehearsal import estimate

            found = estimate(found, rows, length, session.home.path / "rehearsals")
        settings = explain(recipe, chosen) if explained else []
        origins = {"origins": {setting.key: setting.origin for setting in settings}} if explained else {}
        lead = [] if found.weights_here else [Text(f"planned from {found.basis}", style="yellow")]
        session.show(found.model_dump(mode="json") | origins, [str(folder)], *lead, *plan_parts(found, rehearse),
                     *recipe_parts(settings)[:explained])

"""``plan``: what a calibration would do, before anything runs."""

from __future__ import annotations

import typer

from toolkit.options import KvOption, ModelArgument, RecipeOption
from toolkit.session import Session, verb


def register(app: typer.Typer) -> None:
    @verb(app, "plan")
    def plan(session: Session, model: ModelArgument, recipe: RecipeOption, kv_cache: KvOption = "bf16") -> None:
        """Say what calibrating would do. Nothing is calibrated.

        Coverage module by module, group sizes, time, memory, disk, and which runtimes can load the result.
        """
        from calib.plan import make_plan
        from calib.recipe import load_recipe
        from toolkit.making import model_folder
        from toolkit.refs import resolve
        from toolkit.report.judged import plan_parts
        from toolkit.stages import Workshop
        from toolkit.store import RunStore

        chosen = load_recipe(recipe)
        with RunStore(session.home.store) as store:
            shop = Workshop(session.home, store, offline=session.offline)
            folder = model_folder(shop, resolve(model, session.home, store, offline=session.offline))
            found = make_plan(folder, chosen, kv_cache=kv_cache)
        session.show(found.model_dump(mode="json"), [str(folder)], *plan_parts(found))

"""``quantize``: a model becomes a validated QuantizedCheckpoint."""

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
from toolkit.options import ExplainOption, KvOption, ModelArgument, OutOption, RecipeOption
from toolkit.session import Session, verb


def register(app: typer.Typer) -> None:
    @verb(app, "quantize")
    def quantize(session: Session, model: ModelArgument, recipe: RecipeOption, out: OutOption,
                 kv_cache: KvOption = "bf16",
                 data: Annotated[str | None, typer.Option(help="Calibration data: a prepared folder [default: "
                                                          "calibration, where the recipe needs any].",
                                                          show_default=False)] = None,
                 rows: RowsOption = None, length: LengthOption = None,
                 chat: Annotated[bool, typer.Option("--chat", help="Apply the model's chat template.")] = False,
                 seed: Annotated[int | None, typer.Option(min=0, show_default=False, help="Draws the calibration "
                                                          "rows; added to the recipe's own.")] = None,
                 layerwise: LayerwiseOption = "auto", memory: BoundOption = None, tp: TpOption = 1,
                 resume: Annotated[bool, typer.Option("--resume/--no-resume", help="Go on where a killed run "
                                                      "was.")] = True,
                 explained: ExplainOption = False) -> None:
        """Calibrate a model into a checkpoint.

        The checkpoint is validated, and laid out so that other runtimes can load it. A run that was killed goes on when
        the same command is given again.
        """
        from calib.calibrate import quantize as calibrate
        from calib.foresee import foresee
        from calib.recipe import load_recipe
        from toolkit import making
        from toolkit.foreseeing import planned, runs_here
        from toolkit.job import Calibration
        from toolkit.refs import resolve
        from toolkit.report.judged import recipe_parts
        from toolkit.stages import Workshop
        from toolkit.store import RunStore

        chosen, bound = with_rows(load_recipe(recipe), rows), bound_of(memory)
        rows, length = text_size(chosen, kv_cache, rows, length, data=data, chat=chat, seed=seed)
        settings = explain(recipe, chosen, seed or 0) if explained else []
        if explained:
            session.say(*recipe_parts(settings))
        with RunStore(session.home.store) as store, session.watch() as watch:
            shop = Workshop(session.home, store, watch, session.offline)
            folder = making.model_folder(shop, resolve(model, session.home, store, offline=session.offline))
            plan, source = foresee(folder, chosen, kv_cache, out=out, length=length, tp=tp, layerwise=layerwise,
                                   memory=bound)
            answered = planned(plan, source.config)
            for warning in answered.warnings:
                watch.note(f"look at: {warning}")
            wanted = Calibration(data=data or "calibration", rows=rows, length=length, chat=chat)
            stuff = making.material(shop, folder, chosen, kv_cache, wanted, chosen.seed + (seed or 0))
            if chat and stuff.calibration is not None:
                watch.note(f"first calibration row as rendered:\n{stuff.calibration.sample}")
            made = calibrate(folder, chosen, out, kv_cache=kv_cache, calibration=stuff.calibration,
                             choose_texts=stuff.choose, report=watch, seed=seed or 0, resume=resume,
                             layerwise=layerwise, memory=bound, tp=tp)
            if made.artifact is not None:
                store.remember(made.artifact)
        origins = {"origins": {setting.key: setting.origin for setting in settings}} if explained else {}
        session.show({"digest": made.digest, "path": str(out.absolute()), "recipe": made.recipe,
                      "kv_cache": kv_cache, "size_bytes": made.size_bytes, "warnings": answered.warnings} | origins,
                     [made.digest],
                     f"{out}  {made.recipe}, KV cache {kv_cache}, {made.size_bytes / 1e6:,.0f} MB", made.digest,
                     f"next: toolkit build {out} --out ENGINE" if runs_here(answered) else
                     "next: another runtime; no engine of this toolkit runs it")

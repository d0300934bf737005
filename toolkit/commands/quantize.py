"""``quantize``: a model becomes a validated QuantizedCheckpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from toolkit.calibrating import BoundOption, LayerwiseOption, LengthOption, RowsOption, TpOption, bound_of, text_size
from toolkit.options import ExplainOption, KvOption, ModelArgument, OutOption, RecipeOption
from toolkit.session import Session, verb

if TYPE_CHECKING:
    from calib.recipe import Setting


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
        from calib.calibrate import foresee
        from calib.calibrate import quantize as calibrate
        from calib.recipe import explain, load_recipe
        from toolkit import making
        from toolkit.job import Calibration
        from toolkit.refs import resolve
        from toolkit.report.judged import recipe_parts
        from toolkit.stages import Workshop
        from toolkit.store import RunStore

        chosen, bound = load_recipe(recipe), bound_of(memory)
        rows, length = text_size(chosen, kv_cache, rows, length, data=data, chat=chat, seed=seed)
        settings = [_seeded(setting, seed or 0) for setting in explain(recipe)] if explained else []
        if explained:
            session.say(*recipe_parts(settings))
        with RunStore(session.home.store) as store, session.watch() as watch:
            shop = Workshop(session.home, store, watch, session.offline)
            folder = making.model_folder(shop, resolve(model, session.home, store, offline=session.offline))
            foresee(folder, chosen, kv_cache, out=out, length=length, tp=tp, layerwise=layerwise, memory=bound)
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
                      "kv_cache": kv_cache, "size_bytes": made.size_bytes} | origins, [made.digest],
                     f"{out}  {made.recipe}, KV cache {kv_cache}, {made.size_bytes / 1e6:,.0f} MB", made.digest,
                     f"next: toolkit build {out} --out ENGINE")


def _seeded(setting: Setting, seed: int) -> Setting:
    """What ``--explain`` says of the seed: the sum that rows are drawn by, and both its parts."""
    if setting.key != "seed" or not seed:
        return setting
    return setting._replace(value=setting.value + seed, origin=f"{setting.value} ({setting.origin}) + --seed {seed}")

"""``sensitivity``: what each layer of a model costs in each format."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from toolkit.options import KeptOption, ModelArgument
from toolkit.session import Session, verb

if TYPE_CHECKING:
    from calib.sensitivity import Sensitivity


def register(app: typer.Typer) -> None:
    @verb(app, "sensitivity")
    def sensitivity(session: Session, model: ModelArgument, out: KeptOption = None,
                    format_: Annotated[list[str] | None, typer.Option(
                        "--format", help="Recipe to round to; may be repeated [default: fp8, int8, int4_awq].",
                        show_default=False)] = None,
                    data: Annotated[str, typer.Option(help="Prepared folder whose texts are measured: not the ones "
                                                      "that will be judged.")] = "choose",
                    rows: Annotated[int, typer.Option(min=1, help="Packed rows of text.")] = 2,
                    length: Annotated[int, typer.Option(min=8, help="Tokens of a row.")] = 256) -> None:
        """Round one layer at a time and measure the loss: which layers to leave in higher precision.

        Gives delta NLL and KL of each layer, and the signal to noise of each linear's output, as data for a heat map.
        """
        from calib.artifact import Artifact
        from calib.sensitivity import measure, open_sensitivity
        from toolkit import making, stages
        from toolkit.refs import resolve
        from toolkit.report.heat import heat_parts
        from toolkit.store import RunStore

        formats = format_ or ["fp8", "int8", "int4_awq"]
        with RunStore(session.home.store) as store, session.watch() as watch:
            shop = stages.Workshop(session.home, store, watch, session.offline)
            folder = making.model_folder(shop, resolve(model, session.home, store, offline=session.offline))
            texts = making.data_folder(shop, data)
            place = out or shop.place("sensitivity", folder.name, model=stages.model_digest(folder), data=texts.digest,
                                      formats=formats, rows=rows, length=length)
            if out is not None or shop.standing(place, "sensitivity") is None:
                measure(folder, [text.text for text in texts.texts], place, formats=formats, rows=rows, length=length,
                        report=watch, offline=session.offline)
            artifact = Artifact.open(place)
            store.remember(artifact)
        found = open_sensitivity(place)
        _publish(session, found)
        session.show({"digest": artifact.digest, "path": str(place), **found.model_dump(mode="json")},
                     [artifact.digest], *heat_parts(found), f"{place}")


def _publish(session: Session, found: Sensitivity) -> None:
    """The layers' costs where the dashboard looks for them: ``<home>/sensitivity/<model>-<digest>.json``."""
    from calib.artifact import write_atomic
    from toolkit.audit import now
    from toolkit.layers import FOLDER, LayerCost
    from toolkit.layers import Sensitivity as Costs

    facts = {fact.layer: fact for fact in found.facts}
    costs = [LayerCost(layer=loss.layer, format=loss.format, loss=loss.delta_nll, sqnr_db=loss.sqnr_db,
                       amax=facts[loss.layer].amax, parameters=facts[loss.layer].parameters) for loss in found.losses]
    document = Costs(model=found.model, model_digest=found.source, created=now(), costs=costs)
    path = session.home.path / FOLDER / f"{found.model}-{found.source[:12]}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, document.model_dump_json(indent=1).encode())

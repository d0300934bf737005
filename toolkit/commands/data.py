"""``data prepare``: the demo model, calibration and evaluation data."""

from __future__ import annotations

from typing import Annotated

import typer

from toolkit.session import Session, verb


def register(app: typer.Typer) -> None:
    group = typer.Typer(no_args_is_help=True, help="Fetch and convert models and data.")
    app.add_typer(group, name="data")

    @verb(group, "prepare")
    def prepare(session: Session, more: Annotated[bool, typer.Option(
            "--more", help="Also MMLU, BoolQ, arithmetic, topics and code (a minute).")] = False) -> None:
        """Fetch the demo model, calibration and evaluation data; what is there already is kept."""
        from toolkit.data import prepare as prepare_data
        from toolkit.report.status import data_table

        with session.watch() as watch:
            done = prepare_data(session.home, more=more, offline=session.offline, report=watch)
        parts = {"calibration": done.calibration, "choose": done.choose, "evaluation": done.evaluation} | done.more
        document = {"model": str(done.model), "data": {name: {
            "path": str(data.path), "digest": data.digest, "texts": len(data.texts),
            "tasks": {task: len(data.task(task)) for task in data.tasks}, "licences": data.licences}
            for name, data in parts.items()}}
        session.show(document, [str(done.model), *(str(data.path) for data in parts.values())],
                     f"model  {done.model}", data_table(parts))

"""``run``: the whole pipeline of a job file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from toolkit.session import Session, verb


def register(app: typer.Typer) -> None:
    @verb(app, "run")
    def run(session: Session,
            job: Annotated[Path, typer.Argument(metavar="JOB.yaml", help="Job file.", show_default=False)],
            gate: Annotated[bool, typer.Option("--gate", help="Exit by the worst verdict: 1 FAIL, 3 INCONCLUSIVE or "
                                               "ANOMALOUS.")] = False) -> None:
        """Run a whole job: one table, one report.

        Calibrates, builds, judges and measures every engine. Stopped and started again, it goes on.
        """
        from toolkit import pipeline
        from toolkit.job import load_job
        from toolkit.report.status import run_parts
        from toolkit.stages import Workshop
        from toolkit.store import RunStore

        wanted = load_job(job)
        with RunStore(session.home.store) as store, session.watch() as watch:
            shop = Workshop(session.home, store, watch, session.offline)
            found, rows = pipeline.run(shop, wanted, job.absolute().parent)
        plain = [stored.row for stored in rows]
        session.show({"run": found.id, "job": found.job, "rows": [row.model_dump() for row in plain],
                      "report": found.report}, [found.id], *run_parts(found, rows))
        if gate and (code := pipeline.worst(plain)):
            raise typer.Exit(code)

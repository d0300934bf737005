"""``jobs``: long work that goes on or has ended, started in a terminal or on a page."""

from __future__ import annotations

from typing import Annotated

import typer

from toolkit.session import Session, verb

JobName = Annotated[str, typer.Argument(metavar="JOB", help="Job id or its prefix.", show_default=False)]


def register(app: typer.Typer) -> None:
    group = typer.Typer(no_args_is_help=True, help="List, read and cancel long work.")
    app.add_typer(group, name="jobs")

    @verb(group, "ls")
    def ls(session: Session,
           limit: Annotated[int, typer.Option(min=1, max=10_000, help="How many, newest first.")] = 20) -> None:
        """List jobs, newest first."""
        from dataclasses import asdict

        from toolkit.jobs import JobTable
        from toolkit.report.status import jobs_table

        with JobTable(session.home.store) as table:
            found = table.list(limit)
        session.show({"jobs": [asdict(work) | {"eta_s": work.eta_s} for work in found]}, [work.id for work in found],
                     jobs_table(found) if found else "No jobs yet.")

    @verb(group, "logs")
    def logs(session: Session, job: JobName) -> None:
        """Print what a started job said. Work in a terminal says it there."""
        from toolkit.errors import NoRunError
        from toolkit.jobs import JobTable, log_of

        with JobTable(session.home.store) as table:
            work = table.find(job)
        path = log_of(session.home, work.id)
        if not path.is_file():
            raise NoRunError(f"job {work.id} has no log", "It was run in a terminal, which showed what it said.")
        text = path.read_text(encoding="utf-8", errors="replace")
        session.show({"job": work.id, "state": work.state, "log": text}, [work.id], text.rstrip())

    @verb(group, "cancel")
    def cancel(session: Session, job: JobName,
               force: Annotated[bool, typer.Option("--force", help="End it at once.")] = False) -> None:
        """Stop a job; what it made stays, and the same work goes on from there when started again."""
        from toolkit.jobs import JobTable

        with JobTable(session.home.store) as table:
            work = table.cancel(job, force)
        session.show({"job": work.id, "state": work.state}, [work.id], f"job {work.id} was asked to stop")

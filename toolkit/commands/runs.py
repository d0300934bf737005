"""``runs``: what the store knows. ``ls``, ``show``, ``compare``, ``export``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from toolkit.session import Session, verb

RunName = Annotated[str | None, typer.Argument(metavar="RUN", help="Run id, its prefix, or a job's name "
                                               "[default: the newest finished run].", show_default=False)]


def register(app: typer.Typer) -> None:
    group = typer.Typer(no_args_is_help=True, help="List, show, compare and export runs.")
    app.add_typer(group, name="runs")
    for add in (_ls, _show, _compare, _export):
        add(group)


def _ls(group: typer.Typer) -> None:
    @verb(group, "ls")
    def ls(session: Session,
           limit: Annotated[int, typer.Option(min=1, max=10_000, help="How many, newest first.")] = 50) -> None:
        """List runs, newest first."""
        from toolkit.report.status import runs_table
        from toolkit.store import RunStore

        with RunStore(session.home.store) as store:
            found = store.runs(limit)
        document = {"runs": [{"run": run.id, "job": run.job, "status": run.status, "started": run.started,
                              "finished": run.finished, "report": run.report} for run in found]}
        session.show(document, [run.id for run in found],
                     runs_table(found) if found else "No runs yet. Make one: toolkit run examples/demo.yaml")


def _show(group: typer.Typer) -> None:
    @verb(group, "show")
    def show(session: Session, run: RunName = None) -> None:
        """Show a run's engines: accuracy and speed side by side."""
        from toolkit.report.status import run_parts
        from toolkit.store import RunStore

        with RunStore(session.home.store) as store:
            found = store.find_run(run)
            rows = store.rows(found.id)
        session.show({"run": found.id, "job": found.job, "rows": [stored.row.model_dump() for stored in rows]},
                     [stored.row.engine_digest for stored in rows], *run_parts(found, rows))


def _compare(group: typer.Typer) -> None:
    @verb(group, "compare")
    def compare(session: Session, first: Annotated[str, typer.Argument(help="Run or job.")],
                second: Annotated[str, typer.Argument(help="Run or job.")]) -> None:
        """Compare two runs engine by engine: the second against the first."""
        from toolkit.report.compare import compare_runs, comparison_table
        from toolkit.store import RunStore

        with RunStore(session.home.store) as store:
            runs = [store.find_run(name) for name in (first, second)]
            rows = [store.rows(run.id) for run in runs]
        found = compare_runs(runs[0], rows[0], runs[1], rows[1])
        session.show({"first": runs[0].id, "second": runs[1].id, "differences": found.facts,
                      "engines": [line.as_dict() for line in found.lines]},
                     [line.label for line in found.lines], *comparison_table(found))


def _export(group: typer.Typer) -> None:
    @verb(group, "export")
    def export(session: Session, run: RunName = None,
               format: Annotated[Literal["html", "csv", "md", "json"], typer.Option(help="What to write.")] = "html",
               out: Annotated[Path | None, typer.Option(help="File to write [default: RUN.FORMAT here].",
                                                        show_default=False)] = None) -> None:
        """Write a run as one file: HTML report, CSV, Markdown table or JSON."""
        from calib.artifact import write_atomic
        from toolkit.report.export import render
        from toolkit.store import RunStore

        with RunStore(session.home.store) as store:
            found = store.find_run(run)
            text = render(store, found, format)
        path = (out or Path(f"{found.id}.{format}")).absolute()
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, text.encode())
        session.show({"run": found.id, "path": str(path)}, [str(path)], f"wrote {path}")

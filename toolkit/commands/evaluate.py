"""``eval``: accuracy and fidelity of an engine, a checkpoint in memory, or answers that travelled as a file.

``eval import`` and ``eval export`` read and write what other tools use.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from calib.choices import KvChoice
from toolkit.commands.groups import verb_group
from toolkit.options import KeptOption, KindOption, RefArgument
from toolkit.session import Session, verb

if TYPE_CHECKING:
    from toolkit.evaluating import Question

BaselineOption = Annotated[str | None, typer.Option(help="REF to compare with: ΔNLL, KL and flips need one.",
                                                    show_default=False)]
RecipeOption = Annotated[str | None, typer.Option(help="For a model: the recipe [default: bf16].", show_default=False)]
KvOption = Annotated[KvChoice | None, typer.Option("--kv-cache", help="For a model: the KV cache's format.",
                                                  show_default=False)]
DataOption = Annotated[str, typer.Option(help="Prepared folder, or your own .jsonl with --kind.")]
TaskOption = Annotated[list[str] | None, typer.Option(help="Task of the data; may be repeated [default: all].",
                                                      show_default=False)]
TextsOption = Annotated[int, typer.Option(min=1, help="Texts for ΔNLL at most.")]
ItemsOption = Annotated[int, typer.Option(min=1, help="Questions of each task at most.")]
RequestsOption = Annotated[Path | None, typer.Option(help="Only write what would be asked into this file, to be "
                                                     "answered elsewhere.", show_default=False)]
AnswerOption = Annotated[Path | None, typer.Option(help="Only answer such a file with REF, into --responses.",
                                                   show_default=False)]
ResponsesOption = Annotated[Path | None, typer.Option(help="Judge the answers in this file instead of asking REF.",
                                                      show_default=False)]


def register(app: typer.Typer) -> None:
    group = verb_group(app, "eval", "judge", "Judge accuracy and fidelity; read and write other tools' results.")
    _judge(group)
    _harness(group)
    _import(group)
    _export(group)


def _judge(group: typer.Typer) -> None:
    @verb(group, "judge")
    def evaluate(session: Session, ref: RefArgument, out: KeptOption = None, baseline: BaselineOption = None,
                 recipe: RecipeOption = None, kv_cache: KvOption = None, data: DataOption = "evaluation",
                 kind: KindOption = None, task: TaskOption = None, texts: TextsOption = 64, items: ItemsOption = 100,
                 requests: RequestsOption = None, answer: AnswerOption = None, responses: ResponsesOption = None,
                 seed: Annotated[int, typer.Option(min=0)] = 0) -> None:
        """Judge accuracy and fidelity.

        Requests and answers can travel as files to a machine without lm-eval (--requests, --answer, --responses).
        See also: eval harness, eval import, eval export.
        """
        from toolkit.errors import UsageError
        from toolkit.evaluating import Question
        from toolkit.job import EngineJob

        if requests and (answer or responses):
            raise UsageError("--requests stands alone", "Write, answer and judge are three steps.")
        if answer and (responses is None or out is not None):
            raise UsageError("--answer needs --responses for its output, and no --out", "Give --responses FILE.")
        wanted = EngineJob(recipe=recipe or "bf16", kv_cache=kv_cache or "bf16") if recipe or kv_cache else None
        asked = Question(ref, wanted, baseline, data, kind, task, texts, items, seed)
        if requests or answer:
            _travel(session, asked, requests, answer, responses)
        else:
            _report(session, asked, out, responses)


def _travel(session: Session, asked: Question, requests: Path | None, answer: Path | None, responses: Path | None
            ) -> None:
    """Write the questions, or answer them: neither judges anything."""
    from toolkit.evaluating import answer_file, write_requests
    from toolkit.stages import Workshop
    from toolkit.store import RunStore

    with RunStore(session.home.store) as store, session.watch() as watch:
        shop = Workshop(session.home, store, watch, session.offline)
        count = write_requests(shop, asked, requests) if requests else answer_file(
            shop, asked, answer or Path(), responses or Path())
    place = str((requests or responses or Path()).absolute())
    session.show({"path": place, "requests": count}, [place], f"{count} requests in {place}")


def _report(session: Session, asked: Question, out: Path | None, responses: Path | None) -> None:
    from toolkit.evaluating import judge
    from toolkit.report.judged import report_parts
    from toolkit.stages import Workshop
    from toolkit.store import RunStore

    with RunStore(session.home.store) as store, session.watch() as watch:
        found, artifact = judge(Workshop(session.home, store, watch, session.offline), asked, out, responses)
    session.show({"digest": artifact.digest, "path": str(artifact.path), **found.model_dump(mode="json")},
                 [artifact.digest], *report_parts(found), f"{artifact.path}")


def _harness(group: typer.Typer) -> None:
    @verb(group, "harness")
    def harness(session: Session, ref: RefArgument,
                task: Annotated[list[str], typer.Option(help="Name of a task; may be repeated.", show_default=False)],
                include: Annotated[Path | None, typer.Option(
                    help="Folder of lm-eval YAML tasks; without it lm-eval's own, which fetch their data.",
                    show_default=False)] = None,
                items: Annotated[int, typer.Option(min=1, help="Seeded random documents of each task at most.")] = 100,
                metric: Annotated[str, typer.Option(help="The task's metric of right and wrong.")] = "acc",
                filter_name: Annotated[str, typer.Option("--filter", help="The filter of its samples.")] = "none",
                allow_code: Annotated[bool, typer.Option("--allow-code", help="Run Python that the tasks bring along."
                                                         )] = False,
                seed: Annotated[int, typer.Option(min=0)] = 0) -> None:
        """Judge an engine on tasks written for lm-eval: your own YAML files, or one of its own by name.

        Two such reports can be gated: toolkit gate REPORT --baseline REPORT --policy FILE.
        """
        from toolkit.foreign import judge_tasks
        from toolkit.report.judged import report_parts
        from toolkit.stages import Workshop
        from toolkit.store import RunStore

        with RunStore(session.home.store) as store, session.watch() as watch:
            shop = Workshop(session.home, store, watch, session.offline)
            found, artifact = judge_tasks(shop, ref, task, include, items, seed, metric, filter_name, allow_code)
        session.show({"digest": artifact.digest, "path": str(artifact.path), **found.model_dump(mode="json")},
                     [artifact.digest], *report_parts(found), f"{artifact.path}")


def _import(group: typer.Typer) -> None:
    @verb(group, "import")
    def bring(session: Session,
              path: Annotated[Path, typer.Argument(metavar="PATH", show_default=False,
                                                   help="A results file, or lm-eval's folder of one run.")],
              source: Annotated[Literal["lm-eval", "vllm", "aiperf", "guidellm"], typer.Option(
                  "--from", help="The tool that wrote it.", show_default=False)],
              out: KeptOption = None,
              metric: Annotated[str, typer.Option(help="lm-eval: the metric of right and wrong.")] = "acc",
              filter_name: Annotated[str, typer.Option("--filter", help="lm-eval: the filter of its samples.")] = "none"
              ) -> None:
        """Read another tool's results as an artifact: an eval report to gate on, or a latency sweep to compare."""
        from evals.report import EvalReport
        from toolkit.foreign import bring_in
        from toolkit.report.judged import report_parts, sweep_table
        from toolkit.stages import Workshop
        from toolkit.store import RunStore

        with RunStore(session.home.store) as store, session.watch() as watch:
            shop = Workshop(session.home, store, watch, session.offline)
            record, artifact = bring_in(shop, path, source, out, metric, filter_name)
        parts = report_parts(record) if isinstance(record, EvalReport) else [sweep_table(record)]
        session.show({"digest": artifact.digest, "path": str(artifact.path), "kind": artifact.kind,
                      **record.model_dump(mode="json")}, [artifact.digest], *parts, f"{artifact.path}")


def _export(group: typer.Typer) -> None:
    @verb(group, "export")
    def write(session: Session,
              ref: Annotated[str, typer.Argument(metavar="REF", show_default=False, help="Eval report or sweep.")],
              out: Annotated[Path, typer.Option(help="Folder to write into.", show_default=False)],
              target: Annotated[Literal["lm-eval", "vllm", "github-action-benchmark"], typer.Option(
                  "--to", help="The layout to write.", show_default=False)]) -> None:
        """Write a report or a sweep in the layout of another tool."""
        from toolkit.foreign import write_out
        from toolkit.stages import Workshop
        from toolkit.store import RunStore

        with RunStore(session.home.store) as store, session.watch() as watch:
            files = write_out(Workshop(session.home, store, watch, session.offline), ref, target, out)
        session.show({"files": [str(file) for file in files]}, [str(file) for file in files],
                     *[f"{file}" for file in files])

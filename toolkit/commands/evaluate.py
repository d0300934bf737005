"""``eval``: accuracy and fidelity of an engine, a checkpoint in memory, or answers that travelled as a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from toolkit.options import KeptOption, KvCache, RefArgument
from toolkit.session import Session, verb

FileOption = Annotated[Path | None, typer.Option(show_default=False)]


def register(app: typer.Typer) -> None:
    @verb(app, "eval")
    def evaluate(session: Session, ref: RefArgument, out: KeptOption = None,
                 baseline: Annotated[str | None, typer.Option(help="REF to compare with: ΔNLL, KL and flips need one.",
                                                              show_default=False)] = None,
                 recipe: Annotated[str | None, typer.Option(help="For a model: the recipe [default: bf16].",
                                                            show_default=False)] = None,
                 kv_cache: Annotated[KvCache | None, typer.Option(help="For a model: the KV cache's format.",
                                                                  show_default=False)] = None,
                 data: Annotated[str, typer.Option(help="Prepared folder, or your own .jsonl with --kind.")] =
                 "evaluation",
                 kind: Annotated[Literal["choice", "text"] | None, typer.Option(
                     help="What your own .jsonl holds.", show_default=False)] = None,
                 task: Annotated[list[str] | None, typer.Option(help="Task of the data; may be repeated "
                                                                "[default: all].", show_default=False)] = None,
                 texts: Annotated[int, typer.Option(min=1, help="Texts for ΔNLL at most.")] = 64,
                 items: Annotated[int, typer.Option(min=1, help="Questions of each task at most.")] = 100,
                 requests: Annotated[Path | None, typer.Option(
                     help="Only write what would be asked into this file, to be answered elsewhere.",
                     show_default=False)] = None,
                 answer: Annotated[Path | None, typer.Option(
                     help="Only answer such a file with REF, into --responses.", show_default=False)] = None,
                 responses: Annotated[Path | None, typer.Option(
                     help="Judge the answers in this file instead of asking REF.", show_default=False)] = None,
                 seed: Annotated[int, typer.Option(min=0)] = 0) -> None:
        """Judge accuracy and fidelity.

        Requests and answers can travel as files to a machine without lm-eval (--requests, --answer, --responses).
        """
        from toolkit.errors import UsageError
        from toolkit.evaluating import Question, answer_file, judge, write_requests
        from toolkit.job import EngineJob
        from toolkit.report.judged import report_parts
        from toolkit.stages import Workshop
        from toolkit.store import RunStore

        if requests and (answer or responses):
            raise UsageError("--requests stands alone", "Write, answer and judge are three steps.")
        if answer and (responses is None or out is not None):
            raise UsageError("--answer needs --responses for its output, and no --out", "Give --responses FILE.")
        wanted = EngineJob(recipe=recipe or "bf16", kv_cache=kv_cache or "bf16") if recipe or kv_cache else None
        asked = Question(ref, wanted, baseline, data, kind, task, texts, items, seed)
        with RunStore(session.home.store) as store, session.watch() as watch:
            shop = Workshop(session.home, store, watch, session.offline)
            if requests or answer:
                count = write_requests(shop, asked, requests) if requests else answer_file(
                    shop, asked, answer or Path(), responses or Path())
                place = str((requests or responses or Path()).absolute())
                session.show({"path": place, "requests": count}, [place], f"{count} requests in {place}")
                return
            found, artifact = judge(shop, asked, out, responses)
        session.show({"digest": artifact.digest, "path": str(artifact.path), **found.model_dump(mode="json")},
                     [artifact.digest], *report_parts(found), f"{artifact.path}")

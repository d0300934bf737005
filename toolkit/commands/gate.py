"""``gate``: may this engine replace that one? The exit code is the verdict's."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from toolkit.session import Session, verb


def register(app: typer.Typer) -> None:
    @verb(app, "gate")
    def gate(session: Session,
             candidate: Annotated[str, typer.Argument(metavar="CANDIDATE", show_default=False,
                                                      help="Engine, eval report, checkpoint or model.")],
             baseline: Annotated[str, typer.Option(help="REF of the unquantized model, its engine, or a baseline.",
                                                   show_default=False)],
             policy: Annotated[Path, typer.Option(help="Policy file (YAML).", show_default=False)],
             sweep: Annotated[str | None, typer.Option(help="REF of the candidate's sweep, for speed rules.",
                                                       show_default=False)] = None,
             data: Annotated[str, typer.Option(help="Prepared evaluation folder.")] = "evaluation",
             task: Annotated[list[str] | None, typer.Option(help="Task of the data; may be repeated "
                                                            "[default: all].", show_default=False)] = None,
             texts: Annotated[int, typer.Option(min=1, help="Texts for ΔNLL at most.")] = 64,
             items: Annotated[int, typer.Option(min=1, help="Questions of each task at most.")] = 200,
             seed: Annotated[int, typer.Option(min=0)] = 0,
             junit_xml: Annotated[Path | None, typer.Option(help="Write the verdict as JUnit XML, for CI.",
                                                            show_default=False)] = None,
             markdown: Annotated[Path | None, typer.Option(help="Write it as Markdown, for a step summary or comment.",
                                                           show_default=False)] = None) -> None:
        """Judge whether a candidate may be released.

        Exit code 0 PASS, 1 FAIL, 3 INCONCLUSIVE or ANOMALOUS.
        """
        from calib.artifact import Artifact, write_atomic
        from evals import outputs
        from evals.gate import EXIT_CODES, load_policy
        from evals.records import load_record
        from evals.report import LatencySweep
        from toolkit import judging, making, stages
        from toolkit.refs import resolve
        from toolkit.report.judged import verdict_parts
        from toolkit.store import RunStore

        rules = load_policy(policy)
        with RunStore(session.home.store) as store, session.watch() as watch:
            shop = stages.Workshop(session.home, store, watch, session.offline)
            ref = resolve(candidate, session.home, store, offline=session.offline).of_kind(*judging.JUDGED)
            judged = making.data_folder(shop, data)
            settings = judging.settings_for(judged, texts, items, task, seed)
            against = judging.baseline_of(shop, baseline, judged, settings)
            report, report_artifact = judging.report_of(shop, ref, judged, settings, against)
            speed = resolve(sweep, session.home, store).of_kind("latency-sweep") if sweep else None
            measured = load_record(speed.path, LatencySweep) if speed else None
            verdict, artifact = stages.verdict(shop, report, report_artifact, against.report, rules, measured,
                                               Artifact.open(speed.path) if speed else None, "gate")
        if junit_xml is not None:
            write_atomic(junit_xml, outputs.junit_xml({report.target.name: verdict}).encode())
        if markdown is not None:
            text = outputs.markdown(report.target.name, verdict, against.report, report)
            write_atomic(markdown, text.encode())
        session.show({"digest": artifact.digest, "path": str(artifact.path), **verdict.model_dump(mode="json")},
                     [artifact.digest], *verdict_parts(verdict))
        if code := EXIT_CODES[verdict.word]:
            raise typer.Exit(code)

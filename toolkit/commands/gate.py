"""``gate``: may this engine replace that one? The exit code is the verdict's.

Beside it: ``gate update-reference`` (what the baseline is, under review), ``gate noise`` (how much answers change by
themselves here) and ``gate speed`` (is it as fast?).
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from toolkit.commands.groups import verb_group
from toolkit.options import KindOption, parse_cells
from toolkit.session import Session, verb

BaselineOption = Annotated[str | None, typer.Option(help="REF of the unquantized model, its engine, a baseline, or a "
                                                    "stored report.", show_default=False)]
DataOption = Annotated[str | None, typer.Option(help="Prepared evaluation folder, or a .jsonl file of your own with "
                                                "--kind [default: evaluation].", show_default=False)]
TaskOption = Annotated[list[str] | None, typer.Option(help="Task of the data; may be repeated [default: all].",
                                                      show_default=False)]
TextsOption = Annotated[int | None, typer.Option(min=1, help="Texts for ΔNLL at most [default: 64].",
                                                 show_default=False)]
ItemsOption = Annotated[int | None, typer.Option(min=1, help="Questions of each task at most [default: 200].",
                                                 show_default=False)]
SeedOption = Annotated[int | None, typer.Option(min=0, help="Seed of the items [default: 0].", show_default=False)]
CandidateArgument = Annotated[str, typer.Argument(metavar="CANDIDATE", show_default=False,
                                                  help="Engine, eval report, checkpoint or model.")]
PolicyOption = Annotated[Path, typer.Option(help="Policy file (YAML).", show_default=False)]
ReferenceOption = Annotated[Path | None, typer.Option(help="Instead of --baseline: a file that `gate update-reference` "
                                                      "wrote.", show_default=False)]
SweepOption = Annotated[str | None, typer.Option(help="REF of the candidate's sweep, for speed rules.",
                                                 show_default=False)]
ExtendOption = Annotated[bool | None, typer.Option("--extend/--no-extend", show_default=False, help="While it is "
                         "INCONCLUSIVE, ask more questions and look again [default: unless --texts, --items or "
                         "--reference fix what is judged].")]
CandidatesOption = Annotated[int, typer.Option(min=1, help="How many candidates this gate judges: z is corrected for "
                                               "them all.")]
JunitOption = Annotated[Path | None, typer.Option(help="Write the verdict as JUnit XML, for CI.", show_default=False)]
MarkdownOption = Annotated[Path | None, typer.Option(help="Write it as Markdown, for a step summary or comment.",
                                                     show_default=False)]


def register(app: typer.Typer) -> None:
    group = verb_group(app, "gate", "judge", "Judge whether a candidate may be released.")
    _judge(group)
    _update_reference(group)
    _noise(group)
    _speed(group)


def _judge(group: typer.Typer) -> None:
    @verb(group, "judge")
    def gate(session: Session, candidate: CandidateArgument, policy: PolicyOption, baseline: BaselineOption = None,
             reference: ReferenceOption = None, sweep: SweepOption = None, data: DataOption = None,
             kind: KindOption = None, task: TaskOption = None, texts: TextsOption = None, items: ItemsOption = None,
             seed: SeedOption = None, extend: ExtendOption = None, candidates: CandidatesOption = 1,
             junit_xml: JunitOption = None, markdown: MarkdownOption = None) -> None:
        """Judge whether a candidate may be released.

        Exit code 0 PASS, 1 FAIL, 3 INCONCLUSIVE or ANOMALOUS. See also: gate update-reference, gate noise, gate speed.
        """
        from evals.gate import EXIT_CODES, load_policy
        from evals.reference import load_reference
        from toolkit import gating, stages
        from toolkit.store import RunStore

        rules = load_policy(policy)
        kept = load_reference(reference) if reference else None
        _what_is_judged(baseline, reference, data, kind, task, texts, items, seed, extend)
        asked = kept.asked if kept else gating.asked_of(baseline or "", data, kind, task, texts, items, seed,
                                                        rules.length)
        wider = not (kept or texts or items) if extend is None else extend
        with RunStore(session.home.store) as store, session.watch() as watch:
            shop = stages.Workshop(session.home, store, watch, session.offline)
            outcome = gating.decide(shop, candidate, asked, rules, reference=kept, sweep=sweep, candidates=candidates,
                                    extend=wider)
        _show(session, outcome, junit_xml, markdown, "gate update-reference" if kept else "gate --extend")
        if code := EXIT_CODES[outcome.verdict.word]:
            raise typer.Exit(code)


def _what_is_judged(baseline: str | None, reference: Path | None, *options: object) -> None:
    """One baseline; and a reference fixes all of ``options``."""
    from toolkit.errors import UsageError

    if (baseline is None) == (reference is None):
        raise UsageError("a gate needs a baseline", "Give --baseline REF, or --reference FILE.")
    given = [value for value in options if value]
    if reference and given:
        raise UsageError(f"{reference} fixes what is judged; {given[0]!r} is given too",
                         "Leave --data, --kind, --task, --texts, --items, --seed and --extend out.")


def _show(session: Session, outcome: object, junit_xml: Path | None, markdown: Path | None, command: str
          ) -> None:
    from calib.artifact import write_atomic
    from evals import outputs
    from toolkit.gating import Outcome, flips_of
    from toolkit.report.judged import flips_parts, verdict_parts

    assert isinstance(outcome, Outcome)
    verdict, name = outcome.verdict, outcome.report.target.name
    if junit_xml is not None:
        write_atomic(junit_xml, outputs.junit_xml({name: verdict}).encode())
    if markdown is not None:
        text = outputs.markdown(name, verdict, outcome.baseline, outcome.report, questions=outcome.questions)
        write_atomic(markdown, text.encode())
    flips = flips_of(outcome)
    draw = outcome.draw
    more = {"why": outcome.more, "texts": draw.texts if draw else None, "items": draw.items if draw else None}
    how = f"; `toolkit {command}` does, or --texts {draw.texts} --items {draw.items}" if draw else ""
    session.show({"digest": outcome.artifact.digest, "path": str(outcome.artifact.path),
                  **verdict.model_dump(mode="json"), "worst_flips": flips, "more": more if outcome.more else None},
                 [outcome.artifact.digest], *verdict_parts(verdict), *flips_parts(flips),
                 *([f"{outcome.more}{how}"] if outcome.more else []))


def _update_reference(group: typer.Typer) -> None:
    @verb(group, "update-reference")
    def update(session: Session,
               baseline: Annotated[str, typer.Argument(metavar="REF", show_default=False,
                                                       help="The unquantized model, or its engine.")],
               file: Annotated[Path, typer.Option(help="The reference to write, in your repository.",
                                                  show_default=False)],
               reason: Annotated[str, typer.Option(help="Why; it is kept in the file and in the audit log.",
                                                   show_default=False)],
               policy: Annotated[Path | None, typer.Option(help="Policy it will serve: a length rule needs more "
                                                           "continuations.", show_default=False)] = None,
               data: DataOption = None, kind: KindOption = None, task: TaskOption = None,
               texts: TextsOption = None, items: ItemsOption = None, seed: SeedOption = None) -> None:
        """Write down what the baseline is: figures with intervals, n, seed, date and commit.

        Shows the old and the new interval, and writes the audit log. Nothing else ever changes a reference.
        """
        from evals.gate import load_policy
        from toolkit import gating, stages
        from toolkit.report.judged import reference_parts
        from toolkit.store import RunStore

        length = load_policy(policy).length if policy else None
        asked = gating.asked_of(baseline, data, kind, task, texts, items, seed, length)
        with RunStore(session.home.store) as store, session.watch() as watch:
            shop = stages.Workshop(session.home, store, watch, session.offline)
            old, new = gating.update_reference(shop, file, asked, reason)
        session.show({"path": str(file), "sha256": new.sha256, "old": old.model_dump(mode="json") if old else None,
                      "new": new.model_dump(mode="json")}, [str(file)], *reference_parts(old, new), f"{file}")


def _noise(group: typer.Typer) -> None:
    @verb(group, "noise")
    def noise(session: Session,
              ref: Annotated[str, typer.Argument(metavar="REF", show_default=False, help="The engine to judge twice.")],
              data: DataOption = None, kind: KindOption = None, task: TaskOption = None,
              texts: TextsOption = None, items: ItemsOption = None, seed: SeedOption = None) -> None:
        """Judge one engine twice and say how many answers change by themselves: the policy's aa_flips.

        The second time every item has other batch mates. Run it once for each kind of machine.
        """
        from toolkit import gating, stages
        from toolkit.store import RunStore

        asked = gating.asked_of(ref, data, kind, task, texts, items, seed, None)
        with RunStore(session.home.store) as store, session.watch() as watch:
            found = gating.noise(stages.Workshop(session.home, store, watch, session.offline), ref, asked)
        session.show(asdict(found), [f"{found.share:.6f}"],
                     f"{found.flips} of {found.items} answers changed; NLL moved by {found.nll:.2g} nats/token at most",
                     f"policy: aa_flips: {found.share:.4g}  (the upper end of its 95 % interval)",
                     f"the smallest usable margin over {found.items} items is {found.smallest:.2f} points")


def _speed(group: typer.Typer) -> None:
    @verb(group, "speed")
    def speed(session: Session,
              candidate: Annotated[str, typer.Argument(metavar="CANDIDATE", show_default=False, help="An engine.")],
              baseline: Annotated[str, typer.Option(help="The engine it is compared with.", show_default=False)],
              cell: Annotated[str, typer.Option(help="batch x input x output tokens.")] = "1x64x32",
              margin: Annotated[float, typer.Option(min=0.001, max=0.99, help="How much slower it may be, as a "
                                                    "share.")] = 0.05,
              blocks: Annotated[int, typer.Option(min=8, max=10_000, help="A B pairs that are timed.")] = 16,
              seed: Annotated[int, typer.Option(min=0)] = 0) -> None:
        """Judge whether a candidate is as fast as a baseline: timed in turn, A B B A, in one process.

        Exit code 0 PASS, 1 FAIL, 3 INCONCLUSIVE (this machine is too noisy to say). It says nothing about quality.
        """
        from evals.gate import EXIT_CODES
        from toolkit import gating, stages
        from toolkit.errors import UsageError
        from toolkit.store import RunStore

        cells = parse_cells(cell)
        if len(cells) != 1:
            raise UsageError(f"{cell!r} is {len(cells)} cells", "Give one, like 1x64x32.")
        with RunStore(session.home.store) as store, session.watch() as watch:
            found = gating.speed(stages.Workshop(session.home, store, watch, session.offline), candidate, baseline,
                                 cells[0], margin, blocks, seed)
        reason = found.reason
        session.show(found.model_dump(mode="json"), [reason.word], f"{reason.word}  {reason.found}; {reason.allowed}")
        if code := EXIT_CODES[reason.word]:
            raise typer.Exit(code)

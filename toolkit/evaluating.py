"""``eval`` step by step: judge an engine; or write the questions, answer them elsewhere, and judge the answers.

Writing and judging need the same REF, baseline, data and settings: an answer is found by the content of its question,
and one that is missing is an error.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from calib.artifact import Artifact
from toolkit import judging, making, stages
from toolkit.errors import UsageError
from toolkit.job import EngineJob
from toolkit.stages import Workshop

if TYPE_CHECKING:
    from engines.engine import Engine
    from evals.data import EvalData
    from evals.fidelity import Baseline, EvalSettings
    from evals.report import EvalReport


@dataclass(frozen=True, slots=True)
class Question:
    """What an ``eval`` command line asks."""

    ref: str
    engine: EngineJob | None
    baseline: str | None
    data: str
    kind: str | None
    tasks: list[str] | None
    texts: int
    items: int
    seed: int


def _opened(shop: Workshop, asked: Question) -> tuple[Engine, EvalData, EvalSettings, Baseline | None]:
    data = data_of(shop, asked.data, asked.kind)
    settings = judging.settings_for(data, asked.texts, asked.items, asked.tasks, asked.seed)
    against = judging.baseline_of(shop, asked.baseline, data, settings) if asked.baseline else None
    engine = making.engine_of(shop, asked.ref, asked.engine)
    judging.refuse_calibrated(shop, engine, data)
    return engine, data, settings, against


def data_of(shop: Workshop, name: str, kind: str | None) -> EvalData:
    """What ``--data`` and ``--kind`` name: a prepared folder, or the user's own .jsonl file of one kind."""
    own = name.endswith(".jsonl")
    if own != (kind is not None):
        raise UsageError("--kind goes with a .jsonl file of your own" if kind else f"{name} needs --kind",
                         "Give --data FILE.jsonl --kind choice, exact or text.")
    return judging.user_data(shop, Path(name), kind or "") if own else making.data_folder(shop, name)


def judge(shop: Workshop, asked: Question, out: Path | None, responses: Path | None
          ) -> tuple[EvalReport, Artifact]:
    """The report of the engine, or with ``responses`` of who wrote them; kept at ``out`` or in home."""
    engine, data, settings, against = _opened(shop, asked)
    if out is None and responses is None and against is not None:
        return stages.evaluation(shop, engine, data, against, settings, engine.recipe)
    place = out or shop.place("eval-report", engine.recipe, engine=engine.digest, data=data.digest,
                              baseline=against.digest if against else None, recorded=responses is not None,
                              settings=settings.model_dump(mode="json", exclude={"batch"}))
    if out is None and responses is None and shop.standing(place, "eval-report"):
        from evals.records import load_record
        from evals.report import EvalReport

        return load_record(place, EvalReport), Artifact.open(place)
    found = (_judge_answers(shop, engine, data, settings, against, place, responses, replace=out is None)
             if responses else _judge_engine(shop, engine, data, settings, against, place))
    artifact = Artifact.open(place)
    shop.store.remember(artifact)
    return found, artifact


def _judge_engine(shop: Workshop, engine: Engine, data: EvalData, settings: EvalSettings, against: Baseline | None,
                  place: Path) -> EvalReport:
    from engines.llm import LLM
    from evals.fidelity import evaluate

    with LLM(engine) as llm:
        return evaluate(llm, llm.tokenizer, stages.target_of(llm, engine.recipe), data, against, place, shop.report,
                        settings=settings)


def _judge_answers(shop: Workshop, engine: Engine, data: EvalData, settings: EvalSettings, against: Baseline | None,
                   place: Path, responses: Path, *, replace: bool) -> EvalReport:
    """A report about who answered, as the file says: the engine of another device may have, REF lends its tokenizer."""
    from evals.adapters import RecordedAnswers
    from evals.fidelity import evaluate
    from evals.report import Target

    if not responses.is_file():
        raise UsageError(f"there is no file {responses}", "Give the file that --answer wrote.")
    answers, tokenizer = RecordedAnswers(responses), engine.tokenizer()
    try:
        target = Target.model_validate_json(answers.key)
    except ValueError as error:
        raise UsageError(f"{responses} does not say who answered", "Answer the requests with `eval REF --answer`."
                         ) from error
    if target.tokenizer_digest != tokenizer.digest:
        raise UsageError(f"{target.name} {target.digest[:12]} answered with tokenizer {target.tokenizer_digest[:12]}, "
                         f"the questions were written with {tokenizer.digest[:12]}", "Use one model on both machines.")
    return evaluate(answers, tokenizer, target, data, against, place, shop.report, settings=settings, replace=replace)


def write_requests(shop: Workshop, asked: Question, path: Path) -> int:
    """Write every question that ``judge`` would ask; returns how many."""
    from evals.fidelity import record_requests

    engine, data, settings, against = _opened(shop, asked)
    return record_requests(engine.tokenizer(), data, against, path.absolute(),
                           path.absolute().with_name(f".{path.name}.work"), settings=settings)


def answer_file(shop: Workshop, asked: Question, requests: Path, responses: Path) -> int:
    """Answer a file of questions, scores and written answers both, with an engine; needs neither lm-eval nor data."""
    from engines.llm import LLM
    from evals.adapters import answer_requests

    if not requests.is_file():
        raise UsageError(f"there is no file {requests}", "Give the file that --requests wrote.")
    with LLM(making.engine_of(shop, asked.ref, asked.engine)) as llm:
        return answer_requests(requests, llm, responses.absolute(), report=shop.report,
                               key=stages.target_of(llm, llm.engine.recipe).model_dump_json())

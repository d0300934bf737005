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
    data = _data(shop, asked)
    settings = judging.settings_for(data, asked.texts, asked.items, asked.tasks, asked.seed)
    against = judging.baseline_of(shop, asked.baseline, data, settings) if asked.baseline else None
    engine = making.engine_of(shop, asked.ref, asked.engine)
    judging.refuse_calibrated(shop, engine, data)
    return engine, data, settings, against


def _data(shop: Workshop, asked: Question) -> EvalData:
    own = asked.data.endswith(".jsonl")
    if own != (asked.kind is not None):
        raise UsageError("--kind goes with a .jsonl file of your own" if asked.kind else
                         f"{asked.data} needs --kind", "Give --data FILE.jsonl --kind choice, exact or text.")
    return judging.user_data(shop, Path(asked.data), asked.kind or "") if own else making.data_folder(shop, asked.data)


def judge(shop: Workshop, asked: Question, out: Path | None, responses: Path | None
          ) -> tuple[EvalReport, Artifact]:
    """The report of the engine, kept at ``out`` or in home."""
    from engines.llm import LLM
    from evals.adapters import RecordedScorer
    from evals.fidelity import evaluate

    engine, data, settings, against = _opened(shop, asked)
    if out is None and responses is None and against is not None:
        return stages.evaluation(shop, engine, data, against, settings, engine.recipe)
    place = out or shop.place("eval-report", engine.recipe, engine=engine.digest, data=data.digest,
                              baseline=against.digest if against else None, recorded=responses is not None,
                              settings=settings.model_dump(mode="json", exclude={"batch"}))
    if out is None and shop.standing(place, "eval-report"):
        from evals.records import load_record
        from evals.report import EvalReport

        return load_record(place, EvalReport), Artifact.open(place)
    with LLM(engine) as llm:
        scorer = RecordedScorer(responses) if responses else llm
        found = evaluate(scorer, llm.tokenizer, stages.target_of(llm, engine.recipe), data, against, place,
                         shop.report, settings=settings)
    artifact = Artifact.open(place)
    shop.store.remember(artifact)
    return found, artifact


def write_requests(shop: Workshop, asked: Question, path: Path) -> int:
    """Write every question that ``judge`` would ask; returns how many."""
    from evals.fidelity import record_requests

    engine, data, settings, against = _opened(shop, asked)
    return record_requests(engine.tokenizer(), data, against, path.absolute(),
                           path.absolute().with_name(f".{path.name}.work"), settings=settings)


def answer_file(shop: Workshop, asked: Question, requests: Path, responses: Path) -> int:
    """Answer a file of questions with an engine; needs neither lm-eval nor the data."""
    from engines.llm import LLM
    from evals.adapters import answer_requests

    if not requests.is_file():
        raise UsageError(f"there is no file {requests}", "Give the file that --requests wrote.")
    with LLM(making.engine_of(shop, asked.ref, asked.engine)) as llm:
        return answer_requests(requests, llm, responses.absolute(), key=f"{llm.engine.digest} {llm.numerics}",
                               report=shop.report)

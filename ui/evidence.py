"""Judgements and engines behind a run's rows, read once and kept for a while (bounded, keyed by run and time)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import streamlit as st

from evals.items import Asked
from evals.report import Estimate, EvalReport, Row
from toolkit import evidence
from toolkit.evidence import EngineView
from toolkit.home import Home
from toolkit.report import answers
from toolkit.store import RunStore


@dataclass(frozen=True, slots=True)
class Judged:
    """An engine's judgement beside the unquantized model's; either may be gone."""

    report: EvalReport | None
    baseline: EvalReport | None


@st.cache_data(max_entries=64, show_spinner=False)
def judged(path: str, run: str, finished: str, engine: str) -> Judged:
    """``finished`` is part of the key: a run that was done again is read again."""
    with RunStore(Path(path)) as store:
        found = store.find_run(run)
        row = _row(store, run, engine)
        report = evidence.report_of(store, row, found)
        return Judged(report, evidence.baseline_of(store, report) if report else None)


def _row(store: RunStore, run: str, engine: str) -> Row:
    return next(stored.row for stored in store.rows(run) if stored.row.engine_digest == engine)


@st.cache_data(max_entries=64, show_spinner=False)
def losses(path: str, run: str, finished: str) -> dict[str, Estimate]:
    """Paired loss of accuracy by engine digest, for the engines whose answers are kept."""
    found = {}
    with RunStore(Path(path)) as store:
        rows = [stored.row for stored in store.rows(run)]
    for row in rows:
        both = judged(path, run, finished, row.engine_digest)
        if both.report and both.baseline and (loss := answers.loss_of(both.report, both.baseline)):
            found[row.engine_digest] = loss
    return found


@st.cache_data(max_entries=4, show_spinner="Reading the questions")
def questions(home: str, digest: str) -> dict[str, Asked]:
    return evidence.questions(Home(Path(home)), digest)


@st.cache_data(max_entries=32, show_spinner=False)
def engine(path: str, digest: str) -> EngineView | None:
    with RunStore(Path(path)) as store:
        return evidence.engine_view(store, digest)

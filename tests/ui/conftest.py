"""Homes that pages are tested on: figures only, and the tiny real model taken through the whole pipeline."""

from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

import ui

APP = Path(ui.__file__).parent / "app.py"


@pytest.fixture
def open_page(monkeypatch):
    """``open_page(home, "accuracy", engine="int8")``: the page alone, with those query parameters."""
    def run(home, name="tradeoffs", read_only=False, **query):
        monkeypatch.setattr("sys.argv", ["app.py", "--home", str(home.path), *(["--read-only"] if read_only else [])])
        page = AppTest.from_string(f"from ui import {name}\n{name}.page()\n", default_timeout=60)
        for key, value in query.items():
            page.query_params[key] = value
        return page.run()
    return run


@pytest.fixture(scope="session")
def judged_home(tmp_path_factory):
    """A home in which the tiny model was calibrated, built, judged and measured for real: two engines pass."""
    import sys

    sys.path.insert(0, str(Path(__file__).parent.parent / "toolkit"))
    try:
        import conftest as tiny  # the toolkit room's tiny model and data
    finally:
        sys.path.pop(0)
    from toolkit import pipeline
    from toolkit.home import Home
    from toolkit.job import load_job
    from toolkit.stages import Workshop
    from toolkit.store import RunStore

    home = Home(tmp_path_factory.mktemp("judged") / "home")
    tiny.write_model(home.models / "tiny")
    tiny.write_data(home)
    folder = tmp_path_factory.mktemp("job")
    (folder / "job.yaml").write_text(tiny.JOB)
    (folder / "policy.yaml").write_text(tiny.POLICY)
    with RunStore(home.store) as store:
        pipeline.run(Workshop(home, store, offline=True), load_job(folder / "job.yaml"), folder)
    return home


def shown_text(page):
    """All plain text of a page."""
    kinds = (page.markdown, page.caption, page.code, page.title, page.subheader, page.info, page.warning, page.error,
             page.success)
    return " ".join(str(element.value) for kind in kinds for element in kind)


def move_home(old, new):
    """Copy a home; artifacts are found by path, so their paths move along."""
    import shutil

    from toolkit.store import RunStore

    shutil.copytree(old.path, new.path)
    with RunStore(new.store) as store, store._write() as db:
        for table in ("artifacts", "verdicts"):
            db.execute(f"UPDATE {table} SET path=replace(path, ?, ?)", (str(old.path), str(new.path)))
    return new


QUESTIONS = [{"question": f"Which one is {n}?", "choices": [f"the right {n}", f"the wrong {n}"], "answer": 0}
             for n in range(6)]


def add_answers(home, rows, run_facts):
    """A baseline and one report a row with two flips to wrong and one to right, as real artifacts of ``home``."""
    from evals.data import EvalData, Source, write_folder
    from evals.fidelity import BaselineRecord
    from evals.records import save_record
    from evals.report import EvalReport, Item, Target, TextScore
    from toolkit.store import RunStore

    write_folder(home.data / "shown", {"shown": Source(QUESTIONS, "made by the test", "MIT")})
    data = EvalData.load(home.data / "shown")

    def report(digest, wrong, shift, baseline):
        items = [Item(id=item.id, task="shown", prompt_sha256="p" * 64, choice=int(n in wrong), target=0,
                      correct=n not in wrong, margin=-0.4 if n in wrong else 0.5, n_choices=2,
                      answer=item.choices[int(n in wrong)]) for n, item in enumerate(data.items)]
        texts = [TextScore(id=f"{n}" * 64, tokens=100, nll=200.0 + shift * n, kl=0.1, same_top1=95, document=f"doc {n}")
                 for n in range(6)]
        target = Target(name="x", digest=digest, numerics="cpu", tokenizer_digest="t", template_sha256="t", bos=False)
        return EvalReport(target=target, baseline_digest=baseline, data_digest=data.digest, harness={}, seed=0,
                          texts=texts, items=items, accuracy=None, delta_nll=None, kl_mean=None, same_top1=None,
                          flips=None)

    with RunStore(home.store) as store:
        base = save_record(BaselineRecord(key="k", report=report("b" * 64, {5}, 0.0, None)),
                           home.artifacts("baseline") / "shown", ["b" * 64], kind="baseline")
        store.remember(base)
        for number, row in enumerate(rows):
            wrong = {5} if row.verdict == "BASELINE" else {0, 1}
            made = save_record(report(row.engine_digest, wrong, float(number), base.digest),
                               home.artifacts("eval-report") / f"shown-{number}", [row.engine_digest, base.digest])
            store.remember(made)
    run_facts["evaluation_digest"] = data.digest


def add_sensitivity(home, formats=("fp8", "int4_awq")):
    from toolkit import layers
    from toolkit.layers import LayerCost, Sensitivity

    costs = [LayerCost(layer=layer, format=name, loss=0.001 * (layer + 1) * size, sqnr_db=30 - layer, amax=4.0,
                       parameters=1000) for layer in range(4) for name, size in zip(formats, (1, 5), strict=True)]
    (home.path / layers.FOLDER).mkdir(parents=True)
    (home.path / layers.FOLDER / "tiny.json").write_text(Sensitivity(
        model="tiny", model_digest="d" * 64, created="2026-11-29T20:00:00+00:00", costs=costs).model_dump_json())


@pytest.fixture(scope="module")
def full_home(judged_home, report_rows, tmp_path_factory):
    """The judged home with a second, newer run of made-up figures whose answers flip, and a measured model."""
    from toolkit.home import Home
    from toolkit.store import RunStore, StoredRow

    home = move_home(judged_home, Home(tmp_path_factory.mktemp("full") / "home"))
    facts = {"model": "tiny", "device": "cpu test", "margin": 0.05, "seed": 0, "versions": {}, "licences": {}}
    add_answers(home, report_rows, facts)
    add_sensitivity(home)
    with RunStore(home.store) as store:
        store.begin("demo-0123456789ab", "demo", facts)
        store.finish("demo-0123456789ab", [StoredRow(row, row.delta_nll) for row in report_rows],
                     home.reports / "demo.html")
    return home

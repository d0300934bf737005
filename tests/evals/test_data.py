"""Prepared data: what is written is what is read, and every way in which it could mislead is refused."""

import json

import pytest

from calib.errors import UnknownNameError
from evals.data import EvalData, Source, write_folder
from evals.errors import DataError, DataMissingError
from evals.items import Exact, Question, texts_of
from evals.sampling import part_of, sample, shuffled


def texts(n, prefix="words"):
    return [{"text": f"{prefix} number {i} and some more", "document": f"doc{i // 2}"} for i in range(n)]


def questions(n):
    return [{"question": f"What follows {i}?", "choices": [str(i + 1), str(i - 1), "nothing"], "answer": 0}
            for i in range(n)]


def folder(tmp_path, **files):
    return write_folder(tmp_path / "data", {name: Source(rows, "made here", "CC0-1.0") for name, rows in files.items()})


def test_round_trip_keeps_content_digest_and_licences(tmp_path):
    data = folder(tmp_path, texts=[*texts(5), {"text": "line\u2028separator\x85inside", "document": "odd"}],
                  counting=questions(4))
    again = EvalData.load(tmp_path / "data")
    assert data == again
    assert (len(again.texts), len(again.items), again.tasks) == (6, 4, ["counting"])
    assert again.licences == {"texts.jsonl": "CC0-1.0", "counting.jsonl": "CC0-1.0"}
    other = folder(tmp_path / "other", texts=texts(5), counting=questions(4))
    assert other.digest != data.digest


@pytest.mark.parametrize(("files", "words"), [
    ({"texts": []}, "no rows"),
    ({"texts": [*texts(2), texts(2)[1]]}, "more than once"),
    ({"texts": [*texts(2), {"text": "WORDS  number 1\tand some more ", "document": "other"}]},
     "1 item occurs more than once .* 'words number 1 and some more'"),
    ({"quiz": [{"question": "Who wrote it?", "choices": ["Ann", "Bob"], "answer": 0},
               {"question": "who wrote  it? ", "choices": [" bob", "ann"], "answer": 1}]},
     "1 item occurs more than once .* 'Who wrote it\\?'"),
    ({"texts": [{"text": "", "document": "d"}]}, "text"),
    ({"texts": [{"text": "a"}]}, "document"),
    ({"one": questions(3), "two": questions(3)}, "more than once"),
    ({"quiz": [{"question": "q", "choices": ["a", "b"], "answer": 2}]}, "answer 2"),
    ({"quiz": [{"question": "q", "choices": ["a", "a"], "answer": 0}]}, "distinct"),
    ({"quiz": [{"question": "q", "choices": ["a", "b"], "answer": 0, "extra": 1}]}, "extra"),
    ({"Bad name": questions(1)}, "name"),
])
def test_bad_rows_are_refused_with_nothing_written(tmp_path, files, words):
    with pytest.raises(DataError, match=words):
        folder(tmp_path, **files)
    assert not (tmp_path / "data").exists()


def test_changed_missing_and_unlisted_files_are_refused(tmp_path):
    with pytest.raises(DataMissingError):
        EvalData.load(tmp_path)
    folder(tmp_path, texts=texts(4), quiz=questions(2))
    file = tmp_path / "data" / "texts.jsonl"
    original = file.read_bytes()
    file.write_bytes(original.replace(b"number 1", b"number 9"))
    with pytest.raises(DataError, match="sha256"):
        EvalData.load(tmp_path / "data")
    file.write_bytes(original)
    (tmp_path / "data" / "stray.jsonl").write_text("{}\n")
    with pytest.raises(DataError, match=r"stray\.jsonl"):
        EvalData.load(tmp_path / "data")
    (tmp_path / "data" / "stray.jsonl").unlink()
    file.unlink()
    with pytest.raises(DataMissingError, match="missing"):
        EvalData.load(tmp_path / "data")


def test_an_id_that_is_not_its_contents_hash_is_refused(tmp_path):
    data = folder(tmp_path, texts=texts(2))
    file = tmp_path / "data" / "texts.jsonl"
    swapped = file.read_text().replace(data.texts[0].id, "0" * 64)
    file.write_text(swapped)
    manifest_file = tmp_path / "data" / "manifest.json"
    manifest = json.loads(manifest_file.read_text())
    import hashlib
    manifest["files"]["texts.jsonl"]["sha256"] = hashlib.sha256(swapped.encode()).hexdigest()
    manifest_file.write_text(json.dumps(manifest))
    with pytest.raises(DataError, match="not the hash"):
        EvalData.load(tmp_path / "data")


def test_samples_are_seeded_nested_and_not_the_head_of_the_file(tmp_path):
    data = folder(tmp_path, quiz=questions(300))
    items = data.task("quiz")
    assert sample(items, 100, 1) == sample(reversed(items), 100, 1)
    assert sample(items, 200, 1)[:100] == sample(items, 100, 1)
    assert sample(items, 100, 1) != sample(items, 100, 2)
    head = {item.id for item in items[:100]}
    assert 15 < sum(item.id in head for item in sample(items, 100, 1)) < 55
    assert len(shuffled(items, 3)) == 300
    with pytest.raises(DataError, match="301"):
        sample(items, 301, 1)
    with pytest.raises(UnknownNameError, match="quizz"):
        data.task("quizz")


def test_split_is_by_document_and_keeps_its_shares():
    shares = {"choose": 1, "gate": 3}
    parts = [part_of(f"document {i}", shares) for i in range(4000)]
    assert 850 < parts.count("choose") < 1150
    assert parts == [part_of(f"document {i}", dict(shares)) for i in range(4000)]
    with pytest.raises(DataError):
        part_of("d", {"choose": 0})


def sums(n):
    return [{"question": f"What is {i} and {i}?", "answer": f"{2 * i}"} for i in range(n)]


def test_a_task_is_multiple_choice_or_exact_match(tmp_path):
    data = folder(tmp_path, sums=sums(3), quiz=questions(2), texts=texts(1))
    assert [type(item) for item in data.task("sums")] == [Exact] * 3
    assert {type(item) for item in data.task("quiz")} == {Question}
    assert EvalData.load(tmp_path / "data") == data
    assert "What is 2 and 2? 4" in texts_of(data.items)
    assert "What follows 1? nothing" in texts_of(data.items)
    with pytest.raises(DataError, match="row 3: a task is either"):
        folder(tmp_path / "mixed", quiz=[*questions(2), *sums(1)])
    with pytest.raises(DataError, match="blank"):
        folder(tmp_path / "blank", sums=[{"question": "q", "answer": " "}])
    with pytest.raises(DataError, match="more than once"):
        folder(tmp_path / "twice", sums=sums(2), more=sums(1))

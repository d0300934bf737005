"""The journal: continued with its key, started over with another, locked, whole lines only."""

import pytest

from evals.errors import EvalError
from evals.journal import Journal


def test_continues_with_its_key_and_starts_over_with_another(tmp_path):
    path = tmp_path / "work" / "j.jsonl"
    with Journal(path, "one") as journal:
        journal.add({"a": 1, "b": [2.5, None]})
        journal.add({"c": "ü\u2028"})
    with Journal(path, "one") as journal:
        assert journal.done == {"a": 1, "b": [2.5, None], "c": "ü\u2028"}
    with Journal(path, "two") as journal:
        assert journal.done == {}
    with Journal(path, "one") as journal:
        assert journal.done == {}


@pytest.mark.parametrize("cut", range(1, 30, 4))
def test_a_torn_line_is_cut_off_and_the_file_stays_good(tmp_path, cut):
    path = tmp_path / "j.jsonl"
    with Journal(path, "k") as journal:
        journal.add({"a": 1})
        journal.add({"b": 2, "c": "three hundred"})
    path.write_bytes(path.read_bytes()[:-cut])
    with Journal(path, "k") as journal:
        assert journal.done == {"a": 1}
        journal.add({"d": 4})
    with Journal(path, "k") as journal:
        assert journal.done == {"a": 1, "d": 4}


def test_two_processes_may_not_share_it_and_nan_is_refused(tmp_path):
    with Journal(tmp_path / "j", "k") as journal:
        with pytest.raises(EvalError, match="another process"), Journal(tmp_path / "j", "k"):
            pass
        with pytest.raises(ValueError):
            journal.add({"a": float("nan")})
        assert journal.done == {}


def test_a_changed_digit_is_not_believed_and_what_follows_is_done_again(tmp_path):
    path = tmp_path / "j.jsonl"
    with Journal(path, "k") as journal:
        journal.add({"a": 1.25})
        journal.add({"b": 2.5})
        journal.add({"c": {"7": 1, "10": 2}})
    path.write_bytes(path.read_bytes().replace(b"2.5}", b"2.6}"))
    with Journal(path, "k") as journal:
        assert journal.done == {"a": 1.25}
        journal.add({"b": 2.5})
    with Journal(path, "k") as journal:
        assert journal.done == {"a": 1.25, "b": 2.5}


@pytest.mark.parametrize("content", [b"\xff\n", b"[]\n", b'{"key": "k"', b"[" * 100_000 + b"\n", b"\n\n"])
def test_what_is_no_journal_is_begun_anew(tmp_path, content):
    path = tmp_path / "j.jsonl"
    path.write_bytes(content)
    with Journal(path, "k") as journal:
        assert journal.done == {}
        journal.add({"a": 1})
    with Journal(path, "k") as journal:
        assert journal.done == {"a": 1}

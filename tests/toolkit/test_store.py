"""The store: what goes in comes out, names resolve, nothing is silently ambiguous or lost."""

import json
import multiprocessing
import sqlite3

import pytest

from calib.artifact_writer import ArtifactWriter
from evals.report import Verdict
from toolkit.database import Database
from toolkit.errors import NoRunError, UsageError
from toolkit.store import RunStore, StoredRow


@pytest.fixture
def store(tmp_path):
    with RunStore(tmp_path / "toolkit.db") as opened:
        yield opened


def artifact(folder, kind="engine", content="x"):
    with ArtifactWriter(folder, kind) as writer:
        writer.record = {"content": content}
        (writer.folder / "data.bin").write_text(content)
    return writer.artifact


def verdict(engine, word="PASS", policy="p" * 64):
    return Verdict(word=word, reason="because", reasons=[], candidate_digest=engine, baseline_digest="b" * 64,
                   policy="release", policy_sha256=policy)


def test_rows_and_cells_come_back_as_they_went_in(store, report_rows, tmp_path):
    store.begin("r1", "demo", {"seed": 0})
    stored = [StoredRow(row, row.delta_nll) for row in report_rows]
    store.finish("r1", stored, tmp_path / "r.html")
    assert store.rows("r1") == stored
    assert store.find_run().id == "r1"
    assert store.find_run("demo").facts == {"seed": 0}


def test_finishing_again_replaces_the_rows(store, report_rows, tmp_path):
    for rows in (report_rows, report_rows[:2]):
        store.begin("r1", "demo", {})
        store.finish("r1", [StoredRow(row, None) for row in rows], tmp_path / "r.html")
    assert [one.row.recipe for one in store.rows("r1")] == ["bf16", "fp8"]
    assert len(store.runs()) == 1


def test_a_run_that_is_made_again_keeps_its_old_rows_until_the_end(store, report_rows, tmp_path):
    store.begin("r1", "demo", {})
    store.finish("r1", [StoredRow(report_rows[0], None)], tmp_path / "r.html")
    store.begin("r1", "demo", {})
    store.fail("r1")
    assert store.find_run("r1").status == "stopped"
    assert len(store.rows("r1")) == 1


def test_the_newest_finished_run_is_shown(store, report_rows, tmp_path):
    for name in ("a-1", "a-2", "b-1"):
        store.begin(name, name[0], {})
        store.finish(name, [], tmp_path / "r.html")
    store.begin("b-2", "b", {})
    assert store.find_run().id == "b-1"
    assert store.find_run("a").id == "a-2"
    with pytest.raises(UsageError, match="ambiguous"):
        store.find_run("a-")


def test_unknown_runs_are_refused_with_the_nearest_name(store):
    with pytest.raises(NoRunError, match="no finished run"):
        store.find_run()
    store.begin("demo-1", "demo", {})
    with pytest.raises(NoRunError) as caught:
        store.find_run("dmeo")
    assert "'demo" in caught.value.hint


def test_digest_prefixes_resolve(store, tmp_path):
    first = artifact(tmp_path / "one", content="one")
    store.remember(first)
    assert store.resolve(first.digest[:8]) == ("engine", first.path)
    assert store.resolve(first.digest) == ("engine", first.path)
    assert store.resolve(first.digest[:5]) is None, "five characters are too few"
    assert store.resolve("nothexnothex") is None


def test_an_ambiguous_prefix_is_an_error(store, tmp_path):
    for number in range(2):
        store._db.execute("INSERT INTO artifacts VALUES(?, 'engine', '/x', '')", (f"abcdef{number}".ljust(64, "0"),))
    with pytest.raises(UsageError, match="ambiguous"):
        store.resolve("abcdef")


def test_the_newest_verdict_on_exactly_this_engine_counts(store, tmp_path):
    for number, word in enumerate(("PASS", "FAIL")):
        found = verdict("e" * 64, word)
        store.add_verdict(artifact(tmp_path / f"v{number}", "verdict", word), found)
    assert store.verdict_of("e" * 64).verdict.word == "FAIL"
    assert store.verdict_of("e" * 64, "q" * 64) is None, "another policy says nothing about this one"
    assert store.verdict_of("f" * 64) is None


def test_the_audit_log_shows_a_change(store):
    for number in range(3):
        store.log("publish", f"release {number}", alias="production")
    assert [entry.seq for entry in store.audit()] == [1, 2, 3]
    changed = store.audit()[1].model_copy(update={"subject": "another"})
    store._db.execute("UPDATE audit SET entry=? WHERE seq=2", (changed.model_dump_json(),))
    with pytest.raises(UsageError, match="broken at entry 2"):
        store.audit()


def test_a_running_job_is_seen_and_a_dead_one_is_not(store):
    store.begin("r1", "demo", {})
    store.job_progress("r1", "int8: evaluate", 3.0, 10.0)
    assert [(job.run, job.stage) for job in store.running()] == [("r1", "int8: evaluate")]
    assert store.find_run("r1").status == "running"
    store._db.execute("UPDATE progress SET pid=?", (2**22 + 12345,))
    assert store.running() == []
    assert [run.status for run in store.runs()] == [store.find_run("r1").status] == ["killed"]


def test_a_killed_run_that_is_taken_up_again_runs_and_begins_anew(store):
    store.begin("r1", "demo", {})
    store._db.execute("UPDATE progress SET pid=?, began='2026-01-01T00:00:00+00:00'", (2**22 + 12345,))
    store.begin("r1", "demo", {})
    store.job_progress("r1", "int8: evaluate", 3.0, 10.0)
    [job] = store.running()
    assert store.find_run("r1").status == "running"
    assert not job.began.startswith("2026-01-01")


def test_two_connections_see_each_other(tmp_path):
    with RunStore(tmp_path / "toolkit.db") as one, RunStore(tmp_path / "toolkit.db") as two:
        one.begin("r1", "demo", {})
        assert [run.id for run in two.runs()] == ["r1"]


def test_a_file_that_is_no_store_is_refused(tmp_path):
    (tmp_path / "toolkit.db").write_text(json.dumps({"not": "a database"}) * 200)
    with pytest.raises(UsageError, match="not a toolkit store"):
        RunStore(tmp_path / "toolkit.db")


def test_the_store_is_in_wal_mode(store):
    with sqlite3.connect(store.path) as other:
        assert other.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_runs_are_read_a_page_at_a_time_and_searched(store):
    for number in range(7):
        store.begin(f"run-{number}", "alpha" if number % 2 else "beta", {"model": f"Model{number}"})
    assert [run.id for run in store.runs(limit=2, offset=2)] == ["run-4", "run-3"]
    assert (store.count_runs(), store.count_runs("ALPHA"), store.count_runs(finished=True)) == (7, 3, 0)
    assert [run.id for run in store.runs(search="model5")] == ["run-5"]
    assert store.runs(search="%") == []


def test_children_are_found_by_parent_and_kind(store, tmp_path):
    from calib.artifact_writer import ArtifactWriter

    for number, kind in enumerate(("eval-report", "latency-sweep", "eval-report")):
        with ArtifactWriter(tmp_path / f"a{number}", kind, parents=["e" * 64, f"{number}" * 64]) as writer:
            writer.record = {"number": number}
        store.remember(writer.artifact)
    assert {path.name for path in store.children("e" * 64, "eval-report")} == {"a0", "a2"}
    assert store.children("f" * 64, "eval-report") == []


def _open_database(path, together, answers):
    together.wait()
    try:
        with Database(path):
            answers.put("")
    except Exception as error:
        answers.put(repr(error))


def test_processes_that_open_a_new_store_at_once_all_succeed(tmp_path):
    """Switching to a write-ahead log fails at once where another process is doing so: one opening in 25 did."""
    fork = multiprocessing.get_context("fork")
    for turn in range(15):
        together, answers = fork.Barrier(6), fork.Queue()
        opening = [fork.Process(target=_open_database, args=(tmp_path / f"{turn}.db", together, answers))
                   for _ in range(6)]
        for process in opening:
            process.start()
        assert [answers.get(timeout=60) for _ in opening] == [""] * 6
        for process in opening:
            process.join()

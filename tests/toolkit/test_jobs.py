"""The job table: own processes that outlive whoever started them, progress, cancel, and honest ends."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from calib.progress import Progress
from toolkit import jobs
from toolkit.errors import UsageError
from toolkit.home import Home
from toolkit.recording import watcher


@pytest.fixture
def home(tmp_path):
    return Home(tmp_path / "home")


def wait_for(home, job, states, seconds=90):
    for _ in range(seconds * 5):
        with jobs.JobTable(home.store) as table:
            work = table.find(job)
        if work.state in states:
            return work
        time.sleep(0.2)
    raise AssertionError(f"{work}\n{jobs.log_of(home, job).read_text()}")


def test_a_started_job_ends_with_its_exit_code_and_log(home):
    job = jobs.start(home, "eval", ["nothing-of-that-name"])
    work = wait_for(home, job, jobs.ENDED)
    assert (work.state, work.exit_code, work.verb) == ("failed", 4, "eval")
    error = json.loads(jobs.output_of(home, job).read_text())["error"]
    assert error["message"]
    assert error["hint"]


def test_only_work_can_be_started_and_not_twice(home):
    with pytest.raises(UsageError, match="cannot be started"):
        jobs.start(home, "publish", ["x"])
    with jobs.JobTable(home.store) as table:
        table.adopt(table.add("sweep", ["x"], own=True), "running")
    with pytest.raises(UsageError, match="exactly this"):
        jobs.start(home, "sweep", ["x"])


@pytest.mark.parametrize("background", [False, True])
def test_jobs_wait_for_their_turn_and_can_be_cancelled_while_they_wait(home, background):
    """Also where the server was started in the background, which makes the system ignore Ctrl-C for its children."""
    import fcntl

    before = signal.getsignal(signal.SIGINT)
    if background:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    jobs.folder_of(home).mkdir(parents=True)
    with (jobs.folder_of(home) / ".turn").open("wb") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        try:
            job = jobs.start(home, "eval", ["nothing"])
        finally:
            signal.signal(signal.SIGINT, before)
        for _ in range(300):
            with jobs.JobTable(home.store) as table:
                work = table.find(job)
            if work.began:
                break
            time.sleep(0.1)
        assert work.state == "waiting"
        with jobs.JobTable(home.store) as table:
            table.cancel(job)
        assert wait_for(home, job, jobs.ENDED).state == "cancelled"


def test_a_killed_process_is_shown_as_killed_and_a_reused_pid_is_not_believed(home):
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    with jobs.JobTable(home.store) as table:
        job = table.add("sweep", ["x"], own=True)
        table.started(job, process.pid)
        assert table.find(job).state == "waiting"
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert table.find(job).state == "killed"
        mine = table.add("sweep", ["y"], own=False)
        table.adopt(mine, "running")
        assert table.find(mine).state == "running"
        table._db.execute("UPDATE work SET pid_began=pid_began-100 WHERE id=?", (mine,))
        assert table.find(mine).state == "killed"
        with pytest.raises(UsageError, match="is over"):
            table.cancel(mine)


def test_a_terminals_work_is_recorded_with_its_progress(home, monkeypatch):
    monkeypatch.setattr("sys.argv", ["toolkit", "sweep", "int8", "--json", "--home", "x"])
    with watcher(home, True, None) as watch:
        watch(Progress("measure", 2, 8, "cell"))
        with jobs.JobTable(home.store) as table:
            [work] = table.list()
            assert (work.verb, work.arguments, work.state) == ("sweep", ["int8"], "running")
            assert (work.stage, work.share) == ("measure", 0.25)
            table._db.execute("UPDATE work SET stage_began='2026-01-01T00:00:00+00:00', "
                              "updated='2026-01-01T00:00:10+00:00'")
            assert table.find(work.id).eta_s == pytest.approx(30)
    with jobs.JobTable(home.store) as table:
        assert table.list()[0].state == "finished"
    with pytest.raises(KeyboardInterrupt), watcher(home, True, None):
        raise KeyboardInterrupt
    with jobs.JobTable(home.store) as table:
        assert table.list()[0].state == "cancelled"


def test_recording_never_stops_the_work(tmp_path):
    (tmp_path / "file").write_text("")
    with watcher(Home(tmp_path / "file"), True, None) as watch:
        watch(Progress("measure", 1, 2))
    jobs.Recorder(tmp_path / "file" / "x.db", "job")(Progress("measure", 1, 2))

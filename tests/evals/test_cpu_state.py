"""A process that must share its processor knows it; one that sleeps or runs alone has nothing to say."""

import os
import subprocess
import sys
import time

import pytest

from evals.cpu_state import CpuWatch, busy_note

counts = pytest.mark.skipif(not os.path.exists("/proc/self/schedstat"), reason="the kernel does not count waiting")


def work(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


@counts
def test_a_shared_processor_is_seen():
    mine = os.sched_getaffinity(0)
    one = {min(mine)}
    rival = subprocess.Popen([sys.executable, "-c", "while True: pass"],
                             preexec_fn=lambda: os.sched_setaffinity(0, one))
    try:
        os.sched_setaffinity(0, one)
        time.sleep(0.3)
        with CpuWatch() as watch:
            work(1.0)
    finally:
        os.sched_setaffinity(0, mine)
        rival.kill()
        rival.wait()
    assert watch.waited > 0.25


def test_without_counts_there_is_no_figure(monkeypatch, tmp_path):
    from evals import cpu_state
    monkeypatch.setattr(cpu_state, "_TASKS", tmp_path / "none")
    with CpuWatch() as watch:
        work(0.01)
    assert watch.waited is None


def test_the_note():
    assert busy_note([None, 0.02, 0.15]) is None
    assert busy_note([]) is None
    assert "in up to 43 % of its time" in busy_note([0.1, 0.431, None])

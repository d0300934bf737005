"""Progress: a line when a stage begins and every 30 s, with an ETA; silent when asked; never markup from outside."""

import io

import pytest

from calib.progress import Progress
from toolkit import console
from toolkit.calibrating import bound_of
from toolkit.errors import UsageError
from toolkit.options import parse_bytes, parse_cells, parse_memory


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test moves."""
    now = [1000.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    return now


def event(stage, done, total, at, **more):
    return Progress(stage, done, total, at=at, **more)


def test_a_line_every_thirty_seconds(capsys, clock):
    with console.Watcher() as watch:
        for second in range(0, 100, 5):
            clock[0] = 1000.0 + second
            watch(event("evaluate", second, 100, clock[0], unit="text"))
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["evaluate: 0/100 texts", "evaluate: 30/100 texts, about 1 min 10 s left",
                     "evaluate: 60/100 texts, about 40 s left", "evaluate: 90/100 texts, about 10 s left"]


def test_each_stage_speaks_once_at_least(capsys, clock):
    with console.Watcher() as watch:
        for stage in ("load", "calibrate", "export"):
            watch(event(stage, 0, None, clock[0]))
    assert [line.split(":")[0] for line in capsys.readouterr().err.splitlines()] == ["load", "calibrate", "export"]


def test_one_is_no_plural_and_a_note_counts_nothing(capsys, clock):
    with console.Watcher() as watch:
        watch(event("search", 1, None, clock[0], unit="rate", message="2 requests/s"))
        watch(event("draw", 0, None, clock[0], unit="item", message="accuracy is open"))
        watch(event("load", 0, 1, clock[0], unit="model"))
        watch(event("texts", 2, None, clock[0], unit="text"))
    assert capsys.readouterr().err.splitlines() == ["search: 1 rate  2 requests/s", "draw: accuracy is open",
                                                    "load: 0/1 model", "texts: 2 texts"]


def test_quiet_is_quiet(capsys, clock):
    with console.Watcher(quiet=True) as watch:
        watch(event("load", 0, 1, clock[0]))
        watch.note("hello")
    assert capsys.readouterr() == ("", "")


def test_brackets_are_text(capsys, clock):
    with console.Watcher() as watch:
        watch(event("load", 0, None, clock[0], message="[bold]x[/nothing]"))
        watch.note("[red]note[/]")
    assert "[bold]x[/nothing]" in (shown := capsys.readouterr().err)
    assert "[red]note[/]" in shown


def test_on_a_terminal_finished_stages_become_lines(monkeypatch, clock):
    from rich.console import Console

    terminal = Console(force_terminal=True, width=100, record=True, file=io.StringIO())
    monkeypatch.setattr(console, "stderr", lambda: terminal)
    with console.Watcher() as watch:
        for stage in ("calibrate", "build"):
            for done in range(3):
                clock[0] += 1
                watch(event(stage, done, 2, clock[0], unit="layer"))
    shown = terminal.export_text()
    assert "✓ calibrate  2/2 layers, 2 s" in shown
    assert "✓ build  2/2 layers, 2 s" in shown


def test_a_slow_stage_has_an_estimate_on_a_terminal_too(monkeypatch, clock):
    """Steps a minute apart: rich's own estimate had forgotten them, and said --:-- to the end."""
    from rich.console import Console

    monkeypatch.setattr(console, "stderr", lambda: Console(force_terminal=True, width=100, file=io.StringIO()))
    with console.Watcher() as watch:
        def shown():
            [task] = watch._bars.tasks
            return console._Left().render(task).plain

        watch(event("smooth", 0, 3, clock[0], unit="strength"))
        assert shown() == ""
        clock[0] += 58
        watch(event("smooth", 1, 3, clock[0], unit="strength"))
        assert shown() == "about 1 min 56 s left"
        clock[0] += 50
        assert shown() == "about 1 min 06 s left"
        watch(event("smooth", 3, 3, clock[0], unit="strength"))
        assert shown() == ""


def test_a_stage_of_one_step_is_done_when_the_next_begins(monkeypatch, clock):
    from rich.console import Console

    terminal = Console(force_terminal=True, width=100, record=True, file=io.StringIO())
    monkeypatch.setattr(console, "stderr", lambda: terminal)
    with console.Watcher() as watch:
        for stage in ("load model", "export"):
            watch(event(stage, 0, 1, clock[0], unit="model"))
            clock[0] += 40
    shown = terminal.export_text()
    assert "✓ load model  1/1 model, 40 s" in shown
    assert "· export  0/1 model" in shown, "what broke off is not done"


def test_a_stage_that_is_done_has_nothing_left(capsys, clock):
    with console.Watcher() as watch:
        watch(event("latency", 0, 2, clock[0], unit="cell"))
        clock[0] += 31
        watch(event("latency", 2, 2, clock[0], unit="cell"))
    assert capsys.readouterr().err.splitlines()[-1] == "latency: 2/2 cells"


@pytest.mark.parametrize(("seconds", "written"), [(0, "0 s"), (59.4, "59 s"), (65, "1 min 05 s"), (7800, "2 h 10 min")])
def test_duration(seconds, written):
    assert console.duration(seconds) == written


@pytest.mark.parametrize(("text", "size"), [("2GB", 2 * 10**9), ("1500MiB", 1500 * 2**20), ("1.5 kB", 1500),
                                            ("77", 77)])
def test_sizes(text, size):
    assert parse_bytes(text) == size


def test_a_share_of_the_devices_memory():
    assert parse_memory("80%", lambda: 10 * 2**30) == 8 * 2**30
    assert parse_memory("1GiB", lambda: pytest.fail("a size needs no device")) == 2**30
    for text in ("0%", "101%", "-5%", "much"):
        with pytest.raises(UsageError):
            parse_memory(text, lambda: 2**30)


def test_cells():
    assert parse_cells("1x64x32, 8x64x16") == [(1, 64, 32), (8, 64, 16)]


@pytest.mark.parametrize("text", ["0", "0GB", "0.0MiB"])
def test_a_bound_of_nothing_is_refused(text):
    with pytest.raises(UsageError, match="leaves nothing to calibrate in"):
        bound_of(text)
    assert bound_of(None) is None
    assert bound_of("2GB") == 2 * 10**9

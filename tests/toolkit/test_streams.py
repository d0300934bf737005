"""Terminals, pipes and homes as they come: no traceback, one JSON document, and the exit code that was meant."""

import json
import os
import signal
import subprocess
import sys

import pytest

from toolkit import cli
from toolkit.errors import StoreError, UsageError
from toolkit.home import expanded
from toolkit.options import parse_bytes, parse_cells
from toolkit.store import RunStore


def run(home, *arguments, shell="", **environment):
    """(exit code, stdout, stderr) of a command line in its own process; ``shell`` comes behind it."""
    line = " ".join([sys.executable, "-m", "toolkit", *arguments, "--home", str(home), shell])
    done = subprocess.run(["bash", "-c", line + '; exit "${PIPESTATUS[0]}"'], capture_output=True, timeout=60,
                          env={**os.environ, **environment})
    return done.returncode, done.stdout.decode(), done.stderr.decode()


ASCII = {"PYTHONIOENCODING": "ascii"}


def test_a_terminal_without_the_characters_gets_others(stored_home):
    code, out, err = run(stored_home.path, "runs", "show", **ASCII)
    assert (code, err) == (0, "")
    assert "?NLL" in out


def test_json_is_json_in_every_encoding(stored_home):
    code, out, _ = run(stored_home.path, "inspect", "nöpe", "--json", **ASCII)
    assert code == 2
    assert out.isascii()
    assert "nöpe" in json.loads(out)["error"]["message"]


def test_an_argument_that_is_no_text_is_refused(stored_home):
    code, out, err = run(stored_home.path, "runs", "show", "$'n\\xffpe'", "--json", PYTHONUTF8="1")
    assert (code, err) == (2, "")
    assert "is not text" in json.loads(out)["error"]["message"]


@pytest.mark.parametrize(("arguments", "shell", "code"), [
    (("runs", "show"), "| true", 0), (("runs", "show", "--json"), "| true", 0), (("runs", "ls", "--help"), "| true", 0),
    (("runs", "show", "nothing"), "2> >(true)", 4), (("runs", "show", "nothing", "--json"), "| true", 4),
    (("runs", "show"), ">&-", 0), (("runs", "show", "nothing"), ">&- 2>&-", 4), (("runs", "show"), "> /dev/full", 4),
    (("runs", "show", "--json"), "> /dev/full", 4), (("runs", "show", "nothing"), "2> /dev/full", 4)])
def test_a_reader_that_goes_away_changes_no_exit_code(stored_home, arguments, shell, code):
    found, _, err = run(stored_home.path, *arguments, shell=shell)
    assert found == code
    assert "Traceback" not in err
    assert "Exception ignored" not in err


@pytest.mark.parametrize("named", ["", "relative"])
def test_a_home_that_names_no_folder_is_refused(monkeypatch, named):
    monkeypatch.setenv("HOME", named)
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    assert cli.run_command(["runs", "ls"]) == 2


def test_a_home_of_nobody_is_refused(capsys):
    assert cli.run_command(["runs", "ls", "--home", "~no-such-user-here/x"]) == 2
    assert "no home folder" in capsys.readouterr().err
    with pytest.raises(UsageError):
        expanded(cli.Path("~no-such-user-here"))


def test_a_store_that_cannot_be_opened_now_is_no_damaged_one(tmp_path):
    (tmp_path / "toolkit.db").mkdir()
    with pytest.raises(StoreError, match="unable to open"):
        RunStore(tmp_path / "toolkit.db")


def test_a_store_that_is_damaged_inside_gets_two_lines(stored_home, capsys):
    with RunStore(stored_home.store) as store:
        store._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    content = bytearray(stored_home.store.read_bytes())
    content[4096:] = os.urandom(len(content) - 4096)
    stored_home.store.write_bytes(content)
    assert cli.run_command(["runs", "show", "--home", str(stored_home.path), "--json"]) in (2, 4)
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["code"] in ("store", "usage")
    assert error["hint"]


@pytest.mark.parametrize("text", ["²x8x4", "9" * 5000 + "x1x1", "1x1", "0x1x1", "٣x1x1", ""])
def test_what_is_no_cell_is_refused(text):
    with pytest.raises(UsageError, match="not a cell") as caught:
        parse_cells(text)
    assert len(caught.value.message) < 120


@pytest.mark.parametrize("text", ["1" + "0" * 400 + "GB", "٣GB", "-5GB", "1e9", "inf"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(UsageError, match="not a size"):
        parse_bytes(text)


def test_sizes_are_exact():
    assert parse_bytes("9007199254740993") == 9007199254740993
    assert parse_bytes("1.5 GiB") == 1_610_612_736


def test_memory_that_runs_out_is_said_so(capsys, monkeypatch, tmp_path):
    def greedy(*_):
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes.")
    monkeypatch.setattr("toolkit.store.RunStore.__init__", greedy)
    assert cli.run_command(["runs", "ls", "--home", str(tmp_path)]) == 4
    assert "not enough memory" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_in_the_middle_leaves_nothing_half_written(tmp_path, number):
    script = ("import sys, time\nfrom toolkit import cli\nfrom calib.artifact_writer import ArtifactWriter\n"
              "def work(*_, **__):\n"
              f"    with ArtifactWriter({str(tmp_path / 'a')!r}, 'verdict') as writer:\n"
              "        (writer.folder / 'half').write_bytes(b'x')\n        print('in', flush=True)\n"
              # in naps: a signal between Python's look for one and the call to sleep waits for its end
              "        for _ in range(600):\n            time.sleep(0.1)\n"
              "cli.app = work\nsys.argv = ['toolkit', '--json']\ncli.main()\n")
    child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True,  # as from a terminal:
                             preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    assert child.stdout.readline() == "in\n"
    child.send_signal(number)
    out, _ = child.communicate(timeout=30)
    assert child.returncode == 130
    assert json.loads(out)["error"]["code"] == "interrupted"
    assert [path.name for path in tmp_path.iterdir()] == [".a.lock"]

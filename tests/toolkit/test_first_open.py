"""A prepared engine becomes an engine when it is first opened on its device: once, whole or not at all."""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import pytest

from calib import artifact_writer
from calib.checkpoint import QuantizedCheckpoint
from calib.errors import ArtifactError
from engines.build import prepare as preparing
from engines.build.builder import build
from engines.build.prepare import Prepared, prepare
from engines.engine import Engine
from engines.plan import EngineSpec
from toolkit import cli, stages
from toolkit.home import Home
from toolkit.stages import Workshop
from toolkit.store import RunStore

SPEC = EngineSpec(max_seq_len=64, tune="none")
FORK = multiprocessing.get_context("fork")


@pytest.fixture(scope="module")
def made(tiny_home: Home, tmp_path_factory: pytest.TempPathFactory) -> tuple[Prepared, str]:
    """The tiny model prepared for a CPU, and the digest of the engine that is built here."""
    folder = tmp_path_factory.mktemp("prepared")
    source = QuantizedCheckpoint.open(tiny_home.models / "tiny")
    return prepare(source, SPEC, "cpu", folder / "prepared"), build(source, SPEC, folder / "built").digest


def first_open(home: Home, prepared: Prepared) -> Engine:
    with RunStore(home.store) as store:
        return stages.finished(Workshop(home, store), prepared.artifact.path)


def _die(*args: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _killed_while_placing(home: Home, prepared: Prepared) -> None:
    place, left = preparing._place, iter(range(2))

    def deadly(source: Path, target: Path) -> None:
        if next(left, None) is None:
            _die()
        place(source, target)
    pytest.MonkeyPatch().setattr(preparing, "_place", deadly)
    first_open(home, prepared)


def _killed_before_the_manifest(home: Home, prepared: Prepared) -> None:
    pytest.MonkeyPatch().setattr(artifact_writer, "write_atomic", _die)
    first_open(home, prepared)


def _killed_before_the_rename(home: Home, prepared: Prepared) -> None:
    rename = Path.rename

    def deadly(self: Path, target: Path) -> Path:
        if self.name.endswith(".partial"):
            _die()
        return rename(self, target)
    pytest.MonkeyPatch().setattr(Path, "rename", deadly)
    first_open(home, prepared)


@pytest.mark.parametrize("dies", [_killed_while_placing, _killed_before_the_manifest, _killed_before_the_rename])
def test_killed_while_it_is_finished_it_is_finished_anew(made: tuple[Prepared, str], tmp_path: Path,
                                                         dies: Callable[[Home, Prepared], None]) -> None:
    prepared, digest = made
    home = Home(tmp_path / "home")
    process = FORK.Process(target=dies, args=(home, prepared))
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    assert list(home.artifacts("engine").glob("[!.]*")) == [], "nothing that could be opened"
    assert any(home.artifacts("engine").glob(".*.partial")), "it died in the middle"
    engine = first_open(home, prepared)
    assert engine.digest == digest
    assert engine.artifact.verify() == prepared.artifact.verify() == []
    assert not list(home.artifacts("engine").glob(".*.partial"))


def _opens(home: Home, prepared: Prepared, start: Barrier, seen: Queue[str]) -> None:
    finish = preparing.finish

    def counted(*args: Any, **named: Any) -> Engine:
        seen.put("finished")
        return finish(*args, **named)
    pytest.MonkeyPatch().setattr(preparing, "finish", counted)
    start.wait()
    seen.put(first_open(home, prepared).digest)


def test_of_three_processes_one_finishes_it(made: tuple[Prepared, str], tmp_path: Path) -> None:
    prepared, digest = made
    home, start, seen = Home(tmp_path / "home"), FORK.Barrier(3), FORK.Queue()
    opening = [FORK.Process(target=_opens, args=(home, prepared, start, seen)) for _ in range(3)]
    for process in opening:
        process.start()
    said = sorted(seen.get(timeout=120) for _ in range(4))
    for process in opening:
        process.join(60)
    assert said == sorted(["finished", digest, digest, digest])
    assert [process.exitcode for process in opening] == [0, 0, 0]
    assert len(list(home.artifacts("engine").glob("[!.]*"))) == 1


def _without_privileges(home: Home, prepared: Prepared, said: Queue[str]) -> None:
    """Modes hold for root, too, once it has given up its capabilities."""
    if os.geteuid() == 0:
        header, nothing = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
        assert ctypes.CDLL(None, use_errno=True).capset(header, nothing) == 0
    try:
        said.put(first_open(home, prepared).digest)
    except ArtifactError as error:
        said.put(f"{error.message}. {error.hint}")


@pytest.mark.skipif(sys.platform != "linux", reason="capabilities are Linux's")
def test_a_folder_that_cannot_be_written_is_said_in_a_sentence(made: tuple[Prepared, str], tmp_path: Path) -> None:
    prepared, digest = made
    home, said = Home(tmp_path / "home"), FORK.Queue()
    engines = home.artifacts("engine")
    engines.mkdir(parents=True)
    answers = []
    for engines_mode, prepared_mode in ((0o555, 0o755), (0o755, 0o555)):
        engines.chmod(engines_mode)
        prepared.artifact.path.chmod(prepared_mode)
        process = FORK.Process(target=_without_privileges, args=(home, prepared, said))
        process.start()
        answers.append(said.get(timeout=120))
        process.join(60)
        if engines_mode == 0o555:
            assert list(engines.iterdir()) == []
    prepared.artifact.path.chmod(0o755)
    assert answers[0].startswith(f"cannot write in {engines}: Permission denied. ")
    assert answers[1] == digest, "the prepared folder itself is only read"


@pytest.mark.timeout(600)
def test_by_command(tiny_home: Home, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def call(*arguments: object, code: int = 0) -> str:
        assert cli.run_command([*map(str, arguments), "--home", str(tiny_home.path)]) == code
        return capsys.readouterr().out

    def refused(*arguments: object, code: int) -> dict[str, str]:
        return json.loads(call(*arguments, "--json", code=code))["error"]

    common = ("--max-seq-len", 64, "--tune", "none")
    folder, file, there = tmp_path / "here", tmp_path / "here.engine", tmp_path / "there"
    call("build", "tiny", "--target", "cpu", "--out", folder, *common)
    call("pack", folder, "-o", file)
    asked = ("-p", "river town", "--max-tokens", 6, "--json")
    first = json.loads(call("generate", file, *asked))
    engines = [Engine.open(path) for path in tiny_home.artifacts("engine").glob("[!.]*")]
    [engine] = [one for one in engines if "prepared" in one.timings()]
    assert engine.digest == first["engine"]
    made = engine.path.stat().st_mtime_ns
    assert first == json.loads(call("generate", folder, *asked)), "the file's and the folder's are one"
    assert Engine.open(engine.path).path.stat().st_mtime_ns == made
    packed = json.loads(call("pack", first["engine"], "-o", tmp_path / "made.engine", "--json"))
    assert packed["digest"] == engine.digest, "known by its digest from then on"

    for_a_card = json.loads(call("build", "tiny", "--target", "sm_90", "--out", there, "--json", *common))
    assert for_a_card["target"] == "sm_90"
    shown = json.loads(call("inspect", there, "--json"))
    assert (shown["kind"], shown["target"], shown["recipe"]) == ("prepared-engine", "sm_90", "bf16")
    assert "every check passed" in call("verify", there)
    assert "was prepared for sm_90, and this" in refused("generate", there, "-p", "x", code=4)["message"]
    unfinished = refused("publish", there, "--to", tmp_path / "shop", "--alias", "best", code=2)
    assert "is a prepared-engine, not an engine" in unfinished["message"]
    assert "first opened" in unfinished["hint"]
    other = ("build", "tiny", "--target", "sm_90", "--out", tmp_path / "x")
    assert "bytes" in refused(*other, "--memory", "50%", code=2)["hint"]
    assert "--device cuda beside --target sm_90" in refused(*other, "--device", "cuda", code=2)["message"]
    assert not (tmp_path / "x").exists()

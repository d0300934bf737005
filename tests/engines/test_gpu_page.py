"""The page of GPU figures follows from its raw files, and a session's documents become raw files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import gpu_page, gpu_session
from benchmarks.gpu_page import newest, page_with, take, verdict
from evals.bench import BenchCell, write_cells

DOCS = Path(__file__).parents[2] / "docs" / "benchmarks"


def test_the_tables_follow_from_the_raw_files() -> None:
    text = (DOCS / "gpu-h200.md").read_text(encoding="utf-8")
    assert text == page_with(text, DOCS / "gpu"), "write it again: python -m benchmarks.gpu_page"


def test_what_is_asked_is_met_or_missed_by_so_much() -> None:
    assert verdict(1.7, 1.7, True) == "met"
    assert verdict(1.709, 1.7, True) == "missed by 0.5 %"
    assert verdict(101.0, 100.0, False) == "met"
    assert verdict(80.0, 100.0, False) == "missed by 25.0 %"


def test_a_session_is_taken_with_its_commit_and_the_peer_of_its_precision(tmp_path: Path) -> None:
    session, folder = tmp_path / "session", tmp_path / "gpu"
    session.mkdir()
    folder.mkdir()
    made = [BenchCell(name=f"decode int8 kv=bf16 batch={batch} isl=128", value=value, unit="ms", floor=1.9)
            for batch, value in ((1, 2.4), (8, 3.0))]
    write_cells(session / "int8.json", made, "c", device="NVIDIA H200")
    peers = [{"tag": "int8-mp", "b": 1, "isl": 128, "step_ms": 3.7, "prefill_ms": 9.0, "prefill_tok_s": 1.0},
             {"tag": "fp8-mp", "b": 8, "isl": 128, "step_ms": 1.0, "prefill_ms": 9.0, "prefill_tok_s": 1.0}]
    (session / "peers.jsonl").write_text("\n".join(map(json.dumps, peers)))
    [path] = take(session, "0123456789abcdef", folder)
    assert path.name == "int8-0123456.json"
    run = newest(folder)["int8"]
    first, second = (run.cell(f"decode {{}} batch={batch} isl=128") for batch in (1, 8))
    assert first is not None
    assert second is not None
    assert (first.peer, first.peer_name) == (3.7, "vllm 0.20.2 int8-mp")
    assert second.peer is None, "another precision's figure is none of this one"
    [line] = [line for line in gpu_page.decode({"int8": run}) if "| 1 |" in line]
    assert line == "| int8 | 1 | 1.90 | 3.700 | 2.400 | 1.54x | 2.45 | met |"
    (folder / "int9-0123456.json").write_text("{}")
    with pytest.raises(SystemExit, match="no table shows"):
        newest(folder)


def test_an_older_figure_of_the_peer_has_a_star(tmp_path: Path) -> None:
    for commit, date, value, peer in (("aaaaaaa", "2026-11-29", 2.5, 3.7), ("bbbbbbb", "2026-11-30", 2.4, None)):
        cell = BenchCell(name="decode int8 kv=bf16 batch=8 isl=128", value=value, unit="ms", floor=1.9, peer=peer,
                         peer_name=None if peer is None else "vllm 0.20.2 int8-mp")
        (tmp_path / f"int8-{commit}.json").write_text(json.dumps(
            {"commit": commit, "date": date, "cells": [cell.model_dump(mode="json")]}))
    [line] = [line for line in gpu_page.decode(newest(tmp_path)) if "| 8 |" in line]
    assert line == "| int8 | 8 | 1.90 | 3.700 * | 2.400 | 1.54x | vLLM | met |"


def test_steps_of_a_session(tmp_path: Path) -> None:
    step = gpu_session.step_of("fp8:kv:long", tmp_path, tmp_path / "engines")
    assert step.name == "fp8-kv_fp8"
    words = " ".join(step.command)
    assert "--kv fp8" in words
    assert "--cells decode long --max-seq-len 33024" in words
    assert gpu_session.step_of("int4_awq_a8:full", tmp_path, tmp_path).seconds == gpu_session.LIMITS["full"]
    for word in ("fp9", "fp8:wide", "peer:nobody", "", "fp8:kv:full"):
        with pytest.raises(SystemExit):
            gpu_session.step_of(word, tmp_path, tmp_path)


def test_a_step_that_runs_out_of_time_is_ended_and_kept_in_the_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    slow = gpu_session.Step("slow", ["bash", "-c", "echo begun; sleep 60 & wait"], 1)
    assert not gpu_session.run(slow, 30.0, log)
    (tmp_path / "kept").mkdir()
    leaves = gpu_session.Step("leaves", ["bash", "-c", "sleep 60 & echo done"], 20, fresh=tmp_path / "kept")
    assert gpu_session.run(leaves, 30.0, log), "what it leaves behind does not hold up the next"
    assert not (tmp_path / "kept").exists()
    assert log.read_text().splitlines()[1::2] == ["begun", "done"]

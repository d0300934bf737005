"""Engines of quantized checkpoints: rows and their mates, sizes, tuning. Their numbers: ``test_scheme_engines.py``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from memory_checkpoint import INT4, INT8, MemoryCheckpoint
from tiny_models import VOCAB, tiny_llama

from calib.checkpoint import QuantizedCheckpoint
from engines.build.builder import build
from engines.build.tune import tune
from engines.device import detect
from engines.llm import LLM
from engines.plan import EngineSpec
from engines.request import SamplingParams


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("quantized") / "model", seed=7)


def prompts(lengths: Sequence[int] = (200, 31, 2)) -> list[list[int]]:
    generator = np.random.default_rng(0)
    return [generator.integers(0, VOCAB, length).tolist() for length in lengths]


def test_a_loud_row_does_not_spoil_its_mates(folder: Path, tmp_path: Path) -> None:
    """One scale for a whole batch would: every row has its own."""
    engine = build(MemoryCheckpoint.of(folder, INT8), EngineSpec(tune="none"), tmp_path / "e")  # type: ignore[arg-type]
    batch = prompts()
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    with LLM(engine) as llm:
        together = [out.outputs[0].token_ids for out in llm.generate(batch, params)]
        alone = [llm.generate([prompt], params)[0].outputs[0].token_ids for prompt in batch]
    assert together == alone


def test_stored_sizes_follow_the_grids(folder: Path, tmp_path: Path) -> None:
    sizes = {name: build(MemoryCheckpoint.of(folder, scheme), EngineSpec(tune="none"),  # type: ignore[arg-type]
                         tmp_path / name).size_bytes for name, scheme in (("int8", INT8), ("int4", INT4))}
    bf16 = build(QuantizedCheckpoint.open(folder), EngineSpec(tune="none"), tmp_path / "bf16").size_bytes
    assert sizes["int4"] < sizes["int8"] < bf16


def test_tuning_is_cached_and_then_repeatable(folder: Path, tmp_path: Path) -> None:
    checkpoint = MemoryCheckpoint.of(folder, INT8)
    first = build(checkpoint, EngineSpec(tune="quick"), tmp_path / "a", tuning=tmp_path / "t")  # type: ignore[arg-type]
    again = build(checkpoint, EngineSpec(tune="quick"), tmp_path / "b", tuning=tmp_path / "t")  # type: ignore[arg-type]
    assert first.digest == again.digest
    timings = first.timings()["tuning"]
    assert timings == again.timings()["tuning"]
    int8 = next(timing for timing in timings if "int8" in timing["shape"])
    assert set(int8["milliseconds"]) == {"tiles"}
    assert all(value > 0 for row in int8["milliseconds"].values() for value in row.values())
    [full] = [timing for timing in build(checkpoint, EngineSpec(tune="full"), tmp_path / "c",
                                         tuning=tmp_path / "t").timings()["tuning"] if "int8 channel" in timing["shape"]
              and timing["shape"].startswith(int8["shape"].split(" weight")[0])]
    assert set(full["milliseconds"]) == {"tiles", "split", "half", "int_mm", "float"}
    assert full["runner_up"] not in (None, full["impl"])


def test_tune_none_times_nothing(folder: Path, tmp_path: Path) -> None:
    program = build(QuantizedCheckpoint.open(folder), EngineSpec(tune="none"), tmp_path / "e").plan.program
    kernels, timings = tune(program, detect("cpu"), "none", 64, tmp_path / "t", lambda event: None)
    assert timings == []
    assert not (tmp_path / "t").exists()
    assert {kernel.impl for kernel in kernels} == {"tiles"}

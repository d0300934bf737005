"""Quantized engines against calibration's own oracle: a Hugging Face module with dequantized weights and fake-quantized
activations, which shares no code with the engines.

Stated bound on logits, relative to the largest one. Where both do the same arithmetic only the order of float32 sums
differs: 1e-5. But a value on the edge between two codes may then round either way, and moves a logit by one step of its
activation; in a random network everything after it follows. So of many short prompts the median row keeps 1e-5 and
every row keeps one coarse step, 0.1. int4 weights are rounded to fp16 by the operator that runs them: 2e-3.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from memory_checkpoint import FP8, FP8_KV, INT4, INT8, MemoryCheckpoint
from tiny_models import VOCAB, tiny_llama

from calib.checkpoint import QuantizedCheckpoint
from calib.model import load_model
from calib.scheme import BF16, Grid, PerChannel, PerTensor, PerToken, Scheme
from engines.build.builder import build
from engines.build.tune import tune
from engines.device import detect
from engines.llm import LLM
from engines.plan import EngineSpec
from engines.request import SamplingParams

FP8_TOKEN = Scheme(weight=Grid(dtype="fp8_e4m3", granularity=PerChannel()),
                   activation=Grid(dtype="fp8_e4m3", granularity=PerToken(), dynamic=True))
INT8_STATIC = Scheme(weight=Grid(dtype="int8", granularity=PerChannel()),
                     activation=Grid(dtype="int8", granularity=PerTensor()))
CASES = {"fp8": (FP8, BF16), "fp8_token": (FP8_TOKEN, BF16), "int8": (INT8, BF16), "int8_static": (INT8_STATIC, BF16),
         "int8_kv8": (INT8, FP8_KV), "int4": (INT4, BF16), "fp8_kv8": (FP8, FP8_KV)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("quantized") / "model", seed=7)


def prompts(lengths: Sequence[int] = (200, 31, 2)) -> list[list[int]]:
    generator = np.random.default_rng(0)
    return [generator.integers(0, VOCAB, length).tolist() for length in lengths]


@pytest.mark.parametrize("case", CASES)
def test_scores_match_the_fake_quantized_module(folder: Path, tmp_path: Path, case: str) -> None:
    scheme, kv = CASES[case]
    checkpoint = MemoryCheckpoint.of(folder, scheme, kv=kv, input_scale=0.05)
    oracle = load_model(checkpoint)  # type: ignore[arg-type]
    engine = build(checkpoint, EngineSpec(tune="none", max_num_tokens=64), tmp_path / case)  # type: ignore[arg-type]
    assert engine.emulated == ("fp8" in case or "kv8" in case)
    every = np.arange(VOCAB)
    errors: list[np.ndarray] = []
    with LLM(engine) as llm:
        batch = prompts([*([3] * 40), 90])
        scores = llm.loglikelihood(batch, at_ids=[np.tile(every, (len(prompt) - 1, 1)) for prompt in batch])
    for prompt, score in zip(batch, scores, strict=True):
        with torch.inference_mode():
            logits = oracle(torch.tensor([prompt]), use_cache=False).logits[0, :-1]
        table = logits.log_softmax(-1).numpy()
        errors.append(np.abs(score.at_logprobs - table).max(-1) / float(logits.abs().max()))
    rows = np.concatenate(errors)
    bound = 2e-3 if case == "int4" else 1e-5
    assert np.median(rows[:80]) < bound, np.quantile(rows, [0.1, 0.5, 0.9])
    assert rows.max() < (bound if case == "int4" else 0.1), rows.max()


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

"""Every family on int8, int4 and quantized KV caches, against calibration's oracle (bounds: test_quantized_engines)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from memory_checkpoint import FP8_KV, INT4, INT8, MemoryCheckpoint

from benchmarks.tiny_families import FAMILIES, ORIGINAL, VOCAB, make, prompts
from calib.model import load_model
from calib.scheme import BF16, Grid
from engines.build.builder import build
from engines.llm import LLM
from engines.plan import EngineSpec

CASES = {"int8": (INT8, BF16), "int4": (INT4, BF16), "int8 with an fp8 cache": (INT8, FP8_KV),
         "int8 with an int8 cache": (INT8, Grid(dtype="int8"))}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", FAMILIES)
def test_scores_match_the_fake_quantized_module(tmp_path: Path, name: str, case: str) -> None:
    scheme, kv = CASES[case]
    long = "original_max_position_embeddings" in FAMILIES[name].changes
    checkpoint = MemoryCheckpoint.of(make(tmp_path / "model", FAMILIES[name], seed=1), scheme, kv=kv)
    oracle = load_model(checkpoint)  # type: ignore[arg-type]
    spec = EngineSpec(tune="none", max_num_tokens=64, max_seq_len=ORIGINAL if long else None)
    engine = build(checkpoint, spec, tmp_path / "engine")  # type: ignore[arg-type]
    assert {choice.impl for choice in engine.plan.kernels} == {"tiles", "compiled"}, engine.plan.notes
    batch = prompts([*([3] * 20), 60], seed=6)
    with LLM(engine) as llm:
        scores = llm.loglikelihood(batch, at_ids=[np.tile(np.arange(VOCAB), (len(text) - 1, 1)) for text in batch])
    errors = []
    for text, score in zip(batch, scores, strict=True):
        with torch.inference_mode():
            logits = oracle(torch.tensor([text]), use_cache=False).logits[0, :-1]
        table = logits.log_softmax(-1).numpy()
        errors.append(np.abs(score.at_logprobs - table).max(-1) / float(logits.abs().max()))
    rows = np.concatenate(errors)
    assert np.median(rows[:40]) < (2e-3 if case == "int4" else 2e-5), np.quantile(rows, [0.1, 0.5, 0.9])
    assert rows.max() < (2e-3 if case == "int4" else 0.15), rows.max()

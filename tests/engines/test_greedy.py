"""The bf16 engine against transformers in float32 on the same bf16 weights: the same tokens, whatever the batch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import VARIANTS, VOCAB, greedy, reference, tiny_llama

from calib.checkpoint import QuantizedCheckpoint
from engines.build.builder import build
from engines.llm import LLM
from engines.plan import EngineSpec
from engines.request import SamplingParams


def prompts(lengths: list[int], seed: int = 0) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    return [generator.integers(0, VOCAB, length).tolist() for length in lengths]


def checked(llm: LLM) -> LLM:
    """Prove block ownership after every step."""
    loop = llm._open
    inner = loop.step

    def step():
        events = inner()
        loop.check()
        stats = loop.stats()
        assert stats["free_blocks"] + stats["used_blocks"] + stats["cached_blocks"] == stats["blocks"]
        return events
    loop.step = step  # type: ignore[method-assign]
    return llm


def ids(llm: LLM, batch: list[list[int]], count: int) -> list[list[int]]:
    outs = llm.generate(batch, SamplingParams(max_tokens=count, ignore_eos=True))
    return [out.outputs[0].token_ids for out in outs]


@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_equals_transformers(variant: str, tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "model", seed=1, **VARIANTS[variant])
    model = reference(folder)
    batch = prompts([1, 2, 7, 16, 17, 40, 100])
    expected = [greedy(model, prompt, 24) for prompt in batch]
    for name, spec in (("wide", EngineSpec(tune="none")),
                       ("narrow", EngineSpec(tune="none", max_batch_size=3, max_num_tokens=11, block_size=4))):
        with LLM(build(QuantizedCheckpoint.open(folder), spec, tmp_path / name)) as llm:
            checked(llm)
            assert ids(llm, batch, 24) == expected
            assert [ids(llm, [prompt], 24)[0] for prompt in batch[:4]] == expected[:4]


def test_blocks_run_out_and_come_back(llama_folder: Path, tmp_path: Path) -> None:
    """Room for one full sequence and a little more: sequences are preempted, recomputed, and end alike."""
    per_token = 2 * 3 * 2 * 16 * 4
    spec = EngineSpec(tune="none", max_seq_len=128, max_num_tokens=32, block_size=4)
    probe = build(QuantizedCheckpoint.open(llama_folder), spec, tmp_path / "probe").plan.memory
    spec = spec.model_copy(update={"memory": probe.weights + probe.activations + per_token * 160})
    engine = build(QuantizedCheckpoint.open(llama_folder), spec, tmp_path / "tight")
    assert engine.plan.limits.num_blocks == 40
    model = reference(llama_folder)
    batch = prompts([30, 5, 12, 28, 3, 19], seed=3)
    expected = [greedy(model, prompt, 60) for prompt in batch]
    with LLM(engine) as llm:
        checked(llm)
        assert ids(llm, batch, 60) == expected
        stats = llm.stats()
        assert stats["preemptions"] > 0
        assert stats["free_blocks"] + stats["cached_blocks"] == stats["blocks"]
        assert ids(llm, batch[:1], 60) == expected[:1]


def test_scores_equal_transformers(engine, llama_folder: Path) -> None:
    model = reference(llama_folder)
    batch = prompts([2, 33, 150, 256], seed=4)
    at = [np.tile(np.arange(5), (len(prompt) - 1, 1)) for prompt in batch]
    with LLM(engine) as llm:
        checked(llm)
        scores = llm.loglikelihood(batch, top_k=4, at_ids=at)
    for prompt, score in zip(batch, scores, strict=True):
        with torch.inference_mode():
            table = model(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1).numpy()
        rows = np.arange(len(prompt) - 1)
        assert score.logprobs.dtype == np.float32
        assert np.abs(score.logprobs - table[rows, prompt[1:]]).max() < 1e-4
        assert (score.greedy == (table.argmax(-1) == prompt[1:])).all()
        assert np.abs(score.top_logprobs - np.sort(table, -1)[:, :-5:-1]).max() < 1e-4
        assert np.abs(score.at_logprobs - table[:, :5]).max() < 1e-4


def test_long_prompts_are_scored_in_chunks(engine, llama_folder: Path, tmp_path: Path) -> None:
    spec = EngineSpec(tune="none", max_num_tokens=13, max_batch_size=2)
    [prompt] = prompts([200], seed=5)
    with LLM(engine) as whole, LLM(build(QuantizedCheckpoint.open(llama_folder), spec, tmp_path / "e")) as chunked:
        a, b = whole.loglikelihood([prompt])[0], chunked.loglikelihood([prompt])[0]
    assert np.abs(a.logprobs - b.logprobs).max() < 1e-4
    assert (a.greedy == b.greedy).all()


def test_scoring_and_generating_interleave(engine, llama_folder: Path) -> None:
    model = reference(llama_folder)
    [prompt, scored] = prompts([9, 60], seed=6)
    with LLM(engine) as llm:
        loop = checked(llm)._open
        number = loop.admit(prompt, SamplingParams(max_tokens=12, ignore_eos=True))
        loop.step()
        score = loop.admit_score(scored, 0, None)
        while not loop.idle:
            loop.step()
        assert loop.take(number).outputs[0].token_ids == greedy(model, prompt, 12)
        assert np.abs(loop.take_score(score).logprobs - llm.loglikelihood([scored])[0].logprobs).max() < 1e-4

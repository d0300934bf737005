"""The demo model on the card: transformers' tokens, and the CPU engine's log-probabilities in every precision.

TOOLKIT_DEMO_MODEL names its folder or .gguf file; the model is not fetched here, as the card's machine may be offline.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from memory_checkpoint import FP8, INT4, INT8, MemoryCheckpoint
from test_gpu_engine import A8
from tiny_models import reference

from calib.checkpoint import QuantizedCheckpoint
from calib.source import gguf_to_folder
from engines.build.builder import build
from engines.llm import LLM
from engines.plan import EngineSpec
from engines.request import SamplingParams

MODEL = os.environ.get("TOOLKIT_DEMO_MODEL", "")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not (MODEL and torch.cuda.is_available()),
                                                  reason="needs a CUDA device and TOOLKIT_DEMO_MODEL")]
TEXTS = ["The capital of France is", "def fibonacci(n):\n    ", "Water boils at", "Once upon a time, in a village by "
         "the sea, there lived a fisherman who had three daughters. The eldest was proud, the second was clever, and"]
LIMITS = {"max_seq_len": 256, "max_batch_size": 4, "max_num_tokens": 128, "tune": "none"}
#: Mean and largest difference of a log-probability from the CPU engine's float32 activations. Seen: bf16 .042 and .19,
#: int8 .26 and 1.3, int4 .096 and .48, int4_a8 .24 and 1.2, fp8 .21 and 1.1. That is what bf16 activations do to this
#: model under codes that nobody calibrated (round to nearest, outliers and all), not the card: transformers itself,
#: with the same int8 codes, differs by .26 between activations in bf16 and in float32, and by .038 without codes.
BOUNDS = {"bf16": (0.06, 0.4), "int8": (0.36, 2.5), "int4": (0.14, 0.9), "int4_a8": (0.36, 2.5), "fp8": (0.3, 2.0)}
SCHEMES = {"int8": INT8, "int4": INT4, "int4_a8": A8, "fp8": FP8}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    given = Path(MODEL)
    return gguf_to_folder(given, tmp_path_factory.mktemp("demo") / "bf16") if given.suffix == ".gguf" else given


def test_greedy_equals_transformers_until_logits_tie(folder: Path, tmp_path: Path) -> None:
    theirs = reference(folder).cuda()
    spec = EngineSpec(device="cuda", memory=4 << 30, **LIMITS)  # type: ignore[arg-type]
    with LLM(build(QuantizedCheckpoint.open(folder), spec, tmp_path / "engine")) as llm:
        prompts = [llm.tokenizer.encode(text) for text in TEXTS]
        outputs = llm.generate(prompts, SamplingParams(max_tokens=32, ignore_eos=True))
        for prompt, output in zip(prompts, outputs, strict=True):
            ours = output.outputs[0].token_ids
            with torch.inference_mode():
                logits = theirs(torch.tensor([prompt + ours], device="cuda")).logits[0, len(prompt) - 1:-1].float()
            for row, token in zip(logits, ours, strict=True):
                assert float(row.max() - row[token]) < 0.25, "another token, and not a tie"


@pytest.mark.parametrize("precision", sorted(BOUNDS))
def test_scores_match_the_cpu_engine(precision: str, folder: Path, tmp_path: Path) -> None:
    checkpoint = (QuantizedCheckpoint.open(folder) if precision == "bf16"
                  else MemoryCheckpoint.of(folder, SCHEMES[precision], input_scale=0.1))
    card = EngineSpec(device="cuda", memory=4 << 30, **LIMITS)  # type: ignore[arg-type]
    with (LLM(build(checkpoint, EngineSpec(**LIMITS), tmp_path / "cpu")) as cpu,  # type: ignore[arg-type]
          LLM(build(checkpoint, card, tmp_path / "gpu")) as gpu):
        prompts = [cpu.tokenizer.encode(text) for text in TEXTS]
        pairs = zip(gpu.loglikelihood(prompts), cpu.loglikelihood(prompts), strict=True)
        differences = np.concatenate([np.abs(ours.logprobs - theirs.logprobs) for ours, theirs in pairs])
    mean, largest = BOUNDS[precision]
    print(f"{precision}: mean {differences.mean():.4f}, largest {differences.max():.4f}")
    assert differences.mean() < mean
    assert differences.max() < largest

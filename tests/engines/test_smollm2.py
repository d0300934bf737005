"""The demo model itself, when it has been fetched (``toolkit data prepare --home .home``): transformers' tokens.

Greedy tokens may only differ where the two best logits are closer than the float32 sums can tell apart.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models import greedy, reference

from calib.checkpoint import QuantizedCheckpoint
from engines.build.builder import build
from engines.llm import LLM
from engines.plan import EngineSpec
from engines.request import SamplingParams

MODEL = Path(__file__).parents[2] / ".home" / "models" / "SmolLM2-135M-Instruct"
PROMPTS = ["The capital of France is", "def fibonacci(n):\n    ", "Water boils at", "Once upon a time"]


@pytest.mark.skipif(not MODEL.is_dir(), reason="the demo model is not in .home; run toolkit data prepare")
def test_greedy_equals_transformers_alone_together_and_chunked(tmp_path: Path) -> None:
    model = reference(MODEL)
    spec = EngineSpec(tune="none", max_num_tokens=7, max_batch_size=3)
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    with LLM(build(QuantizedCheckpoint.open(MODEL), spec, tmp_path / "engine")) as llm:
        prompts = [llm.tokenizer.encode(text) for text in PROMPTS]
        prompts.append(prompts[0] * 6)
        expected = [greedy(model, prompt, 12) for prompt in prompts]
        assert [out.outputs[0].token_ids for out in llm.generate(prompts, params)] == expected
        assert llm.generate([prompts[0]], params)[0].outputs[0].token_ids == expected[0]
        score = llm.loglikelihood([prompts[-1]])[0]
    with torch.inference_mode():
        table = model(torch.tensor([prompts[-1]])).logits[0, :-1].log_softmax(-1)
    theirs = table.gather(1, torch.tensor(prompts[-1][1:])[:, None]).squeeze(1).numpy()
    assert abs(score.logprobs - theirs).max() < 1e-3

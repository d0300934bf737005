"""A tiny model of each family through the GPU engine beside the CPU engine: in Triton's interpreter, or on a GPU.

Without a GPU, run as a process of its own with TRITON_INTERPRET=1 (chosen before Triton is imported):
    TRITON_INTERPRET=1 python -m benchmarks.families_interpreted WORK_DIR [FAMILY ...]
Prints a line a family: its name, a tab, the largest difference of a log-probability (bf16 activations there, float32
here). Texts are longer than the windows; prompts are prefilled in chunks beside another one's decode.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch

from benchmarks.tiny_families import FAMILIES, make, prompts
from calib.checkpoint import QuantizedCheckpoint
from engines.build.builder import build
from engines.llm import LLM
from engines.plan import EngineSpec
from engines.request import SamplingParams

#: Largest difference of a log-probability that bf16 activations may make against float32 ones on these models.
BOUND = 0.25
_STEPS = 4
_LIMITS = {"max_seq_len": 40, "max_batch_size": 2, "max_num_tokens": 16, "tune": "none"}
_SIZES = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2,
          "num_key_value_heads": 1, "head_dim": 16, "initializer_range": 0.2}
#: On a GPU: sizes that the matrix instructions take as they are.
_WIDER: dict[str, object] = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
                             "num_key_value_heads": 2, "initializer_range": 0.15}
_SMALLER = {"sliding_window": 6, "max_window_layers": 1, "sliding_window_pattern": 2}


def _changes(name: str, device: str) -> dict[str, object]:
    """Smaller sizes; windows of 6 where there are any, and a layer without one where they alternate."""
    found: dict[str, object] = {**_SIZES, **{key: value for key, value in _SMALLER.items()
                                             if key in FAMILIES[name].changes}}
    if device == "cuda":
        found |= _WIDER
    if FAMILIES[name].model_type == "phi3":
        del found["head_dim"]  # it is hidden_size / heads there
    return found


def worst_difference(work: Path, name: str, device: str = "interpreter") -> float:
    """Largest difference of a log-probability over a text's scores and some decode steps of two sequences.

    RuntimeError when already the first token is another one; later ones may part at near ties and end the comparison.
    """
    checkpoint = QuantizedCheckpoint.open(make(work / "model", FAMILIES[name], seed=3, **_changes(name, device)))
    texts = prompts([3, 21], seed=8)
    params = SamplingParams(max_tokens=_STEPS, ignore_eos=True, logprobs=1)
    with (LLM(build(checkpoint, EngineSpec(**_LIMITS), work / "cpu")) as cpu,  # type: ignore[arg-type]
          LLM(build(checkpoint, EngineSpec(device=device, memory=(2 << 30 if device == "cuda" else 64 << 20),
                                           **_LIMITS), work / "gpu")) as gpu):  # type: ignore[arg-type]
        pairs = [(a.outputs[0], b.outputs[0])
                 for a, b in zip(gpu.generate(texts, params), cpu.generate(texts, params), strict=True)]
        [ours], [theirs] = (llm.loglikelihood(texts[1:]) for llm in (gpu, cpu))
    worst = float(np.abs(ours.logprobs - theirs.logprobs).max())
    for a, b in pairs:
        if a.token_ids[0] != b.token_ids[0]:
            raise RuntimeError(f"{name}: {a.token_ids} in the interpreter, {b.token_ids} on the CPU")
        for mine, other in zip(a.logprobs or [], b.logprobs or [], strict=True):
            if mine.token_id != other.token_id:
                break
            worst = max(worst, abs(mine.logprob - other.logprob))
    return worst


def main(work: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    for index, name in enumerate(names or FAMILIES):
        print(f"{name}\t{worst_difference(work / str(index), name):.4f}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])

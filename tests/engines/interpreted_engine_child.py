"""Child of test_gpu_engine: a tiny engine through Triton's interpreter beside the CPU engine.

A process of its own with TRITON_INTERPRET=1, as the interpreter must be chosen before Triton is imported.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch
from memory_checkpoint import INT8, MemoryCheckpoint
from tiny_models import tiny_llama

from calib.scheme import BF16, Grid, PerBlock, PerGroup, Scheme
from engines.build.builder import build
from engines.kernels import attention_decode
from engines.llm import LLM
from engines.plan import EngineSpec
from engines.request import Grammar, SamplingParams
from engines.runtime.cuda.shape import Shape
from engines.runtime.protocols import Launched
from engines.runtime.scheduler import Chunk

SCHEMES = {
    "int8": INT8,
    "int8_static": Scheme(weight=INT8.weight, activation=Grid(dtype="int8")),
    "fp8_block": Scheme(weight=Grid(dtype="fp8_e4m3", granularity=PerBlock(rows=128, cols=128)),
                        activation=Grid(dtype="fp8_e4m3", granularity=PerGroup(size=128), dynamic=True)),
}


def late(op: object) -> NoReturn:
    raise AssertionError(f"a step looks a weight up ({op}), which may read it: no CUDA graph could be captured")


def again_alone(gpu: LLM) -> None:
    """A step that raises is started sequence by sequence: more launches than may be under way, and no token changes."""
    six = [[5 * i + 1, 5 * i + 2] for i in range(6)]
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    gpu.forget_prefixes()
    plain = [out.outputs[0].token_ids for out in gpu.generate(six, params)]
    assert gpu._gpu is not None
    runner, failed = gpu._gpu.runner, []
    inner = runner.launch

    def failing(chunks: Sequence[Chunk]) -> Launched:
        if len(chunks) == 6 and len(failed) < 2:  # the prompts, and the first decoding step
            failed.append(chunks)
            raise RuntimeError("injected")
        return inner(chunks)

    runner.launch = failing  # type: ignore[method-assign]
    gpu.forget_prefixes()
    found = [out.outputs[0].token_ids for out in gpu.generate(six, params)]
    assert len(failed) == 2
    assert found == plain, (found, plain)


def main(work: Path, scheme: str) -> None:
    torch.set_num_threads(1)
    wide = 4 if scheme == "fp8_block" else 1
    folder = tiny_llama(work / "model", num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
                        head_dim=16 * wide, hidden_size=32 * wide, intermediate_size=128)
    kv = Grid(dtype="int8") if scheme == "int8_static" else BF16
    checkpoint = MemoryCheckpoint.of(folder, SCHEMES[scheme], input_scale=0.05, kv=kv)
    limits = {"max_seq_len": 48, "max_batch_size": 6, "max_num_tokens": 16, "tune": "none"}
    cpu = LLM(build(checkpoint, EngineSpec(**limits), work / "cpu"))
    attention_decode._LONG_FROM = 8  # so that a context becomes long here
    gpu = LLM(build(checkpoint, EngineSpec(device="interpreter", memory=64 << 20, **limits), work / "gpu"))
    assert gpu._gpu is not None
    shapes: list[Shape] = []
    body = gpu._gpu.steps.body
    gpu._gpu.steps.body = lambda shape: (shapes.append(shape), body(shape))[1]  # type: ignore[method-assign]
    gpu._gpu._weights.linear = late  # type: ignore[method-assign]
    prompts = [[1, 2, 3], list(range(40, 60))]  # the second is prefilled in two chunks, beside the first one's decode
    bound = 0.6 if scheme == "fp8_block" else 0.3
    params = SamplingParams(max_tokens=3, ignore_eos=True, logprobs=1)
    for apart in (1024, 0):  # a mixed step as two launches, and as one
        gpu._gpu.runner.apart_tokens = apart
        gpu.forget_prefixes()
        for ours, theirs in zip(gpu.generate(prompts, params), cpu.generate(prompts, params), strict=True):
            a, b = ours.outputs[0], theirs.outputs[0]
            assert a.logprobs is not None
            assert b.logprobs is not None
            for x, y, ours_id, theirs_id in zip(a.logprobs, b.logprobs, a.token_ids, b.token_ids, strict=True):
                assert abs(x.logprob - y.logprob) < bound, (x, y)
                if scheme == "fp8_block" and ours_id != theirs_id:
                    break  # equally likely within the bound: rows of 3 bits, rounded from bf16 there and float32 here
                assert ours_id == theirs_id, (a.token_ids, b.token_ids)
    for ours, theirs in zip(*(llm.loglikelihood(prompts, top_k=2) for llm in (gpu, cpu)), strict=True):
        difference = np.abs(ours.logprobs - theirs.logprobs)
        assert float(difference.max()) < bound, difference
    assert gpu.stats()["used_blocks"] == 0
    assert {shape.long for shape in shapes if shape.decodes and not shape.prefills} == {False, True}
    if scheme != "int8":
        return
    again = SamplingParams(max_tokens=5, ignore_eos=True, presence_penalty=2.0, repetition_penalty=1.5,
                           logit_bias={7: 4.0})
    formed = SamplingParams(max_tokens=5, grammar=Grammar(kind="regex", source="[ab]{3}"))
    for asked in (again, formed):  # host-adjusted logits; the second prompt begins with a kept block
        ours, theirs = ([out.outputs[0].token_ids for out in llm.generate(prompts, asked)] for llm in (gpu, cpu))
        assert ours == theirs, (ours, theirs)
    assert gpu.stats()["prefix_hit_tokens"] > 0
    again_alone(gpu)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])

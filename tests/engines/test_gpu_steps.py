"""Decode steps of the GPU runtime: which graph a step takes, and what it does not wait for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from memory_checkpoint import INT8
from test_gpu_parts import CONFIG, H200, schemes_for
from torch.utils._python_dispatch import TorchDispatchMode

from calib.scheme import BF16
from engines.build.plan_gpu import make_gpu_plan
from engines.build.tune_gpu import tune_gpu
from engines.plan import EngineSpec, Plan, fused_program
from engines.request import SamplingParams
from engines.runtime.cuda.configs import Configs
from engines.runtime.cuda.graphs import Key, keys
from engines.runtime.cuda.runner import CudaRunner
from engines.runtime.cuda.shape import Shape
from engines.runtime.cuda.steps import _shape
from engines.runtime.sequence import Sequence


def plan_of(max_seq_len: int) -> Plan:
    schemes, by = schemes_for(INT8)
    spec = EngineSpec(device="cuda", max_seq_len=max_seq_len, max_batch_size=8, max_num_tokens=256, tune="none")
    program = fused_program(CONFIG, schemes, by)[2]
    linears = tune_gpu(program, H200, "none", 256, False, None, lambda event: None).choices
    return make_gpu_plan(CONFIG, schemes, BF16, spec, H200, by, linears)


def test_few_sequences_have_a_graph_for_long_contexts() -> None:
    plan = plan_of(max_seq_len=2048)
    configs = Configs(plan)
    assert [configs.long_from(rows) for rows in (1, 2, 4, 8, 256)] == [2048, 2048, 2048, None, None]
    assert configs.attention(1, True)["FUSED"] == 0
    assert configs.attention(1, False)["FUSED"] == 1
    assert [Configs(plan_of(max_seq_len=longest)).long_from(1) for longest in (2047, 2048)] == [None, 2048]
    found = keys(8, 64, lambda rows: configs.long_from(rows) is not None)
    assert {(key.kind, key.rows) for key in found if key.long} == {(kind, rows) for kind in ("decode", "body")
                                                                   for rows in (1, 2, 4)}
    assert _shape(Key("decode", 4, 4, long=True)) == Shape(4, decodes=4, long=True)
    assert _shape(Key("body", 4, 4)) == Shape(4, decodes=4), "adjusted rows are decoded by the kernels of all others"


def test_an_entry_that_no_sequence_reaches_is_left_out() -> None:
    assert [[choice.shape for choice in plan_of(longest).kernels if choice.shape == "long"] for longest in (2047, 2048)
            ] == [[], ["long"]]


def test_adjusted_rows_are_not_waited_for() -> None:
    """A number asked of the device while a step is launched waits for all that was launched before it."""
    asked: list[str] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            asked.append(str(function))
            return function(*args, **(kwargs or {}))

    logits = torch.randn(5, 40)
    runner = object.__new__(CudaRunner)
    runner._unmasked, runner._faults = None, {}
    runner._arena = SimpleNamespace(sampled=torch.tensor([3, -1, 7, 39, 0], dtype=torch.int32),  # type: ignore[assignment]
                                    logprobs=torch.full((5,), 9.0))
    runner._steps = SimpleNamespace(head=lambda size, mask: mask(logits))  # type: ignore[assignment]
    rows = {row: Sequence(row, [1, 2, 3], 3, SamplingParams(), 0, frozenset(), computed=2) for row in (0, 3)}
    with Watch():
        runner._head(5, rows)
    assert not [name for name in asked if "item" in name or "_local_scalar_dense" in name]
    wanted = torch.log_softmax(logits, -1)
    assert runner._arena.logprobs.tolist() == pytest.approx(
        [float(wanted[0, 3]), 9.0, 9.0, float(wanted[3, 39]), 9.0], abs=1e-5)

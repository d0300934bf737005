"""What tuning keeps: a second build takes it; another kernel's sources or another device do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from memory_checkpoint import INT8
from test_gpu_parts import A100, CONFIG, H200, schemes_for

from calib.progress import silent
from calib.scheme import BF16, Grid
from engines.build import choose_gpu, tune_gpu, tuning_cache
from engines.build.plan_gpu import make_gpu_plan
from engines.build.step_bench import contexts, small_plan
from engines.build.tune_gpu import GpuTiming
from engines.build.tune_step import sites, switch
from engines.build.tuning_cache import TuningCache
from engines.errors import EngineError
from engines.kernels.impl import KernelConfig
from engines.plan import EngineSpec, fused_program

RECORD = GpuTiming(shape="s", tokens=1, config={}, microseconds=1.5)


def test_what_was_kept_is_read_again(tmp_path: Path) -> None:
    cache = TuningCache(tmp_path / "t", "tuning-gpu", H200, GpuTiming)
    assert cache.read() == {}
    cache.add({"a": RECORD})
    cache.add({"b": RECORD})
    assert TuningCache(tmp_path / "t", "tuning-gpu", H200, GpuTiming).read() == {"a": RECORD, "b": RECORD}
    assert TuningCache(tmp_path / "t", "tuning-gpu", A100, GpuTiming).read() == {}
    assert TuningCache(None, "tuning-gpu", H200, GpuTiming).read() == {}


def test_other_kernels_have_a_cache_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The best of the old candidates says nothing about the new ones."""
    TuningCache(tmp_path, "tuning-gpu", H200, GpuTiming).add({"a": RECORD})
    before, engines = tuning_cache.sources(), tmp_path / "engines"
    (engines / "kernels" / "linear").mkdir(parents=True)
    (engines / "kernels" / "linear" / "gemv.py").write_text("one = 1\n")
    monkeypatch.setattr(tuning_cache, "_ENGINES", engines)
    tuning_cache.sources.cache_clear()
    try:
        first = tuning_cache.sources()
        assert first != before
        assert TuningCache(tmp_path, "tuning-gpu", H200, GpuTiming).read() == {}
        (engines / "kernels" / "linear" / "gemv.py").write_text("one = 2\n")
        tuning_cache.sources.cache_clear()
        assert tuning_cache.sources() != first
    finally:
        tuning_cache.sources.cache_clear()


def test_a_damaged_or_unwritable_cache_is_an_error(tmp_path: Path) -> None:
    cache = TuningCache(tmp_path, "tuning-gpu", H200, GpuTiming)
    assert cache.path is not None
    cache.path.write_text('{"a": {"shape": 3}}')
    with pytest.raises(EngineError, match="damaged") as error:
        cache.read()
    assert "Remove it" in str(error.value.hint)
    (tmp_path / "file").write_text("")
    with pytest.raises(EngineError, match="cannot write"):
        TuningCache(tmp_path / "file" / "t", "tuning-gpu", H200, GpuTiming).add({"a": RECORD})


def test_another_kv_cache_is_tuned_in_steps_though_its_linears_were_timed_before(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where every linear was found in the cache, whole steps were once not tuned at all."""
    timed: list[int] = []
    tuned: list[tuple[str, dict[int, dict[str, list[KernelConfig]]]]] = []

    def time_all(tuner: Any, wanted: list[tuple[Any, int]]) -> None:
        timed.append(len(wanted))
        for op, tokens in wanted:
            times = [(config, 1.0 + 0.1 * n) for n, config in enumerate(tuner.candidates(op, tokens))]
            tuner._keep(op, tokens, times, 0)

    def tune_step(plan: Any, mode: str, tops: Any, report: Any) -> tuple[list[Any], list[Any]]:
        tuned.append((plan.kv.dtype, tops))
        return list(plan.kernels), []

    monkeypatch.setattr(tune_gpu._Tuner, "_time", time_all)
    monkeypatch.setattr(choose_gpu, "tune_step", tune_step)
    schemes, keys = schemes_for(INT8)
    spec = EngineSpec(max_seq_len=256, max_batch_size=8, max_num_tokens=256, tune="quick")
    plans = [choose_gpu.choose_gpu(CONFIG, schemes, kv, spec, H200, keys, tmp_path, silent)[0]
             for kv in (BF16, Grid(dtype="fp8_e4m3"), BF16)]
    assert len(timed) == 1
    assert [dtype for dtype, _ in tuned] == ["bf16", "fp8_e4m3"], "the third found the first's choices"
    assert tuned[0][1] == tuned[1][1]
    assert all(1 <= len(configs) <= tune_gpu.TOPS for row in tuned[1][1].values() for configs in row.values())
    assert any(len(configs) > 1 for configs in tuned[1][1][1].values())
    assert plans[0] == plans[2]
    few, more = (sites(plans[0], tuned[0][1][size], size) for size in (1, 8))
    assert {site.op for site in few} == {site.op for site in more} >= {"linear", "norm", "silu_mul", "read_ahead"}
    assert not any(site.long for site in (*few, *more)), "at 256 tokens no context is long"


def test_no_context_is_tuned_that_the_engine_cannot_hold() -> None:
    schemes, keys = schemes_for(INT8)
    spec = EngineSpec(max_seq_len=2048, max_batch_size=8, max_num_tokens=256)
    program = fused_program(CONFIG, schemes, keys)[2]
    choices = tune_gpu.tune_gpu(program, H200, "none", 256, False, None, silent).choices
    plan = make_gpu_plan(CONFIG, schemes, BF16, spec, H200, keys, choices)

    def found(size: int, **limits: int) -> tuple[int, ...]:
        return contexts(plan.model_copy(update={"limits": plan.limits.model_copy(update=limits)}), size)

    assert found(1) == (160, 2048)
    assert found(1, max_seq_len=65536, num_blocks=1 << 20) == (160, 8192, 32768)
    assert found(8, max_seq_len=65536, num_blocks=8 * 5000 // 16) == (160, 4096, 5000)
    assert found(8, num_blocks=8) == (160,)
    assert found(1, max_seq_len=64) == (160,)
    longer = plan.model_copy(update={"limits": plan.limits.model_copy(update={"max_seq_len": 65536,
                                                                               "num_blocks": 1 << 20})})
    lengths = {(size, site.shape): site.lengths for size in (1, 8) for site in sites(longer, {}, size)
               if site.op == "attention_decode"}
    assert lengths == {(1, "split"): (160, 1024), (1, "long"): (8192, 32768), (8, "split"): (160, 4096, 16384)}
    small = small_plan(plan.model_copy(update={"limits": plan.limits.model_copy(update={"num_blocks": 100})}), 8)
    assert small.limits.num_blocks == 8 * 13, "200 tokens, in whole blocks"
    assert small.limits.max_batch_size == small.limits.max_num_tokens == 8


def test_the_graph_for_long_contexts_is_taken_where_it_is_faster() -> None:
    lengths = [512, 1024, 2048, 4096]
    assert switch(lengths, [1.0, 2.0, 3.0, 4.0], [2.0, 2.1, 2.5, 3.0]) == 2048
    assert switch(lengths, [1.0, 2.0, 3.0, 4.0], [0.9, 1.9, 2.5, 3.0]) == 512
    assert switch(lengths, [1.0, 2.0, 3.0, 4.0], [0.8, 2.1, 2.5, 3.0]) == 512, "one length's loss is another's gain"
    assert switch(lengths, [1.0, 2.0, 3.0, 4.0], [1.1, 2.1, 3.1, 4.1]) is None
    assert switch(lengths, [1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 3.0, 4.0]) is None, "a second graph must be worth it"
    assert switch(lengths, [1.0, 2.0, 3.0, 4.0], [float("inf")] * 4) is None
    assert switch(lengths, [1.0, 2.0, float("inf"), float("inf")], [1.5, 2.5, 3.0, 4.0]) == 2048

"""What decode attention's idle programs are told to bring into L2, and that it changes no result."""

from __future__ import annotations

import pytest
import torch

from engines.kernels import attention_decode, attention_plan
from engines.kernels.impl import DeviceFacts, KernelConfig
from engines.kernels.jit import INTERPRETED
from engines.kernels.read_ahead import CHUNK, ReadAhead, arguments, candidates

HOPPER, ADA = DeviceFacts("H200", 90, 132, 227 << 10, 60 << 20), DeviceFacts("L40", 89, 142, 99 << 10, 96 << 20)


@pytest.mark.parametrize(("sizes", "most", "chunks"), [
    ((3 * CHUNK, 9 * CHUNK), 5 * CHUNK, (3, 2)),
    ((3 * CHUNK + 5, 9 * CHUNK), 5 * CHUNK, (3, 1)),  # what the first weight's tail takes is not asked for twice
    ((9 * CHUNK, 9 * CHUNK), 5 * CHUNK, (5, 0)),
    ((3 * CHUNK, 2 * CHUNK), 50 * CHUNK, (3, 2)),
    ((3 * CHUNK,), 50 * CHUNK, (3, 0)),
    ((), 50 * CHUNK, (0, 0)),
    ((3 * CHUNK, 3 * CHUNK), 0, (0, 0)),
])
def test_whole_chunks_in_the_order_of_use(sizes: tuple[int, ...], most: int, chunks: tuple[int, int]) -> None:
    assert ReadAhead([torch.empty(size, dtype=torch.uint8) for size in sizes], most).chunks() == chunks


def test_nothing_is_asked_for_before_hopper_or_without_weights() -> None:
    x, weight = torch.empty(4), torch.empty(4 * CHUNK, dtype=torch.uint8)
    pdl = KernelConfig.of("split", pdl=True)
    plain = KernelConfig.of("split")
    for ahead, config in ((None, pdl), (ReadAhead([weight], CHUNK), plain), (ReadAhead([weight], 0), pdl)):
        assert arguments(ahead, config, x)[1]["AHEAD"] == 0
    (pointer, count, other, none), how = arguments(ReadAhead([weight], 3 * CHUNK, 500), pdl, x)
    assert how["AHEAD"] == (not INTERPRETED)
    if how["AHEAD"]:
        assert (how["THREADS"], how["DELAY"], count, none) == (128, 500, 3, 0)
        assert pointer is weight
        assert other is x
    assert [config["MIB"] for config in candidates(ADA)] == [0]
    assert candidates(HOPPER)[0]["MIB"] > 0
    assert candidates(HOPPER, 8)[0]["MIB"] == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("most", "delay"), [(0, 0), (3 << 20, 0), (64 << 20, 0), (64 << 20, 700)])
def test_results_are_the_same_to_the_bit(most: int, delay: int) -> None:
    torch.manual_seed(0)
    facts = torch.cuda.get_device_properties(0)
    config = attention_decode.candidates(128, 16, 2, DeviceFacts(
        facts.name, 90, facts.multi_processor_count, 227 << 10, facts.L2_cache_size), batch=1)[0]
    lens = torch.tensor([150], dtype=torch.int32, device="cuda")
    q = torch.randn(1, 32, 128, device="cuda").bfloat16()
    k, v = (torch.randn(10, 8, 16, 128, device="cuda").bfloat16() for _ in "kv")
    table = torch.arange(10, dtype=torch.int32, device="cuda")[None]
    work = attention_plan.workspace(1, 256, 32, 8, 128, config, "cuda")
    attention_plan.make_plan(lens, work, 8, config)
    weights = [torch.ones(size, dtype=torch.uint8, device="cuda") for size in (5_000_001, 30_000_000)]
    found = []
    for ahead in (None, ReadAhead(weights, most, delay)):
        out = torch.full((1, 4096), float("nan"), device="cuda").bfloat16()
        attention_decode.launch(q, k, v, table, work, out, config, sm_scale=0.1, ahead=ahead)
        found.append(out.clone())
    assert found[0].isfinite().all()
    assert torch.equal(*found)

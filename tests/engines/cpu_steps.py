"""One tiny engine's plan through the torch backend and the compiled one, and steps to run through them."""

from __future__ import annotations

import torch
from memory_checkpoint import MemoryCheckpoint
from tiny_models import tiny_llama

from calib.checkpoint import QuantizedCheckpoint
from calib.scheme import BF16, Grid, PerGroup, Scheme
from engines.build.builder import plan_for
from engines.build.weights import Weights, write_weights
from engines.plan import EngineSpec, Plan
from engines.runtime.batch import Batch
from engines.runtime.cpu import CpuBackend
from engines.runtime.native import NativeBackend, open_cpu


def checkpoint_of(folder, scheme=None, kv=BF16) -> MemoryCheckpoint:
    if scheme is None and kv.quantized:
        scheme = Scheme(weight=Grid(dtype="int4", granularity=PerGroup(size=32)))
    if scheme is None:
        return MemoryCheckpoint(QuantizedCheckpoint.open(folder), {}, kv=kv)
    return MemoryCheckpoint.of(folder, scheme, kv=kv)


def open_both(tmp_path, scheme, kv=BF16, **changes):
    """A tiny engine's plan through the torch backend and the compiled one (one thread and two)."""
    return open_backends(tmp_path, checkpoint_of(tiny_llama(tmp_path / "model", head_dim=16, **changes), scheme, kv))


def open_backends(tmp_path, checkpoint):
    plan, _ = plan_for(checkpoint, EngineSpec(tune="none", max_seq_len=128, block_size=4, max_batch_size=4,
                                              max_num_tokens=64))
    write_weights(checkpoint.tensors(), plan.program, checkpoint.kv, tmp_path / "weights")
    files = sorted((tmp_path / "weights").glob("*.safetensors"))
    by_torch = Plan.model_validate(plan.model_dump() | {"kernels": [
        choice.model_dump() | {"impl": "float"} for choice in plan.kernels]})
    assert isinstance(open_cpu(plan, Weights(files)), NativeBackend)
    assert isinstance(open_cpu(by_torch, Weights(files)), CpuBackend)
    return CpuBackend(by_torch, Weights(files)), NativeBackend(plan, Weights(files), 1), NativeBackend(
        plan, Weights(files), 2)


def batch_of(news, cached, tables, block=4) -> Batch:
    generator = torch.Generator().manual_seed(sum(news))
    positions = [at for new, seen in zip(news, cached, strict=True) for at in range(seen, seen + new)]
    slots = [table[at // block] * block + at % block
             for new, seen, table in zip(news, cached, tables, strict=True) for at in range(seen, seen + new)]
    tokens = torch.randint(0, 250, (len(positions),), generator=generator)
    last = torch.tensor(news).cumsum(0) - 1
    return Batch(tokens, torch.tensor(positions), torch.tensor(slots), last, tables,
                 [new + seen for new, seen in zip(news, cached, strict=True)], news)


def steps():
    """Prefill, decode beside a chunk, decodes whose lengths differ, a second chunk of 21 tokens over 5 blocks."""
    tables = [[3, 9, 1, 20, 4, 7, 30, 31, 2], [5, 6, 8, 21, 10, 22, 23], [11, 12, 13, 14]]
    yield batch_of([5, 3], [0, 0], tables[:2])
    yield batch_of([1, 1, 7], [5, 3, 0], tables)
    yield batch_of([1, 1, 1], [6, 4, 7], tables)
    yield batch_of([21], [7], tables[:1])
    yield batch_of([1, 1, 1], [28, 5, 8], tables)


def logits_of(backend, batch) -> torch.Tensor:
    context = backend.context(batch)
    return backend.head(backend.body(context), context).clone()

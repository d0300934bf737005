"""Where device memory goes, as a table in words, and what the engine really took."""

from __future__ import annotations

import gc

import torch

from engines.device import Device
from engines.errors import EngineError
from engines.plan import MemoryPlan, check_cap

#: Until it is measured: graphs of all buckets, kernels' code, cuBLAS workspaces.
GRAPH_ALLOWANCE = 1024**3
#: Share of a card that an engine may take when no cap is given.
DEFAULT_SHARE = 0.9


def cap_bytes(asked: int | None, device: Device) -> int:
    """The cap in bytes. EngineError when more is asked for than the card has."""
    total = device.memory_bytes
    check_cap(asked, device)
    return int(DEFAULT_SHARE * total) if asked is None else asked


def table(memory: MemoryPlan) -> str:
    """The plan line by line, in GiB."""
    lines = [("weights", memory.weights), ("activations", memory.activations), ("graphs", memory.graphs),
             ("kv_cache", memory.kv_cache), ("total", memory.total)]
    if memory.cap is not None:
        lines.append(("cap", memory.cap))
    return "\n".join(f"{name:<12} {size / 2**30:9.3f} GiB" for name, size in lines)


def free_bytes(device: Device) -> int | None:
    """Free device memory now; None where the question has no meaning."""
    return torch.cuda.mem_get_info()[0] if device.kind == "cuda" else None


def available(memory: MemoryPlan, device: Device, least_cache: int) -> int | None:
    """Bytes that the engine may take: its cap, or less when the card has less free. None off a GPU.

    The KV cache then shrinks. EngineError with the table when not even ``least_cache`` bytes of it would be left.
    """
    free = free_bytes(device)
    if free is None:
        return None
    needed = memory.total - memory.kv_cache + least_cache
    if free < needed:
        raise EngineError(f"{device.name} has {free / 2**30:.3f} GiB free, this engine takes at least "
                          f"{needed / 2**30:.3f} GiB\n{table(memory)}",
                          "Stop what else runs there, or build with lower max_seq_len, max_num_tokens or "
                          "max_batch_size.")
    return min(free, memory.cap or free)


def release() -> None:
    """Give back what nobody holds any more: captured graphs and closures form cycles, so collect first."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()

"""The static device memory of a runner: every tensor that a step touches, allocated once, at one address for ever.

CUDA graphs keep pointers, so nothing here is ever moved or grown. A step of t tokens uses the first t rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from calib.scheme import Grid
from engines.build.buffers import Assignment, Value
from engines.kernels import attention_plan, rope_kv, sample
from engines.plan import Plan
from engines.runtime.cuda.configs import Configs
from engines.runtime.cuda.graphs import decode_sizes
from engines.runtime.cuda.record import DeviceRecord, Layout

CODES = {"fp8_e4m3": torch.float8_e4m3fn, "int8": torch.int8}


def code_dtype(grid: Grid | None) -> torch.dtype:
    """How rows on a grid are held."""
    return torch.bfloat16 if grid is None else CODES[grid.dtype]


class Rows:
    """The buffers of a Program's values."""

    def __init__(self, assignment: Assignment, tokens: int, device: torch.device) -> None:
        self._values = assignment.values
        self._buffers = [torch.zeros(size * tokens, dtype=torch.uint8, device=device)
                         for size in assignment.bytes_per_token]

    @property
    def buffers(self) -> list[torch.Tensor]:
        return self._buffers

    def of(self, name: str, tokens: int) -> torch.Tensor:
        """The value's rows [tokens, width], contiguous."""
        value = self._values[name]
        dtype = code_dtype(value.grid)
        raw = self._buffers[value.buffer][:tokens * value.width * dtype.itemsize]
        return raw.view(dtype).view(tokens, value.width)

    def scales(self, name: str, tokens: int) -> torch.Tensor | None:
        """The value's dynamic scales, float32 [tokens] or [tokens, groups]; None without."""
        value = self._values[name]
        if value.scales is None:
            return None
        columns = value.scale_columns
        flat = self._buffers[value.scales][:4 * tokens * columns].view(torch.float32)
        return flat.view(tokens, columns) if _grouped(value) else flat


def _grouped(value: Value) -> bool:
    return value.grid is not None and value.grid.granularity.kind == "group"


@dataclass(frozen=True, slots=True)
class StepTensors:
    """What ``kernels/prepare`` fills: int32, for up to ``tokens`` tokens and ``rows`` rows."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    seq_lens: torch.Tensor
    tables: torch.Tensor
    known: torch.Tensor

    @classmethod
    def allocate(cls, layout: Layout, slots: int, width: int, device: torch.device) -> StepTensors:
        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        return cls(zeros(layout.tokens), zeros(layout.tokens), zeros(layout.tokens), zeros(layout.rows),
                   zeros(layout.rows, width), zeros(slots, width))


class KVCache:
    """K and V pools of every layer, [blocks, kv heads, block size, head_dim], and scales (see ``kernels/rope_kv``)."""

    def __init__(self, plan: Plan, num_blocks: int, scales: list[tuple[torch.Tensor, torch.Tensor]] | None,
                 device: torch.device) -> None:
        model, size = plan.model, plan.limits.block_size
        dtype = code_dtype(plan.kv if plan.kv.quantized else None)
        shape = (model.num_layers, 2, num_blocks, model.num_kv_heads, size, model.head_dim)
        self.pool = torch.zeros(shape, dtype=torch.uint8 if plan.kv.quantized else dtype, device=device).view(dtype)
        self.scales = scales

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = self.pool[index, 0], self.pool[index, 1]
        return k, v.view(rope_kv.v_shape(v.shape, self.scales is not None))

    def scale(self, index: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        return (None, None) if self.scales is None else self.scales[index]


def table_width(plan: Plan) -> int:
    """Blocks of the longest sequence, rounded up so that rows stay 16-byte aligned."""
    blocks = -(-plan.limits.max_seq_len // plan.limits.block_size)
    return -(-blocks // 32) * 32


class Arena:
    """Everything but weights and KV cache. ``workspace`` is the bytes that linear kernels share."""

    def __init__(self, plan: Plan, assignment: Assignment, workspace: int, device: torch.device) -> None:
        model, limits, configs = plan.model, plan.limits, Configs(plan)
        width = table_width(plan)
        layout = Layout.of(limits.max_batch_size, limits.max_num_tokens, width, limits.block_size)
        self.layout = layout
        self.record = DeviceRecord(layout, device)
        self.step = StepTensors.allocate(layout, limits.max_batch_size, width, device)
        self.rows = Rows(assignment, layout.tokens, device)
        self.workspace = torch.zeros(max(workspace, 16), dtype=torch.uint8, device=device)
        #: Work lists of decode attention by (bucket, for long contexts) and window.
        self.attention = {(bucket, long): {window: attention_plan.workspace(
            bucket, limits.max_seq_len, model.num_heads, model.num_kv_heads, model.head_dim,
            configs.attention(bucket, long), device, window=window)
            for window in sorted({model.window(layer) for layer in range(model.num_layers)})}
            for bucket in decode_sizes(limits.max_batch_size)
            for long in ((False, True) if configs.long_from(bucket) is not None else (False,))}
        #: The step's own keys and values, for prompts that begin here. Not beside a quantized cache, whose rounding a
        #: prompt must see like everybody, nor in deterministic mode, where one way of summing serves all chunks.
        self.fresh = None if plan.kv.quantized or plan.deterministic else tuple(torch.zeros(
            layout.tokens, model.num_kv_heads, model.head_dim, dtype=torch.bfloat16, device=device) for _ in range(2))
        self.final = torch.zeros(layout.samples * model.hidden_size * 2, dtype=torch.uint8, device=device)
        self.final_scales = torch.zeros(layout.samples * max(1, model.hidden_size // 32), device=device)
        self.logits = torch.zeros(layout.samples, model.vocab_size, dtype=logits_dtype(plan), device=device)
        self.sampled = torch.zeros(layout.samples, dtype=torch.int32, device=device)
        self.logprobs = torch.zeros(layout.samples, dtype=torch.float32, device=device)
        self.sampling = sample.workspace(layout.samples, model.vocab_size, configs.of("sample"), device)


def logits_dtype(plan: Plan) -> torch.dtype:
    """What the output layer writes: float32, but 4-bit kernels store 16 bits."""
    return torch.bfloat16 if plan.program.linears()[-1].weight.dtype == "int4" else torch.float32


def arena_bytes(plan: Plan, assignment: Assignment, workspace: int) -> int:
    """What ``Arena`` will allocate, without allocating."""
    arena = Arena(plan, assignment, workspace, torch.device("meta"))
    tensors = [arena.record.words, arena.workspace, arena.final, arena.final_scales, arena.logits, arena.sampled,
               arena.logprobs, *arena.sampling, *arena.rows.buffers, *(arena.fresh or ()),
               *(getattr(arena.step, name) for name in StepTensors.__slots__)]
    for work in (work for by_window in arena.attention.values() for work in by_window.values()):
        tensors += [work.plan, work.acc, work.stats, work.counters]
    return sum(-(-tensor.nbytes // 512) * 512 for tensor in tensors)

"""The compiled CPU backend: a fused Program as a table of Ops for ``kernels/cpu/native``, filled when an engine opens.

It has the face of ``CpuBackend`` and takes its place when the KernelTable names ``tiles`` for every linear. The buffers
of values are taken for the largest step that the limits allow; the system gives their memory page by page when a step
first touches it, so a small step costs little. A value's buffer is used again after its last reader.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from engines.build.weights import Weights
from engines.kernels.cpu.native.attend import ROWS, Form
from engines.kernels.cpu.native.grids import NAME, group_size, scaled_rows
from engines.kernels.cpu.native.norms import Coding
from engines.kernels.cpu.native.step import Code, Context
from engines.kernels.cpu.native.table import Array, OpRow, Table
from engines.kernels.cpu.native.team import team
from engines.kernels.cpu.native.tiles import Tiles, aligned, padded
from engines.plan import Plan
from engines.program import (
    Add,
    AddNorm,
    Attention,
    Embed,
    GatedSilu,
    Linear,
    Program,
    Quantize,
    RMSNorm,
    RopeKV,
    SelectRows,
    SoftCap,
    writes,
)
from engines.runtime.batch import HEAD_ROWS, Batch
from engines.runtime.cpu import CpuBackend
from engines.runtime.cpu_constants import kv_scales, rotary_tables
from engines.runtime.native_buffers import Buffer, Buffers, widths_of

_SCALED = {("int8", True): Coding.INT8_TOKEN, ("int8", False): Coding.INT8_STATIC,
           ("fp8_e4m3", False): Coding.FP8_STATIC, ("fp8_e4m3", True): Coding.FP8_TOKEN}
_VALUES = {("int8", True): Coding.INT8_VALUES, ("int8", False): Coding.INT8_VALUES_STATIC,
           ("fp8_e4m3", True): Coding.FP8_VALUES}

_FORMS = {"bf16": Form.FLOAT, "fp8_e4m3": Form.FP8, "int8": Form.INT8}


@dataclass(frozen=True, slots=True)
class NativeContext:
    """A step's numbers (``Context``) and the arrays whose addresses are in it."""

    numbers: Array
    arrays: tuple[Array, ...]
    batch: Batch


class NativeBackend:
    """An engine's weights, caches and Program on this CPU, compiled. One step at a time."""

    def __init__(self, plan: Plan, weights: Weights, threads: int | None = None) -> None:
        """``threads``: torch's number when not given."""
        self._plan, self._weights = plan, weights
        program, model, limits = plan.program, plan.model, plan.limits
        self._team = team(threads or torch.get_num_threads())
        self._rows = max(limits.max_num_tokens, limits.max_batch_size)
        self._buffers = Buffers(program, widths_of(program, model.hidden_size), self._rows)
        self._rotary = rotary_tables(plan)
        self._caches = [self._cache() for _ in range(model.num_layers)]
        code = torch.int8 if plan.kv.dtype == "int8" else torch.float8_e4m3fn
        self._codes = torch.arange(256, dtype=torch.uint8).view(code).float().numpy().copy()
        self._scratch()
        self._table = Table(len(program.ops))
        self._tiles = self._pack(program)
        for index, op in enumerate(program.ops):
            _BINDERS[type(op)](self, op, self._table.row(index))
            if isinstance(op, SelectRows):
                self._split, self._selected = index + 1, self._buffers.of[op.out]
        [logits] = writes(program.ops[-1])
        self._logits = self._buffers.of[logits]
        weights.done()

    def _scratch(self) -> None:
        """Every thread's own memory: a row for quantization, or a unit of attention."""
        model, limits = self._plan.model, self._plan.limits
        group, dim = model.num_heads // model.num_kv_heads, model.head_dim
        self._longest = -(-limits.max_seq_len // limits.block_size) * limits.block_size + 1  # keys go in pairs
        unit = ROWS * group * (2 * dim + self._longest) + (limits.block_size + 1) * dim
        width = max(buffer.width for buffer in self._buffers.of.values())
        self._work = aligned((self._team.size, padded(max(unit, width))), np.float32)

    def _cache(self) -> Array:
        """Zeros that the system fills when they are first touched; one slot more, for keys are read in pairs."""
        model, limits = self._plan.model, self._plan.limits
        shape = (limits.num_blocks * limits.block_size + 1, 2 * model.num_kv_heads, model.head_dim)
        return np.zeros(shape, np.uint8 if self._plan.kv.quantized else np.float32)

    def _pack(self, program: Program) -> dict[str, Tiles]:
        """Private layouts, largest weight first: its temporaries are gone before the others take memory."""
        return {op.out: Tiles.of(self._weights.linear(op), op.activation)
                for op in sorted(program.linears(), key=lambda op: -op.n * op.k)}

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Around a whole step: torch's operators (sampling) stay on the calling thread.

        After a parallel operator torch's own threads spin for a while in wait of the next one, on the processors that
        this team needs: at two cores and one token that doubled a step's time.
        """
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)

    def context(self, batch: Batch) -> NativeContext:
        """Everything that is made once a step."""
        width = max(len(table) for table in batch.tables)
        tables = np.zeros((len(batch.tables), width), np.int64)
        for row, table in zip(tables, batch.tables, strict=True):
            row[:len(table)] = table
        tokens, positions, slots = batch.tokens.numpy(), batch.positions.numpy(), batch.slots.numpy()
        wanted = np.arange(tokens.size) if batch.rows is None else batch.rows.numpy()
        news, lengths = np.array(batch.new, np.int64), np.array(batch.lengths, np.int64)
        numbers = np.array([
            tokens.size, tokens.ctypes.data, positions.ctypes.data, slots.ctypes.data, wanted.ctypes.data, wanted.size,
            news.size, news.ctypes.data, lengths.ctypes.data, tables.ctypes.data, width, self._plan.limits.block_size,
            self._codes.ctypes.data, self._work.ctypes.data, self._work[0].nbytes, self._longest], np.int64)
        return NativeContext(numbers, (tokens, positions, slots, wanted, news, lengths, tables), batch)

    def _run(self, first: int, last: int, numbers: Array) -> None:
        self._table.run(self._team, first, last, numbers)

    def body(self, context: NativeContext) -> torch.Tensor:
        """All layers; stores keys and values. Returns the hidden rows [r, hidden] whose logits are wanted.

        They lie in a buffer that the next step overwrites.
        """
        self._run(0, self._split, context.numbers)
        return self._view(self._selected, int(context.numbers[Context.WANTED_ROWS]), self._plan.model.hidden_size)

    def head(self, rows: torch.Tensor, context: NativeContext) -> torch.Tensor:
        """Final norm and output layer of up to ``HEAD_ROWS`` hidden rows -> logits float32 [r, vocabulary].

        They lie in a buffer that the next call overwrites.
        """
        count, width = rows.shape
        source = rows.contiguous().numpy()
        assert count <= HEAD_ROWS
        self._table.row(self._split).set(X=source.ctypes.data, X_BYTES=width * 4)
        numbers = context.numbers.copy()
        numbers[Context.ROWS] = count
        self._run(self._split, len(self._table), numbers)
        return self._view(self._logits, count, self._plan.model.vocab_size)

    @staticmethod
    def _view(buffer: Buffer, rows: int, width: int) -> torch.Tensor:
        return torch.from_numpy(buffer.data[:rows, :width])

    # One method binds one kind of Op.

    def _quant(self, op: RMSNorm | AddNorm | GatedSilu | Quantize, width: int, row: OpRow) -> None:
        """How the rows of an Op are coded: as the linears want them that read them."""
        quant = op.quant
        if quant is None:
            return
        if quant.pre_quant_scale is not None:
            multiplier = self._weights.take(quant.pre_quant_scale).float().reshape(-1)
            row.set(MULTIPLIER=row.address(multiplier))
        grid = quant.grid
        if grid is not None:
            scaled = any(scaled_rows(reader.weight, grid) for reader in self._plan.program.linears()
                         if reader.x == op.out)
            row.set(CODING=(_SCALED if scaled else _VALUES)[grid.dtype, grid.dynamic], GROUP=group_size(grid) or width)
            if not grid.dynamic:
                assert quant.input_scale is not None
                row.real(STATIC_SCALE=float(self._weights.take(quant.input_scale)))

    def _in(self, name: str, row: OpRow) -> None:
        buffer = self._buffers.of[name]
        row.set(X=buffer.data.ctypes.data, X_BYTES=buffer.row_bytes)

    def _out(self, name: str, row: OpRow) -> None:
        buffer = self._buffers.of[name]
        row.set(OUT=buffer.data.ctypes.data, OUT_BYTES=buffer.row_bytes, OUT_SCALES=buffer.scales.ctypes.data)

    def _embed(self, op: Embed, row: OpRow) -> None:
        table = self._weights.take(f"{op.weight}.weight")
        code = Code.EMBED_BF16 if table.dtype == torch.bfloat16 else Code.EMBED_F32
        kept = table if table.dtype == torch.bfloat16 else table.float()
        row.set(CODE=code, WEIGHT=row.address(kept), N=table.shape[1])
        row.real(FACTOR=op.scale)
        self._out(op.out, row)

    def _norm(self, op: RMSNorm | AddNorm, row: OpRow) -> None:
        weight = self._weights.take(f"{op.weight}.weight")
        row.set(CODE=Code.NORM, WEIGHT=row.address(weight.float() + op.offset), N=weight.numel())
        row.real(EPS=op.eps)
        self._in(op.x, row)
        self._out(op.out, row)
        self._quant(op, weight.numel(), row)
        if isinstance(op, AddNorm):
            residual, total = self._buffers.of[op.residual], self._buffers.of[op.residual_out]
            row.set(CODE=Code.ADD_NORM, RESIDUAL=residual.data.ctypes.data, RESIDUAL_BYTES=residual.row_bytes,
                    SUM=total.data.ctypes.data, SUM_BYTES=total.row_bytes)

    def _add(self, op: Add, row: OpRow) -> None:
        b = self._buffers.of[op.b]
        row.set(CODE=Code.ADD, N=self._plan.model.hidden_size, RESIDUAL=b.data.ctypes.data, RESIDUAL_BYTES=b.row_bytes)
        self._in(op.a, row)
        self._out(op.out, row)

    def _quantize(self, op: Quantize, row: OpRow) -> None:
        width = next(linear.k for linear in self._plan.program.linears() if linear.x == op.out)
        row.set(CODE=Code.QUANTIZE, N=width)
        self._in(op.x, row)
        self._out(op.out, row)
        self._quant(op, width, row)

    def _linear(self, op: Linear, row: OpRow) -> None:
        row.linear(self._tiles[op.out])
        self._in(op.x, row)
        self._out(op.out, row)
        if scaled_rows(op.weight, op.activation):
            row.set(X_SCALES=self._buffers.of[op.x].scales.ctypes.data)

    def _rope_kv(self, op: RopeKV, row: OpRow) -> None:
        cos, sin = self._rotary[op.local]
        row.set(CODE=Code.ROPE_KV, HEADS=op.heads, KV_HEADS=op.kv_heads, DIM=op.head_dim, COS=row.address(cos),
                SIN=row.address(sin), ROTARY=cos.shape[1])
        if op.norms is not None:
            q, k = (self._weights.take(f"{name}.weight").float() + op.norms.offset
                    for name in (op.norms.q, op.norms.k))
            row.set(Q_NORM=row.address(q), K_NORM=row.address(k))
            row.real(EPS=op.norms.eps)
        self._in(op.qkv, row)
        self._out(op.out, row)
        self._kv(op.layer, row)

    def _kv(self, layer: int, row: OpRow) -> None:
        row.set(CACHE=self._caches[layer].ctypes.data, FORM=_FORMS[self._plan.kv.dtype],
                KV_SCALES=row.address(kv_scales(self._plan, self._weights, layer)))

    def _attention(self, op: Attention, row: OpRow) -> None:
        row.set(CODE=Code.ATTENTION, HEADS=op.heads, KV_HEADS=op.kv_heads, DIM=op.head_dim, WINDOW=op.window)
        row.real(FACTOR=op.factor, SOFTCAP=op.softcap or 0.0)
        self._in(op.q, row)
        self._out(op.out, row)
        self._kv(op.layer, row)

    def _gated_silu(self, op: GatedSilu, row: OpRow) -> None:
        row.set(CODE=Code.SILU if op.activation == "silu" else Code.GELU, N=op.width)
        self._in(op.gate_up, row)
        self._out(op.out, row)
        self._quant(op, op.width, row)

    def _soft_cap(self, op: SoftCap, row: OpRow) -> None:
        row.set(CODE=Code.SOFT_CAP, N=self._plan.model.vocab_size)
        row.real(SOFTCAP=op.cap)
        self._in(op.x, row)
        self._out(op.out, row)

    def _select_rows(self, op: SelectRows, row: OpRow) -> None:
        row.set(CODE=Code.SELECT, N=self._plan.model.hidden_size)
        self._in(op.x, row)
        self._out(op.out, row)


_BINDERS: dict[type, Callable[[NativeBackend, Any, OpRow], None]] = {
    Embed: NativeBackend._embed, RMSNorm: NativeBackend._norm, AddNorm: NativeBackend._norm,
    Quantize: NativeBackend._quantize, Linear: NativeBackend._linear, RopeKV: NativeBackend._rope_kv,
    Attention: NativeBackend._attention, GatedSilu: NativeBackend._gated_silu,
    SelectRows: NativeBackend._select_rows, SoftCap: NativeBackend._soft_cap, Add: NativeBackend._add,
}


def open_cpu(plan: Plan, weights: Weights) -> CpuBackend | NativeBackend:
    """The backend that the plan's KernelTable asks for."""
    compiled = all(plan.choice(op).impl == NAME for op in plan.program.linears())
    return NativeBackend(plan, weights) if compiled else CpuBackend(plan, weights)

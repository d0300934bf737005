"""From hidden rows to tokens: the last norm of the wanted rows only, the output layer, the sampler.

The body leaves its last sum undone where it can: ``x + residual`` of a wanted row is formed inside the norm that reads
it, so that rows nobody asks for cost nothing here. Logits are float32 (from the kernels' float32 sums; a 4-bit output
layer gives bf16): rounding them to bf16 would put an error of 2^-9 of the largest logit on every log-probability.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from engines.errors import EngineError
from engines.kernels import norm, sample
from engines.kernels.linear.impls import IMPLS
from engines.program import Add, Linear, Op, RMSNorm, SelectRows, SoftCap
from engines.runtime.cuda.arena import code_dtype
from engines.runtime.cuda.ops import Binder, void

Mask = Callable[[torch.Tensor], None]


class Head:
    """The bound head of a Program: [Add,] SelectRows, RMSNorm, Linear[, SoftCap]."""

    def __init__(self, binder: Binder, ops: Sequence[Op]) -> None:
        self._binder, self._arena = binder, binder.arena
        self._residual: str | None
        self._cap = ops[-1].cap if isinstance(ops[-1], SoftCap) else None
        match list(ops if self._cap is None else ops[:-1]):
            case [Add() as add, SelectRows() as select, RMSNorm() as last, Linear() as linear] if select.x == add.out:
                self._x, self._residual = add.a, add.b
            case [SelectRows() as select, RMSNorm() as last, Linear() as linear]:
                self._x, self._residual = select.x, None
            case _:
                raise EngineError(f"the program ends in {[op.op for op in ops]}", "This model family has no GPU head.")
        if last.x != select.out or linear.x != last.out:
            raise EngineError("the output layer does not read the last norm", "This model family has no GPU head.")
        self._linear, self._eps = linear, last.eps
        self._weight, self._codes = binder.weights.norm(last.weight, last.offset), binder.codes(last.quant)
        self._grid = None if last.quant is None else last.quant.grid
        self._packed, self._impl = binder.weights.linear(linear), IMPLS[binder.plan.choice(linear).impl]
        self._static = binder.static_scale(linear)
        self._sample_config = binder.configs.of("sample")

    def logits(self, count: int) -> torch.Tensor:
        """Logits [count, vocabulary] of the record's first ``count`` selected tokens."""
        arena, width = self._arena, self._linear.k
        dtype = code_dtype(self._grid)
        final = arena.final[:count * width * dtype.itemsize].view(dtype).view(count, width)
        scales = None
        if self._codes.mode.per_token:
            scales = arena.final_scales[:count]
        elif self._codes.group:
            scales = arena.final_scales[:count * (width // self._codes.group)].view(count, -1)
        tokens = arena.layout.tokens
        residual = None if self._residual is None else arena.rows.of(self._residual, tokens)
        norm.launch(arena.rows.of(self._x, tokens), self._weight, final, self._binder.configs.of("norm", count),
                    eps=self._eps, residual=residual, rows=arena.record.selected[:count],
                    pre_quant_scale=self._codes.pre_quant_scale,
                    quant=self._codes.mode, group=self._codes.group, input_scale=self._codes.input_scale, scales=scales)
        out = arena.logits[:count]
        void(self._impl.launch(final, self._packed, self._binder.configs.linear(self._linear, count), out,
                               x_scale=self._static if scales is None else scales, workspace=arena.workspace))
        return out if self._cap is None else out.div_(self._cap).tanh_().mul_(self._cap)

    def __call__(self, count: int, mask: Mask | None = None) -> None:
        """Sample the first ``count`` selected tokens into ``arena.sampled`` and ``arena.logprobs``."""
        logits, arena = self.logits(count), self._arena
        if mask is not None:
            mask(logits)
        sample.launch(logits, arena.record.sampling(count), arena.sampled[:count], arena.logprobs[:count],
                      arena.sampling, self._sample_config)

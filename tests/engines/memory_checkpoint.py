"""A quantized checkpoint in memory: round-to-nearest codes of a bf16 folder on any scheme, in the canonical stream.

Calibration is not under test here, so static activation scales are given, not measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from calib.checkpoint import QuantizedCheckpoint
from calib.scheme import BF16, CODE_MAX, Grid, PerChannel, PerGroup, PerTensor, PerToken, Scheme
from calib.text import Tokenizer

INT8 = Scheme(weight=Grid(dtype="int8", granularity=PerChannel()),
              activation=Grid(dtype="int8", granularity=PerToken(), dynamic=True))
FP8 = Scheme(weight=Grid(dtype="fp8_e4m3", granularity=PerTensor()),
             activation=Grid(dtype="fp8_e4m3", granularity=PerTensor()))
INT4 = Scheme(weight=Grid(dtype="int4", granularity=PerGroup(size=32)), pre_quant_scale=True)
FP8_KV = Grid(dtype="fp8_e4m3")


def cells(grid: Grid, n: int, k: int, g_idx: torch.Tensor | None = None) -> tuple[torch.Tensor, tuple[int, int]]:
    """The scale that each weight [n, k] takes, as an index into scales [rows, columns], and their shape."""
    kind = grid.granularity
    rows = torch.zeros(n) if kind.kind == "tensor" else torch.arange(n) // (kind.rows if kind.kind == "block" else 1)
    width = kind.size if kind.kind == "group" else kind.cols if kind.kind == "block" else k
    columns = torch.arange(k) // width if g_idx is None else g_idx
    shape = (int(rows.max()) + 1, int(columns.max()) + 1)
    return (rows[:, None] * shape[1] + columns).long(), shape


def quantize_weight(weight: torch.Tensor, grid: Grid, g_idx: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    """Canonical tensors of one weight, rounded to nearest."""
    weight = weight.float()
    at, shape = cells(grid, weight.shape[0], weight.shape[1], g_idx)

    def most(values: torch.Tensor) -> torch.Tensor:
        return torch.zeros(shape[0] * shape[1]).scatter_reduce(0, at.flatten(), values.flatten(), "amax")

    if grid.symmetric:
        top = CODE_MAX[grid.dtype]
        scale = (most(weight.abs()) / top).clamp_min(1e-12)
        codes = (weight / scale[at]).clamp(-top, top)
        zero = None
    else:
        low, high = most(-weight), most(weight)
        scale = ((low + high) / 15).clamp_min(1e-12)
        zero = (low / scale).round()
        codes = ((weight / scale[at]).round() + zero[at]).clamp(0, 15)
    codes = codes.to(torch.float8_e4m3fn) if grid.dtype == "fp8_e4m3" else codes.round().to(torch.int8)
    form = {"tensor": (), "channel": shape[:1]}.get(grid.granularity.kind, shape)
    part = {"weight": codes, "weight_scale": scale.reshape(form)}
    if zero is not None:
        part["weight_zero"] = zero.to(torch.int8).reshape(form)
    return part if g_idx is None else part | {"g_idx": g_idx}


@dataclass
class MemoryCheckpoint:
    """Looks like a ``QuantizedCheckpoint`` to the builder."""

    source: QuantizedCheckpoint
    schemes: dict[str, Scheme]
    kv: Grid = BF16
    input_scale: float = 0.02
    kv_scale: float = 0.02
    kv_heads: int = 0
    orders: Literal["shared", "own"] = "shared"
    recipe: str = "memory"
    source_grid: str | None = None
    extra: dict[str, torch.Tensor] = field(default_factory=dict)
    drop: frozenset[str] = frozenset()

    @classmethod
    def of(cls, folder: Path, scheme: Scheme, head: Scheme | None = None, **settings: Any) -> MemoryCheckpoint:
        """Every decoder linear of a bf16 folder on one scheme, and the output layer on ``head``."""
        source = QuantizedCheckpoint.open(folder)
        names = [name.removesuffix(".weight") for name, _ in source.tensors()
                 if scheme.weight.quantized and name.endswith("_proj.weight")]
        return cls(source, dict.fromkeys(names, scheme) | ({} if head is None else {"lm_head": head}), **settings)

    @property
    def config(self) -> dict[str, Any]:
        return self.source.config

    @property
    def digest(self) -> str:
        return self.source.digest

    def tokenizer(self) -> Tokenizer:
        return self.source.tokenizer()

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._tensors():
            if name not in self.drop:
                yield name, self.extra.get(name, tensor)

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self.source.tensors():
            module, _, kind = name.rpartition(".")
            if name.endswith((".k_proj.weight", ".qkv_proj.weight")) and self.kv.quantized:
                attention = module.rpartition(".")[0]
                spread = torch.arange(self.kv_heads) * 0.003 if self.kv_heads else torch.tensor(0.0)
                yield f"{attention}.k_scale", self.kv_scale + spread
                yield f"{attention}.v_scale", self.kv_scale + 0.001 - spread
            scheme = self.schemes.get(module)
            if scheme is None or kind != "weight":
                yield name, tensor
                continue
            pre = self._pre_quant_scale(module, tensor) if scheme.pre_quant_scale else None
            values = tensor.float() if pre is None else tensor.float() / pre
            order = self._g_idx(module, scheme.weight, tensor.shape[1]) if scheme.act_order else None
            for key, value in quantize_weight(values, scheme.weight, order).items():
                yield f"{module}.{key}", value
            if scheme.activation is not None and not scheme.activation.dynamic:
                yield f"{module}.input_scale", torch.tensor(self.input_scale)
            if pre is not None:
                yield f"{module}.pre_quant_scale", pre

    def _g_idx(self, module: str, grid: Grid, k: int) -> torch.Tensor:
        """A shuffled assignment of columns to groups: the readers of one input agree, or each has its own."""
        seed = sum(module.encode() if self.orders == "own" else module.rpartition(".")[0].encode())
        assert grid.granularity.kind == "group"
        groups = torch.arange(k) // grid.granularity.size
        return groups[torch.randperm(k, generator=torch.Generator().manual_seed(seed))].to(torch.int32)

    def _pre_quant_scale(self, module: str, tensor: torch.Tensor) -> torch.Tensor:
        """Equal for the readers of one norm (as AWQ makes them), powers of two so that only rounding differs."""
        seed = sum(module.rpartition(".")[0].encode()) + ("o_proj" in module) + 2 * ("down_proj" in module)
        generator = torch.Generator().manual_seed(seed)
        return 2.0 ** torch.randint(-1, 2, (tensor.shape[1],), generator=generator).float()

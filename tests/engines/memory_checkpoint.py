"""A quantized checkpoint in memory: round-to-nearest codes of a bf16 folder on any scheme, in the canonical stream.

Calibration is not under test here, so static activation scales are given, not measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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


def quantize_weight(weight: torch.Tensor, grid: Grid) -> dict[str, torch.Tensor]:
    """Canonical tensors of one weight, rounded to nearest on a symmetric grid (block grids: only the layout)."""
    weight = weight.float()
    top = CODE_MAX[grid.dtype]
    kind = grid.granularity.kind
    if kind == "block":
        return {"weight": weight.to(torch.int8), "weight_scale": torch.ones(1, 1)}
    blocks = weight.view(weight.shape[0], -1, grid.granularity.size) if kind == "group" else weight
    amax = blocks.abs().amax() if kind == "tensor" else blocks.abs().amax(-1)
    scale = (amax / top).clamp_min(1e-12)
    spread = scale if kind == "tensor" else scale.unsqueeze(-1)
    codes = (blocks / spread).clamp(-top, top)
    codes = codes.to(torch.float8_e4m3fn) if grid.dtype == "fp8_e4m3" else codes.round().to(torch.int8)
    return {"weight": codes.reshape(weight.shape), "weight_scale": scale}


@dataclass
class MemoryCheckpoint:
    """Looks like a ``QuantizedCheckpoint`` to the builder."""

    source: QuantizedCheckpoint
    schemes: dict[str, Scheme]
    kv: Grid = BF16
    input_scale: float = 0.02
    kv_scale: float = 0.02
    recipe: str = "memory"
    source_grid: str | None = None
    extra: dict[str, torch.Tensor] = field(default_factory=dict)
    drop: frozenset[str] = frozenset()

    @classmethod
    def of(cls, folder: Path, scheme: Scheme, **settings: Any) -> MemoryCheckpoint:
        """Every decoder linear of a bf16 folder on one scheme."""
        source = QuantizedCheckpoint.open(folder)
        names = [name.removesuffix(".weight") for name, _ in source.tensors() if name.endswith("_proj.weight")]
        return cls(source, dict.fromkeys(names, scheme), **settings)

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
            scheme = self.schemes.get(module)
            if scheme is None or kind != "weight":
                yield name, tensor
                continue
            pre = self._pre_quant_scale(module, tensor) if scheme.pre_quant_scale else None
            values = tensor.float() if pre is None else tensor.float() / pre
            for key, value in quantize_weight(values, scheme.weight).items():
                yield f"{module}.{key}", value
            if scheme.activation is not None and not scheme.activation.dynamic:
                yield f"{module}.input_scale", torch.tensor(self.input_scale)
            if pre is not None:
                yield f"{module}.pre_quant_scale", pre
            if self.kv.quantized and module.endswith("k_proj"):
                yield f"{module.removesuffix('.k_proj')}.k_scale", torch.tensor(self.kv_scale)
                yield f"{module.removesuffix('.k_proj')}.v_scale", torch.tensor(self.kv_scale)

    def _pre_quant_scale(self, module: str, tensor: torch.Tensor) -> torch.Tensor:
        """Equal for the readers of one norm (as AWQ makes them), powers of two so that only rounding differs."""
        seed = sum(module.rpartition(".")[0].encode()) + ("o_proj" in module) + 2 * ("down_proj" in module)
        generator = torch.Generator().manual_seed(seed)
        return 2.0 ** torch.randint(-1, 2, (tensor.shape[1],), generator=generator).float()

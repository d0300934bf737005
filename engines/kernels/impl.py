"""What every way of running an Op looks like, and the one value that says how to launch it.

A kernel file knows tensors and a ``KernelConfig``, nothing else: no Plan, no Scheme, no device query hidden inside. A
``KernelConfig`` is a value: it can be stored in the KernelTable, printed, compared, and overridden by argument. It is
chosen by the build (``engines/build/tune.py``), never by the kernel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch


@dataclass(frozen=True, slots=True)
class KernelConfig:
    """One launch choice.

    ``kernel`` names the body (``gemv``, ``dot``, ``mm``, ``torch``); ``meta`` holds its constexprs, sorted by name.
    """

    kernel: str
    meta: tuple[tuple[str, int], ...] = ()
    num_warps: int = 4
    num_stages: int = 1
    pdl: bool = False

    @classmethod
    def of(cls, kernel: str, *, num_warps: int = 4, num_stages: int = 1, pdl: bool = False,
           **meta: int) -> KernelConfig:
        return cls(kernel, tuple(sorted(meta.items())), num_warps, num_stages, pdl)

    def __getitem__(self, name: str) -> int:
        return dict(self.meta)[name]

    def get(self, name: str, default: int = 0) -> int:
        """A constexpr that not every config has."""
        return dict(self.meta).get(name, default)

    def to_json(self) -> dict[str, Any]:
        return {"kernel": self.kernel, "meta": dict(self.meta), "num_warps": self.num_warps,
                "num_stages": self.num_stages, "pdl": self.pdl}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> KernelConfig:
        return cls.of(data["kernel"], num_warps=data["num_warps"], num_stages=data["num_stages"], pdl=data["pdl"],
                      **data["meta"])


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """What a candidate list may depend on. ``capability`` is 90 for sm_90, 0 for a CPU."""

    name: str
    capability: int
    num_sms: int
    shared_bytes: int
    l2_bytes: int


@dataclass(frozen=True, slots=True)
class LinearShape:
    """A linear layer's problem: x [m, k] times weight [n, k] transposed; ``group`` is 0 without group scales."""

    m: int
    n: int
    k: int
    group: int = 0


@dataclass(frozen=True, slots=True)
class Packed:
    """A weight as its kernels read it. ``tensors`` go to disk as they are; ``shape`` is the logical [n, k]."""

    tensors: Mapping[str, torch.Tensor]
    n: int
    k: int
    group: int = 0
    facts: Mapping[str, int] = field(default_factory=dict)


@runtime_checkable
class LinearImpl(Protocol):
    """One storage layout of a linear's weight, with all kernels that read it.

    ``pack`` runs once at build time, ``unpack`` is its exact inverse, ``launch`` fills ``out`` [m, n].
    ``x`` is what the activation side of the scheme gives: bf16/fp16 [m, k], or quantized codes with ``x_scale``.
    """

    @property
    def name(self) -> str:
        """As the KernelTable names it."""

    def supports(self, shape: LinearShape, device: DeviceFacts) -> str | None:
        """None if this Impl can run the shape there, otherwise the reason in words."""

    def pack(self, weight: torch.Tensor, weight_scale: torch.Tensor | None = None, *,
             bias: torch.Tensor | None = None) -> Packed: ...

    def unpack(self, packed: Packed) -> tuple[torch.Tensor, torch.Tensor | None]: ...

    def candidates(self, shape: LinearShape, device: DeviceFacts) -> Sequence[KernelConfig]: ...

    def workspace_bytes(self, shape: LinearShape, config: KernelConfig) -> int: ...

    def launch(self, x: torch.Tensor, packed: Packed, config: KernelConfig, out: torch.Tensor, *,
               x_scale: torch.Tensor | None = None, workspace: torch.Tensor | None = None) -> torch.Tensor: ...

    def twin(self, x: torch.Tensor, packed: Packed, *, x_scale: torch.Tensor | None = None) -> torch.Tensor:
        """The same sum in plain torch, float32 accumulate: spec and oracle."""

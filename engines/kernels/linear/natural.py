"""What the linears with one natural weight layout share: packing, checking, choosing the body.

The weight stays as the checkpoint has it, rows of the output contiguous along k. One copy serves GEMV (16-byte loads
along a row), the tensor-core bodies (both operands K-major, as wgmma wants them) and torch's own operators::

    weight        [n, k]  codes or 16-bit values, contiguous
    weight_scale  [n]     fp32, one per output row (a per-tensor scale is repeated, 4 bytes a row); absent for 16-bit
    bias          [n]     as the model has it, optional

Where kernels get ``x`` quantized, ``x_scale`` is [] (static, per tensor) or [m] (per token).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch

from engines.kernels.impl import DeviceFacts, KernelConfig, LinearShape, Packed
from engines.kernels.linear.candidates import (
    MAX_TOKENS,
    DotTiles,
    GemvTile,
    MmTile,
    dot_candidates,
    gemv_candidates,
    mm_candidates,
)
from engines.kernels.linear.dot import dot_workspace, launch_dot
from engines.kernels.linear.gemv import UNIT, gemv_rows, launch_gemv
from engines.kernels.linear.mm import launch_mm

TORCH = KernelConfig.of("torch")
#: torch's operator on 2048 tokens at a time: on an H200, 28672 x 4096 in bf16 runs at 774 TFLOP/s so, at 697 in one go.
TORCH_IN_RUNS = KernelConfig.of("torch", RUN=2048)
MANY_TOKENS = 64  # above, arithmetic begins to weigh as much as reading the weights


class NaturalLinear(ABC):
    """Base of the impls; a subclass gives dtypes, the tiles worth timing (best guess first) and torch's operator."""

    name: ClassVar[str]
    kind: ClassVar[str]
    weight_dtypes: ClassVar[tuple[torch.dtype, ...]]
    x_dtypes: ClassVar[tuple[torch.dtype, ...]]
    scaled: ClassVar[bool] = True
    quantized_x: ClassVar[bool] = True
    gemv_tiles: ClassVar[dict[int, list[GemvTile]]]  # by ROWS
    dot_tiles: ClassVar[dict[int, DotTiles]]  # up to 16, 64, 256 tokens
    mm_tiles: ClassVar[list[MmTile]] = []
    torch_first: ClassVar[bool] = True  # torch's operator leads for many tokens

    def supports(self, shape: LinearShape, device: DeviceFacts) -> str | None:
        """None, or why this Impl cannot run ``shape`` on ``device``."""
        if shape.group:
            return f"{self.name} weights have one scale a row, this one has groups of {shape.group}"
        if 0 < device.capability < 80:
            return f"{self.name} kernels need compute capability 8.0, {device.name} has {device.capability / 10:.1f}"
        return None

    def pack(self, weight: torch.Tensor, weight_scale: torch.Tensor | None = None, *,
             bias: torch.Tensor | None = None) -> Packed:
        """``weight`` [n, k], ``weight_scale`` [] or [n] (8-bit only), ``bias`` [n] -> what the kernels read.

        Raises ValueError for another dtype or shape, or scales that are missing, not finite or not positive.
        """
        if weight.ndim != 2 or weight.dtype not in self.weight_dtypes:
            found = f"{weight.dtype} {tuple(weight.shape)}"
            raise ValueError(f"{self.name} packs a matrix of {self._dtypes()}, got {found}")
        n, k = weight.shape
        tensors = {"weight": weight.contiguous()}
        if self.scaled != (weight_scale is not None):
            raise ValueError(f"{self.name} weights {'need' if self.scaled else 'have no'} scales")
        if weight_scale is not None:
            if weight_scale.shape not in (torch.Size([]), torch.Size([n])):
                raise ValueError(f"{self.name} scales are [] or [{n}], got {tuple(weight_scale.shape)}")
            if not bool(torch.isfinite(weight_scale).all()) or bool((weight_scale <= 0).any()):
                raise ValueError(f"{self.name} scales must be finite and positive")
            tensors["weight_scale"] = weight_scale.to(torch.float32).expand(n).contiguous()
        if bias is not None:
            if bias.shape != (n,):
                raise ValueError(f"the bias is {tuple(bias.shape)}, expected [{n}]")
            tensors["bias"] = bias.contiguous()
        per_tensor = int(weight_scale is not None and weight_scale.ndim == 0)
        return Packed(tensors, n, k, facts={"per_tensor": per_tensor})

    def unpack(self, packed: Packed) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The weight and its scales as ``pack`` got them (the bias stays in ``packed.tensors``)."""
        scale = packed.tensors.get("weight_scale")
        if scale is not None and packed.facts["per_tensor"]:
            scale = scale[0].clone()
        return packed.tensors["weight"], scale

    def candidates(self, shape: LinearShape, device: DeviceFacts) -> Sequence[KernelConfig]:
        """Configurations worth timing, best guess first; on a CPU torch's operator alone."""
        if device.capability == 0:
            return [TORCH]
        return self.gpu_candidates(shape, device)

    def gpu_candidates(self, shape: LinearShape, device: DeviceFacts) -> list[KernelConfig]:
        """``candidates`` where kernels run: GEMV up to 4 tokens, the swapped dot for batches, mm for prefill."""
        weight_bytes, x_bytes = self.weight_dtypes[0].itemsize, self.x_dtypes[0].itemsize
        rows = gemv_rows(shape.m)
        vectors = []
        if rows in self.gemv_tiles and shape.k % UNIT[self.kind] == 0:
            vectors = list(gemv_candidates(self.gemv_tiles[rows], shape, device, UNIT[self.kind], rows))
        tiles = self.dot_tiles[16 if shape.m <= 16 else 64 if shape.m <= MANY_TOKENS else MAX_TOKENS]
        dots = list(dot_candidates(tiles, shape, device, weight_bytes, x_bytes))
        few = vectors + dots if rows <= 2 else dots + vectors
        library = [TORCH] if self.torch_runs(shape, device) else []
        if library and shape.m >= 2 * TORCH_IN_RUNS["RUN"]:
            library.append(TORCH_IN_RUNS)
        if shape.m <= MANY_TOKENS:
            return few + library
        many = list(mm_candidates(self.mm_tiles, shape, device, weight_bytes))
        filled = -(-shape.n // 256) * -(-shape.m // 128) >= device.num_sms
        if shape.m > 2 * MAX_TOKENS and (many or library):
            few = []
        kernels = many + few if filled else few + many
        return library + kernels if self.torch_first else kernels + library

    def torch_runs(self, shape: LinearShape, device: DeviceFacts) -> bool:
        """True if ``launch_torch`` can run the shape on this GPU and is worth timing."""
        return True

    def workspace_bytes(self, shape: LinearShape, config: KernelConfig) -> int:
        """Bytes of workspace ``launch`` needs; it must have been zeroed once (split_k)."""
        return dot_workspace(shape, config) if config.kernel == "dot" else 0

    def launch(self, x: torch.Tensor, packed: Packed, config: KernelConfig, out: torch.Tensor, *,
               x_scale: torch.Tensor | None = None, workspace: torch.Tensor | None = None) -> torch.Tensor:
        """Fill ``out`` [m, n] with x [m, k] times the weight transposed, scaled, plus the bias; returns ``out``."""
        self._check(x, packed, out, x_scale)
        if x.shape[0] == 0:
            return out
        weight, w_scale, bias = (packed.tensors.get(name) for name in ("weight", "weight_scale", "bias"))
        assert weight is not None
        if config.kernel == "gemv":
            launch_gemv(x, weight, out, config, self.kind, w_scale=w_scale, x_scale=x_scale, bias=bias)
        elif config.kernel == "dot":
            launch_dot(x, weight, out, config, self.kind, w_scale=w_scale, x_scale=x_scale, bias=bias,
                       workspace=workspace)
        elif config.kernel == "mm":
            launch_mm(x, weight, out, config, self.kind, w_scale=w_scale, x_scale=x_scale, bias=bias)
        elif config.kernel == "torch":
            run = dict(config.meta).get("RUN", x.shape[0])
            each = x_scale is not None and x_scale.ndim > 0
            for at in range(0, x.shape[0], run):
                part = slice(at, at + run)
                scale = x_scale[part] if each and x_scale is not None else x_scale
                self.launch_torch(x[part], packed, out[part], scale, workspace)
        else:
            raise ValueError(f"{self.name} has no kernel {config.kernel!r}: gemv, dot, mm or torch")
        return out

    @staticmethod
    def gates(config: KernelConfig, n: int) -> bool:
        """Whether ``launch_gated`` can run a stacked gate and up of ``n`` rows with this config."""
        return (config.kernel == "gemv" and config["BLOCK_N"] >= 2) or (config.kernel == "mm" and n % 32 == 0)

    def launch_gated(self, x: torch.Tensor, packed: Packed, config: KernelConfig, out: torch.Tensor, *,
                     x_scale: torch.Tensor | None = None, out_scale: torch.Tensor | None = None) -> torch.Tensor:
        """For a stacked gate and up: ``out`` [m, n / 2] = silu(gate) * up, bf16, or fp8 by ``out_scale`` []."""
        if not self.gates(config, packed.n):
            raise ValueError(f"{self.name}: {config.kernel} cannot gate its output of {packed.n} columns")
        if x.shape[0] == 0:
            return out
        launch = launch_gemv if config.kernel == "gemv" else launch_mm
        launch(x, packed.tensors["weight"], out, config, self.kind, w_scale=packed.tensors.get("weight_scale"),
               x_scale=x_scale, bias=packed.tensors.get("bias"), gated=True, out_scale=out_scale)
        return out

    @abstractmethod
    def launch_torch(self, x: torch.Tensor, packed: Packed, out: torch.Tensor, x_scale: torch.Tensor | None,
                     workspace: torch.Tensor | None) -> None:
        """``launch`` by torch's own operators; the only way on a CPU."""

    def twin(self, x: torch.Tensor, packed: Packed, *, x_scale: torch.Tensor | None = None) -> torch.Tensor:
        """The same sum in plain torch [m, n] fp32; products are summed in fp64, so the oracle itself is exact."""
        y = x.double() @ packed.tensors["weight"].double().t()
        if self.scaled:
            y *= packed.tensors["weight_scale"].double()
        if x_scale is not None:
            y *= x_scale.double().reshape(-1, 1)
        if "bias" in packed.tensors:
            y += packed.tensors["bias"].double()
        return y.float()

    def _check(self, x: torch.Tensor, packed: Packed, out: torch.Tensor, x_scale: torch.Tensor | None) -> None:
        m = x.shape[0]
        if x.shape != (m, packed.k) or out.shape != (m, packed.n):
            raise ValueError(f"x {tuple(x.shape)} times [{packed.n}, {packed.k}]^T does not fill {tuple(out.shape)}")
        if x.dtype not in self.x_dtypes:
            raise ValueError(f"{self.name} takes x of {self._dtypes(self.x_dtypes)}, got {x.dtype}")
        if not (x.is_contiguous() and out.is_contiguous()):
            raise ValueError("x and out must be contiguous")
        if self.quantized_x != (x_scale is not None):
            raise ValueError(f"{self.name} {'needs' if self.quantized_x else 'takes no'} x_scale")
        self._check_scale(x, packed, x_scale)

    def _check_scale(self, x: torch.Tensor, packed: Packed, x_scale: torch.Tensor | None) -> None:
        if x_scale is not None and x_scale.shape not in (torch.Size([]), torch.Size([x.shape[0]])):
            raise ValueError(f"x_scale is [] or [{x.shape[0]}], got {tuple(x_scale.shape)}")

    def _dtypes(self, dtypes: tuple[torch.dtype, ...] | None = None) -> str:
        return " or ".join(str(d).removeprefix("torch.") for d in dtypes or self.weight_dtypes)

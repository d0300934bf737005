"""What the two 4-bit Impls share: storage, checks, and the choice of body by ``KernelConfig.kernel``.

    mma   ``int4_mma``: up to 32 tokens, weights straight into registers (NVIDIA sm_80 and later)
    dot   ``int4_dot``: any number of tokens, plain Triton (also in the interpreter)
    dot16 ``int4_dot16``: the same for int8 activations that are widened to 16 bits first (order A8 only)
    mm    ``int4_mm``: a 16-bit scratch and torch.mm
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import triton

from engines.kernels.impl import DeviceFacts, KernelConfig, LinearShape, Packed
from engines.kernels.jit import launch_options, next_pow2
from engines.kernels.linear.int4_dot import dot_workspace, launch_int4_dot
from engines.kernels.linear.int4_dot16 import dot16_workspace, launch_int4_dot16
from engines.kernels.linear.int4_layout import (
    GROUPS,
    Geometry,
    Int4WeightError,
    Order,
    dequantize,
    pack_int4,
    unpack_int4,
)
from engines.kernels.linear.int4_mm import launch_int4_mm, mm_workspace
from engines.kernels.linear.int4_mma import MAX_TOKENS, int4_mma

__all__ = ["Int4Linear", "MmaChoice", "check_shapes", "dot_configs", "mma_configs", "unpack_config"]

_SCALE_KIND = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
_MAX_BYTES = 2**31


class Int4Linear:
    """A linear with 4-bit group-wise symmetric weights; subclasses say what the activations are."""

    name: str
    order: Order

    def supports(self, shape: LinearShape, device: DeviceFacts) -> str | None:
        """None if the shape can run there, otherwise why not."""
        if shape.group not in GROUPS:
            return f"groups of {shape.group} inputs; the kernels know {GROUPS}"
        if shape.k % shape.group:
            return f"k = {shape.k} is no multiple of the group {shape.group}"
        if shape.n * Geometry(shape.n, shape.k, shape.group).padded_k // 2 >= _MAX_BYTES:
            return f"a weight of {shape.n} x {shape.k} has more than 2 GiB, the offsets are 32 bit"
        if 0 < device.capability < 80:
            return f"sm_{device.capability} has no bf16 matrix instruction"
        return None

    def pack(self, weight: torch.Tensor, weight_scale: torch.Tensor | None = None, *,
             bias: torch.Tensor | None = None) -> Packed:
        """int8 codes [n, k] in [-8, 7], float32 scales [n, k / group], bias [n] -> storage. Raises Int4WeightError."""
        packed = pack_int4(weight, weight_scale, self.order)
        if bias is None:
            return packed
        if bias.shape != (packed.n,):
            raise Int4WeightError(f"the bias is {list(bias.shape)}, expected [{packed.n}]", "Check the name map.")
        return replace(packed, tensors={**packed.tensors, "bias": bias.contiguous()})

    def unpack(self, packed: Packed) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The exact inverse of ``pack`` (the bias stays in ``packed.tensors``)."""
        return unpack_int4(packed, self.order)

    def workspace_bytes(self, shape: LinearShape, config: KernelConfig) -> int:
        """Bytes of scratch ``launch`` needs; split-K's must be zeroed before its first use (see split_k)."""
        if config.kernel == "dot":
            return dot_workspace(shape, config)
        if config.kernel == "dot16":
            return dot16_workspace(shape, config)
        return mm_workspace(shape, self.order is Order.A8) if config.kernel == "mm" else 0

    def launch(self, x: torch.Tensor, packed: Packed, config: KernelConfig, out: torch.Tensor, *,
               x_scale: torch.Tensor | None = None, workspace: torch.Tensor | None = None) -> torch.Tensor:
        """Fill ``out`` [m, n] (bf16 or fp16); an empty batch launches nothing. Raises ValueError on wrong operands."""
        self.check(x, packed, out, x_scale)
        if out.shape[0] == 0:
            return out
        if config.kernel == "mma":
            _launch_mma(x, packed, config, out, x_scale)
        elif config.kernel == "dot":
            launch_int4_dot(x, packed, config, out, order=self.order, x_scale=x_scale, workspace=workspace)
        elif config.kernel == "dot16" and x_scale is not None:
            launch_int4_dot16(x, packed, config, out, x_scale=x_scale, workspace=workspace)
        elif config.kernel == "mm":
            launch_int4_mm(x, packed, config, out, x_scale=x_scale, workspace=workspace)
        else:
            kernels = "mma, dot, mm" if x_scale is None else "mma, dot, dot16, mm"
            raise ValueError(f"{self.name} has no kernel {config.kernel!r}; it has {kernels}")
        return out

    def product(self, x: torch.Tensor, packed: Packed) -> torch.Tensor:
        """x [m, k] float32 times the dequantized weight, plus the bias: the twin's sum, float32 [m, n]."""
        bias = packed.tensors.get("bias")
        return x @ dequantize(packed, self.order).t() + (0.0 if bias is None else bias.float())

    def check(self, x: torch.Tensor, packed: Packed, out: torch.Tensor, x_scale: torch.Tensor | None) -> None:
        """Raises ValueError when the operands do not fit the weight or each other."""
        raise NotImplementedError

    def twin(self, x: torch.Tensor, packed: Packed, *, x_scale: torch.Tensor | None = None) -> torch.Tensor:
        """The same sum in plain torch, float32 [m, n]."""
        raise NotImplementedError

    def candidates(self, shape: LinearShape, device: DeviceFacts) -> Sequence[KernelConfig]:
        """Configurations worth timing for this shape, likely winner first."""
        raise NotImplementedError


def check_shapes(name: str, x: torch.Tensor, packed: Packed, out: torch.Tensor) -> None:
    """x [m, k] and out [m, n], contiguous, out 16-bit."""
    if x.dim() != 2 or x.shape[1] != packed.k or tuple(out.shape) != (x.shape[0], packed.n):
        raise ValueError(f"{name}: x {list(x.shape)} and out {list(out.shape)} do not fit [{packed.n}, {packed.k}]")
    if not (x.is_contiguous() and out.is_contiguous()):
        raise ValueError(f"{name}: x and out must be contiguous, strides are {x.stride()} and {out.stride()}")
    if out.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"{name}: out is {out.dtype}, expected bfloat16 or float16")


MmaChoice = tuple[int, int, int, int, int]
"""(warps, UNIT, RT, programs per multiprocessor or 0 for one a tile, STAGED)."""


def mma_configs(shape: LinearShape, choices: Sequence[MmaChoice], device: DeviceFacts, *,
                pdl: bool) -> list[KernelConfig]:
    """``mma`` configurations that fit the shape: no idle warps, no loop of one turn, no more memory than there is."""
    if shape.m > MAX_TOKENS or device.capability < 80:
        return []
    geometry = Geometry(shape.n, shape.k, shape.group)
    token_tiles = 1 if shape.m <= 8 else 2 if shape.m <= 16 else 4
    configs = []
    for warps, unit, row_tiles, per_sm, staged in choices:
        grid = triton.cdiv(geometry.tiles, row_tiles)
        programs = min(grid, per_sm * device.num_sms)
        block_k = unit * shape.group * warps
        too_large = device.shared_bytes and 2 * staged * block_k > device.shared_bytes
        if (warps > 1 and warps // 2 >= geometry.groups // unit) or (per_sm and programs == grid) or too_large:
            continue
        configs.append(KernelConfig.of("mma", num_warps=warps, pdl=pdl, UNIT=unit, RT=row_tiles, NT=token_tiles,
                                       STAGED=staged, PROGRAMS=programs, BLOCK_K=block_k, SPLIT_K=1))
    return configs


def dot_configs(shape: LinearShape, device: DeviceFacts, choices: Sequence[tuple[int, int, int, int]], *,
                pdl: bool, kernel: str = "dot") -> list[KernelConfig]:
    """``dot`` or ``dot16`` configurations from (BLOCK_N, warps, stages, FOLD), split over k to fill the device."""
    block_m = min(128, max(16, next_pow2(shape.m)))
    configs = []
    for block_n, warps, stages, fold in choices:
        block_k = max(64, shape.group) if fold == 1 else shape.group
        tiles = triton.cdiv(shape.n, block_n) * triton.cdiv(shape.m, block_m)
        steps = triton.cdiv(shape.k, block_k)
        for split in (1, 2, 4, 8):
            crowded = tiles * split > 3 * max(1, device.num_sms)
            if split > 1 and (crowded or 4 * split > steps or device.capability == 0):
                break
            if 4 * tiles * split < device.num_sms and 8 * split < steps and split < 8:
                continue  # most of the device would idle, and a larger split is coming
            configs.append(KernelConfig.of(kernel, num_warps=warps, num_stages=stages, pdl=pdl, BLOCK_M=block_m,
                                           BLOCK_N=block_n, BLOCK_K=block_k, SPLIT_K=split, FOLD=fold))
    return configs


def unpack_config(shape: LinearShape, pdl: bool) -> KernelConfig:
    """``mm``: tiles of the kernel that widens the weight; the product itself is the library's."""
    return KernelConfig.of("mm", num_warps=4, pdl=pdl, BLOCK_N=32, BLOCK_K=max(64, shape.group), SPLIT_K=1)


def _launch_mma(x: torch.Tensor, packed: Packed, config: KernelConfig, out: torch.Tensor,
                x_scale: torch.Tensor | None) -> None:
    """``config.meta``: UNIT, RT, NT, STAGED, PROGRAMS (0: one a tile)."""
    m, staged = out.shape[0], config["STAGED"]
    if m > 8 * config["NT"] or 0 < staged < m:
        raise ValueError(f"{m} tokens do not fit NT={config['NT']} tiles of 8, STAGED={staged}")
    words, scales = packed.tensors["words"], packed.tensors["scales"]
    bias = packed.tensors.get("bias")
    programs = config["PROGRAMS"] or triton.cdiv(words.shape[0], config["RT"])
    int4_mma[(programs,)](x, scales if x_scale is None else x_scale, words, scales, scales if bias is None else bias,
                          out, m, packed.n, programs, K=packed.k, GROUP=packed.group, NUM_WARPS=config.num_warps,
                          UNIT=config["UNIT"], RT=config["RT"], NT=config["NT"], A8=x.dtype == torch.int8,
                          FP16=x.dtype == torch.float16, SCALE=_SCALE_KIND[scales.dtype], STAGED=staged,
                          LOOP=config["PROGRAMS"] > 0, HAS_BIAS=bias is not None, **launch_options(config))

"""Activation quantization: the host side that norm, silu_mul and attention share, and the pass that does only that.

Most activations are quantized in the epilogue of the kernel that makes them (``jit.store_act``). What is left for a
pass of its own is an attention output quantized per token: its heads are made by different programs, none of which sees
the whole row. The pass reads a row once [n] (optionally times ``pre_quant_scale`` [n]), finds its amax and writes
codes and scale: one program a row, 2 n bytes read, n written; at one token its time is launch latency.

Modes and scale conventions: ``jit`` module docstring. Group codes lie in plain row order, group scales as [m, n/group].
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from engines.kernels.impl import DeviceFacts, KernelConfig
from engines.kernels.jit import ActQuant, gdc_launch, gdc_wait, launch_options, next_pow2, scale_at, store_act

FP8_MAX = 448.0
INT8_MAX = 127.0


def check_act(out: torch.Tensor, m: int, n: int, quant: ActQuant, group: int, input_scale: torch.Tensor | None,
              scales: torch.Tensor | None) -> None:
    """Raise ValueError where an output and its scales do not fit the mode; nothing is accepted and ignored."""
    if tuple(out.shape) != (m, n) or out.stride(1) != 1:
        raise ValueError(f"out must be [{m}, {n}] with unit column stride, found {tuple(out.shape)}, {out.stride()}")
    codes = torch.float8_e4m3fn if quant.fp8 else torch.int8
    dtypes = (torch.bfloat16, torch.float16, torch.float32) if quant is ActQuant.NONE else (codes,)
    if out.dtype not in dtypes:
        raise ValueError(f"{quant.name} writes {dtypes[0]}, found out of {out.dtype}")
    if (input_scale is not None) != quant.static:
        raise ValueError(f"input_scale belongs to the static modes and to them alone, found {quant.name}")
    if (group > 0) != quant.per_group or (group and (n % group or group != next_pow2(group))):
        raise ValueError(f"{quant.name} with n={n}: group must be a power of two that divides n for the group modes, "
                         f"and 0 otherwise; found {group}")
    wanted = (m,) if quant.per_token else (m, n // group) if group else None
    found = None if scales is None else tuple(scales.shape)
    if found != wanted or (scales is not None and (scales.dtype != torch.float32 or not scales.is_contiguous())):
        raise ValueError(f"{quant.name} needs contiguous float32 scales of shape {wanted}, found {found}")


def store_act_twin(y: torch.Tensor, out: torch.Tensor, quant: ActQuant = ActQuant.NONE, group: int = 0,
                   input_scale: torch.Tensor | None = None, scales: torch.Tensor | None = None) -> None:
    """``jit.store_act`` in plain torch: ``y`` [m, n] float32 into ``out`` (and ``scales``)."""
    check_act(out, y.shape[0], y.shape[1], quant, group, input_scale, scales)
    if quant is ActQuant.NONE:
        out.copy_(y)
    elif quant.static:
        assert input_scale is not None
        largest = FP8_MAX if quant.fp8 else INT8_MAX
        codes = (y * (1.0 / input_scale.float())).clamp(-largest, largest)
        out.copy_(codes if quant.fp8 else codes.round())
    else:
        assert scales is not None
        largest = FP8_MAX if quant.fp8 else INT8_MAX
        grouped = y.reshape(*scales.shape, group or y.shape[1])
        if y.numel():
            scales.copy_(grouped.abs().amax(-1).clamp(min=1e-12) / largest)
        codes = (grouped * (1.0 / scales)[..., None]).clamp(-largest, largest).reshape(y.shape)
        out.copy_(codes if quant.fp8 else codes.round())


def dequantize(codes: torch.Tensor, quant: ActQuant, input_scale: torch.Tensor | None = None,
               scales: torch.Tensor | None = None) -> torch.Tensor:
    """The float32 values that codes [m, n] and their scales stand for."""
    values = codes.float()
    if quant is ActQuant.NONE:
        return values
    scale = input_scale if quant.static else scales
    if scale is None:
        raise ValueError(f"{quant.name} needs its scale")
    if quant.static:
        return values * scale
    width = values.shape[1] if scale.dim() == 1 else values.shape[1] // scale.shape[1]
    return (values.reshape(*scale.shape, width) * scale[..., None]).reshape(values.shape)


@triton.jit
def quantize_kernel(x_ptr, pre_quant_ptr, out_ptr, scales_ptr, input_scale_ptr, x_stride, out_stride, num_groups, n,
                    QUANT: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr) -> None:
    """One program a row."""
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    mask = cols < n
    gdc_launch(PDL)
    if pre_quant_ptr is not None:
        factor = tl.load(pre_quant_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    input_scale = scale_at(input_scale_ptr)
    gdc_wait(PDL)
    y = tl.load(x_ptr + tl.cast(row, tl.int64) * x_stride + cols, mask=mask, other=0.0).to(tl.float32)
    if pre_quant_ptr is not None:
        y = y * factor
    amax = tl.max(tl.abs(y), 0)
    store_act(y, amax, row, cols, mask, 0, n, out_ptr, out_stride, scales_ptr, num_groups, input_scale, QUANT, GROUP,
              BLOCK)


def candidates(n: int, device: DeviceFacts) -> Sequence[KernelConfig]:
    """Warps to try for rows of ``n``; the first is the default."""
    block = next_pow2(n)
    sizes = dict.fromkeys(w for w in (min(16, block // 512), 8, 4, 16) if w > 0 and w * 32 <= block) or [1]
    return [KernelConfig.of("row", num_warps=w, pdl=device.capability >= 90) for w in sizes]


def launch(x: torch.Tensor, out: torch.Tensor, config: KernelConfig, *, quant: ActQuant, group: int = 0,
           pre_quant_scale: torch.Tensor | None = None, input_scale: torch.Tensor | None = None,
           scales: torch.Tensor | None = None) -> torch.Tensor:
    """Quantize ``x`` [m, n] into ``out`` [m, n] (codes) and ``scales``. Graph safe. Raises ValueError on a misfit."""
    m, n = x.shape
    check_act(out, m, n, quant, group, input_scale, scales)
    if m:
        quantize_kernel[(m,)](x, pre_quant_scale, out, scales, input_scale, x.stride(0), out.stride(0),
                              n // group if group else 0, n, QUANT=int(quant), GROUP=group, BLOCK=next_pow2(n),
                              **launch_options(config))
    return out


def twin(x: torch.Tensor, out: torch.Tensor, config: KernelConfig | None = None, *, quant: ActQuant, group: int = 0,
         pre_quant_scale: torch.Tensor | None = None, input_scale: torch.Tensor | None = None,
         scales: torch.Tensor | None = None) -> torch.Tensor:
    """The same in plain torch."""
    y = x.float() if pre_quant_scale is None else x.float() * pre_quant_scale.float()
    store_act_twin(y, out, quant, group, input_scale, scales)
    return out

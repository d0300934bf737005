"""Gated activation: [m, 2 * inter] -> [m, inter], quantized on the way out.

    out[t, i] = act(gate_up[t, i]) * gate_up[t, inter + i] * pre_quant_scale[i]

with act = silu (x * sigmoid(x)) or Gemma's gelu_tanh (0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))). gate_up is the
output of the fused gate/up linear: gate columns first, then up columns.

Tiles: [BLOCK] columns of one row a program; a per-token scale needs the row's amax, so there a program takes the whole
row (BLOCK = next power of two of inter). Bytes: 2 * inter read + inter written a row, each once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from engines.kernels.impl import DeviceFacts, KernelConfig
from engines.kernels.jit import (
    ActQuant,
    gdc_launch,
    gdc_wait,
    launch_options,
    next_pow2,
    scale_at,
    silu,
    store_act,
    tanh,
)
from engines.kernels.quantize import check_act, store_act_twin

ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}


@triton.jit
def silu_mul_kernel(x_ptr, pre_quant_ptr, out_ptr, scales_ptr, input_scale_ptr, x_stride, out_stride, num_groups, inter,
                    ACT: tl.constexpr, QUANT: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
                    ) -> None:
    """One program a row and a run of BLOCK columns."""
    row = tl.program_id(0)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < inter
    gdc_launch(PDL)
    if pre_quant_ptr is not None:
        factor = tl.load(pre_quant_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    input_scale = scale_at(input_scale_ptr)
    gdc_wait(PDL)
    base = x_ptr + tl.cast(row, tl.int64) * x_stride + cols
    gate = tl.load(base, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(base + inter, mask=mask, other=0.0).to(tl.float32)
    if ACT == 0:
        y = silu(gate) * up
    else:
        y = 0.5 * gate * (1.0 + tanh(0.7978845608028654 * (gate + 0.044715 * gate * gate * gate))) * up
    if pre_quant_ptr is not None:
        y = y * factor
    if QUANT == 2 or QUANT == 3:
        amax = tl.max(tl.abs(y), 0)
    else:
        amax = 0.0
    store_act(y, amax, row, cols, mask, tl.program_id(1) * BLOCK, inter, out_ptr, out_stride, scales_ptr, num_groups,
              input_scale, QUANT, GROUP, BLOCK)


def candidates(inter: int, quant: ActQuant, group: int, device: DeviceFacts) -> Sequence[KernelConfig]:
    """Tiles to try for ``inter`` columns; the first is the default."""
    pdl = device.capability >= 90
    if quant.per_token:
        block = next_pow2(inter)
        sizes = [w for w in (16, 8, 32) if w * 32 <= block] or [1]
        return [KernelConfig.of("tile", BLOCK=block, num_warps=w, pdl=pdl) for w in sizes]
    tiles = ((1024, 4), (512, 2), (512, 4), (2048, 8), (2048, 4), (256, 1))
    fitting = [(b, w) for b, w in tiles if b < 2 * inter and b >= group] or [(max(32, next_pow2(inter)), 1)]
    return [KernelConfig.of("tile", BLOCK=b, num_warps=w, pdl=pdl) for b, w in fitting]


def _check(gate_up: torch.Tensor, activation: str) -> tuple[int, int]:
    if activation not in ACTIVATIONS:
        raise ValueError(f"unknown activation {activation!r}, known: {', '.join(ACTIVATIONS)}")
    if gate_up.shape[1] % 2:
        raise ValueError(f"gate_up needs an even number of columns, found {tuple(gate_up.shape)}")
    return gate_up.shape[0], gate_up.shape[1] // 2


def launch(gate_up: torch.Tensor, out: torch.Tensor, config: KernelConfig, *, activation: str = "silu",
           pre_quant_scale: torch.Tensor | None = None, quant: ActQuant = ActQuant.NONE, group: int = 0,
           input_scale: torch.Tensor | None = None, scales: torch.Tensor | None = None) -> torch.Tensor:
    """Fill ``out`` [m, inter] (and ``scales``) from ``gate_up`` [m, 2 * inter]. Graph safe. ValueError on a misfit."""
    m, inter = _check(gate_up, activation)
    check_act(out, m, inter, quant, group, input_scale, scales)
    block = config["BLOCK"]
    if quant.per_token and block < inter:
        raise ValueError(f"{quant.name} needs the whole row in a tile: BLOCK {block} < {inter}")
    if m:
        silu_mul_kernel[(m, triton.cdiv(inter, block))](
            gate_up, pre_quant_scale, out, scales, input_scale, gate_up.stride(0), out.stride(0),
            inter // group if group else 0, inter, ACT=ACTIVATIONS[activation], QUANT=int(quant), GROUP=group,
            BLOCK=block, **launch_options(config))
    return out


def twin(gate_up: torch.Tensor, out: torch.Tensor, config: KernelConfig | None = None, *, activation: str = "silu",
         pre_quant_scale: torch.Tensor | None = None, quant: ActQuant = ActQuant.NONE, group: int = 0,
         input_scale: torch.Tensor | None = None, scales: torch.Tensor | None = None) -> torch.Tensor:
    """The same in plain torch, float32 inside."""
    _check(gate_up, activation)
    gate, up = gate_up.float().chunk(2, 1)
    act = torch.nn.functional.silu(gate) if activation == "silu" else torch.nn.functional.gelu(gate, approximate="tanh")
    y = act * up if pre_quant_scale is None else act * up * pre_quant_scale.float()
    store_act_twin(y, out, quant, group, input_scale, scales)
    return out

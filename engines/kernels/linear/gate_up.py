"""A stacked gate_up linear and the activation behind it: one kernel where the linear's can gate, two where not.

    out [m, inter] = act(gate) * up * pre_quant_scale, quantized        gate_up [m, 2 inter] = x . weight^T

GEMV and mm can store silu(gate) * up themselves (bf16, or fp8 by a static scale). An int8 scale per token needs the
whole row: then the gated row waits as bf16 where gate_up would have been, and ``quantize`` makes the codes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engines.kernels import quantize, silu_mul
from engines.kernels.impl import KernelConfig, LinearImpl, Packed
from engines.kernels.jit import ActQuant
from engines.kernels.linear.natural import NaturalLinear

__all__ = ["Activation", "gates", "launch_gate_up"]

_GATED_MODES = (ActQuant.NONE, ActQuant.FP8_STATIC, ActQuant.INT8_TOKEN)


@dataclass(frozen=True, slots=True)
class Activation:
    """What follows gate_up: the function (``silu_mul.ACTIVATIONS``), and how its rows are quantized."""

    name: str
    mode: ActQuant
    group: int = 0
    input_scale: torch.Tensor | None = None
    pre_quant_scale: torch.Tensor | None = None


def gates(impl: LinearImpl, config: KernelConfig, n: int, activation: Activation) -> bool:
    """Whether the linear's own kernel can apply ``activation`` to its ``n`` rows."""
    return (isinstance(impl, NaturalLinear) and activation.name == "silu" and activation.pre_quant_scale is None
            and activation.mode in _GATED_MODES and impl.gates(config, n))


def launch_gate_up(impl: LinearImpl, x: torch.Tensor, packed: Packed, config: KernelConfig, gate_up: torch.Tensor,
                   out: torch.Tensor, activation: Activation, *, x_scale: torch.Tensor | None,
                   scales: torch.Tensor | None, silu_config: KernelConfig, quantize_config: KernelConfig,
                   workspace: torch.Tensor | None = None) -> None:
    """Fill ``out`` [m, inter] (and ``scales``, the dynamic modes'); ``gate_up`` [m, 2 inter] is scratch. Graph safe."""
    if not (gates(impl, config, packed.n, activation) and isinstance(impl, NaturalLinear)):
        impl.launch(x, packed, config, gate_up, x_scale=x_scale, workspace=workspace)
        silu_mul.launch(gate_up, out, silu_config, activation=activation.name,
                        pre_quant_scale=activation.pre_quant_scale, quant=activation.mode, group=activation.group,
                        input_scale=activation.input_scale, scales=scales)
        return
    apart = activation.mode is ActQuant.INT8_TOKEN
    target = gate_up.view(-1)[:out.numel()].view(out.shape) if apart else out
    impl.launch_gated(x, packed, config, target, x_scale=x_scale, out_scale=activation.input_scale)
    if apart:
        quantize.launch(target, out, quantize_config, quant=activation.mode, scales=scales)

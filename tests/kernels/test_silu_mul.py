"""Gated activations against plain torch."""

from __future__ import annotations

import pytest
import torch

from engines.kernels import quantize, silu_mul
from engines.kernels.jit import ActQuant


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(("quant", "group", "dtype"), [
    (ActQuant.NONE, 0, torch.bfloat16), (ActQuant.FP8_STATIC, 0, torch.float8_e4m3fn),
    (ActQuant.FP8_TOKEN, 0, torch.float8_e4m3fn), (ActQuant.INT8_TOKEN, 0, torch.int8),
    (ActQuant.INT8_GROUP, 32, torch.int8), (ActQuant.FP8_GROUP, 32, torch.float8_e4m3fn),
    (ActQuant.INT8_STATIC, 0, torch.int8)])
@pytest.mark.parametrize(("m", "inter"), [(1, 96), (3, 1536), (0, 64), (2, 704)])
def test_modes(device, facts, judge, activation, quant, group, dtype, m, inter):
    torch.manual_seed(inter)
    x = torch.randn(m, 2 * inter, device=device).bfloat16()
    pre = torch.rand(inter, device=device) + 0.5
    results = []
    for run in (silu_mul.launch, silu_mul.twin):
        out = torch.full((m, inter), float("nan"), device=device).to(dtype) if dtype != torch.int8 else torch.full(
            (m, inter), -128, dtype=dtype, device=device)
        shape = (m,) if quant.per_token else (m, inter // group) if group else None
        scales = torch.full(shape, float("nan"), device=device) if shape else None
        input_scale = torch.tensor(0.02, device=device) if quant.static else None
        run(x, out, silu_mul.candidates(inter, quant, group, facts)[0], activation=activation, pre_quant_scale=pre,
            quant=quant, group=group, input_scale=input_scale, scales=scales)
        results.append(quantize.dequantize(out, quant, input_scale, scales))
    judge(results[0], results[1], *{torch.bfloat16: (0.1, 6e-3), torch.int8: (0.2, 1e-2)}.get(dtype, (1.0, 3e-2)))


def test_extreme_gates(device, facts):
    x = torch.tensor([[-1e4, -100.0, 0.0, 100.0, 1e4, 1.0, 1.0, 1.0, 1.0, 1.0]], device=device)
    for activation in silu_mul.ACTIVATIONS:
        out = torch.full((1, 5), float("nan"), device=device)
        silu_mul.launch(x, out, silu_mul.candidates(5, ActQuant.NONE, 0, facts)[0], activation=activation)
        assert torch.allclose(out.cpu(), torch.tensor([[0.0, 0.0, 0.0, 100.0, 1e4]]), atol=1e-6)


def test_unknown_activation_and_short_tile(device, facts):
    x, out = torch.ones(1, 128, device=device), torch.empty(1, 64, device=device)
    config = silu_mul.candidates(64, ActQuant.NONE, 0, facts)[0]
    with pytest.raises(ValueError, match="relu"):
        silu_mul.launch(x, out, config, activation="relu")
    codes = torch.empty(1, 64, dtype=torch.int8, device=device)
    small = silu_mul.candidates(16, ActQuant.INT8_TOKEN, 0, facts)[0]
    with pytest.raises(ValueError, match="whole row"):
        silu_mul.launch(x, codes, small, quant=ActQuant.INT8_TOKEN, scales=torch.empty(1, device=device))

"""Residual + RMSNorm + quantization against plain torch."""

from __future__ import annotations

import pytest
import torch

from engines.kernels import norm, quantize
from engines.kernels.jit import ActQuant

MODES = [(ActQuant.NONE, 0), (ActQuant.FP8_STATIC, 0), (ActQuant.FP8_TOKEN, 0), (ActQuant.INT8_TOKEN, 0),
         (ActQuant.INT8_GROUP, 32), (ActQuant.FP8_GROUP, 32), (ActQuant.INT8_STATIC, 0)]
TOLERANCE = {ActQuant.NONE: (8e-2, 6e-3), ActQuant.FP8_STATIC: (0.5, 3e-2), ActQuant.FP8_TOKEN: (0.5, 3e-2),
             ActQuant.INT8_TOKEN: (8e-2, 1e-2), ActQuant.INT8_GROUP: (8e-2, 1e-2), ActQuant.FP8_GROUP: (0.5, 3e-2),
             ActQuant.INT8_STATIC: (8e-2, 1e-2)}


def targets(m, n, quant, group, device):
    """Poisoned outputs of a mode: (out, scales, input_scale)."""
    codes = torch.float8_e4m3fn if quant.fp8 else torch.int8
    dtype = torch.bfloat16 if quant is ActQuant.NONE else codes
    out = torch.full((m, n), float("nan"), device=device)
    out = out.to(dtype) if dtype != torch.int8 else torch.full((m, n), -128, dtype=dtype, device=device)
    shape = (m,) if quant.per_token else (m, n // group) if group else None
    scales = torch.full(shape, float("nan"), device=device) if shape else None
    input_scale = torch.tensor(4.0 / (448 if quant.fp8 else 127), device=device) if quant.static else None
    return out, scales, input_scale


@pytest.mark.parametrize(("quant", "group"), MODES)
@pytest.mark.parametrize(("m", "n", "residual", "pre"), [
    (1, 64, True, False), (3, 576, True, True), (5, 96, False, True),
                                              (0, 64, True, False), (2, 1024, False, False)])
def test_modes(device, facts, judge, quant, group, m, n, residual, pre):
    torch.manual_seed(m * 1000 + n)
    x = torch.randn(m, n, device=device).bfloat16()
    weight = (torch.rand(n, device=device) + 0.5).bfloat16()
    keys = {"eps": 1e-5, "quant": quant, "group": group,
            "pre_quant_scale": torch.rand(n, device=device) + 0.5 if pre else None}
    other = torch.randn(m, n, device=device).bfloat16() if residual else None
    results = []
    for run in (norm.launch, norm.twin):
        out, scales, input_scale = targets(m, n, quant, group, device)
        residual_out = torch.full_like(x, float("nan"))
        run(x, weight, out, norm.candidates(n, facts)[0], residual=other, residual_out=residual_out, scales=scales,
            input_scale=input_scale, **keys)
        results.append((quantize.dequantize(out, quant, input_scale, scales), residual_out, scales))
    (found, found_residual, found_scales), (wanted, wanted_residual, wanted_scales) = results
    judge(found, wanted, *TOLERANCE[quant])
    judge(found_residual, wanted_residual, 3e-2, 6e-3)
    if scales is not None:
        judge(found_scales, wanted_scales, 2e-2, 8e-3)


def test_in_place_residual_and_all_candidates_agree(device, facts, judge):
    torch.manual_seed(0)
    x, weight = torch.randn(4, 512, device=device).bfloat16(), torch.ones(512, device=device)
    outs = []
    for config in norm.candidates(512, facts):
        residual = torch.arange(4 * 512, device=device).reshape(4, 512).bfloat16() / 512
        out = torch.empty(4, 512, device=device, dtype=torch.float32)
        norm.launch(x, weight, out, config, eps=1e-6, residual=residual, residual_out=residual)
        outs.append((out, residual))
    for out, residual in outs[1:]:
        judge(out, outs[0][0], 1e-5, 1e-6)
        assert torch.equal(residual, outs[0][1])


def test_final_norm_gathers_rows(device, facts, judge):
    torch.manual_seed(1)
    x, residual = torch.randn(2, 9, 128, device=device).bfloat16()
    weight = torch.rand(128, device=device)
    rows = torch.tensor([8, 0, 3], device=device, dtype=torch.int32)
    outs = [torch.full((3, 128), float("nan"), device=device) for _ in range(2)]
    norm.launch(x, weight, outs[0], norm.candidates(128, facts)[0], eps=1e-6, residual=residual, rows=rows)
    norm.twin(x, weight, outs[1], eps=1e-6, residual=residual, rows=rows)
    judge(outs[0], outs[1], 2e-2, 6e-3)


def test_zero_row_has_a_finite_scale(device, facts):
    out, scales, _ = targets(1, 64, ActQuant.INT8_TOKEN, 0, device)
    quantize.launch(torch.zeros(1, 64, device=device), out, quantize.candidates(64, facts)[0],
                    quant=ActQuant.INT8_TOKEN,
                    scales=scales)
    assert out.eq(0).all()
    assert 0 < float(scales[0]) < 1e-10


@pytest.mark.parametrize(("quant", "group"), [mode for mode in MODES if mode[0] is not ActQuant.NONE])
def test_quantize_alone(device, facts, judge, quant, group):
    torch.manual_seed(2)
    x = torch.randn(3, 160, device=device).bfloat16()
    results = []
    for run in (quantize.launch, quantize.twin):
        out, scales, input_scale = targets(3, 160, quant, group, device)
        run(x, out, quantize.candidates(160, facts)[0], quant=quant, group=group, scales=scales,
            input_scale=input_scale,
            pre_quant_scale=torch.full((160,), 0.5, device=device))
        results.append(quantize.dequantize(out, quant, input_scale, scales))
    judge(results[0], results[1], *TOLERANCE[quant])
    judge(results[0], x.float() / 2, 0.3 if "FP8" in quant.name else 6e-2, 4e-2)


@pytest.mark.parametrize(("change", "text"), [
    ({"scales": None}, "scales"), ({"quant": ActQuant.NONE, "scales": None}, "found out of"),
    ({"input_scale": torch.ones(())}, "input_scale"), ({"group": 32}, "group")])
def test_misfits_are_errors(device, facts, change, text):
    out, scales, _ = targets(2, 64, ActQuant.INT8_TOKEN, 0, device)
    keys = {"quant": ActQuant.INT8_TOKEN, "scales": scales} | change
    with pytest.raises(ValueError, match=text):
        quantize.launch(torch.ones(2, 64, device=device), out, quantize.candidates(64, facts)[0], **keys)

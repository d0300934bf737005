"""Problems, inputs and error measures that all linear tests share. Cases are lists: none, one, odd, aligned, many."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engines.kernels.impl import DeviceFacts, KernelConfig, LinearShape, Packed
from engines.kernels.linear.bf16 import Bf16Linear
from engines.kernels.linear.fp8 import Fp8Linear
from engines.kernels.linear.int8 import Int8Linear
from engines.kernels.linear.natural import NaturalLinear
from engines.kernels.linear.weight_only import Fp8WeightOnlyLinear, Int8WeightOnlyLinear

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
HALF = torch.bfloat16 if ON_GPU else torch.float16  # bf16 products are wrong in the interpreter
H200 = DeviceFacts("NVIDIA H200", 90, 132, 232448, 60 << 20)
A100 = DeviceFacts("NVIDIA A100", 80, 108, 166912, 40 << 20)
L40 = DeviceFacts("NVIDIA L40", 89, 142, 101376, 96 << 20)
CPU = DeviceFacts("cpu", 0, 2, 0, 0)
IMPLS: list[NaturalLinear] = [Bf16Linear(), Fp8Linear(), Int8Linear(), Int8WeightOnlyLinear(), Fp8WeightOnlyLinear()]

# max |error| / max |reference|, and |error| / |reference| in the 2-norm. Output rounding alone is 2^-9 and 1.7e-3 in
# bf16; fp8 adds the tensor cores' short accumulator (measured up to 3.4e-3 at k = 14336).
MAX_ERROR = {"bf16": 8e-3, "fp8": 1.2e-2, "int8": 8e-3, "int8_weight_only": 8e-3, "fp8_weight_only": 8e-3,
             "fp8_block": 1.2e-2}
RMS_ERROR = {"bf16": 2.5e-3, "fp8": 5e-3, "int8": 2.5e-3, "int8_weight_only": 2.5e-3, "fp8_weight_only": 2.5e-3,
             "fp8_block": 5e-3}


@dataclass(frozen=True)
class Problem:
    """One launch's inputs, seeded by its shape."""

    impl: NaturalLinear
    x: torch.Tensor
    packed: Packed
    x_scale: torch.Tensor | None


def problem(impl: NaturalLinear, m: int, n: int, k: int, *, bias: bool = False, static: bool = False,
            per_tensor: bool = False) -> Problem:
    """Normal weights and activations, quantized as the impl wants them, with one outlier channel in x."""
    seed = torch.Generator().manual_seed(m * 7919 + n * 31 + k)
    w = torch.randn(n, k, generator=seed) * 0.05
    x = torch.randn(m, k, generator=seed)
    x[:, : k // 7 + 1] *= 8
    b = torch.randn(n, generator=seed).to(HALF).to(DEVICE) if bias else None
    limit = {"fp8": 448.0, "int8": 127.0, "int8_weight_only": 127.0, "fp8_weight_only": 448.0}.get(impl.name)
    if limit is None:
        return Problem(impl, x.to(HALF).to(DEVICE), impl.pack(w.to(HALF).to(DEVICE), bias=b), None)
    w_scale = w.abs().amax() / limit if per_tensor else w.abs().amax(1).clamp(min=1e-6) / limit
    codes = _codes(w / (w_scale if per_tensor else w_scale[:, None]), impl.weight_dtypes[0]).to(DEVICE)
    packed = impl.pack(codes, w_scale.to(DEVICE), bias=b)
    if not impl.quantized_x:
        return Problem(impl, x.to(HALF).to(DEVICE), packed, None)
    x_scale = torch.tensor(0.07 if limit > 200 else 0.2) if static else x.abs().amax(1) / limit
    x_codes = _codes((x / x_scale.reshape(-1, 1)).clamp(-limit, limit), impl.x_dtypes[0])
    return Problem(impl, x_codes.to(DEVICE), packed, x_scale.to(DEVICE))


def _codes(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return values.round().to(dtype) if dtype == torch.int8 else values.to(dtype)


def run(case: Problem, config: KernelConfig) -> torch.Tensor:
    """Launch on a poisoned output; the workspace starts zeroed, and its tickets must be zero again afterwards."""
    m, packed = case.x.shape[0], case.packed
    out = torch.full((m, packed.n), float("nan"), dtype=HALF, device=DEVICE)
    needed = case.impl.workspace_bytes(LinearShape(m, packed.n, packed.k, packed.group), config)
    workspace = torch.zeros(needed, dtype=torch.uint8, device=DEVICE) if needed else None
    case.impl.launch(case.x, packed, config, out, x_scale=case.x_scale, workspace=workspace)
    if workspace is not None:
        assert not workspace[: 4 * 16384].any(), "a ticket was left behind"
    return out


def check(case: Problem, out: torch.Tensor) -> None:
    """Both normalised errors against the twin; says where the worst element is."""
    want = case.impl.twin(case.x, case.packed, x_scale=case.x_scale)
    assert out.shape == want.shape
    if out.numel() == 0:
        return
    error = (out.float() - want).abs()
    worst = int(error.nan_to_num(nan=float("inf")).argmax())
    where = f"worst at {divmod(worst, out.shape[1])}: {out.reshape(-1)[worst]} for {want.reshape(-1)[worst]}"
    assert not out.isnan().any(), f"not every element was written, {where}"
    name = case.impl.name
    assert error.max() <= MAX_ERROR[name] * want.abs().max(), where
    assert error.norm() <= RMS_ERROR[name] * want.norm(), where

"""CPU linear operators: ways to multiply float32 rows by a packed weight [n, k]. float32 accumulate, no bf16 anywhere.

A weight lies on disk on its own grid (``disk.py``): that form is small, portable and independent of the operator. When
an engine opens, the operator that the KernelTable names turns it into its private layout (opaque to torch, made for
this processor) and keeps only that.

    name      weights it takes         private layout        y =
    float     any                      float32 [n, k]        x w^T
    half      any                      fbgemm fp16 tiles     x w^T, float32 accumulate; half the bytes of float32
    split     int8                     fbgemm int8 tiles     (q c^T) * scales, exact
    int_mm    int8                     int8 [k, n]           (q c^T) * scales, exact
    int4pack  int4 group, symmetric    torch's int4 tiles    x w^T with x and scales in bf16

**Why ``half`` is exact enough.** A bf16 weight has 8 significant bits and fp16 has 11, so only fp16's narrow exponent
can lose anything: below 2^-14 it drops bits. A power of two that lifts amax to 2^14 is folded into the output scale
when it is needed; what is then still lost is below amax * 2^-38, far under float32's own rounding of the sum. int8 and
fp8 codes are fp16 numbers exactly. Only int4 (code * scale) is rounded, by 2^-11 relative, some 1/200 of int4's own
error. Since no bf16 unit is needed it is also the fastest here: a 49152 x 576 head took 3.5 ms at one row and 8.9 ms
at eight, against 14.7 and 44.9 for float32 (2 cores, AVX2). Its price: tiles are 512 inputs deep, so that an odd width
(576) takes the memory of the next multiple (1024); the padding is not read.

**Why ``split``.** Without VNNI, fbgemm multiplies u8 by s8 with vpmaddubsw, which adds two products in *saturating*
int16: 2 * 255 * 127 does not fit, and full-range activations came out wrong by up to 50 % (measured against int64 at
+-127 everywhere, and 10 % on random codes). 2 * 128 * 127 = 32,512 does fit. So a row q in [-127, 127] is fed in pieces
of that size, whose int32 sums are exact and add up to the true product:
- few rows: its positive and its negated negative part, as two rows. The weights are read once for both, and at one row
  reading them is all that counts.
- more rows: q clamped to [-64, 64] (u8 = q + 64), plus what is left of it. After per-token scaling few columns of a
  batch hold a code beyond 64 (SmolLM2, 8 rows: 3 of 576 into qkv, 9 into gate_up, 46 of 1,536 into down), so the rest
  is a small float32 product with those columns of the weight; when a third of them do, it is a second full pass.
``tests/engines/test_cpu_linear.py`` holds all of it against int64 at the extremes. One scale for the whole batch
(``linear_dynamic``) is never used: it lets one loud row spoil its mates.

**Rows and batch mates.** ``split`` and ``int_mm`` are bitwise independent of the batch: exact integer sums, for
``split`` (whose pieces pass through float32) as long as they stay below 2^24, beyond that within 2^-23 relative.
``float`` and ``half`` are the same operator at every batch size, but its blocking follows the number of rows: a row may
differ by some 1e-6 of the largest output. The price of the bitwise form on a CPU would be one call a row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from calib.scheme import Grid
from engines.kernels.cpu.disk import Stored
from engines.kernels.cpu.rows import Quantized

Rows = torch.Tensor | Quantized
Run = Callable[[Rows], torch.Tensor]
_HALF_MAX_EXPONENT = 14
#: ``split``: codes up to this size go through fbgemm in one piece; from this many rows on that beats feeding two signs.
_BODY = 64
_BY_SIZE_FROM = 4


class LinearOperator(Protocol):
    """One way to run a linear. ``prepare`` makes the private layout and returns the function on rows."""

    name: str

    def refuses(self, weight: Grid, activation: Grid | None, n: int, k: int) -> str | None:
        """None when it can run this linear, otherwise the reason in words."""
        ...

    def prepare(self, stored: Stored) -> Run: ...


def _plain(rows: Rows) -> torch.Tensor:
    return rows.codes if isinstance(rows, Quantized) else rows


def _finish(out: torch.Tensor, rows: Rows, weight_scale: torch.Tensor | float | None) -> torch.Tensor:
    """out * weight_scale [n] or float * activation scale [t, 1] or float, in place."""
    if isinstance(rows, Quantized):
        if isinstance(rows.scale, float) and isinstance(weight_scale, float):
            return out.mul_(rows.scale * weight_scale)
        out.mul_(rows.scale)
    return out if weight_scale is None else out.mul_(weight_scale)


def _output_scale(scale: torch.Tensor | None) -> torch.Tensor | float | None:
    if scale is None:
        return None
    return float(scale) if scale.numel() == 1 else scale.reshape(-1)


class FloatLinear:
    """The reference: dequantized float32 weights and F.linear."""

    name = "float"

    def refuses(self, weight: Grid, activation: Grid | None, n: int, k: int) -> str | None:
        return None

    def prepare(self, stored: Stored) -> Run:
        weight, scale = stored.values()
        out_scale = _output_scale(scale)

        def run(rows: Rows) -> torch.Tensor:
            return _finish(torch.nn.functional.linear(_plain(rows), weight), rows, out_scale)
        return run


def half_exponent(weight: torch.Tensor) -> int:
    """The power of two by which a float32 weight is lifted before it is stored as fp16; 0 when it fits as it is.

    "Fits" means: finite, and losing less than 2^-24 of the weight's norm.
    """
    amax = float(weight.abs().max())
    if amax == 0.0:
        return 0
    loss = torch.linalg.vector_norm(weight - weight.half().float())
    if amax < 65504.0 and float(loss) <= 2.0**-24 * float(torch.linalg.vector_norm(weight)):
        return 0
    return _HALF_MAX_EXPONENT - int(torch.tensor(amax).log2().floor())


class HalfLinear:
    """fp16 weight tiles, float32 rows and sums (fbgemm)."""

    name = "half"

    def refuses(self, weight: Grid, activation: Grid | None, n: int, k: int) -> str | None:
        return None if "fbgemm" in torch.backends.quantized.supported_engines else "this torch has no fbgemm"

    def prepare(self, stored: Stored) -> Run:
        weight, scale = stored.values()
        exponent = 0 if stored.grid.dtype == "int4" else half_exponent(weight)
        out_scale = _output_scale(scale)
        if exponent:
            weight = weight * 2.0**exponent
            lift = 2.0**-exponent
            out_scale = lift if out_scale is None else out_scale * lift
        packed = torch.ops.quantized.linear_prepack_fp16(weight, None)
        multiply = torch.ops.quantized.linear_dynamic_fp16

        def run(rows: Rows) -> torch.Tensor:
            return _finish(multiply(_plain(rows), packed), rows, out_scale)
        return run


def _needs_int8(weight: Grid, activation: Grid | None) -> str | None:
    if weight.dtype != "int8" or activation is None or activation.dtype != "int8" or not weight.symmetric:
        return "takes symmetric int8 weights and int8 activations only"
    if weight.granularity.kind not in ("tensor", "channel"):
        return f"takes one weight scale a channel, not {weight.granularity}"
    return None


class SplitLinear:
    """Exact int8 by fbgemm without VNNI: every row fed in pieces that cannot saturate."""

    name = "split"

    def refuses(self, weight: Grid, activation: Grid | None, n: int, k: int) -> str | None:
        return _needs_int8(weight, activation) or HalfLinear().refuses(weight, activation, n, k)

    def prepare(self, stored: Stored) -> Run:
        n, k = stored.codes.shape
        quantized = torch._make_per_channel_quantized_tensor(
            stored.codes.contiguous(), torch.ones(n, dtype=torch.float64), torch.zeros(n, dtype=torch.int64), 0)
        packed = torch.ops.quantized.linear_prepack(quantized, None)
        multiply = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32
        columns_of = stored.codes.t().contiguous()  # from disk it is: a view of the mapped file, no copy
        scale = stored.channel_scale()
        signs = torch.tensor([[[1.0]], [[-1.0]]])

        def by_sign(codes: torch.Tensor) -> torch.Tensor:
            tokens = codes.shape[0]
            halves = torch.mul(codes, signs).view(2 * tokens, k)  # the operator clamps below at 0
            positive, negative = multiply(halves, 1.0, 0, packed).view(2, tokens, n).unbind(0)
            return positive.sub_(negative)

        def by_size(codes: torch.Tensor) -> torch.Tensor:
            body = codes.clamp(-_BODY, _BODY)
            out = multiply(body, 1.0, _BODY, packed)
            rest = codes - body
            loud = rest.any(0).nonzero().view(-1)
            count = loud.numel()
            if count == 0:
                return out
            if 3 * count > k:
                return out.add_(multiply(rest, 1.0, _BODY, packed))
            return out.addmm_(rest.index_select(1, loud), columns_of.index_select(0, loud).float())

        def run(rows: Rows) -> torch.Tensor:
            assert isinstance(rows, Quantized)
            out = by_sign(rows.codes) if rows.codes.shape[0] < _BY_SIZE_FROM else by_size(rows.codes)
            return out.mul_(scale).mul_(rows.scale)
        return run


class IntMMLinear:
    """Exact int8 by ``torch._int_mm``: fast where the processor has VNNI."""

    name = "int_mm"

    def refuses(self, weight: Grid, activation: Grid | None, n: int, k: int) -> str | None:
        return _needs_int8(weight, activation)

    def prepare(self, stored: Stored) -> Run:
        codes = stored.codes.t()
        scale = stored.channel_scale()

        def run(rows: Rows) -> torch.Tensor:
            assert isinstance(rows, Quantized)
            out = torch._int_mm(rows.codes.to(torch.int8), codes).float()
            return out.mul_(scale).mul_(rows.scale)
        return run


class Int4PackLinear:
    """torch's packed int4 operator: a quarter of the bytes of ``half``, rows and scales rounded to bf16."""

    name = "int4pack"

    def refuses(self, weight: Grid, activation: Grid | None, n: int, k: int) -> str | None:
        if weight.dtype != "int4" or weight.granularity.kind != "group" or not weight.symmetric:
            return "takes symmetric int4 weights with group scales only"
        if activation is not None:
            return "takes unquantized activations only"
        group = weight.granularity.size
        if group not in (32, 64, 128, 256) or k % group or n % 16:
            return f"takes groups of 32, 64, 128 or 256 that divide k, and n % 16 = 0, not g{group}, k={k}, n={n}"
        return None

    def prepare(self, stored: Stored) -> Run:
        codes, scale = stored.int4_codes(), stored.scale
        assert scale is not None
        assert stored.grid.granularity.kind == "group"
        group = stored.grid.granularity.size
        packed = torch._convert_weight_to_int4pack_for_cpu((codes + 8).to(torch.int32), 2)
        scales_zeros = torch.stack([scale.t(), torch.zeros_like(scale.t())], -1).to(torch.bfloat16).contiguous()

        def run(rows: Rows) -> torch.Tensor:
            assert isinstance(rows, torch.Tensor)
            return torch._weight_int4pack_mm_for_cpu(
                rows.bfloat16(), packed, group, scales_zeros).float()
        return run


#: Every operator by name, in the order of preference when nothing was timed.
OPERATORS: dict[str, LinearOperator] = {operator.name: operator for operator in (
    SplitLinear(), HalfLinear(), IntMMLinear(), Int4PackLinear(), FloatLinear())}


def choices(weight: Grid, activation: Grid | None, n: int, k: int, act_order: bool = False) -> list[LinearOperator]:
    """The operators that can run a linear, preferred ones first. Columns in another order need one that reads g_idx."""
    return [operator for operator in OPERATORS.values() if operator.refuses(weight, activation, n, k) is None
            and not (act_order and isinstance(operator, Int4PackLinear))]

"""The smaller problems of ``benchmarks.gpu_ops`` (Llama-3.1-8B's shapes), with their checks, and what all share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from engines.kernels import (
    embedding,
    norm,
    quantize,
    rope_kv,
    sample,
    silu_mul,
)
from engines.kernels.impl import DeviceFacts, KernelConfig
from engines.kernels.jit import ActQuant

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTER, VOCAB, BLOCK = 4096, 32, 8, 128, 14336, 128256, 16
TOKENS = (1, 8, 32, 128, 256)
MODES = {"bf16": (ActQuant.NONE, 0, torch.bfloat16), "fp8": (ActQuant.FP8_STATIC, 0, torch.float8_e4m3fn),
         "int8 token": (ActQuant.INT8_TOKEN, 0, torch.int8), "int8 g128": (ActQuant.INT8_GROUP, 128, torch.int8)}


@dataclass(slots=True)
class Point:
    """One thing to time: ``launches`` closures a graph, each checked by ``check`` beforehand."""

    name: str
    config: KernelConfig | None
    launches: Sequence[Callable[[], object]]
    check: Callable[[], float]
    limit: float
    facts: dict[str, float] = field(default_factory=dict)


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """||found - wanted|| / ||wanted||, infinite where something is not finite."""
    found, wanted = found.float(), wanted.float()
    return float((found - wanted).norm() / wanted.norm()) if bool(torch.isfinite(found).all()) else float("inf")


def act_target(m: int, n: int, mode: str) -> dict[str, Any]:
    """Poisoned output keywords of an activation mode."""
    quant, group, dtype = MODES[mode]
    out = torch.full((m, n), float("nan"), device="cuda").to(dtype) if dtype != torch.int8 else torch.full(
        (m, n), -128, dtype=dtype, device="cuda")
    shape = (m,) if quant.per_token else (m, n // group) if group else None
    return {"out": out, "quant": quant, "group": group,
            "scales": torch.full(shape, float("nan"), device="cuda") if shape else None,
            "input_scale": torch.tensor(0.02, device="cuda") if quant is ActQuant.FP8_STATIC else None}


def values(target: dict[str, Any]) -> torch.Tensor:
    return quantize.dequantize(target["out"], target["quant"], target["input_scale"], target["scales"])


def norm_points(device: DeviceFacts, tiny: bool) -> Iterator[Point]:
    for m in (1,) if tiny else TOKENS:
        x, residual = torch.randn(2, m, HIDDEN, device="cuda").bfloat16()
        for mode in MODES:
            for config in norm.candidates(HIDDEN, device):
                yield _norm_point(x, residual, mode, config)


def _norm_point(x: torch.Tensor, residual: torch.Tensor, mode: str, config: KernelConfig) -> Point:
    m = x.shape[0]
    weight = torch.rand(HIDDEN, device="cuda").bfloat16()
    ours, other = act_target(m, HIDDEN, mode), act_target(m, HIDDEN, mode)
    sums = [torch.full_like(x, float("nan")) for _ in range(2)]

    def run() -> None:
        norm.launch(x, weight, config=config, eps=1e-5, residual=residual, residual_out=sums[0], **ours)

    def check() -> float:
        run()
        norm.twin(x, weight, eps=1e-5, residual=residual, residual_out=sums[1], **other)
        return max(relative(values(ours), values(other)), relative(sums[0], sums[1]))

    return Point(f"norm {mode} tokens={m}", config, [run] * 64, check, 2e-2)


def silu_points(device: DeviceFacts, tiny: bool) -> Iterator[Point]:
    for m in (1,) if tiny else TOKENS:
        x = torch.randn(m, 2 * INTER, device="cuda").bfloat16()
        for mode, (quant, group, _) in MODES.items():
            for config in silu_mul.candidates(INTER, quant, group, device):
                yield _silu_point(x, mode, config)


def _silu_point(x: torch.Tensor, mode: str, config: KernelConfig) -> Point:
    ours, other = act_target(x.shape[0], INTER, mode), act_target(x.shape[0], INTER, mode)

    def run() -> None:
        silu_mul.launch(x, config=config, **ours)

    def check() -> float:
        run()
        silu_mul.twin(x, **other)
        return relative(values(ours), values(other))

    return Point(f"silu_mul {mode} tokens={x.shape[0]}", config, [run] * 64, check, 2e-2)


def rope_points(device: DeviceFacts, tiny: bool) -> Iterator[Point]:
    for m in (1,) if tiny else (*TOKENS, 16384):
        for dtype in (torch.bfloat16, torch.float8_e4m3fn):
            for config in rope_kv.candidates(HEADS, KV_HEADS, device, m):
                yield _rope_point(m, dtype, config)


def _rope_point(m: int, dtype: torch.dtype, config: KernelConfig) -> Point:
    angle = torch.arange(4096)[:, None] / 5e5 ** (torch.arange(HEAD_DIM // 2) / (HEAD_DIM // 2))
    cos_sin = torch.cat([angle.cos(), angle.sin()], 1).to("cuda").contiguous()
    qkv = torch.randn(m, (HEADS + 2 * KV_HEADS) * HEAD_DIM, device="cuda").bfloat16()
    slots = torch.randperm(2 * m + 16, device="cuda")[:m].int()
    positions = torch.randint(0, 4096, (m,), device="cuda")
    scale = torch.tensor(0.02, device="cuda") if dtype != torch.bfloat16 else None
    q = [torch.full((m, HEADS, HEAD_DIM), float("nan"), device="cuda").bfloat16() for _ in range(2)]
    k, v = ([torch.zeros(m // 8 + 2, KV_HEADS, BLOCK, HEAD_DIM, device="cuda").to(dtype) for _ in range(2)]
            for _ in "kv")

    def run() -> None:
        rope_kv.launch(qkv, cos_sin, positions, slots, q[0], k[0], v[0], config, k_scale=scale, v_scale=scale)

    def check() -> float:
        run()
        rope_kv.twin(qkv, cos_sin, positions, slots, q[1], k[1], v[1], k_scale=scale, v_scale=scale)
        return max(relative(a, b) for a, b in (q, k, v))

    return Point(f"rope_kv kv={str(dtype)[6:]} tokens={m}", config, [run] * 16, check, 1e-2)


def embedding_points(device: DeviceFacts, tiny: bool) -> Iterator[Point]:
    weights = torch.randn(VOCAB, HIDDEN, device="cuda").bfloat16()
    for m in (1,) if tiny else TOKENS:
        for config in embedding.candidates(HIDDEN, device):
            yield _embedding_point(m, weights, config)


def _embedding_point(m: int, weights: torch.Tensor, config: KernelConfig) -> Point:
    ids = torch.randint(0, VOCAB, (m,), device="cuda")
    out, other = torch.full((2, m, HIDDEN), float("nan"), device="cuda").bfloat16()

    def run() -> None:
        embedding.launch(ids, weights, out, config)

    def check() -> float:
        run()
        embedding.twin(ids, weights, other)
        return relative(out, other)

    return Point(f"embedding tokens={m}", config, [run] * 64, check, 1e-6)


RULES: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0}, "temperature": {}, "top_p": {"temperature": 0.6,
                                                                 "top_p": 0.9}, "top_k": {"top_k": 50},
    "top_k+top_p": {"temperature": 0.7, "top_k": 20, "top_p": 0.8}, "min_p": {"min_p": 0.05}}


def sample_points(device: DeviceFacts, tiny: bool) -> Iterator[Point]:
    for m in (1,) if tiny else TOKENS:
        logits = torch.randn(m, VOCAB, device="cuda") * 2.5
        logits.scatter_add_(1, torch.randint(0, VOCAB, (m, 30), device="cuda"), torch.rand(m, 30, device="cuda") * 12)
        for name, rule in RULES.items():
            for config in sample.candidates(VOCAB, device):
                yield _sample_point(logits.bfloat16(), name, rule, config)


def _sample_point(logits: torch.Tensor, name: str, rule: dict[str, float], config: KernelConfig) -> Point:
    m = logits.shape[0]

    def full(key: str, default: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((m,), rule.get(key, default), dtype=dtype, device="cuda")

    rows = sample.SamplingRows(full("temperature", 1.0, torch.float32), full("top_k", 0, torch.int32),
                               full("top_p", 1.0, torch.float32), full("min_p", 0.0, torch.float32),
                               torch.arange(m, device="cuda"), torch.arange(m, device="cuda") * 3)
    work = sample.workspace(m, VOCAB, config, "cuda")
    tokens, logprobs = torch.full((m,), -7, device="cuda"), torch.full((m,), 9.0, device="cuda")

    def run() -> None:
        sample.launch(logits, rows, tokens, logprobs, work, config)

    def check() -> float:
        run()
        few = min(2, m)
        part = sample.SamplingRows(rows.temperature[:few], rows.top_k[:few], rows.top_p[:few], rows.min_p[:few],
                                   rows.seeds[:few], rows.positions[:few])
        wanted = torch.full((few,), -7, device="cuda")
        sample.twin(logits[:few], part, wanted, torch.empty(few, device="cuda"))
        return float((wanted != tokens[:few]).float().mean())

    return Point(f"sample {name} rows={m}", config, [run] * 16, check, 0.0)

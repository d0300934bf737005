"""The attention problems of ``benchmarks.gpu_ops``, at Llama-3.1-8B's shapes."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.gpu_ops_points import BLOCK, HEAD_DIM, HEADS, KV_HEADS, Point, relative
from engines.kernels import attention_decode, attention_plan, attention_prefill, rope_kv
from engines.kernels.impl import DeviceFacts, KernelConfig

BANDWIDTH = 4.27e12


def decode_configs(device: DeviceFacts, kv_bytes: int) -> list[KernelConfig]:
    """What the build tries, in both modes."""
    return [*attention_decode.candidates(HEAD_DIM, BLOCK, kv_bytes, device),
            *attention_decode.candidates(HEAD_DIM, BLOCK, kv_bytes, device, deterministic=True)[:4]]


def decode_points(device: DeviceFacts, tiny: bool) -> Iterator[Point]:
    contexts, batches = ((300,), (2,)) if tiny else ((128, 1024, 8192, 32768), (1, 16, 64, 256))
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        most = max(contexts) * max(batches)
        pool = most // BLOCK + 64
        shape = (pool, KV_HEADS, BLOCK, HEAD_DIM)
        caches = [torch.empty(sides, dtype=dtype, device="cuda")
                  for sides in (shape, rope_kv.v_shape(shape, dtype.itemsize == 1))]
        for cache in caches:  # random in pieces: the whole is larger than the chip's idea of a tensor iterator
            for piece in cache.split(max(1, 2**27 // (KV_HEADS * BLOCK * HEAD_DIM))):
                piece.copy_(torch.randn(piece.shape, device="cuda", dtype=torch.bfloat16))
        scale = torch.tensor(1.1, device="cuda") if dtype != torch.bfloat16 else None
        for context in contexts:
            for batch in batches:
                tables = _tables(context, batch, pool)
                for config in decode_configs(device, dtype.itemsize):
                    yield _decode_point(caches, tables, context, batch, scale, config)
        del caches
        torch.cuda.empty_cache()


def _tables(context: int, batch: int, pool: int) -> list[torch.Tensor]:
    """Distinct block tables, enough that their blocks together exceed L2 several times (where the pool allows)."""
    blocks = -(-context // BLOCK)
    layers = max(1, min(16, pool // (blocks * batch)))
    order = torch.randperm(pool, device="cuda")[: layers * batch * blocks].int()
    return list(order.reshape(layers, batch, blocks))


def _decode_point(caches: list[torch.Tensor], tables: list[torch.Tensor], context: int, batch: int,
                  scale: torch.Tensor | None, config: KernelConfig) -> Point:
    q = torch.randn(batch, HEADS, HEAD_DIM, device="cuda").bfloat16()
    lens = torch.full((batch,), context, dtype=torch.int32, device="cuda")
    work = attention_plan.workspace(batch, context, HEADS, KV_HEADS, HEAD_DIM, config, "cuda")
    attention_plan.make_plan(lens, work, KV_HEADS, config)
    out = torch.full((batch, HEADS * HEAD_DIM), float("nan"), device="cuda").bfloat16()

    def run(blocks: torch.Tensor) -> None:
        attention_decode.launch(q, caches[0], caches[1], blocks, work, out, config, sm_scale=HEAD_DIM**-0.5,
                                k_scale=scale,
                                v_scale=scale)

    def check() -> float:
        run(tables[0])
        rows = sorted({0, batch - 1})
        wanted = torch.empty(len(rows), HEADS * HEAD_DIM, device="cuda")
        attention_decode.twin(q[rows], caches[0], caches[1], tables[0][rows], lens[rows], wanted,
                              sm_scale=HEAD_DIM**-0.5,
                              k_scale=scale, v_scale=scale)
        return relative(out[rows], wanted)

    bytes_read = 2 * batch * context * KV_HEADS * HEAD_DIM * caches[0].element_size()
    name = f"attention decode kv={str(caches[0].dtype)[6:]} batch={batch} ctx={context}"
    launches = [lambda t=t: run(t) for t in tables] * max(1, 16 // len(tables) if bytes_read < 1e9 else 1)
    return Point(name, config, launches, check, 2e-2, {"floor": bytes_read / BANDWIDTH * 1e6})


def prefill_points(device: DeviceFacts, tiny: bool) -> Iterator[Point]:
    cases = ((2, 64, 64),) if tiny else ((8, 2048, 0), (1, 2048, 0), (1, 8192, 0), (4, 512, 7680))
    for batch, new, cached in cases:
        q = torch.randn(batch * new, HEADS, HEAD_DIM, device="cuda").bfloat16()
        cu = torch.arange(batch + 1, dtype=torch.int32, device="cuda") * new
        lens = torch.full((batch,), new + cached, dtype=torch.int32, device="cuda")
        blocks = (new + cached) // BLOCK
        order = torch.randperm(batch * blocks, device="cuda").int().reshape(batch, blocks)
        flops = 4 * batch * HEADS * HEAD_DIM * (new * cached + new * (new + 1) / 2)
        for dtype in (torch.bfloat16, torch.float8_e4m3fn, None):
            if dtype is None and cached and not tiny:
                continue
            shape = (batch * new, KV_HEADS, HEAD_DIM) if dtype is None else (batch * blocks, KV_HEADS, BLOCK, HEAD_DIM)
            k, v = (torch.randn(shape, device="cuda").to(dtype or torch.bfloat16) for _ in "kv")
            scale = torch.tensor(1.1, device="cuda") if dtype == torch.float8_e4m3fn else None
            label = f"kv={'rows' if dtype is None else str(dtype)[6:]} batch={batch} new={new} cached={cached}"
            configs = list(attention_prefill.candidates(HEAD_DIM, HEADS // KV_HEADS, 2, device))
            if dtype is None:
                configs = [*attention_prefill.rows_candidates(HEAD_DIM, HEADS // KV_HEADS, device), *configs]
            for config in configs:
                yield _prefill_point(label, q, k, v, None if dtype is None else order, cu,
                                     lens if dtype is not None else cu[1:] - cu[:-1], new, scale, config, flops)
            if dtype is None:
                yield _sdpa_point(label, q, k, v, cu, new, flops)


def _prefill_point(label: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, blocks: torch.Tensor | None,
                   cu: torch.Tensor, lens: torch.Tensor, new: int, scale: torch.Tensor | None, config: KernelConfig,
                   flops: float) -> Point:
    out = torch.full((q.shape[0], HEADS * HEAD_DIM), float("nan"), device="cuda").bfloat16()

    def run() -> None:
        attention_prefill.launch(q, k, v, blocks, cu, lens, new, out, config, sm_scale=HEAD_DIM**-0.5, k_scale=scale,
                                 v_scale=scale)

    def check() -> float:
        run()
        wanted = torch.empty(new, HEADS * HEAD_DIM, device="cuda")
        rows = slice(None) if blocks is not None else slice(0, new)
        attention_prefill.twin(q[:new], k[rows], v[rows], None if blocks is None else blocks[:1], cu[:2], lens[:1], new,
                               wanted, sm_scale=HEAD_DIM**-0.5, k_scale=scale, v_scale=scale)
        return relative(out[:new], wanted)

    return Point(f"attention prefill {label}", config, [run] * 4, check, 2e-2, {"flops": flops})


def _sdpa_point(label: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu: torch.Tensor, new: int, flops: float
                ) -> Point:
    """The yardstick: torch's own attention (cuDNN or flash) on sequences of one length."""
    out = torch.full((q.shape[0], HEADS * HEAD_DIM), float("nan"), device="cuda").bfloat16()

    def run() -> None:
        by_head = [x.view(-1, new, *x.shape[1:]).transpose(1, 2) for x in (q, k, v)]
        y = torch.nn.functional.scaled_dot_product_attention(by_head[0], by_head[1], by_head[2], is_causal=True,
                                                             scale=HEAD_DIM**-0.5, enable_gqa=True)
        out.view(-1, new, HEADS, HEAD_DIM).copy_(y.transpose(1, 2))

    def check() -> float:
        run()
        wanted = torch.empty(new, HEADS * HEAD_DIM, device="cuda")
        attention_prefill.twin(q[:new], k[:new], v[:new], None, cu[:2], cu[1:2], new, wanted, sm_scale=HEAD_DIM**-0.5)
        return relative(out[:new], wanted)

    return Point(f"attention prefill {label}", KernelConfig("sdpa"), [run] * 4, check, 2e-2, {"flops": flops})

"""The compiled CPU step: kernels against float64 and int64, rows against torch, whole backends against each other."""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from cpu_steps import batch_of, checkpoint_of, logits_of, open_both, steps
from memory_checkpoint import FP8 as FP8_SCHEME
from memory_checkpoint import FP8_KV, MemoryCheckpoint
from memory_checkpoint import INT4 as INT4_SCHEME
from memory_checkpoint import INT8 as INT8_SCHEME
from numba import njit
from tiny_models import tiny_llama

from calib.scheme import BF16, Grid, PerChannel, PerGroup, PerTensor, PerToken
from engines.build.builder import plan_for
from engines.build.compiled_cpu import refuses
from engines.errors import EngineError
from engines.kernels.cpu.disk import pack
from engines.kernels.cpu.native import norms, step
from engines.kernels.cpu.native.grids import bits
from engines.kernels.cpu.native.operator import prepare
from engines.kernels.cpu.native.team import Team, team
from engines.kernels.cpu.native.tiles import Kind, Tiles
from engines.kernels.cpu.rows import Quantized, quantize_fp8_static, quantize_fp8_token, quantize_int8_token
from engines.plan import EngineSpec
from engines.runtime.batch import Batch

INT8_TOKEN = Grid(dtype="int8", granularity=PerToken(), dynamic=True)
INT8 = Grid(dtype="int8", granularity=PerChannel())
FP8 = Grid(dtype="fp8_e4m3", granularity=PerTensor())
FP8_STATIC = Grid(dtype="fp8_e4m3", granularity=PerTensor())
ROWS = (1, 2, 3, 4, 5, 8, 9, 33)


def stored(grid: Grid, n: int, k: int, seed: int = 0, bias: bool = False):
    generator = torch.Generator().manual_seed(seed)
    part: dict[str, torch.Tensor] = {}
    if grid.dtype == "bf16":
        part["weight"] = torch.randn(n, k, generator=generator).bfloat16()
    elif grid.dtype == "fp8_e4m3":
        part["weight"] = torch.randn(n, k, generator=generator).mul(50).clamp(-448, 448).to(torch.float8_e4m3fn)
        part["weight_scale"] = torch.tensor(0.013)
    elif grid.dtype == "int8":
        part["weight"] = torch.randint(-127, 128, (n, k), generator=generator).to(torch.int8)
        part["weight_scale"] = torch.rand(n, generator=generator) + 0.1
    else:
        part["weight"] = torch.randint(-8 if grid.symmetric else 0, 8 if grid.symmetric else 16, (n, k),
                                       generator=generator).to(torch.int8)
        groups = k // grid.granularity.size
        part["weight_scale"] = torch.rand(n, groups, generator=generator) + 0.1
        if not grid.symmetric:
            part["weight_zero"] = torch.randint(0, 16, (n, groups), generator=generator).to(torch.int8)
    if bias:
        part["bias"] = torch.randn(n, generator=generator)
    return pack(grid, [part], ["layer"])


def exact(weight, rows, bias: bool):
    values, scale = weight.values()
    full = values.double() if scale is None else values.double() * scale.double().reshape(-1, 1)
    x = rows.codes.double() * torch.as_tensor(rows.scale).double() if isinstance(rows, Quantized) else rows.double()
    out = x @ full.t()
    return out + weight.bias.double() if bias else out


@pytest.mark.parametrize(("grid", "activation", "k", "kind"), [
    (BF16, None, 48, Kind.BF16), (BF16, None, 37, Kind.BF16),
    (FP8, FP8_STATIC, 64, Kind.FP8),
    (INT8, INT8_TOKEN, 64, Kind.INT8), (INT8, INT8_TOKEN, 37, Kind.INT8),
    (INT8, None, 64, Kind.INT8_WIDE),
    (Grid(dtype="int4", granularity=PerGroup(size=32)), None, 96, Kind.INT4),
    (Grid(dtype="int4", granularity=PerGroup(size=8)), None, 40, Kind.INT4),
    (Grid(dtype="int4", granularity=PerGroup(size=32), symmetric=False), None, 96, Kind.INT4_ZERO),
], ids=str)
@pytest.mark.parametrize("n", [16, 50])
@pytest.mark.parametrize("bias", [False, True])
def test_tiles_equal_float64(grid, activation, k, kind, n, bias) -> None:
    weight = stored(grid, n, k, bias=bias)
    prepared = Tiles.of(weight, activation)
    assert prepared.kind is kind
    held = prepared.data.nbytes + (0 if prepared.group_scales is None else prepared.group_scales.nbytes)
    assert held == -(-n // 16) * 16 * (k + k % 2 * (prepared.kind is Kind.INT8)) * bits(grid, activation, k) / 8
    one, two = prepare(weight, activation, 1), prepare(weight, activation, 2)
    for count in ROWS:
        x = torch.randn(count, k, generator=torch.Generator().manual_seed(count))
        rows = quantize_int8_token(x) if activation is INT8_TOKEN else (
            quantize_fp8_static(x, 0.01) if activation is FP8_STATIC else x)
        wanted = exact(weight, rows, bias)
        out = one(rows)
        assert out.shape == (count, n)
        assert (out.double() - wanted).abs().max() <= 3e-6 * wanted.abs().max()
        assert torch.equal(out, two(rows)), "the number of threads changed a bit"


def test_a_row_does_not_depend_on_its_mates() -> None:
    for grid in (BF16, INT8, Grid(dtype="int4", granularity=PerGroup(size=32))):
        activation = INT8_TOKEN if grid is INT8 else None
        run = prepare(stored(grid, 48, 64), activation, 2)
        x = torch.randn(33, 64, generator=torch.Generator().manual_seed(1))
        rows = quantize_int8_token(x) if activation else x
        together = run(rows)
        for row in (0, 4, 31, 32):
            alone = Quantized(rows.codes[row:row + 1], rows.scale[row:row + 1]) if activation else x[row:row + 1]
            assert torch.equal(run(alone)[0], together[row])


def test_compiled_code_is_cached_by_the_content_of_every_source() -> None:
    """Numba's cache sees one file; a kernel changed in another must not run as it was."""
    folder = Path(step.__file__).parent
    joined = b"\0".join(source.read_bytes() for source in sorted(folder.glob("*.py")))
    assert step.run.py_func.__qualname__ == f"walk_{hashlib.sha256(joined).hexdigest()[:16]}"
    assert any(f"walk_{hashlib.sha256(joined).hexdigest()[:16]}" in str(path)
               for path in Path(step.run.stats.cache_path).glob("*.nbi"))


def test_every_copy_of_a_weight_stays_alive() -> None:
    """The table holds addresses only; copies that nobody held were freed, and timing them crashed now and then."""
    import gc
    import weakref

    from engines.kernels.cpu.native import operator as module
    made: list[weakref.ref[Tiles]] = []

    class Watched(Tiles):
        """A packed weight that can be watched."""

    def of(stored, activation):
        tiles = Tiles.of(stored, activation)
        watched = Watched(**{name: getattr(tiles, name) for name in Tiles.__slots__})
        made.append(weakref.ref(watched))
        return watched

    original, module.Tiles = module.Tiles, type("Packer", (), {"of": staticmethod(of)})
    try:
        run = prepare(stored(BF16, 32, 16), None, 1, copies=3)
    finally:
        module.Tiles = original
    gc.collect()
    assert [reference() is not None for reference in made] == [True] * 3
    assert run(torch.ones(1, 16)).shape == (1, 32)


def test_int8_is_exact_at_the_extremes() -> None:
    n, k = 16, 1536
    weight = pack(INT8, [{"weight": torch.full((n, k), 127, dtype=torch.int8), "weight_scale": torch.ones(n)}], ["a"])
    for count in (1, 5):
        out = prepare(weight, INT8_TOKEN, 1)(Quantized(torch.full((count, k), -127.0), torch.ones(count, 1)))
        assert (out == -127 * 127 * k).all()


@njit
def _exp_all(x, y):
    for i in range(x.size):
        y[i] = norms.exp(x[i])


def test_exp() -> None:
    x = np.concatenate([np.linspace(-87, 88, 20001), [0.0, -0.0]]).astype(np.float32)
    y = np.empty_like(x)
    _exp_all(x, y)
    assert np.abs(y / np.exp(x.astype(np.float64)) - 1).max() < 4e-7
    _exp_all(np.array([np.nan, -np.inf, np.inf], np.float32), y)
    assert np.isnan(y[0])
    assert 0 <= y[1] < 1e-37
    assert y[2] > 1e38


def quantized(x: torch.Tensor, coding: norms.Coding, static: float = 0.0):
    """One row through the compiled quantizer -> codes, scale."""
    y = x.numpy().copy()
    codes = np.zeros(y.size + 1, np.int16) if coding in (norms.Coding.INT8_TOKEN, norms.Coding.INT8_STATIC) else y
    scale = np.zeros(1, np.float32)
    norms.quantize_row(y, int(coding), static, 0, codes.ctypes.data, scale.ctypes.data, 0)
    return torch.from_numpy(codes[:y.size].astype(np.float32)), float(scale[0])


@pytest.mark.parametrize("size", [1, 7, 64, 577])
def test_rows_are_quantized_as_by_torch(size) -> None:
    x = torch.randn(size, generator=torch.Generator().manual_seed(size)) * 3
    codes, scale = quantized(x, norms.Coding.INT8_TOKEN)
    twin = quantize_int8_token(x.clone().unsqueeze(0))
    assert scale == pytest.approx(float(twin.scale), rel=2e-7)
    assert (codes - twin.codes[0]).abs().max() <= 1
    assert (codes != twin.codes[0]).float().mean() < 0.01
    codes, scale = quantized(x, norms.Coding.FP8_TOKEN)
    twin = quantize_fp8_token(x.clone().unsqueeze(0))
    assert scale == pytest.approx(float(twin.scale), rel=2e-7)
    assert torch.allclose(codes, twin.codes[0], rtol=0.13, atol=2**-9)
    codes, scale = quantized(x, norms.Coding.FP8_STATIC, 0.004)
    assert torch.equal(codes, quantize_fp8_static(x.clone().unsqueeze(0), 0.004).codes[0])


def test_every_e4m3_number_and_every_tie() -> None:
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    numbers = numbers[numbers.isfinite()].sort().values
    x = torch.cat([numbers, (numbers[1:] + numbers[:-1]) / 2, torch.tensor([500.0, -1e9, 1e-12])])
    codes, _ = quantized(x, norms.Coding.FP8_STATIC, 1.0)
    assert torch.equal(codes, x.clamp(-448, 448).to(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("coding", [norms.Coding.INT8_TOKEN, norms.Coding.FP8_TOKEN])
@pytest.mark.parametrize("bad", [float("nan"), -float("nan")])
def test_nan_is_never_hidden_by_quantization(coding, bad) -> None:
    x = torch.randn(64)
    x[17] = bad
    _, scale = quantized(x, coding)
    assert np.isnan(scale)


def test_zero_rows_give_zero_codes() -> None:
    codes, scale = quantized(torch.zeros(32), norms.Coding.INT8_TOKEN)
    assert not codes.any()
    assert scale > 0


def test_a_team_takes_one_step_at_a_time() -> None:
    members = Team(3)
    seen: list[tuple[int, int]] = []

    def one(caller: int) -> None:
        members.run(lambda rank, size, sync: seen.append((caller, rank)))

    callers = [threading.Thread(target=one, args=(caller,)) for caller in range(8)]
    for thread in callers:
        thread.start()
    for thread in callers:
        thread.join(timeout=20)
    assert sorted(seen) == [(caller, rank) for caller in range(8) for rank in range(3)]
    for start in range(0, 24, 3):
        assert len({caller for caller, _ in seen[start:start + 3]}) == 1, "two steps ran at once"
    assert team(2) is team(2)


@pytest.mark.parametrize(("scheme", "kv", "bound"), [(None, BF16, 2e-5), (INT4_SCHEME, BF16, 2e-5),
                                             (None, FP8_KV, 0.2), (INT8_SCHEME, BF16, 0.2),
                                             (FP8_SCHEME, BF16, 0.2)], ids=["bf16", "int4", "fp8-kv", "int8", "fp8"])
@pytest.mark.parametrize("changes", [{}, {"num_key_value_heads": 1, "attention_bias": True}],
                         ids=["gqa", "mqa-bias"])
def test_the_compiled_backend_equals_torch(tmp_path, scheme, kv, bound, changes) -> None:
    """Unquantized activations agree to rounding; where codes are rounded a tie may fall either way (bounded)."""
    reference, one, two = open_both(tmp_path, scheme, kv, **changes)
    with torch.inference_mode():
        for batch in steps():
            wanted, found = logits_of(reference, batch), logits_of(one, batch)
            assert torch.equal(found, logits_of(two, batch)), "the number of threads changed a bit"
            assert (wanted - found).abs().max() <= bound * wanted.abs().max()


@pytest.mark.parametrize("scheme", [None, INT8_SCHEME, INT4_SCHEME], ids=["bf16", "int8", "int4"])
def test_compiled_logits_do_not_depend_on_mates_or_chunks(tmp_path, scheme) -> None:
    """Bit for bit: alone or in a batch, a prompt in one piece or in three."""
    _, _, backend = open_both(tmp_path, scheme)
    table = [2, 5, 7, 8, 1]
    with torch.inference_mode():
        whole = batch_of([17], [0], [table])
        alone = logits_of(backend, whole)
        for first, count in ((0, 6), (6, 1), (7, 10)):
            part = Batch(whole.tokens[first:first + count], whole.positions[first:first + count],
                         whole.slots[first:first + count], torch.tensor([count - 1]), [table], [first + count], [count])
            chunked = logits_of(backend, part)
        assert torch.equal(alone, chunked)
        mate = batch_of([9], [0], [[10, 11, 12]])
        mixed = Batch(torch.cat([mate.tokens, whole.tokens]), torch.cat([mate.positions, whole.positions]),
                      torch.cat([mate.slots, whole.slots]), torch.tensor([8, 25]), [[10, 11, 12], table], [9, 17],
                      [9, 17])
        assert torch.equal(alone[0], logits_of(backend, mixed)[1])


def test_hidden_rows_outlive_the_head(tmp_path) -> None:
    """The head is called part by part on rows of one step: no call may write over rows that wait."""
    _, backend, _ = open_both(tmp_path, None)
    with torch.inference_mode():
        batch = batch_of([9], [0], [[1, 2, 3]])
        every = Batch(batch.tokens, batch.positions, batch.slots, None, batch.tables, batch.lengths, batch.new)
        context = backend.context(every)
        hidden = backend.body(context)
        before = hidden.clone()
        parts = torch.cat([backend.head(hidden[at:at + 3], context).clone() for at in (0, 3, 6)])
        assert torch.equal(hidden, before)
        assert torch.equal(parts, backend.head(hidden, context))


def test_what_the_compiled_backend_refuses(tmp_path) -> None:
    checkpoint = checkpoint_of(tiny_llama(tmp_path / "model", hidden_size=32, head_dim=8))
    spec = EngineSpec(tune="none")
    plan, _ = plan_for(checkpoint, spec)
    assert "multiple of 16, not 8" in str(refuses(plan.program))
    assert {choice.impl for choice in plan.kernels if choice.op == "linear"} == {"half"}
    with pytest.raises(EngineError, match="head_dim"):
        plan_for(checkpoint, spec.model_copy(update={"deterministic": True}))


def test_full_tuning_times_both_and_keeps_the_times(tmp_path) -> None:
    checkpoint = MemoryCheckpoint.of(tiny_llama(tmp_path / "model", head_dim=16), INT8_SCHEME)
    plan, timings = plan_for(checkpoint, EngineSpec(tune="full"), tmp_path / "tuning")
    impls = {choice.impl for choice in plan.kernels if choice.op == "linear"}
    assert impls == {"tiles"} or "tiles" not in impls
    assert all({"tiles", "split"} <= timing.milliseconds.keys() or "tiles" in timing.milliseconds for timing in timings)
    again, _ = plan_for(checkpoint, EngineSpec(tune="full"), tmp_path / "tuning")
    assert again == plan

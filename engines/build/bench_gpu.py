"""Timing linears on a GPU: cold weights, CUDA graphs (what ``tune_gpu`` measures with).

For many tokens a gate_up linear is timed with the activation behind it, in one kernel where its own can do both: what
storing the widest rows and reading them again costs is then part of the choice. (Few tokens: ``tune_step``.)
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from engines.build.gpu_linears import impl_for, shape_of, weight_bytes
from engines.build.impls import group_of
from engines.build.kernel_table import mode_of
from engines.device import Device
from engines.errors import EngineError
from engines.kernels import quantize, silu_mul
from engines.kernels.impl import KernelConfig, LinearImpl, Packed
from engines.kernels.linear.gate_up import Activation, launch_gate_up
from engines.plan import linear_shape
from engines.program import GatedSilu, Linear

_LOG = logging.getLogger(__name__)
COLD_BYTES = 400e6
#: Largest differences between a candidate's results and the twin's or another candidate's, as parts of the latter's
#: root mean square and greatest value: bf16 rounding and fp8 accumulators. A few wrong sums show in the second alone.
SAME_RMS, SAME_MOST = 1e-2, 5e-2
#: Up to so many rows are all compared with the twin's; of more, some of every tile.
TWIN_ROWS = 256
#: Above this many tokens storing rows matters, and weights need no copies to be cold.
MANY_TOKENS = 512


class _Subject:
    """Copies of one linear's weight, with random codes, and rows to multiply."""

    def __init__(self, op: Linear, silu: GatedSilu | None) -> None:
        self.op, self.impl, self.silu = op, impl_for(op), silu
        count = max(1, min(48, -(-int(COLD_BYTES) // weight_bytes(op))))
        first = random_packed(op, self.impl, torch.device("cuda"))
        self.packed = [first]
        for _ in range(count - 1):
            copies = {name: tensor.clone() for name, tensor in first.tensors.items()}
            self.packed.append(replace(first, tensors=copies))
        self._rows: dict[int, tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]] = {}

    def rows(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """(x, x_scale, out) for a step size."""
        if tokens not in self._rows:
            self._rows[tokens] = (*random_rows(self.op, tokens),
                                  torch.empty(tokens, self.op.n, dtype=torch.bfloat16, device="cuda"))
        return self._rows[tokens]

    def forget(self, tokens: int) -> None:
        self._rows.pop(tokens, None)


def random_packed(op: Linear, impl: LinearImpl, device: torch.device) -> Packed:
    """A weight with random codes on the op's grid: times depend on bits that toggle, so zeros would flatter."""
    grid, shape = op.weight, (op.n, op.k)
    if grid.dtype == "bf16":
        return impl.pack(torch.randn(shape, device=device, dtype=torch.bfloat16).mul_(0.02))
    if grid.dtype == "fp8_e4m3":
        weight = torch.randn(shape, device=device, dtype=torch.bfloat16).mul_(100).clamp_(-448, 448)
        scales = (op.n, op.k // group_of(grid)) if group_of(grid) else ()
        return impl.pack(weight.to(torch.float8_e4m3fn), torch.full(scales, 2e-4, device=device))
    low, high = (-127, 128) if grid.dtype == "int8" else (-8, 8)
    codes = torch.randint(low, high, shape, device=device, dtype=torch.int8)
    if grid.granularity.kind == "group":
        scale = torch.rand(op.n, op.k // grid.granularity.size, device=device).mul_(1e-3).add_(1e-3)
        return impl.pack(codes, scale.to(torch.float16).float())
    return impl.pack(codes, torch.rand(op.n, device=device).mul_(1e-4).add_(1e-4))


def random_rows(op: Linear, tokens: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Activations as the op's kernels take them, and their scales."""
    grid = op.activation
    if grid is None:
        return torch.randn(tokens, op.k, device="cuda", dtype=torch.bfloat16), None
    if grid.granularity.kind == "group":
        scale = torch.rand(tokens, op.k // grid.granularity.size, device="cuda").add_(0.5).mul_(0.01)
    elif grid.dynamic:
        scale = torch.rand(tokens, device="cuda").add_(0.5).mul_(0.01)
    else:
        scale = torch.tensor(0.01, device="cuda")
    if grid.dtype == "int8":
        return torch.randint(-127, 128, (tokens, op.k), device="cuda", dtype=torch.int8), scale
    codes = torch.randn(tokens, op.k, device="cuda", dtype=torch.bfloat16).mul_(100).clamp_(-448, 448)
    return codes.to(torch.float8_e4m3fn), scale


def activated(silu: GatedSilu, tokens: int, device: Device
              ) -> tuple[Activation, torch.Tensor, torch.Tensor | None]:
    """An activation with plausible scales, and room for its rows and their dynamic scales."""
    grid = None if silu.quant is None else silu.quant.grid
    mode, group = mode_of(grid), 0 if grid is None else group_of(grid)
    on = device.torch_device
    known = None if grid is None or grid.dynamic else torch.tensor(0.01, device=on)
    before = silu.quant is not None and silu.quant.pre_quant_scale is not None
    columns = (silu.width // group,) if mode.per_group else ()
    scales = torch.empty(tokens, *columns, device=on) if mode.per_token or mode.per_group else None
    dtype = torch.bfloat16 if grid is None else torch.float8_e4m3fn if mode.fp8 else torch.int8
    return (Activation(silu.activation, mode, group, known, torch.ones(silu.width, device=on) if before else None),
            torch.empty(tokens, silu.width, dtype=dtype, device=on), scales)


def twin_rows(tokens: int) -> list[int]:
    """Rows that are compared with the twin's: all, or the first and last, those at a tile's end, and some between."""
    if tokens <= TWIN_ROWS:
        return list(range(tokens))
    between = {step * (tokens - 1) // (TWIN_ROWS - 1) for step in range(TWIN_ROWS)}
    return sorted(between | {edge + by for edge in (64, 128, 192, 256) for by in (-1, 0) if edge + by < tokens})


def difference(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """How far results are from others, 1 being the most that rounding may do; NaN where one is NaN."""
    error = found - wanted
    whole = error.square().mean().sqrt() / wanted.square().mean().sqrt()
    most = error.abs().max() / wanted.abs().max()
    return float(torch.maximum(whole / SAME_RMS, most / SAME_MOST))


class Bench:
    """Times candidates, on copies of each linear's weight."""

    def __init__(self, device: Device, activations: Mapping[str, GatedSilu]) -> None:
        """``activations``: linear shape -> the activation that alone reads it."""
        self._device, self._activations = device, activations
        self._stream = torch.cuda.Stream()
        self._subjects: dict[str, _Subject] = {}
        self._workspace = torch.zeros(16, dtype=torch.uint8, device="cuda")
        #: Bytes a second of a large copy, read and written.
        self.bandwidth = self._copy_bandwidth()

    def _copy_bandwidth(self) -> float:
        source = torch.ones(1 << 30, dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)
        seconds = self._median(lambda: target.copy_(source), 5, graphed=False)
        return 2 * source.nbytes / seconds

    def _subject(self, op: Linear) -> _Subject:
        key = linear_shape(op)
        if key not in self._subjects:
            self._subjects[key] = _Subject(op, self._activations.get(key))
        return self._subjects[key]

    def _launch(self, subject: _Subject, copy: int, tokens: int, config: KernelConfig) -> torch.Tensor:
        x, scale, out = subject.rows(tokens)
        need = subject.impl.workspace_bytes(shape_of(subject.op, tokens), config)
        if need > self._workspace.nbytes:
            self._workspace = torch.zeros(need, dtype=torch.uint8, device="cuda")
        return subject.impl.launch(x, subject.packed[copy % len(subject.packed)], config, out, x_scale=scale,
                                   workspace=self._workspace)

    def _timed(self, subject: _Subject, tokens: int, config: KernelConfig) -> Callable[[int], object]:
        """What is timed, by the number of the weight's copy: the linear, or that and its activation."""
        if subject.silu is None or tokens <= MANY_TOKENS:
            return lambda copy: self._launch(subject, copy, tokens, config)
        silu, (x, scale, out) = subject.silu, subject.rows(tokens)
        activation, codes, scales = activated(silu, tokens, self._device)
        configs = {"silu_config": silu_mul.candidates(silu.width, activation.mode, activation.group,
                                                      self._device.facts)[0],
                   "quantize_config": quantize.candidates(silu.width, self._device.facts)[0]}
        self._launch(subject, 0, tokens, config)  # sizes the workspace
        return lambda copy: launch_gate_up(
            subject.impl, x, subject.packed[copy % len(subject.packed)], config, out, codes, activation,
            x_scale=scale, scales=scales, workspace=self._workspace, **configs)

    def launch_once(self, op: Linear, tokens: int, config: KernelConfig) -> None:
        """One launch of all that ``race`` launches, for collecting variants."""
        subject = self._subject(op)
        self._launch(subject, 0, tokens, config)
        if subject.silu is not None and tokens > MANY_TOKENS:
            self._timed(subject, tokens, config)(0)

    def _check(self, subject: _Subject, tokens: int) -> Callable[[torch.Tensor], float]:
        """Says how far results are from the twin's; 0 where there is no memory for the twin."""
        x, scale, _ = subject.rows(tokens)
        some = torch.tensor(twin_rows(tokens), device=x.device)
        its = scale if scale is None or not scale.ndim else scale[some]
        try:
            rows = x.view(torch.uint8)[some].view(x.dtype)  # as bytes: whatever torch can index
            expected = subject.impl.twin(rows, subject.packed[0], x_scale=its)
        except RuntimeError as error:  # torch's own kind for memory, or cuBLAS's
            if not isinstance(error, torch.OutOfMemoryError) and "ALLOC_FAILED" not in str(error):
                raise
            _LOG.warning("%s tokens=%d: no memory for the twin: candidates are compared with each other only",
                         linear_shape(subject.op), tokens)
            return lambda out: 0.0
        return lambda out: difference(out[some], expected)

    def race(self, op: Linear, tokens: int, candidates: Sequence[KernelConfig]
             ) -> tuple[list[tuple[KernelConfig, float]], int]:
        """Microseconds a launch of every candidate that runs and agrees, fastest first; and how many did not."""
        subject = self._subject(op)
        launches = len(subject.packed) if tokens > MANY_TOKENS else max(8, len(subject.packed))
        check = self._check(subject, tokens)
        wanted: torch.Tensor | None = None
        found: list[tuple[KernelConfig, float]] = []
        for config in candidates:
            try:
                subject.rows(tokens)[2].fill_(float("nan"))
                out = self._launch(subject, 0, tokens, config).float()
                errors = [check(out), 0.0 if wanted is None else difference(out, wanted)]
                if not out.isfinite().all() or not all(error <= 1.0 for error in errors):  # NaN is not
                    _LOG.warning("%s tokens=%d: %s is wrong, by %s times what rounding may do: dropped",
                                 linear_shape(op), tokens, config, [round(error, 2) for error in errors])
                    continue
                wanted = out if wanted is None else wanted
                launch = self._timed(subject, tokens, config)
                seconds = self._median(lambda launch=launch: [  # type: ignore[misc]
                    launch(copy) for copy in range(launches)], 5 if tokens <= MANY_TOKENS else 3)
                found.append((config, seconds * 1e6 / launches))
            except Exception as error:  # a candidate that cannot run here is no candidate
                _LOG.warning("%s tokens=%d: %s does not run: %s", linear_shape(op), tokens, config, error)
        if tokens > MANY_TOKENS:
            subject.forget(tokens)
        if not found:
            raise EngineError(f"no kernel runs {linear_shape(op)} at {tokens} tokens on {self._device.name}",
                              "Leave this layer unquantized, or quantize it otherwise.")
        return sorted(found, key=lambda entry: entry[1]), len(candidates) - len(found)

    def _median(self, run: Callable[[], object], replays: int, *, graphed: bool = True) -> float:
        """Median seconds of ``run``: captured and replayed, or launched as it is."""
        marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(replays)]
        with torch.cuda.stream(self._stream):
            run()
            replay = run
            if graphed:
                graph = torch.cuda.CUDAGraph()
                graph.capture_begin()
                try:
                    run()
                finally:
                    graph.capture_end()
                replay = graph.replay
                replay()
            for begin, end in marks:
                begin.record()
                replay()
                end.record()
        self._stream.synchronize()
        return statistics.median(begin.elapsed_time(end) for begin, end in marks) * 1e-3

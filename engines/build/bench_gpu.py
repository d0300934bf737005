"""Timing linears on a GPU: cold weights, CUDA graphs (what ``tune_gpu`` measures with)."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from engines.build.gpu_linears import impl_for, shape_of, weight_bytes
from engines.build.impls import group_of
from engines.device import Device
from engines.errors import EngineError
from engines.kernels.impl import KernelConfig, LinearImpl, Packed
from engines.plan import linear_shape
from engines.program import Linear

_LOG = logging.getLogger(__name__)
COLD_BYTES = 400e6
#: Largest root-mean-square difference between two candidates' results, relative: bf16 rounding and fp8 accumulators.
SAME_RMS = 1e-2


class _Subject:
    """Copies of one linear's weight, with random codes, and rows to multiply."""

    def __init__(self, op: Linear) -> None:
        self.op, self.impl = op, impl_for(op)
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


class Bench:
    """Times candidates, on copies of each linear's weight."""

    def __init__(self, device: Device) -> None:
        self._device = device
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
            self._subjects[key] = _Subject(op)
        return self._subjects[key]

    def _launch(self, subject: _Subject, copy: int, tokens: int, config: KernelConfig) -> torch.Tensor:
        x, scale, out = subject.rows(tokens)
        need = subject.impl.workspace_bytes(shape_of(subject.op, tokens), config)
        if need > self._workspace.nbytes:
            self._workspace = torch.zeros(need, dtype=torch.uint8, device="cuda")
        return subject.impl.launch(x, subject.packed[copy % len(subject.packed)], config, out, x_scale=scale,
                                   workspace=self._workspace)

    def launch_once(self, op: Linear, tokens: int, config: KernelConfig) -> None:
        """One launch, for collecting variants."""
        self._launch(self._subject(op), 0, tokens, config)

    def race(self, op: Linear, tokens: int, candidates: Sequence[KernelConfig]
             ) -> tuple[list[tuple[KernelConfig, float]], int]:
        """Microseconds a launch of every candidate that runs and agrees, fastest first; and how many did not."""
        subject = self._subject(op)
        launches = len(subject.packed) if tokens > 512 else max(8, len(subject.packed))
        wanted: torch.Tensor | None = None
        found: list[tuple[KernelConfig, float]] = []
        for config in candidates:
            try:
                subject.rows(tokens)[2].fill_(float("nan"))
                out = self._launch(subject, 0, tokens, config).float()
                wanted = out if wanted is None else wanted
                error = float((out - wanted).square().mean().sqrt() / wanted.square().mean().sqrt())
                if not error <= SAME_RMS:
                    _LOG.warning("%s tokens=%d: %s differs by %.3g: dropped", linear_shape(op), tokens, config, error)
                    continue
                seconds = self._median(lambda config=config: [  # type: ignore[misc]
                    self._launch(subject, copy, tokens, config) for copy in range(launches)], 5 if tokens <= 512 else 3)
                found.append((config, seconds * 1e6 / launches))
            except Exception as error:  # a candidate that cannot run here is no candidate
                _LOG.warning("%s tokens=%d: %s does not run: %s", linear_shape(op), tokens, config, error)
        if tokens > 512:
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

"""Opening an engine on its device: memory planned, weights read, every kernel compiled, graphs captured, cache sized.

The order matters. Graphs and kernels' code take memory that nobody can predict, so they come first, on a cache of one
block; what is then left under the cap is the KV cache, and the graphs are captured again with its address (a fraction
of a second: everything is compiled). Nothing is compiled after this; ``stats`` would show it.
"""

from __future__ import annotations

import logging
import time
from contextlib import AbstractContextManager, nullcontext

import torch

from engines.build.buffers import assign
from engines.build.plan_gpu import block_bytes, workspace_bytes
from engines.engine import Engine
from engines.errors import EngineError
from engines.kernels.compile_ahead import CompileWatch, late
from engines.plan import Limits
from engines.runtime.cuda.arena import Arena, KVCache
from engines.runtime.cuda.graphs import Graphs
from engines.runtime.cuda.memory import available, free_bytes, release, table
from engines.runtime.cuda.runner import CudaRunner
from engines.runtime.cuda.steps import Steps
from engines.runtime.cuda.warm import compile_reachable
from engines.runtime.cuda.weights import DeviceWeights, read_weights

_LOG = logging.getLogger(__name__)
#: Left free beside the cache: what torch's operators take between steps.
SPARE = 256 * 1024**2


class GpuEngine:
    """An engine on its device. ``limits`` are the plan's, with the KV blocks that there really are."""

    @torch.inference_mode()
    def __init__(self, engine: Engine) -> None:
        """Load. EngineError with the memory table when it does not fit; ArtifactError for changed files."""
        plan = self._plan = engine.plan
        self._device = plan.device.torch_device
        self._stream = torch.cuda.Stream() if self._device.type == "cuda" else None
        _LOG.info("memory plan\n%s", table(plan.memory))
        release()
        self._may_take = available(plan.memory, plan.device, self._least_blocks * block_bytes(plan))
        self._free_at_start = free_bytes(plan.device)
        self.seconds: dict[str, float] = {}
        self._lap = time.monotonic()
        self._weights = DeviceWeights(plan, read_weights(engine, self._device), self._device)
        self._clock("read weights")
        workspace = workspace_bytes(plan.program, plan.kernels, plan.limits.max_num_tokens)
        self._arena = Arena(plan, assign(plan.program), workspace, self._device)
        self._graphs = Graphs(self._stream)
        with late() as self._late:
            self.limits = self._size_cache()
        self.runner = CudaRunner(plan, self._arena, self.steps, self._graphs, self._stream)
        self._weights.done()
        self._watch = CompileWatch()

    def _on_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _clock(self, what: str) -> None:
        """Note the seconds since the last call."""
        now = time.monotonic()
        self.seconds[what], self._lap = now - self._lap, now
        _LOG.info("%s: %.2f s", what, self.seconds[what])

    def _bind(self, blocks: int) -> Steps:
        scales = None
        if self._plan.kv.quantized:
            names = [f"model.layers.{layer}.self_attn" for layer in range(self._plan.model.num_layers)]
            scales = [(self._weights.vector(f"{name}.k_scale"), self._weights.vector(f"{name}.v_scale"))
                      for name in names]
        cache = KVCache(self._plan, blocks, scales, self._device)
        return Steps(self._plan, self._weights, self._arena, cache)

    def _size_cache(self) -> Limits:
        limits = self._plan.limits
        if self._stream is None:
            self.steps = self._bind(limits.num_blocks)
            return limits
        self.steps = self._bind(1)
        self._warm()
        self._capture()
        blocks = self._affordable(limits.num_blocks)
        self._clock("capture")
        self._graphs.clear()
        self.steps = self._bind(blocks)
        self._clock("allocate cache")
        self._capture()
        self._clock("capture again")
        return limits.model_copy(update={"num_blocks": blocks})

    def _affordable(self, wanted: int) -> int:
        """Blocks that fit under the cap beside everything else, now that everything else is there."""
        free = free_bytes(self._plan.device)
        assert free is not None
        assert self._free_at_start is not None
        assert self._may_take is not None
        taken = self._free_at_start - free
        blocks = min(wanted, (self._may_take - taken - SPARE) // block_bytes(self._plan))
        if blocks < self._least_blocks:
            raise EngineError(f"{taken / 2**30:.3f} GiB are taken before the KV cache, {blocks} blocks fit, one "
                              f"sequence needs {self._least_blocks}\n{table(self._plan.memory)}",
                              "Raise the memory cap, or lower max_seq_len.")
        if blocks < wanted:
            _LOG.warning("the KV cache has %d blocks, not %d: the device has less free than planned", blocks, wanted)
        return blocks

    @property
    def _least_blocks(self) -> int:
        """Blocks of one sequence of the longest length."""
        return -(-self._plan.limits.max_seq_len // self._plan.limits.block_size)

    def _warm(self) -> None:
        """Compile what is missing (nothing, where the build did it), then load and run every variant once, on empty
        rows."""
        with self._on_stream():
            compile_reachable(self.steps, self._plan.device.capability)
            self._clock("compile")
            for step in self.steps.reachable():
                self.steps.touch(step)
        torch.cuda.synchronize()
        self._clock("warm")

    def _capture(self) -> None:
        for key in self.steps.graph_keys():
            self._graphs.capture(key, lambda key=key: self.steps.launch(key))  # type: ignore[misc]
        torch.cuda.synchronize()

    @property
    def memory_bytes(self) -> int:
        """What the engine takes on its device: what torch reserves, and graphs and code beside it."""
        free = free_bytes(self._plan.device)
        if free is None or self._free_at_start is None:
            return self._plan.memory.total
        return self._free_at_start - free

    def stats(self) -> dict[str, int]:
        """Kernels compiled after loading, or one by one while loading (bugs when not 0), graphs, and steps by how they
        were launched."""
        return {"compiles_after_loading": self._watch.count, "compiles_while_loading": len(self._late),
                "graphs": len(self._graphs), "graph_steps": self.runner.graph_steps,
                "eager_steps": self.runner.eager_steps}

    def close(self) -> None:
        """Free the device. The runner must not be used afterwards."""
        self._watch.close()
        self._graphs.clear()
        del self.runner, self.steps, self._arena, self._weights
        release()


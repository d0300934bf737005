"""Every kernel variant of an engine, compiled before it is needed: at build time without its weights, when opened with.

Which variants an engine reaches follows from its Plan alone, so the build compiles them on tensors that hold nothing.
"""

from __future__ import annotations

from pathlib import Path

import torch

from engines.build.buffers import assign
from engines.build.plan_gpu import workspace_bytes
from engines.errors import EngineError
from engines.kernels.compile_ahead import collect, compile_variants
from engines.plan import Plan
from engines.runtime.cuda.arena import Arena, KVCache
from engines.runtime.cuda.memory import release
from engines.runtime.cuda.steps import Steps
from engines.runtime.cuda.weights import DeviceWeights, empty_weights


def compile_reachable(steps: Steps, capability: int) -> int:
    """Compile all that is missing, on all cores; returns how many variants there are. EngineError if one fails."""
    with torch.inference_mode(), collect() as variants:
        for step in steps.reachable():
            steps.touch(step)
    failed = compile_variants(list(variants.values()), capability)
    if failed:
        name, error = next(iter(failed.items()))
        raise EngineError(f"{len(failed)} kernels do not compile here, the first is {name.split(' ')[0]}: {error}",
                          "Build the engine again on this machine.")
    return len(variants)


def compile_plan(plan: Plan, folder: Path) -> int:
    """Compile what an engine with this plan and these weight files will reach; returns how many variants."""
    if plan.device.kind != "cuda":
        return 0
    device = plan.device.torch_device
    with torch.inference_mode():
        weights = DeviceWeights(plan, empty_weights(sorted(folder.glob("*.safetensors")), device), device)
        workspace = workspace_bytes(plan.program, plan.kernels, plan.limits.max_num_tokens)
        arena = Arena(plan, assign(plan.program), workspace, device)
        scales = None
        if plan.kv.quantized:
            scales = [(torch.ones((), device=device),) * 2] * plan.model.num_layers
        count = compile_reachable(Steps(plan, weights, arena, KVCache(plan, 1, scales, device)), plan.device.capability)
    del weights, arena
    release()
    return count

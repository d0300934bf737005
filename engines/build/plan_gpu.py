"""A Plan for a GPU: what is refused, which kernels run, and how memory is divided, before anything is allocated.

Memory under one cap (``spec.memory``, or 90 % of the card):

    weights       as packed, known exactly
    activations   the arena: values, step tensors, attention and sampling workspaces, logits; known exactly
    graphs        what CUDA graphs, kernels' code and torch's own operators take: an allowance, measured when opened
    kv_cache      all that is left, in whole blocks, at most what ``max_batch_size`` full sequences can use

Opening measures the third line and gives back blocks if the allowance was too small; it never takes more than the cap.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from calib.scheme import Grid, Scheme
from engines.build.buffers import assign
from engines.build.gpu_linears import impl_for, shape_of, weight_bytes
from engines.build.kernel_table import default_table, taken
from engines.device import Device
from engines.errors import EngineError
from engines.kernels.impl import KernelConfig
from engines.models.decoder import ActivationKeys
from engines.models.facts import ModelFacts
from engines.parallel.mesh import Mesh
from engines.plan import (
    EngineSpec,
    KernelChoice,
    Limits,
    MemoryPlan,
    Plan,
    check_batch,
    fused_program,
    linear_shape,
    longest,
)
from engines.program import AddNorm, Embed, Linear, Program, RMSNorm, RopeKV
from engines.runtime.cuda.arena import arena_bytes
from engines.runtime.cuda.graphs import decode_sizes
from engines.runtime.cuda.memory import GRAPH_ALLOWANCE, cap_bytes, table
from engines.runtime.cuda.weights import rotations


def check_gpu(spec: EngineSpec, schemes: Mapping[str, Scheme], kv: Grid, device: Device) -> None:
    """Refuse, in words, what this device cannot do."""
    Mesh.single(spec.tp, spec.pp)
    if spec.compute_dtype == "fp32":
        raise EngineError("compute_dtype fp32 has no GPU kernels: activations are bf16, sums float32", "Leave it out.")
    fp8 = [module for module, scheme in schemes.items() if scheme.weight.dtype == "fp8_e4m3"]
    if (fp8 or kv.dtype == "fp8_e4m3") and 0 < device.capability < 89:
        what = f"{fp8[0]} is fp8" if fp8 else "the KV cache is fp8"
        raise EngineError(f"{what}, which needs compute capability 8.9; {device.name} has "
                          f"{device.capability / 10:.1f}", "Use int8 or int4_awq here.")
    check_batch(spec)
    if spec.max_num_tokens < (largest := decode_sizes(spec.max_batch_size)[-1]):
        raise EngineError(f"max_num_tokens {spec.max_num_tokens:,} is less than {largest:,}, the largest decode step "
                          f"of max_batch_size {spec.max_batch_size:,} (a multiple of 4)",
                          f"Ask for at least {largest:,} tokens, or lower max_batch_size.")


def check_linears(program: Program, device: Device) -> None:
    """EngineError for a linear that no Impl runs here."""
    for op in program.linears():
        if (reason := impl_for(op).supports(shape_of(op, 1), device.facts)) is not None:
            raise EngineError(f"{op.parts[0]}: {reason}", "Quantize it otherwise, or leave it unquantized.")


def stored_bytes(program: Program) -> int:
    """Bytes of all weights on the device: linears as packed, embedding and norms. A tied head is counted once."""
    linears = {op.parts: weight_bytes(op) for op in program.linears()}
    tables = {op.weight for op in program.ops if isinstance(op, Embed)}
    vocab = next(op for op in reversed(program.ops) if isinstance(op, Linear))
    norms = sum((6 if op.offset else 2) * vocab.k for op in program.ops if isinstance(op, RMSNorm | AddNorm))
    norms += sum((12 if op.norms.offset else 4) * op.head_dim for op in program.ops
                 if isinstance(op, RopeKV) and op.norms is not None)
    tied = any(parts == (table,) for parts in linears for table in tables)
    return sum(linears.values()) + norms + (0 if tied else 2 * vocab.n * vocab.k)


def workspace_bytes(program: Program, kernels: Sequence[KernelChoice], max_num_tokens: int) -> int:
    """The largest workspace that any chosen linear kernel needs in any step."""
    linears = {linear_shape(op): op for op in program.linears()}
    need = 0
    for choice in kernels:
        if choice.op == "linear" and choice.config is not None:
            op = linears[choice.shape]
            shape = shape_of(op, min(choice.max_tokens, max_num_tokens))
            need = max(need, impl_for(op).workspace_bytes(shape, KernelConfig.from_json(choice.config)))
    return need


def make_gpu_plan(config: Mapping[str, object], schemes: Mapping[str, Scheme], kv: Grid, spec: EngineSpec,
                  device: Device, keys: ActivationKeys, linears: Sequence[KernelChoice],
                  others: Sequence[KernelChoice] = ()) -> Plan:
    """Resolve a spec. ``linears`` are the tuned choices, ``others`` those of all other Ops (default: first candidates).

    EngineError says in words and numbers what cannot be met."""
    check_gpu(spec, schemes, kv, device)
    facts, unfused, program, fusions = fused_program(config, schemes, keys)
    max_seq_len = longest(spec, facts)
    entries = others or default_table(facts, program, spec.block_size, kv, device.facts, spec.deterministic)
    kernels = (*linears, *(choice for choice in entries if taken(choice, max_seq_len)))
    limits = Limits(max_seq_len=max_seq_len, max_batch_size=spec.max_batch_size, max_num_tokens=spec.max_num_tokens,
                    block_size=spec.block_size, num_blocks=1)
    plan = Plan(device=device, model=facts, program=program, fusions=fusions, ops_unfused=len(unfused.ops),
                kernels=kernels, limits=limits, memory=MemoryPlan(weights=0, activations=0, kv_cache=0, cap=None),
                kv=kv, compute_dtype="bf16", deterministic=spec.deterministic, tp=spec.tp, pp=spec.pp,
                notes=facts.notes(max_seq_len))
    return _with_memory(plan, spec, facts)


def _with_memory(plan: Plan, spec: EngineSpec, facts: ModelFacts) -> Plan:
    cap = cap_bytes(spec.memory, plan.device)
    weights = stored_bytes(plan.program) + sum(
        4 * plan.limits.max_seq_len * facts.rope_of(local).rotary_dim(facts.head_dim)
        for local in rotations(plan.program))
    workspace = workspace_bytes(plan.program, plan.kernels, spec.max_num_tokens)
    arena = arena_bytes(plan, assign(plan.program), workspace)
    block = block_bytes(plan)
    one = -(-plan.limits.max_seq_len // spec.block_size)
    allowance = GRAPH_ALLOWANCE if plan.device.kind == "cuda" else 0
    blocks = min(one * spec.max_batch_size, max(0, cap - weights - arena - allowance) // block)
    memory = MemoryPlan(weights=weights, activations=arena, kv_cache=blocks * block, graphs=allowance, cap=cap)
    if blocks < one:
        raise EngineError(f"one sequence of {plan.limits.max_seq_len} tokens needs {one * block:,} bytes of KV cache, "
                          f"{blocks * block:,} are left\n{table(memory)}",
                          "Raise the memory cap, or lower max_seq_len, max_num_tokens or max_batch_size.")
    limits = plan.limits.model_copy(update={"num_blocks": blocks})
    return plan.model_copy(update={"limits": limits, "memory": memory})


def block_bytes(plan: Plan) -> int:
    """Bytes of one KV block in all layers."""
    return plan.limits.block_size * _token_bytes(plan.model, plan.kv)


def _token_bytes(model: ModelFacts, kv: Grid) -> int:
    return 2 * model.num_layers * model.num_kv_heads * model.head_dim * (1 if kv.quantized else 2)


def check_least(spec: EngineSpec, facts: ModelFacts, kv: Grid, weights: int, device: Device) -> None:
    """EngineError when a cap holds no sequence beside ``weights`` bytes, before kernels (and so the arena) are known.
    """
    if spec.memory is None:
        return
    allowance = GRAPH_ALLOWANCE if device.kind == "cuda" else 0
    length = longest(spec, facts)
    one = -(-length // spec.block_size) * spec.block_size * _token_bytes(facts, kv)
    if weights + allowance + one > spec.memory:
        raise EngineError(f"a cap of {spec.memory:,} bytes is less than weights of {weights:,}, {allowance:,} for CUDA "
                          f"graphs and {one:,} of KV cache for one sequence of {length} tokens",
                          "Raise the memory cap, or lower max_seq_len.")

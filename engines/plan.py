"""EngineSpec (what is asked) -> Plan (what will run): no "auto" is left in a Plan.

A Plan is the fused Program, the KernelTable and the limits, with the device that they hold for. It is the record of an
Engine, so it is part of the digest: the same checkpoint, spec, device and versions give the same Plan, except for the
tuned choices, which come from the tuning cache when device, versions and shapes match. What tuning measured is
evidence and lies beside the Plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from calib.scheme import Frozen, Grid, Scheme
from engines.build import compiled_cpu
from engines.build.fuse import FusionStep, fuse
from engines.device import Device
from engines.errors import EngineError
from engines.kernels.cpu.native.grids import NAME
from engines.kernels.cpu.native.grids import bits as tile_bits
from engines.models.decoder import ActivationKeys, decoder_program
from engines.models.facts import ModelFacts
from engines.models.families import model_facts
from engines.numbers import Whole
from engines.parallel.mesh import Mesh
from engines.program import Linear, Program, linear_shape

#: Bytes of KV cache on a CPU when no memory cap is given. Only what tokens fill is ever touched.
DEFAULT_KV_BYTES = 2 * 1024**3


class EngineSpec(Frozen):
    """What is asked of an engine. None means "from the model and the device", and is resolved in the Plan."""

    device: str = "cpu"
    max_seq_len: Whole | None = Field(default=None, ge=2, description="prompt and generated tokens of one sequence")
    max_batch_size: Whole = Field(default=16, ge=1, description="sequences in one step")
    max_num_tokens: Whole = Field(default=2048, ge=1, description="tokens in one step; longer prompts are chunked")
    block_size: Whole = Field(default=16, ge=1)
    memory: Whole | None = Field(default=None, ge=1, description="cap in bytes for weights, activations and KV cache")
    deterministic: bool = False
    tune: Literal["none", "quick", "full"] = "quick"
    tp: Whole = Field(default=1, ge=1)
    pp: Whole = Field(default=1, ge=1)
    compute_dtype: Literal["fp32", "bf16"] | None = None


class Limits(Frozen):
    """What an engine accepts, and the KV cache that follows from it."""

    max_seq_len: int = Field(ge=1)
    max_batch_size: int = Field(ge=1)
    max_num_tokens: int = Field(ge=1)
    block_size: int = Field(ge=1)
    num_blocks: int = Field(ge=1)


class MemoryPlan(Frozen):
    """Bytes by use: estimated before anything is allocated."""

    weights: int
    activations: int
    kv_cache: int
    graphs: int = 0
    cap: int | None

    @property
    def total(self) -> int:
        return self.weights + self.activations + self.kv_cache + self.graphs


class KernelChoice(Frozen):
    """Which operator runs an Op of this shape, for steps of at most ``max_tokens`` tokens.

    On a CPU there is one entry a shape: one operator for every batch size.
    """

    op: str
    shape: str
    max_tokens: int
    impl: str
    config: dict[str, Any] | None = None


class Plan(Frozen):
    """Everything that is decided ahead of time."""

    device: Device
    model: ModelFacts
    program: Program
    fusions: tuple[FusionStep, ...]
    ops_unfused: int
    kernels: tuple[KernelChoice, ...]
    limits: Limits
    memory: MemoryPlan
    kv: Grid
    compute_dtype: Literal["fp32", "bf16"]
    deterministic: bool
    tp: int
    pp: int
    notes: tuple[str, ...] = ()

    def choice(self, op: Linear) -> KernelChoice:
        """The kernel of a linear."""
        shape = linear_shape(op)
        for choice in self.kernels:
            if choice.op == "linear" and choice.shape == shape:
                return choice
        raise EngineError(f"the plan has no kernel for a linear {shape}", "Build the engine again.")


def kv_bytes_per_token(facts: ModelFacts, kv: Grid) -> int:
    """Bytes that one token takes in all layers: float32 unless the cache holds codes of 8 bits."""
    return 2 * facts.num_layers * facts.num_kv_heads * facts.head_dim * (1 if kv.quantized else 4)


def check_spec(spec: EngineSpec) -> None:
    """Refuse, in words, what a CPU cannot do."""
    Mesh.single(spec.tp, spec.pp)
    check_batch(spec)
    if spec.compute_dtype == "bf16":
        raise EngineError("compute_dtype bf16 is emulated on this CPU and slower than fp32", "Use fp32.")


def _weight_bytes(program: Program, impls: Mapping[str, str]) -> int:
    """Bytes of the linears in the operators' own layouts (fbgemm's tiles are 512 inputs deep)."""
    if set(impls.values()) == {NAME}:
        return int(sum(op.n * op.k * tile_bits(op.weight, op.activation, op.k, op.order is not None) / 8
                       for op in program.linears()))
    layouts = {"float": (32, 1), "half": (16, 512), "split": (8, 512), "int_mm": (8, 1), "int4pack": (4, 1)}
    total = 0
    for op in program.linears():
        bits, depth = layouts[impls[linear_shape(op)]]
        total += op.n * -(-op.k // depth) * depth * bits // 8
    return total


def longest(spec: EngineSpec, facts: ModelFacts) -> int:
    """Tokens of the longest sequence that is asked for; EngineError when the model has fewer positions."""
    if spec.max_seq_len is not None and spec.max_seq_len > facts.max_position:
        raise EngineError(f"max_seq_len {spec.max_seq_len} is beyond the model's {facts.max_position} positions",
                          f"Ask for at most {facts.max_position}.")
    return spec.max_seq_len or facts.max_position


def check_step(spec: EngineSpec, facts: ModelFacts) -> None:
    """EngineError when a step is to hold more tokens than all its sequences have (the default is only an upper bound).
    """
    most = longest(spec, facts) * spec.max_batch_size
    if spec.max_num_tokens > max(most, EngineSpec().max_num_tokens):
        raise EngineError(f"max_num_tokens {spec.max_num_tokens:,} is more than a step can hold: "
                          f"{spec.max_batch_size:,} sequences of {longest(spec, facts):,} tokens are {most:,}",
                          f"Ask for at most {most:,}.")


def check_batch(spec: EngineSpec) -> None:
    """EngineError when a step has fewer tokens than sequences: each of them takes at least one."""
    if spec.max_num_tokens < spec.max_batch_size:
        raise EngineError(f"max_num_tokens {spec.max_num_tokens:,} is less than max_batch_size "
                          f"{spec.max_batch_size:,}",
                          "Every sequence of a step needs a token: raise one or lower the other.")


def check_cap(memory: int | None, device: Device) -> None:
    """EngineError when an engine is to take more memory than its device has."""
    total = device.memory_bytes
    if memory is not None and memory > total:
        raise EngineError(f"a cap of {memory:,} bytes is more than the {total:,} of {device.name}", "Lower it.")


def least_weight_bytes(program: Program) -> int:
    """Bytes of the linears in the tightest of a CPU's layouts: what they take at least, whatever is chosen."""
    return _weight_bytes(program, {linear_shape(op): NAME for op in program.linears()})


def cpu_limits(spec: EngineSpec, facts: ModelFacts, kv: Grid, weights: int, device: Device | None
               ) -> tuple[Limits, MemoryPlan]:
    """Limits and memory beside ``weights`` bytes; EngineError with the figures when one sequence, or one step on
    ``device`` (None: it is not here), does not fit."""
    max_seq_len = longest(spec, facts)
    tokens = min(spec.max_num_tokens, max_seq_len * spec.max_batch_size)
    activations = 4 * tokens * (4 * facts.hidden_size + 6 * facts.intermediate_size) + 4 * 128 * facts.vocab_size
    if device is not None and weights + activations > device.memory_bytes:
        raise EngineError(f"a step of {tokens:,} tokens works in {activations:,} bytes beside {weights:,} of weights; "
                          f"{device.name} has {device.memory_bytes:,}", "Lower max_num_tokens and max_batch_size.")
    block_bytes = spec.block_size * kv_bytes_per_token(facts, kv)
    one = -(-max_seq_len // spec.block_size)
    room = DEFAULT_KV_BYTES if spec.memory is None else spec.memory - weights - activations
    blocks = min(one * spec.max_batch_size, max(room, 0) // block_bytes)
    if blocks < one:
        raise EngineError(
            f"one sequence of {max_seq_len} tokens needs {one * block_bytes:,} bytes of KV cache; {max(room, 0):,} are "
            f"left (weights {weights:,}, activations {activations:,}, cap {spec.memory or 'none'})",
            "Raise the memory cap, or lower max_seq_len or max_num_tokens.")
    limits = Limits(max_seq_len=max_seq_len, max_batch_size=spec.max_batch_size, max_num_tokens=spec.max_num_tokens,
                    block_size=spec.block_size, num_blocks=blocks)
    return limits, MemoryPlan(weights=weights, activations=activations, kv_cache=blocks * block_bytes, cap=spec.memory)


def fused_program(config: Mapping[str, Any], schemes: Mapping[str, Scheme], keys: ActivationKeys
                  ) -> tuple[ModelFacts, Program, Program, tuple[FusionStep, ...]]:
    """Facts, unfused program, fused program and what each rewrite did."""
    facts = model_facts(config)
    unfused = decoder_program(facts, schemes, keys)
    fused, steps = fuse(unfused)
    return facts, unfused, fused, steps


def make_plan(config: Mapping[str, Any], schemes: Mapping[str, Scheme], kv: Grid, spec: EngineSpec, device: Device,
              keys: ActivationKeys, kernels: Sequence[KernelChoice]) -> Plan:
    """Resolve a spec. ``kernels`` are the linears' choices (``build/tune.py``).

    EngineError says in words and numbers what cannot be met.
    """
    check_spec(spec)
    check_cap(spec.memory, device)
    facts, unfused, program, fusions = fused_program(config, schemes, keys)
    impls = {choice.shape: choice.impl for choice in kernels if choice.op == "linear"}
    limits, memory = cpu_limits(spec, facts, kv, _weight_bytes(program, impls), device)
    others = sorted({op.op for op in program.ops} - {"linear"})
    compiled = set(impls.values()) == {NAME}
    if spec.deterministic and not compiled:
        raise EngineError(f"deterministic: {compiled_cpu.refuses(program) or 'torch operators were chosen'}",
                          "Leave it out; rows agree across batches within 1e-5 of the largest logit.")
    table = (*kernels, *(KernelChoice(op=name, shape="any", max_tokens=spec.max_num_tokens,
                                      impl="compiled" if compiled else "torch") for name in others))
    slow = () if compiled else (f"steps run through torch's operators: the compiled step "
                                f"{compiled_cpu.refuses(program) or 'was slower'}",)
    return Plan(device=device, model=facts, program=program, fusions=fusions, ops_unfused=len(unfused.ops),
                kernels=table, limits=limits, memory=memory, kv=kv, compute_dtype="fp32",
                deterministic=spec.deterministic, tp=spec.tp, pp=spec.pp,
                notes=(*facts.notes(limits.max_seq_len), *slow))


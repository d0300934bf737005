"""An engine taken apart: its program before and after fusion, where its memory goes, how near kernels are to a floor.

The plan keeps the fused program and how many operations there were before. Every fused operation stands for a fixed set
of textbook operations, so the program before fusion can be written down from it; that the counts agree is checked.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

#: Bytes that a weight takes in the layouts of ``engines`` (bits a weight), by operator name.
_BITS = {"float": 32, "half": 16, "split": 8, "int_mm": 8, "int4pack": 4}
#: The compiled step's tiles, whose width depends on the weight's grid.
_TILE_BITS = {"bf16": 16, "fp8_e4m3": 16, "int8": 8, "int4": 4}
_LAYER = re.compile(r"layers\.(\d+)\.|^L(\d+)\.|\+?L(\d+)\.")


@dataclass(frozen=True, slots=True)
class Step:
    """One operation after fusion and the textbook operations that it stands for."""

    fused: str
    detail: str
    before: tuple[str, ...]
    layer: int | None


@dataclass(frozen=True, slots=True)
class Program:
    """``layers`` alike are shown once. ``agrees``: the expansion has as many operations as the plan counted."""

    head: list[Step]
    layer: list[Step]
    tail: list[Step]
    layers: int
    ops_before: int
    ops_after: int
    agrees: bool


def program_of(plan: Mapping[str, Any]) -> Program:
    """From a plan's JSON."""
    steps = [_step(op) for op in plan["program"]["ops"]]
    before = sum(len(step.before) for step in steps)
    first = next((place for place, step in enumerate(steps) if step.layer == 0), len(steps))
    last = max((place for place, step in enumerate(steps) if step.layer is not None), default=-1)
    layers = int(plan["model"]["num_layers"])
    one = [step for step in steps if step.layer == min(1, layers - 1)]
    return Program(steps[:first], one, steps[last + 1:], layers, int(plan["ops_unfused"]), len(steps),
                   before == int(plan["ops_unfused"]))


def _step(op: Mapping[str, Any]) -> Step:
    kind = str(op["op"])
    quantize = ("quantize",) if op.get("quant") else ()
    if kind == "linear":
        parts = [name.rsplit(".", 1)[-1] for name in op["parts"]]
        grid = op["weight"]["dtype"]
        return Step("linear", f"{' + '.join(parts)}  [{sum(op['rows'])} x {op['k']}] {grid}",
                    tuple(f"linear {part}" for part in parts), _layer(op))
    before = {"add_norm": ("add", "rms_norm", *quantize), "rms_norm": ("rms_norm", *quantize),
              "rope_kv": ("rope q", "rope k", "kv_write"), "gated_silu": ("silu_mul", *quantize)}
    detail = {"rope_kv": "rotate q and k, store k and v", "add_norm": "residual and norm in one pass",
              "gated_silu": "gate and up in one pass", "attention": "over the paged KV cache"}.get(kind, "")
    detail = ", then ".join(part for part in (detail, "quantize" if quantize and kind in before else "") if part)
    return Step(kind, detail, before.get(kind, (kind,)), _layer(op))


def _layer(op: Mapping[str, Any]) -> int | None:
    if isinstance(op.get("layer"), int):
        return int(op["layer"])
    for name in ("weight", "out", "x"):
        value = op.get(name)
        if isinstance(value, str) and (found := _LAYER.search(value)):
            return int(next(group for group in found.groups() if group is not None))
    return None


def memory_of(plan: Mapping[str, Any]) -> list[tuple[str, int]]:
    """(what, bytes), the planned map."""
    memory = plan["memory"]
    names = {"weights": "weights", "kv_cache": "KV cache, when full", "activations": "activations", "graphs": "graphs"}
    return [(title, int(memory[key])) for key, title in names.items() if memory.get(key)]


def limits_of(plan: Mapping[str, Any]) -> list[tuple[str, str]]:
    limits, memory = plan["limits"], plan["memory"]
    cap = memory.get("cap")
    return [("sequences in one step", f"{limits['max_batch_size']:,}"),
            ("tokens of one sequence", f"{limits['max_seq_len']:,}"),
            ("tokens in one step", f"{limits['max_num_tokens']:,}"),
            ("KV blocks", f"{limits['num_blocks']:,} of {limits['block_size']} tokens"),
            ("memory cap", f"{cap / 1e9:.2f} GB" if cap else "none"),
            ("computes in", str(plan["compute_dtype"])), ("KV cache", _grid(plan["kv"])),
            ("device", _device(plan["device"]))]


def _grid(grid: Mapping[str, Any]) -> str:
    return str(grid["dtype"])


def _device(device: Mapping[str, Any]) -> str:
    return ", ".join(str(device[key]) for key in ("name", "isa", "torch") if device.get(key))


@dataclass(frozen=True, slots=True)
class Kernel:
    """One linear of the KernelTable as tuning saw it: ``fraction`` of the floor, and what the floor is."""

    shape: str
    impl: str
    tokens: int
    milliseconds: float
    gigabytes_s: float | None
    fraction: float | None


def kernels_of(plan: Mapping[str, Any], timings: Mapping[str, Any]) -> tuple[list[Kernel], str]:
    """(kernels, in words what the fraction is of). Decode: one token at a time, which reads every weight once."""
    chosen = {choice["shape"]: choice["impl"] for choice in plan["kernels"] if choice["op"] == "linear"}
    found = []
    for timing in timings.get("tuning", []):
        shape, impl = timing.get("shape"), chosen.get(timing.get("shape"))
        measured = timing.get("milliseconds")
        if impl is None or measured is None:
            continue
        times = measured.get(impl) if isinstance(measured, dict) else {"1": measured}
        for tokens, spent in sorted((times or {}).items(), key=lambda entry: int(entry[0])):
            found.append(Kernel(shape, impl, int(tokens), float(spent), _rate(shape, impl, float(spent)),
                                timing.get("floor_fraction") if tokens == "1" else None))
    return _against_floor(found)


def _rate(shape: str, impl: str, milliseconds: float) -> float | None:
    size = re.search(r"n=(\d+) k=(\d+)", shape)
    grid = re.search(r"weight=(\w+)", shape)
    bits = _BITS.get(impl) or (_TILE_BITS.get(grid[1]) if grid and impl == "tiles" else None)
    if size is None or bits is None or milliseconds <= 0:
        return None
    return int(size[1]) * int(size[2]) * bits / 8 / 1e6 / milliseconds


def _against_floor(found: list[Kernel]) -> tuple[list[Kernel], str]:
    """The device's copy bandwidth where tuning measured it; else the best rate that any kernel here reached."""
    if any(kernel.fraction is not None for kernel in found):
        return found, "of the time that reading the weight once takes at the device's copy bandwidth"
    best = max((kernel.gigabytes_s for kernel in found if kernel.gigabytes_s and kernel.tokens == 1), default=None)
    if best is None:
        return found, "not known: tuning kept no time for this engine's kernels"
    return [Kernel(kernel.shape, kernel.impl, kernel.tokens, kernel.milliseconds, kernel.gigabytes_s,
                   kernel.gigabytes_s / best if kernel.gigabytes_s and kernel.tokens == 1 else None)
            for kernel in found], f"of the best rate that any kernel of this engine reached, {best:.1f} GB/s"


def shape_name(kernel: Kernel, plan: Mapping[str, Any]) -> str:
    """The modules of a shape: ``q_proj + k_proj + v_proj``."""
    for op in plan["program"]["ops"]:
        if op["op"] == "linear" and f"n={sum(op['rows'])} k={op['k']} " in kernel.shape:
            return " + ".join(name.rsplit(".", 1)[-1] for name in op["parts"])
    return kernel.shape


def totals(memory: Sequence[tuple[str, int]]) -> int:
    return sum(size for _, size in memory)

"""Where every value of a Program lies on a GPU: a few buffers, reused as soon as their last reader has run.

Values are rows [tokens, width]. A buffer holds ``bytes`` a token for up to ``max_num_tokens`` tokens, and a step of t
tokens uses its first t rows, so one set of buffers (and of pointers, which CUDA graphs keep) serves every step. A value
takes the smallest free buffer that is large enough, else a new one; as all layers are alike, 32 of them need as many
buffers as one.

An attention is one kernel with the RoPE before it and the quantization after it where that can be
(``runtime/cuda/ops``), and so are a gate_up linear and its activation: what those read stays until the last of them has
run.

A fused add writes the residual over the old one where nobody else reads it: the residual stream stays in one place.
Quantized rows have a second buffer for scales (4 bytes a token, or a token and group).

The same assignment is used to plan memory before anything is allocated and to allocate.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from calib.scheme import Grid
from engines.build.impls import group_of
from engines.program import (
    ActQuant,
    Add,
    AddNorm,
    Attention,
    Embed,
    GatedSilu,
    Linear,
    Op,
    Program,
    Quantize,
    RopeKV,
    SelectRows,
    Split,
    reads,
    writes,
)


@dataclass(frozen=True, slots=True)
class Value:
    """One value: ``width`` elements a token on ``grid`` (None: 16-bit), in ``buffer``, its scales in ``scales``."""

    width: int
    grid: Grid | None
    buffer: int
    scales: int | None

    @property
    def scale_columns(self) -> int:
        """Scales a token: 1, or one for each group; 0 for unquantized and static ones."""
        if self.grid is None or not self.grid.dynamic:
            return 0
        group = group_of(self.grid)
        return self.width // group if group else 1


@dataclass(slots=True)
class Assignment:
    """Values by name, and bytes a token of each buffer."""

    values: dict[str, Value] = field(default_factory=dict)
    bytes_per_token: list[int] = field(default_factory=list)

    def total(self, tokens: int) -> int:
        """Bytes of all buffers for that many tokens, each rounded up to 256."""
        return sum(-(-size * tokens // 256) * 256 for size in self.bytes_per_token)


def body_and_head(program: Program) -> tuple[tuple[Op, ...], tuple[Op, ...]]:
    """(all layers, final norm and output layer): the Program cut at SelectRows, or at the Add that it alone reads."""
    cut = next(i for i, op in enumerate(program.ops) if isinstance(op, SelectRows))
    before = program.ops[cut - 1] if cut else None
    if isinstance(before, Add) and reads(program.ops[cut]) == (before.out,):
        cut -= 1
    return program.ops[:cut], program.ops[cut:]


def widths(program: Program) -> dict[str, tuple[int, Grid | None]]:
    """Width and grid of every value."""
    found: dict[str, tuple[int, Grid | None]] = {}
    hidden = next(op.k for op in program.linears())
    for op in program.ops:
        if isinstance(op, Split):
            found.update((name, (width, None)) for name, width in zip(op.outs, op.widths, strict=True))
            continue
        width = _width(op, found, hidden)
        for name in writes(op):
            grid = _grid(op) if name == getattr(op, "out", None) else None
            found[name] = (width, grid)
    return found


def _width(op: Op, known: dict[str, tuple[int, Grid | None]], hidden: int) -> int:
    match op:
        case Linear():
            return op.n
        case RopeKV() | Attention():
            return op.heads * op.head_dim
        case GatedSilu():
            return op.width
        case Embed():
            return hidden
        case _:
            return known[next(iter(reads(op)))][0] if reads(op) else 0


def _grid(op: Op) -> Grid | None:
    quant: ActQuant | None = getattr(op, "quant", None)
    return None if quant is None else quant.grid


class _Pool:
    """Buffers by size; takes the smallest that fits."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes, self.free = sizes, list[int]()

    def take(self, size: int) -> int:
        fitting = [index for index in self.free if self.sizes[index] >= size]
        if not fitting:
            self.sizes.append(size)
            return len(self.sizes) - 1
        best = min(fitting, key=lambda index: (self.sizes[index], index))
        self.free.remove(best)
        return best

    def give(self, index: int | None) -> None:
        if index is not None:
            self.free.append(index)


def assign(program: Program) -> Assignment:
    """Give every value of the body a buffer. (The head's values have other row counts and buffers of their own.)"""
    body, head = body_and_head(program)
    sizes = widths(program)
    assignment = Assignment()
    pool = _Pool(assignment.bytes_per_token)
    last = last_uses(body)
    kept = {name for op in head for name in reads(op)}
    for index, op in enumerate(body):
        for name, value in _placed(op, index, last, kept, assignment, pool, sizes):
            assignment.values[name] = value
        for name in sorted(name for name, end in last.items() if end == index):
            if name not in kept and not _inherited(op, name, index, last, kept):
                pool.give(assignment.values[name].buffer)
                pool.give(assignment.values[name].scales)
    return assignment


def last_uses(body: Sequence[Op]) -> dict[str, int]:
    """Value -> the index of the last Op that touches it, where Ops that may be one kernel are taken together."""
    last = {name: index for index, op in enumerate(body) for name in (*writes(op), *reads(op))}
    made = {op.out: op for op in body if isinstance(op, RopeKV)}
    linears = {op.out: op for op in body if isinstance(op, Linear)}
    for index, op in enumerate(body):
        if isinstance(op, GatedSilu) and op.gate_up in linears:
            name = linears[op.gate_up].x
            last[name] = max(last[name], index)
        if not isinstance(op, Attention):
            continue
        after = body[index + 1] if index + 1 < len(body) else None
        end = index + 1 if isinstance(after, Quantize) and after.x == op.out else index
        for name in (op.q, *([made[op.q].qkv] if op.q in made else [])):
            last[name] = max(last[name], end)
    return last


def _inherited(op: Op, name: str, index: int, last: dict[str, int], kept: set[str]) -> bool:
    """Whether the old residual's buffer lives on as the new one."""
    return isinstance(op, AddNorm) and name == op.residual and last[name] == index and name not in kept


def _placed(op: Op, index: int, last: dict[str, int], kept: set[str], known: Assignment, pool: _Pool,
            sizes: dict[str, tuple[int, Grid | None]]) -> Iterator[tuple[str, Value]]:
    for name in writes(op):
        width, grid = sizes[name]
        if isinstance(op, AddNorm) and name == op.residual_out and _inherited(op, op.residual, index, last, kept):
            yield name, Value(width, None, known.values[op.residual].buffer, None)
            continue
        value = Value(width, grid, pool.take(width * (1 if grid else 2)), None)
        if value.scale_columns:
            value = Value(width, grid, value.buffer, pool.take(4 * value.scale_columns))
        yield name, value

"""The KernelTable as the runtime asks it: by Op, shape and step size."""

from __future__ import annotations

from collections.abc import Iterator

from engines.errors import EngineError
from engines.kernels.impl import KernelConfig
from engines.plan import Plan, linear_shape
from engines.program import Linear


class Configs:
    """The KernelTable by Op, shape and step size."""

    def __init__(self, plan: Plan) -> None:
        self._longest = plan.limits.max_seq_len
        self._table: dict[tuple[str, str], list[tuple[int, KernelConfig]]] = {}
        self._shapes: dict[str, str] = {}
        for choice in sorted(plan.kernels, key=lambda choice: choice.max_tokens):
            if choice.config is not None:
                self._table.setdefault((choice.op, choice.shape), []).append(
                    (choice.max_tokens, KernelConfig.from_json(choice.config)))
                self._shapes.setdefault(choice.op, choice.shape)

    def of(self, op: str, tokens: int = 0, shape: str | None = None) -> KernelConfig:
        """The config of an Op for a step of ``tokens`` tokens; the only shape's when none is given."""
        entries = self._table.get((op, self._shapes.get(op, "") if shape is None else shape))
        if entries is None:
            raise EngineError(f"the plan has no kernel for {op} {shape or ''}", "Build the engine again.")
        return next((config for most, config in entries if tokens <= most), entries[-1][1])

    def has(self, op: str, shape: str) -> bool:
        """Whether the table has an entry of that shape."""
        return (op, shape) in self._table

    def attention(self, decodes: int, long: bool) -> KernelConfig:
        """Decode attention's config for so many rows, or that of their graph for ``long`` contexts."""
        return self.of("attention_decode", decodes, "long" if long else "split")

    def long_from(self, decodes: int) -> int | None:
        """The context from which a step of so many rows has a graph of its own; None where it never has."""
        entries = self._table.get(("attention_decode", "long"), [])
        found = next((config["FROM"] for most, config in entries if decodes <= most), self._longest + 1)
        return found if found <= self._longest else None

    def linear(self, op: Linear, tokens: int) -> KernelConfig:
        return self.of("linear", tokens, linear_shape(op))

    def all_linear(self) -> Iterator[tuple[str, int, KernelConfig]]:
        """(shape, most tokens, config) of every linear."""
        for (op, shape), entries in self._table.items():
            if op == "linear":
                yield from ((shape, most, config) for most, config in entries)

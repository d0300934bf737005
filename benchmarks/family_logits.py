"""An engine's logits of prompts and of tokens after them, step by step, as the runtime's own batches give them.

What ``LLM`` hides: which backend runs, how prompts are cut, which blocks a sequence has. The blocks of a sequence are
never neighbours here, and decodes of sequences of different lengths share a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.tiny_families import reference, step_logits
from calib.checkpoint import QuantizedCheckpoint
from engines.build.builder import plan_for
from engines.build.weights import Weights, write_weights
from engines.plan import EngineSpec, Plan
from engines.runtime.batch import Batch
from engines.runtime.cpu import CpuBackend
from engines.runtime.native import NativeBackend

BLOCK = 4
Backend = CpuBackend | NativeBackend


def backends(folder: Path, work: Path, **spec: int) -> Iterator[Backend]:
    """The compiled step on two threads, then torch's operators."""
    checkpoint = QuantizedCheckpoint.open(folder)
    plan, _ = plan_for(checkpoint, EngineSpec.model_validate({"tune": "none", "block_size": BLOCK, **spec}))
    if {choice.impl for choice in plan.kernels} != {"tiles", "compiled"}:
        raise RuntimeError(f"the compiled step was not chosen: {plan.notes}")
    write_weights(checkpoint.tensors(), plan.program, plan.kv, work)
    files = sorted(work.glob("*.safetensors"))
    yield NativeBackend(plan, Weights(files), 2)
    by_torch = [choice.model_dump() | {"impl": "float"} for choice in plan.kernels]
    yield CpuBackend(Plan.model_validate(plan.model_dump() | {"kernels": by_torch}), Weights(files))


def _batch(tokens: list[list[int]], cached: list[int], tables: list[list[int]]) -> Batch:
    news = [len(part) for part in tokens]
    positions = [at for new, seen in zip(news, cached, strict=True) for at in range(seen, seen + new)]
    slots = [table[at // BLOCK] * BLOCK + at % BLOCK for new, seen, table in zip(news, cached, tables, strict=True)
             for at in range(seen, seen + new)]
    return Batch(torch.tensor([token for part in tokens for token in part]), torch.tensor(positions),
                 torch.tensor(slots), torch.tensor(news).cumsum(0) - 1, tables,
                 [new + seen for new, seen in zip(news, cached, strict=True)], news)


def engine_logits(backend: Backend, texts: list[list[int]], following: list[list[int]], chunk: int) -> torch.Tensor:
    """[sequences, 1 + steps, vocabulary]: each prompt in chunks, then every sequence's next token in one step."""
    steps = len(following[0])
    width = -(-(max(map(len, texts)) + steps) // BLOCK)
    tables = [list(range(row, row + width * len(texts), len(texts))) for row in range(len(texts))]

    def run(tokens: list[list[int]], cached: list[int], which: list[int]) -> torch.Tensor:
        context = backend.context(_batch(tokens, cached, [tables[row] for row in which]))
        return backend.head(backend.body(context), context).clone()  # type: ignore[arg-type]

    with torch.inference_mode():
        rows = []
        for row, text in enumerate(texts):
            parts = [run([text[first:first + chunk]], [first], [row]) for first in range(0, len(text), chunk)]
            rows.append(parts[-1])
        after = [run([[tokens[step]] for tokens in following], [len(text) + step for text in texts],
                     list(range(len(texts)))) for step in range(steps)]
    return torch.stack([torch.cat(rows), *after], 1)


def differences(folder: Path, work: Path, texts: list[list[int]], following: list[list[int]], *,
                feed: int | None = None, **spec: int) -> dict[str, float]:
    """Largest difference of a logit from transformers', relative to the largest logit, by backend and chunk.

    ``feed``: how many tokens of a prompt transformers gets in its first call (all of them, if not given).
    """
    model = reference(folder)
    wanted = torch.stack([step_logits(model, text, after, first=feed)
                          for text, after in zip(texts, following, strict=True)])
    return {f"{type(backend).__name__} {chunk}": float((engine_logits(backend, texts, following, chunk) - wanted)
                                                       .abs().max() / wanted.abs().max())
            for backend in backends(folder, work, **spec) for chunk in (1000, 13)}

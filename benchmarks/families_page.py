"""The page of model families (docs/families.md), written from the figures of docs/benchmarks/families.json.

The JSON is what was measured; words, supported architectures and rope kinds come from the code as it is now. The page
says nothing else, so that it can be written again at any time (``python -m benchmarks.families --page``), and a test
holds it against what is written here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.families_interpreted import BOUND
from benchmarks.tiny_families import FAMILIES, ORIGINAL, ROPES, WINDOW
from engines.models.families import FAMILIES as ARCHITECTURES
from engines.models.rope import KINDS
from evals.bench import BenchCell, cell_of

#: Tokens of the prompts whose logits are compared, and of the decode steps behind each.
LENGTHS = (1, 5, WINDOW, WINDOW + 1, 60, 90)
STEPS = 6
_LOGITS, _GREEDY, _INT8, _GPU = "logits", "greedy texts equal", "int8 nll - oracle", "interpreter"
_PAGE = """\
# Model families

Written by `python -m benchmarks.families`, not by hand ({device}, commit {commit}): tiny random models of the real
architectures (four layers, a window of {window} tokens, an original context of {original}), in float32 against
transformers, on a CPU.

Supported: {architectures}.
Any other architecture is refused by `plan`, by name, with this list. From GGUF files: `llama` only.

| family | what differs from the plain decoder | largest logit difference | greedy texts equal | int8: NLL minus \
oracle's | GPU path |
|---|---|--:|--:|--:|--:|
{families}

* **Logit differences** are relative to the largest logit: the worst of prompts of {first} to {last} tokens (longrope:
  so many beyond the original context) and {steps} tokens after each with the cache, in one piece and in chunks,
  through the compiled step and through torch's operators. A family whose step is not compiled ends the measurement.
* **int8** is made by `quantize`; the oracle is the module with dequantized weights and fake-quantized activations. Nats
  per token, on random texts.
* The **GPU path** computes in bf16. Its column is the largest difference of a log-probability from the CPU engine, in
  Triton's interpreter: the kernels' arithmetic and the runner, without a GPU. The same comparison on a card, within
  {bound}, is `tests/engines/test_families_gpu.py` (marker `gpu`).
* A window is a mask: layers that have one keep their KV cache at full length all the same, and the plan says so.

## Rope variants

| variant | largest logit difference | greedy texts equal |
|---|--:|--:|
{ropes}

Kinds: {kinds}. Two of them depend on a text's length, which a KV cache cannot follow:

* **dynamic**: position p is rotated as the last one of a text of p + 1 tokens. That is what transformers does while it
  generates; a prompt longer than the original context it rotates by the whole prompt's length. The row above compares
  with transformers fed one token at a time from there on.
* **longrope**: an engine takes the short factors for all its texts if `max_seq_len` is at most the original context,
  else the long ones for all; transformers switches, and computes its cache again, when a text grows past it. The plan
  says which. The row above is of texts beyond the original context; shorter ones equal transformers in an engine that
  was built with `max_seq_len` at the original context (`tests/engines/test_families.py`).
"""


@dataclass(frozen=True, slots=True)
class Row:
    """One family's figures; None where a figure was not asked for."""

    name: str
    logits: float
    same_tokens: int
    texts: int
    int8_nll: float | None = None
    interpreter: float | None = None


def cells(rows: Iterable[Row]) -> list[BenchCell]:
    """Every figure as a benchmark cell."""
    found = []
    for row in rows:
        found += [cell_of(f"families {row.name} {_LOGITS}", [row.logits], "of the largest"),
                  cell_of(f"families {row.name} {_GREEDY}", [float(row.same_tokens)], f"of {row.texts}")]
        if row.int8_nll is not None:
            found.append(cell_of(f"families {row.name} {_INT8}", [row.int8_nll], "nats per token"))
        if row.interpreter is not None:
            found.append(cell_of(f"families {row.name} {_GPU}", [row.interpreter], "nats"))
    return found


def rows_of(written: Iterable[BenchCell], names: Iterable[str]) -> list[Row]:
    """The rows that cells were made of, in the order of ``names``. SystemExit names a figure that is missing."""
    held = {cell.name: cell for cell in written}
    rows = []
    for name in names:
        logits, greedy, int8, gpu = (held.get(f"families {name} {what}") for what in (_LOGITS, _GREEDY, _INT8, _GPU))
        if logits is None or greedy is None:
            raise SystemExit(f"the JSON has no figures of {name}: run python -m benchmarks.families without --page")
        rows.append(Row(name, logits.value, int(greedy.value), int(greedy.unit.removeprefix("of ")),
                        None if int8 is None else int8.value, None if gpu is None else gpu.value))
    return rows


def page_of(path: Path) -> str:
    """docs/families.md, from a document of ``evals.bench.write_cells``."""
    document = json.loads(path.read_bytes())
    written = [BenchCell.model_validate(cell) for cell in document["cells"]]
    measured = [f"| {row.name} | {FAMILIES[row.name].words} | {row.logits:.0e} | {row.same_tokens} of {row.texts} | "
                f"{_figure(row.int8_nll, '+.5f')} | {_figure(row.interpreter, '.3f')} |"
                for row in rows_of(written, FAMILIES)]
    variants = [f"| {row.name} | {row.logits:.0e} | {row.same_tokens} of {row.texts} |"
                for row in rows_of(written, ROPES)]
    return _PAGE.format(window=WINDOW, original=ORIGINAL, first=LENGTHS[0], last=LENGTHS[-1], steps=STEPS, bound=BOUND,
                        device=document["device"], commit=document["commit"][:7],
                        kinds=", ".join(KINDS), architectures=", ".join(f"`{name}`" for name in sorted(ARCHITECTURES)),
                        families="\n".join(measured), ropes="\n".join(variants))


def _figure(value: float | None, form: str) -> str:
    return "not measured" if value is None else format(value, form)

"""Options that several verbs share, and how their values are read."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from calib.choices import KvChoice
from calib.errors import shown
from toolkit.errors import UsageError

if TYPE_CHECKING:
    from engines.plan import Limits

RefArgument = Annotated[str, typer.Argument(metavar="REF", show_default=False, help="Folder, digest prefix, "
                                            "alias:NAME, or a model (what is missing is made).")]
ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", show_default=False,
                                              help="Model folder, .gguf file, name in home, or hub name.")]
RecipeOption = Annotated[str, typer.Option("--recipe", help="bf16, fp8, int8, int4_awq, or a recipe's YAML file.")]
ExplainOption = Annotated[bool, typer.Option("--explain", help="Show each of the recipe's values with the file it is "
                                             "from.")]
KvOption = Annotated[KvChoice, typer.Option("--kv-cache", help="Format of the KV cache.")]
OutOption = Annotated[Path, typer.Option("--out", "-o", help="Folder to write; it must not exist.", show_default=False)]
KeptOption = Annotated[Path | None, typer.Option("--out", help="Folder to write [default: in home].",
                                                 show_default=False)]
KindOption = Annotated[Literal["choice", "exact", "text"] | None, typer.Option(help="What your own .jsonl holds.",
                                                                              show_default=False)]
MemoryOption = Annotated[str | None, typer.Option("--memory", "--gpu-memory", show_default=False,
                                                  help="Cap on the engine's memory, like 2GB or 1500MiB, or a share "
                                                  "of the device's, like 80%.")]
LengthOption = Annotated[int | None, typer.Option("--max-seq-len", min=2, show_default=False,
                                                  help="Where an engine is made: prompt and output tokens of a "
                                                  "sequence [default: 1024, or the model's where that is less].")]
#: Seconds that a server may be told to wait for anything: a day, far within what timers can count.
LONGEST_S = 86_400.0
#: Prompts that may wait: each is held in memory with its tokens.
MOST_QUEUED = 100_000
_UNITS = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def parse_bytes(text: str, also: str = "") -> int:
    """``2GB``, ``1500MiB`` or plain bytes; UsageError otherwise. ``also``: what else the caller takes, for the hint."""
    found = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,9})?)\s*([a-zA-Z]*)", text.strip())
    if not found or found[2].lower() not in _UNITS:
        raise UsageError(f"{text!r} is not a size", f"Write it like 2GB, 1500MiB{also}, or in bytes.")
    return int(Decimal(found[1]) * _UNITS[found[2].lower()])


def parse_memory(text: str, total: Callable[[], int]) -> int:
    """A size as ``parse_bytes`` reads it, or a share of ``total()`` bytes: ``80%``. UsageError otherwise."""
    found = re.fullmatch(r"([0-9]{1,3}(?:\.[0-9]{1,9})?)\s*%", text.strip())
    if not found:
        return parse_bytes(text, ", 80%")
    if not 0 < float(found[1]) <= 100:
        raise UsageError(f"{text!r} is no share of the memory", "Write more than 0% and at most 100%.")
    return int(float(found[1]) / 100 * total())


def check_cells(cells: Iterable[tuple[int, int, int]], limits: Limits) -> None:
    """UsageError for a cell that an engine of these limits cannot run, before prompts are made for it."""
    for batch, isl, osl in cells:
        if batch > limits.max_batch_size:
            raise UsageError(f"cell {batch}x{isl}x{osl}: the engine takes {limits.max_batch_size:,} sequences in one "
                             "step", "Measure smaller batches, or build with a larger --max-batch-size.")
        if isl + osl > limits.max_seq_len:
            raise UsageError(f"cell {batch}x{isl}x{osl}: a sequence of {isl + osl:,} tokens, the engine takes "
                             f"{limits.max_seq_len:,}", "Measure shorter texts, or build with a larger --max-seq-len.")


def parse_cells(text: str) -> list[tuple[int, int, int]]:
    """``1x64x32,8x64x32``: batch x input tokens x output tokens."""
    cells = []
    for part in text.split(","):
        found = re.fullmatch(r"([0-9]{1,9})x([0-9]{1,9})x([0-9]{1,9})", part.strip().lower())
        if not found or not all(map(int, found.groups())):
            raise UsageError(f"{shown(part)} is not a cell", "Write batch x input x output, like 8x64x32.")
        cells.append((int(found[1]), int(found[2]), int(found[3])))
    return cells

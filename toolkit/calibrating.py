"""Options that ``plan`` and ``quantize`` share: what is planned with them is what is then done with them."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from toolkit.errors import UsageError
from toolkit.options import parse_bytes

Layerwise = Literal["auto", "on", "off"]
LayerwiseOption = Annotated[Layerwise, typer.Option("--layerwise", help="Calibrate one layer at a time: the same "
                            "checkpoint in the memory of a layer. auto: where the whole pass would exceed --memory.")]
BoundOption = Annotated[str | None, typer.Option("--memory", show_default=False, help="Bound on calibration's memory, "
                                                 "like 8GB [default: 60 % of what is free].")]
TpOption = Annotated[int, typer.Option("--tp", min=1, help="Devices that the result will be cut over: groups must "
                                       "still divide.")]
RowsOption = Annotated[int, typer.Option("--rows", min=1, help="Packed rows of calibration text.")]
LengthOption = Annotated[int, typer.Option("--length", min=8, help="Tokens of a row.")]


def bound_of(memory: str | None) -> int | None:
    """Bytes of ``--memory``; UsageError when it is no size, or none."""
    bound = None if memory is None else parse_bytes(memory)
    if bound == 0:
        raise UsageError(f"--memory {memory} leaves nothing to calibrate in", "Give a size such as 16GB.")
    return bound

"""LLM for users: a model's name, a checkpoint or an engine; what is missing is calibrated and built once.

    from toolkit import LLM, SamplingParams

    with LLM("SmolLM2-135M-Instruct", recipe="int8") as llm:
        print(llm.generate("The sky is", SamplingParams(max_tokens=8))[0].outputs[0].text)

Made engines are kept in home under everything they depend on (the model's content, recipe, data, limits, device and
versions), so the second time opens at once, another model under the same name is made anew, and of two processes that
start together one makes and one waits. Home is the user data folder unless ``home`` is given; no environment variable
is read here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from pydantic import ValidationError

from calib.errors import name_hint, shown
from calib.faults import fault_words
from calib.progress import Report
from engines import llm as engine_llm
from engines.request import SamplingParams
from toolkit.console import Watcher
from toolkit.errors import UsageError
from toolkit.home import find_home
from toolkit.job import EngineJob, Limits
from toolkit.making import engine_of
from toolkit.stages import Workshop
from toolkit.store import RunStore

__all__ = ["LLM", "SamplingParams"]


Record = TypeVar("Record", EngineJob, Limits)
_GIVE = 'Write it like LLM("SmolLM2-135M-Instruct", recipe="int8").'


def _record(kind: type[Record], values: Mapping[str, Any]) -> Record:
    """The record that options spell. UsageError names the option, what it must be, and the options there are."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        hint = name_hint(name, ("recipe", "kv_cache", "home", "offline", "report", *Limits.model_fields)) if (
            first["type"] == "extra_forbidden") else f"Correct {name}, or leave it out for the default."
        raise UsageError(f"LLM: {name} {fault_words(first)}", hint) from error


class LLM(engine_llm.LLM):
    """An open engine; see ``engines.llm.LLM`` for generate, stream, loglikelihood, stats and close.

    ``ref``: engine or checkpoint folder, digest prefix, ``alias:NAME``, or a model. ``recipe`` and ``kv_cache`` apply
    to a model, ``limits`` (max_seq_len, max_batch_size, ...) to whatever is built; given for what is already made
    they are refused, never ignored. What has to be made shows its progress on stderr, unless ``report`` takes it
    (``calib.progress.silent`` shows none).
    """

    def __init__(self, ref: str | Path, *, recipe: str | None = None, kv_cache: str | None = None,
                 home: Path | str | None = None, offline: bool = False,
                 report: Report | None = None, **limits: Any) -> None:
        for name, value in (("ref", ref), ("home", home), ("recipe", recipe)):
            if not isinstance(value, str | Path) and (name == "ref" or value is not None):
                raise UsageError(f"{name} is {shown(value)}, not a text or a path", _GIVE)
        if not str(ref):
            raise UsageError("ref is an empty text", _GIVE)
        if not isinstance(offline, bool):
            raise UsageError(f"offline is {shown(offline)}, not True or False", "Write offline=True.")
        if report is not None and not callable(report):
            raise UsageError(f"report is {shown(report)}, which cannot be called",
                             "Give a function that takes a Progress, like calib.progress.silent.")
        place = find_home(Path(home) if home is not None else None)
        asked = {"recipe": str(recipe or "bf16"), "kv_cache": "bf16" if kv_cache is None else kv_cache}
        wanted = None if recipe is None and kv_cache is None else _record(EngineJob, asked)
        bounds = _record(Limits, {name: int(value) if isinstance(value, np.integer) else value
                                  for name, value in limits.items()}) if limits else None
        with RunStore(place.store) as store, Watcher() as watch:
            engine = engine_of(Workshop(place, store, report or watch, offline), str(ref), wanted, bounds)
        super().__init__(engine)

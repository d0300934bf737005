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

from pathlib import Path
from typing import Any

from calib.progress import Report
from engines import llm as engine_llm
from engines.request import SamplingParams
from toolkit.console import Watcher
from toolkit.home import find_home
from toolkit.job import EngineJob, Limits
from toolkit.making import engine_of
from toolkit.stages import Workshop
from toolkit.store import RunStore

__all__ = ["LLM", "SamplingParams"]


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
        place = find_home(Path(home) if home is not None else None)
        wanted = None
        if recipe is not None or kv_cache is not None:
            wanted = EngineJob.model_validate({"recipe": recipe or "bf16", "kv_cache": kv_cache or "bf16"})
        with RunStore(place.store) as store, Watcher() as watch:
            engine = engine_of(Workshop(place, store, report or watch, offline), str(ref), wanted,
                               Limits.model_validate(limits) if limits else None)
        super().__init__(engine)

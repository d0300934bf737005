"""The face of the toolkit: command line, jobs, store, reports, releases, and ``LLM`` for Python users.

``from toolkit import LLM, SamplingParams`` is all a program needs. Both names are resolved on first use, so importing
``toolkit`` (as the command line does at every start) loads neither torch nor pydantic.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toolkit.version import __version__

if TYPE_CHECKING:
    from engines.request import SamplingParams
    from toolkit.llm import LLM

__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from toolkit.llm import LLM

        return LLM
    if name == "SamplingParams":
        from engines.request import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'toolkit' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)

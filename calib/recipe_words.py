"""What a wrong recipe is told: where the fault is, in the keys that were written, and what to write there.

pydantic's places hold words that nobody wrote (the kind it took a granularity for, ``[key]`` for a key itself), and a
key inside a grid needs an example of its own: ``{kind: group, size: 128}`` helps whoever wrote a size of 0, the line
of another kind of grid does not.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from calib.errors import name_hint
from calib.faults import fault_words
from calib.scheme import Frozen, Grid, PerBlock, PerChannel, PerGroup, PerTensor, PerToken

#: How each key is written, for whoever wrote it otherwise.
WRITTEN = {"name": "my-recipe", "summary": "what it is for", "method": "max", "layout": "compressed-tensors",
           "weight": "{dtype: int8, granularity: {kind: channel}}",
           "activation": "{dtype: int8, granularity: {kind: token}, dynamic: true}", "group_sizes": "[128, 64, 32]",
           "alphas": "[0, 0.5, 0.7]", "alpha_step": "0.1", "clip_ratios": "[1.0, 0.95, 0.9]", "damping": "0.01",
           "act_order": "static", "keep": "['*.down_proj']", "protect": "2", "raised": "{int8: ['*.down_proj']}",
           "lm_head": "int8", "rows": "16", "choose_tokens": "2048", "seed": "0"}
_GRIDS = ("weight", "activation")
_KINDS: dict[str, type[Frozen]] = {
    "tensor": PerTensor, "channel": PerChannel, "token": PerToken, "group": PerGroup, "block": PerBlock}
_KIND_WRITTEN = {"tensor": "{kind: tensor}", "channel": "{kind: channel}", "token": "{kind: token}",
                 "group": "{kind: group, size: 128}", "block": "{kind: block, rows: 128, cols: 128}"}


def first_fault(faults: Iterable[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The fault to tell: an unknown key before the missing one that it was meant to be."""
    faults = list(faults)
    return next((fault for fault in faults if fault["type"] == "extra_forbidden"), faults[0])


def place_of(fault: Mapping[str, Any]) -> list[str]:
    """The keys on the way to a fault, as they stand in the file."""
    place = [str(part) for part in fault["loc"]]
    if _kind(place):
        del place[2]
    return [part for part in place if part != "[key]"]


def words_of(fault: Mapping[str, Any]) -> str:
    """What is wrong there; of an unknown or missing key of a granularity also with which kind."""
    kind = _kind([str(part) for part in fault["loc"]])
    tails = {"extra_forbidden": f" of kind {kind!r}", "missing": f" in kind {kind!r}"}
    return fault_words(fault) + (tails.get(str(fault["type"]), "") if kind else "")


def hint_of(fault: Mapping[str, Any], keys: Iterable[str]) -> str:
    """What to do about a value: the keys that its place has, and how it is written. ``keys``: those of a recipe."""
    place, kind = place_of(fault), _kind([str(part) for part in fault["loc"]])
    unknown = fault["type"] == "extra_forbidden"
    if unknown and len(place) == 1:
        return name_hint(place[0], ("extends", *keys))
    said = f"granularity: {_KIND_WRITTEN[kind]}" if kind else f"{place[0]}: {WRITTEN[place[0]]}"
    if unknown:
        known = _KINDS[kind].model_fields if kind else Grid.model_fields
        return f"{name_hint(place[-1], known)} Write it like `{said}`."
    if fault["type"] == "missing" and len(place) == 1:
        return f"Write it like `{said}`, or start from another recipe: `extends: int8`."
    if len(place) > 1 and place[0] in _GRIDS and place[1] == "granularity" and not kind:
        return f"Write it like `{said}`. Kinds: {', '.join(f'`{written}`' for written in _KIND_WRITTEN.values())}."
    return f"Write it like `{said}`."


def name_of_file(path: Path) -> str:
    """A recipe's name as its file gives it: in small letters, with a hyphen for what a name cannot hold."""
    return re.sub(r"[^a-z0-9_.-]+", "-", path.stem.lower()).lstrip("-_.")[:64]


def _kind(place: list[str]) -> str | None:
    """The kind that a granularity's keys were read as."""
    inside = len(place) > 2 and place[0] in _GRIDS and place[1] == "granularity" and place[2] in _KINDS
    return place[2] if inside else None

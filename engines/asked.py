"""What callers from Python hand in: prompts, ids and settings, taken when they are what they should be.

Python turns 1.7, '3' and True into a whole number without a word, so a list of probabilities or of words would be
generated from as token ids. Here a token id is an ``int`` (or numpy's or torch's integer of any width), and whatever
else stands in its place is a UsageError with the value, and with what is written instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

import numpy as np
import torch

from calib.errors import UsageError, shown
from engines.numbers import whole

_PROMPTS = ("Give a text, a list of texts, or a list with a list of token ids for each prompt: "
            "generate([[1, 2, 3]]).")
_IDS = "Token ids are whole numbers of this model's tokenizer, like [1, 2, 3]."


def prompts_of(prompts: Any) -> list[str | list[int]]:
    """Texts, and token ids as lists of Python's ints. UsageError names the prompt and the value that is neither."""
    if isinstance(prompts, str):
        return [_text(prompts, "the prompt")]
    if isinstance(prompts, np.ndarray | torch.Tensor):
        if len(prompts.shape) != 2:
            raise UsageError(f"prompts are an array of shape {list(prompts.shape)}", _PROMPTS)
        prompts = list(prompts)
    if isinstance(prompts, bytes | bytearray) or not isinstance(prompts, Sequence):
        raise UsageError(f"prompts are {shown(prompts)}", _PROMPTS)
    if any(isinstance(one, int | np.integer) for one in prompts):
        raise UsageError(f"prompts are {shown(prompts)}: ids of one prompt stand in a list of their own", _PROMPTS)
    return [_text(one, f"prompt {at}") if isinstance(one, str) else token_ids(one, f"prompt {at}")
            for at, one in enumerate(prompts)]


def prompt_of(prompt: Any) -> str | list[int]:
    """One prompt: a text, or token ids."""
    return _text(prompt, "the prompt") if isinstance(prompt, str) else token_ids(prompt, "the prompt")


def token_ids(ids: Any, what: str) -> list[int]:
    """A list of Python's ints from a list or an array of one dimension. UsageError names the value that is none."""
    if isinstance(ids, np.ndarray | torch.Tensor):
        if len(ids.shape) != 1 or not _integral(ids):
            raise UsageError(f"{what} is an array of {ids.dtype} {list(ids.shape)}, not of token ids", _IDS)
        return [int(one) for one in ids.tolist()]
    if isinstance(ids, str | bytes | bytearray | Mapping | Set) or not isinstance(ids, Sequence):
        raise UsageError(f"{what} is {shown(ids)}, not a list of token ids", _IDS)
    if set(map(type, ids)) <= {int}:  # the usual case, without a loop in Python
        return list(ids)
    found = []
    for one in ids:
        try:
            found.append(whole(one))
        except ValueError as error:
            raise UsageError(f"{what} holds {shown(one)}, which is no token id", _IDS) from error
    return found


def id_rows(ids: Any, what: str) -> np.ndarray:
    """int64 of any shape from an array or nested lists of whole numbers. UsageError where they are none."""
    try:
        found = np.asarray(ids)
    except (ValueError, TypeError, RuntimeError) as error:
        raise UsageError(f"{what} is {shown(ids)}, not an array of token ids", "Give int64 ids, [n - 1, k].") from error
    if found.size and found.dtype.kind not in "iu":
        first = shown(found.reshape(-1)[0].item())
        raise UsageError(f"{what} holds {first} ({found.dtype}), which is no token id", _IDS)
    return found.astype(np.int64)


def _integral(array: np.ndarray | torch.Tensor) -> bool:
    if isinstance(array, np.ndarray):
        return array.dtype.kind in "iu"
    return not (array.is_floating_point() or array.is_complex() or array.dtype == torch.bool)


def _text(text: str, what: str) -> str:
    at = next((at for at, character in enumerate(text) if "\ud800" <= character <= "\udfff"), None)
    if at is not None:
        raise UsageError(f"{what} holds half of a surrogate pair ({text[at]!r} at {at}), which is no character",
                         "Decode the text with errors='replace', or take it out.")
    return text

"""What all requests' records are made of, and how a wrong one is told.

A body of some megabytes may hold a million entries that are all wrong, and pydantic would write an error for each while
nobody else is served. So lists end at their first wrong entry (``SETTLED``), lists and objects have a length that is
looked at before what is in them, and of unknown fields the first one is an error (``Part``).
"""

from __future__ import annotations

import functools
import re
from typing import Any, ClassVar, TypeVar

from pydantic import BeforeValidator, ValidationError, model_validator

from calib.errors import UsageError, shown
from calib.scheme import Frozen
from engines.request import SETTLED, SamplingParams
from toolkit.serve.faults import ApiError, bad

__all__ = ["DEFAULTS", "PROMPT_FORMS", "SETTLED", "Part", "Record", "bounded", "listed", "refusal", "validated"]

Record = TypeVar("Record", bound=Frozen)
PROMPT_FORMS = "a string, a list of strings, a list of token ids (0 or more), or a list of such lists"
#: What need not be validated, as it was not asked for.
DEFAULTS = {name: field.get_default(call_default_factory=True) for name, field in SamplingParams.model_fields.items()}


def bounded(most: int) -> BeforeValidator:
    """An object's most entries, looked at before they are."""
    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > most:
            raise ValueError(f"has {len(value)} entries; at most {most} are allowed")
        return value
    return BeforeValidator(check)


def listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class Part(Frozen):
    """Base of what requests hold. null is "not given", as in OpenAI's API, wherever a field may be left out."""

    #: Fields of OpenAI's that are not served, and that its clients send as null.
    only_null: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def _given(cls, value: Any) -> Any:
        """The fields that are given, and of those that are not known the first."""
        if not isinstance(value, dict):
            return value
        known = cls._names()
        if value.keys() <= known and None not in value.values():
            return value
        strange = next((name for name, its in value.items()
                        if name not in known and (its is not None or name not in cls.only_null)), None)
        return {name: its for name, its in value.items() if name == strange or (name in known and its is not None)}

    @classmethod
    @functools.cache
    def _names(cls) -> frozenset[str]:
        return frozenset(field.alias or name for name, field in cls.model_fields.items())


def validated(kind: type[Record], value: Any, *, strict: bool = False) -> Record:
    """A record, or an ApiError 400 that names the first field that is wrong. ``strict``: "1" is no number."""
    try:
        return kind.model_validate(value, strict=strict)
    except ValidationError as error:
        raise refusal(error) from error
    except UsageError as error:  # SamplingParams says it in its own words; its cause knows the parameter
        if isinstance(error.__cause__, ValidationError):
            raise refusal(error.__cause__) from error
        raise


def refusal(error: ValidationError) -> ApiError:
    """pydantic's complaint as OpenAI's error: the parameter, what is wrong, and what was found."""
    first = error.errors(include_url=False)[0]
    if first["loc"][:1] == ("prompt",) and len(first["loc"]) > 1:  # of four forms, what one would have to be is no help
        return bad(f"prompt: must be {PROMPT_FORMS}", "prompt")
    named = [str(part) for part in first["loc"]]
    place = ".".join(part for part in named if not part.startswith(("list[", "function-", "constr", "literal[")))
    place = place[:200]  # (an unknown field's name may be as long as the body)
    if first["type"] == "extra_forbidden":
        return bad(f"unknown or unsupported parameter: {place}", place, "unknown_parameter")
    message = first["msg"].removeprefix("Value error, ")
    if not place:  # of several parameters together, in words that have the values
        return bad(message, next((word for word in re.findall(r"[a-z_]+", message) if word in DEFAULTS), None))
    return bad(f"{place}: {message} (found {shown(first.get('input'))})", place)

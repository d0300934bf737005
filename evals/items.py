"""What is judged: texts to score, questions with choices, and questions whose answer is written out.

``id`` is the sha256 of an item's content, so an item cannot change under its name and two reports that judged "the same
item" really did. ``document`` names what a text or question was cut from: intervals are clustered by it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import Field, ValidationError, model_validator

from calib.artifact import canonical_json, sha256_hex
from calib.scheme import Frozen
from evals.errors import DataError


class Text(Frozen):
    """A stretch of prose to be scored. Texts that share a ``document`` are one cluster."""

    id: str
    text: str = Field(min_length=1)
    document: str = Field(min_length=1)

    def expected_id(self) -> str:
        return sha256_hex(canonical_json({"text": self.text, "document": self.document}))


class Question(Frozen):
    """A multiple-choice question; ``answer`` is the index of the right choice. ``task`` is its file's stem."""

    id: str
    task: str
    question: str = Field(min_length=1)
    choices: tuple[str, ...] = Field(min_length=2)
    answer: int = Field(ge=0)
    document: str | None = None

    @model_validator(mode="after")
    def _answerable(self) -> Question:
        if self.answer >= len(self.choices):
            raise ValueError(f"answer {self.answer} is not one of {len(self.choices)} choices")
        if len(set(self.choices)) < len(self.choices) or not all(choice.strip() for choice in self.choices):
            raise ValueError("choices must be distinct and not blank")
        return self

    def expected_id(self) -> str:
        return sha256_hex(canonical_json({"question": self.question, "choices": list(self.choices),
                                          "answer": self.answer}))


class Exact(Frozen):
    """A question whose answer is generated and compared: a number, or a word or phrase (``evals.exact``)."""

    id: str
    task: str
    question: str = Field(min_length=1)
    answer: str = Field(min_length=1)
    document: str | None = None

    @model_validator(mode="after")
    def _answerable(self) -> Exact:
        if not self.answer.strip():
            raise ValueError("the answer must not be blank")
        return self

    def expected_id(self) -> str:
        return sha256_hex(canonical_json({"question": self.question, "answer": self.answer}))


Asked = Question | Exact
Record = TypeVar("Record", Text, Question, Exact)


def checked(kind: type[Record], row: Mapping[str, Any], where: str) -> Record:
    """The row as a record; DataError with place and field otherwise."""
    try:
        return kind.model_validate(row)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"])) or "row"
        raise DataError(f"{where}: {field}: {first['msg']}", "Correct the row and prepare the data again.") from error


def kind_of(row: Mapping[str, Any]) -> type[Question] | type[Exact]:
    """A row with choices is multiple choice; one whose answer is written out is an exact match."""
    return Exact if "choices" not in row and isinstance(row.get("answer"), str) else Question


def named(row: Mapping[str, Any], kind: type[Record], where: str) -> Record:
    """The checked record, its id the hash of its content (DataError otherwise)."""
    record = checked(kind, row, where)
    if record.id != record.expected_id():
        raise DataError(f"{where}: id {record.id[:12]!r} is not the hash of its content ({record.expected_id()[:12]})",
                        "Write data with evals.data.write_folder, which computes the ids.")
    return record


def with_id(row: Mapping[str, Any], task: str | None, where: str) -> dict[str, Any]:
    """The row (a text's without ``task``) with its computed id in front; its fields are checked as on loading."""
    content = {key: value for key, value in row.items() if key != "id"}
    if task is None:
        return {"id": checked(Text, {**content, "id": ""}, where).expected_id(), **content}
    asked = {**content, "id": "", "task": task}
    record: Asked = checked(Exact, asked, where) if kind_of(row) is Exact else checked(Question, asked, where)
    return {"id": record.expected_id(), **content}


def fingerprint(item: Text | Asked) -> tuple[str, str]:
    """(kind, content) that two copies of an item share, whatever their case, their spacing or the order of choices."""
    if isinstance(item, Text):
        return "text", folded(item.text)
    return "question", question_key(item.question, item.choices if isinstance(item, Question) else ())


def question_key(question: str, choices: Iterable[str]) -> str:
    return f"{folded(question)} {sorted(map(folded, choices))}"


def folded(text: str) -> str:
    """The text but for case and the kind and number of blanks."""
    return " ".join(text.casefold().split())


def texts_of(items: Sequence[Text | Asked]) -> list[str]:
    """Everything that a model is shown of these items, for overlap checks against calibration texts."""
    shown: list[str] = []
    for item in items:
        if isinstance(item, Text):
            shown.append(item.text)
        elif isinstance(item, Question):
            shown += [f"{item.question} {choice}" for choice in item.choices]
        else:
            shown.append(f"{item.question} {item.answer}")
    return shown

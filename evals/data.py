"""A prepared evaluation folder: texts to score, questions to answer, and a manifest that says where they came from.

Layout (everything UTF-8, one JSON object a line)::

    manifest.json    {"files": {NAME: {"sha256", "source", "licence", "rows"}}}; sha256 of the file's bytes
    texts.jsonl      {"id", "text", "document"}
    <task>.jsonl     {"id", "question", "choices": [...], "answer": index, "document"?}

``id`` is the sha256 of the row's content (``text_id``, ``question_id``), so an item cannot change under its name and
two reports that judged "the same item" really did. ``document`` names what a text or question was cut from: intervals
are clustered by it, and splits are made by it (``part_of``), so no document lies in two splits.

Order. Items are never "the first N of the file": public sets are sorted in ways that make their head easier or harder
(the first 200 GSM8K questions score .68 where the whole scores .642). ``shuffled`` sorts by sha256(seed, id), which
needs no random state, does not depend on the order of the file, and *nests*: the first 200 of a look are also the
first 200 of the next look at 400, which the sequential gate relies on.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from pydantic import Field, ValidationError, model_validator

from calib.artifact import MANIFEST, canonical_json, sha256_hex, write_atomic
from calib.errors import UnknownNameError
from calib.scheme import Frozen
from evals.errors import DataError, DataMissingError

TEXTS = "texts.jsonl"
_TASK_NAME = re.compile(r"[a-z0-9][a-z0-9_]{0,63}")


class Text(Frozen):
    """A stretch of prose to be scored. Texts that share a ``document`` are one cluster."""

    id: str
    text: str = Field(min_length=1)
    document: str = Field(min_length=1)


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


class FileFacts(Frozen):
    """Where a data file came from and what may be done with it. ``rows`` is checked on loading."""

    sha256: str
    source: str = Field(min_length=1)
    licence: str = Field(min_length=1)
    rows: int = Field(ge=1)


class DataManifest(Frozen):
    files: dict[str, FileFacts] = Field(min_length=1)


class _HasId(Protocol):
    @property
    def id(self) -> str: ...


Identified = TypeVar("Identified", bound=_HasId)


def text_id(text: str, document: str) -> str:
    return sha256_hex(canonical_json({"text": text, "document": document}))


def question_id(question: str, choices: Sequence[str], answer: int) -> str:
    return sha256_hex(canonical_json({"question": question, "choices": list(choices), "answer": answer}))


def part_of(document: str, shares: Mapping[str, int]) -> str:
    """The split a document belongs to, by hash: {"choose": 1, "gate": 4} sends one in five to ``choose``.

    It depends on the document alone, so data that is prepared again, in another order or with more documents, keeps
    every document where it was.
    """
    if not shares or any(share <= 0 for share in shares.values()):
        raise DataError(f"shares {dict(shares)} cannot split anything", "Give each split a positive share.")
    point = int.from_bytes(hashlib.sha256(b"split\0" + document.encode()).digest()[:8], "big") % sum(shares.values())
    for name, share in shares.items():
        if point < share:
            return name
        point -= share
    raise AssertionError("shares were exhausted")


def shuffled(items: Iterable[Identified], seed: int) -> list[Identified]:
    """Seeded order that depends on ids only and nests: a longer sample begins with the shorter one."""
    return sorted(items, key=lambda item: hashlib.sha256(f"{seed}\0{item.id}".encode()).digest())


def sample(items: Iterable[Identified], limit: int | None, seed: int) -> list[Identified]:
    """``limit`` random items (all when None). More than there are is an error, not a silent shortfall."""
    ordered = shuffled(items, seed)
    if limit is None:
        return ordered
    if limit < 1 or limit > len(ordered):
        raise DataError(f"{limit} items were asked for and {len(ordered)} exist",
                        f"Ask for between 1 and {len(ordered)}, or prepare more data.")
    return ordered[:limit]


@dataclass(frozen=True, slots=True)
class EvalData:
    """A checked folder in memory. ``digest`` binds every file's content; ``licences`` maps file to licence."""

    path: Path
    texts: list[Text]
    items: list[Question]
    digest: str
    licences: dict[str, str]

    @property
    def tasks(self) -> list[str]:
        return sorted({item.task for item in self.items})

    def task(self, name: str) -> list[Question]:
        """All questions of a task; UnknownNameError with the near match otherwise."""
        found = [item for item in self.items if item.task == name]
        if not found:
            raise UnknownNameError("task", name, self.tasks)
        return found

    @classmethod
    def load(cls, folder: Path | str) -> EvalData:
        """Read and check a folder. DataError names the file and line of the first fault."""
        folder = Path(folder)
        manifest = _read_manifest(folder)
        texts: list[Text] = []
        items: list[Question] = []
        for name, facts in sorted(manifest.files.items()):
            rows = _read_rows(folder / name, facts)
            if name == TEXTS:
                texts = [_text(row, f"{name} line {n}") for n, row in enumerate(rows, 1)]
            else:
                task = _task_of(name)
                items += [_question(row, task, f"{name} line {n}") for n, row in enumerate(rows, 1)]
        _refuse_copies(texts, items)
        digest = sha256_hex(canonical_json({name: facts.sha256 for name, facts in manifest.files.items()}))
        return cls(folder, texts, items, digest, {name: facts.licence for name, facts in manifest.files.items()})


def _read_manifest(folder: Path) -> DataManifest:
    path = folder / MANIFEST
    if not path.is_file():
        raise DataMissingError(f"{folder} is no prepared data: it has no {MANIFEST}", "Run `toolkit data prepare`.")
    try:
        manifest = DataManifest.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise DataError(f"{path}: {error.errors()[0]['loc']}: {error.errors()[0]['msg']}",
                        "Prepare the data again.") from error
    unlisted = sorted(file.name for file in folder.glob("*.jsonl") if file.name not in manifest.files)
    if unlisted:
        raise DataError(f"{folder} holds {unlisted[0]}, which its {MANIFEST} does not list",
                        "Remove the file, or prepare the data again so that source and licence are written down.")
    return manifest


def _read_rows(path: Path, facts: FileFacts) -> list[dict[str, Any]]:
    if not path.is_file():
        raise DataMissingError(f"{path} is missing", "Run `toolkit data prepare`.")
    content = path.read_bytes()
    found = sha256_hex(content)
    if found != facts.sha256:
        raise DataError(f"{path} has sha256 {found[:12]}, its manifest says {facts.sha256[:12]}",
                        "The file was changed; prepare the data again.")
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(content.decode().removesuffix("\n").split("\n"), 1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(f"{path.name} line {number} is not JSON: {error.msg}", "One JSON object a line.") from error
        if not isinstance(row, dict):
            raise DataError(f"{path.name} line {number} is not an object", "One JSON object a line.")
        rows.append(row)
    if len(rows) != facts.rows:
        raise DataError(f"{path} has {len(rows)} rows, its manifest says {facts.rows}", "Prepare the data again.")
    return rows


def _text(row: Mapping[str, Any], where: str) -> Text:
    text = _checked(Text, row, where)
    return _named(text, text_id(text.text, text.document), where)


def _question(row: Mapping[str, Any], task: str, where: str) -> Question:
    question = _checked(Question, {**row, "task": task}, where)
    return _named(question, question_id(question.question, question.choices, question.answer), where)


Record = TypeVar("Record", Text, Question)


def _checked(kind: type[Record], row: Mapping[str, Any], where: str) -> Record:
    try:
        return kind.model_validate(row)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"])) or "row"
        raise DataError(f"{where}: {field}: {first['msg']}", "Correct the row and prepare the data again.") from error


def _named(record: Record, expected: str, where: str) -> Record:
    if record.id != expected:
        raise DataError(f"{where}: id {record.id[:12]!r} is not the hash of its content ({expected[:12]})",
                        "Write data with evals.data.write_folder, which computes the ids.")
    return record


def _task_of(name: str) -> str:
    stem = name.removesuffix(".jsonl")
    if stem == name or not _TASK_NAME.fullmatch(stem):
        raise DataError(f"{name!r} is no name for a task file", "Use lower-case letters, digits and _, then .jsonl.")
    return stem


def _refuse_copies(texts: Sequence[Text], items: Sequence[Question]) -> None:
    contents = [("text", " ".join(text.text.split())) for text in texts]
    contents += [("question", " ".join(f"{item.question} {sorted(item.choices)}".split())) for item in items]
    twice = [content for content, count in Counter(contents).items() if count > 1]
    if twice:
        what, content = twice[0]
        raise DataError(f"{len(twice)} items occur more than once, the first is the {what} {content[:80]!r}",
                        "A doubled item counts twice and narrows the interval falsely; remove the copies.")


def refuse_overlap(one: Iterable[Text], other: Iterable[Text], what: str) -> None:
    """DataError when two splits share a document or a text (case and spacing aside)."""
    def flat(text: Text) -> str:
        return " ".join(text.text.lower().split())
    ones = list(one)
    documents, texts = {text.document for text in ones}, {flat(text) for text in ones}
    shared = [text for text in other if text.document in documents or flat(text) in texts]
    if shared:
        raise DataError(f"{what} overlap in {len(shared)} texts, the first is of document {shared[0].document!r}",
                        "Split by document with evals.data.part_of.")


@dataclass(frozen=True, slots=True)
class Source:
    """Rows for one file with where they came from. Rows lack ``id``: it is computed from their content."""

    rows: Sequence[Mapping[str, Any]]
    source: str
    licence: str


def write_folder(folder: Path | str, files: Mapping[str, Source]) -> EvalData:
    """Write a prepared folder and load it back through every check.

    ``files`` maps ``texts`` to rows {"text", "document"} and each task's name to rows {"question", "choices",
    "answer"} (+ "document" when questions share a passage). Data files first, the manifest last: a folder that was
    interrupted has none and is refused. Raises DataError (empty, doubled or malformed rows) with nothing written.
    """
    folder = Path(folder)
    contents: dict[str, bytes] = {}
    facts: dict[str, FileFacts] = {}
    texts: list[Text] = []
    items: list[Question] = []
    for stem, source in files.items():
        name = f"{stem}.jsonl"
        if not source.rows:
            raise DataError(f"{name} would have no rows", "An empty file would be averaged as if it had said nothing.")
        records = [_with_id(name, row, f"{name} row {n}") for n, row in enumerate(source.rows, 1)]
        if name == TEXTS:
            texts = [_text(record, name) for record in records]
        else:
            items += [_question(record, _task_of(name), name) for record in records]
        contents[name] = b"".join(canonical_json(record) + b"\n" for record in records)
        facts[name] = FileFacts(sha256=sha256_hex(contents[name]), source=source.source, licence=source.licence,
                                rows=len(records))
    _refuse_copies(texts, items)
    manifest = DataManifest(files=facts)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MANIFEST).unlink(missing_ok=True)
    for name, content in contents.items():
        write_atomic(folder / name, content)
    write_atomic(folder / MANIFEST, manifest.model_dump_json(indent=1).encode())
    return EvalData.load(folder)


def _with_id(name: str, row: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The row with its computed id in front; its other fields are checked as they will be on loading."""
    content = {key: value for key, value in row.items() if key != "id"}
    if name == TEXTS:
        text = _checked(Text, {**content, "id": ""}, where)
        return {"id": text_id(text.text, text.document), **content}
    question = _checked(Question, {**content, "id": "", "task": _task_of(name)}, where)
    return {"id": question_id(question.question, question.choices, question.answer), **content}

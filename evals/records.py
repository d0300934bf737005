"""Judgements on disk: one Artifact kind for each record, opened strictly into the record it was.

The record lies in the manifest, so its digest covers every figure in it. Arrays that belong to a record (per-token
values) are files beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
from pydantic import ValidationError
from safetensors.numpy import save_file

from calib.artifact import Artifact
from calib.artifact_writer import ArtifactWriter
from calib.errors import ArtifactError
from calib.scheme import Frozen
from evals.report import EvalReport, LatencySweep, Verdict

Record = TypeVar("Record", bound=Frozen)

FORMAT = 1
#: The artifact kind that holds each record. A baseline holds an EvalReport too and has its own door (fidelity).
KIND: dict[type[Frozen], str] = {EvalReport: "eval-report", LatencySweep: "latency-sweep", Verdict: "verdict"}


def save_record(record: Frozen, out: Path | str, parents: Sequence[str] = (), *, kind: str | None = None,
                arrays: Mapping[str, Mapping[str, np.ndarray]] | None = None, replace: bool = False) -> Artifact:
    """Write a record as an artifact, with ``arrays`` {file name: {tensor name: array}} as safetensors beside it."""
    with ArtifactWriter(out, kind or KIND[type(record)], FORMAT, parents, replace=replace) as writer:
        writer.record = record.model_dump(mode="json")
        for name, tensors in (arrays or {}).items():
            save_file({key: np.ascontiguousarray(value) for key, value in tensors.items()}, writer.folder / name)
    assert writer.artifact is not None
    return writer.artifact


def load_record(path: Path | str, record: type[Record], *, kind: str | None = None) -> Record:
    """The record of an artifact; ArtifactError when it is another kind or its fields are not the record's."""
    artifact = Artifact.open(path, kind or KIND[record], FORMAT)
    try:
        return record.model_validate(artifact.record)
    except ValidationError as error:
        first = error.errors()[0]
        raise ArtifactError(f"{path} does not hold a {record.__name__}: {'.'.join(map(str, first['loc']))}: "
                            f"{first['msg']}", "Make it again with this version of the toolkit.") from error

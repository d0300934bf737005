"""What a gate's baseline was, written down in the user's repository: a small YAML file under review.

A baseline that is made anew in every run can drift unseen: other weights under one name, another library, another
machine, and the gate quietly measures against something worse. So a reference says *who* was judged (digest, numerics,
template), *on what* (data, items, seed, harness), *when* (date, commit), and *what came out*, with intervals.

A gate run by reference makes or finds that baseline and refuses it when anything differs, the figures by more than
float32 programs of one model do. Nothing changes a reference by itself: ``toolkit gate update-reference`` is a command
with a reason, shows the old and the new interval, keeps the hash of what it replaces, and is in the audit log.
"""

from __future__ import annotations

import subprocess
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import yaml
from pydantic import Field, ValidationError

from calib.artifact import canonical_json, sha256_hex, write_atomic
from calib.scheme import Frozen
from calib.yaml_text import read_yaml
from evals.errors import ComparisonError, PolicyError
from evals.report import Accuracy, Estimate, EvalReport
from evals.statistics import clustered_estimate

#: Nats per token, and share of answers, that two correct float32 programs of one model may differ by.
NLL_DRIFT, ANSWER_DRIFT = 1e-3, 0.005
_HEAD = "# Written by `toolkit gate update-reference`; change it by that command only.\n"


class Asked(Frozen):
    """How the baseline is judged: what ``gate`` needs besides the candidate and the policy."""

    baseline: str = Field(min_length=1, description="REF of the unquantized model, or an engine")
    data: str
    kind: str | None = Field(default=None, description="of the user's own .jsonl file; None for a prepared folder")
    tasks: tuple[str, ...] | None
    texts: int = Field(ge=1)
    items: int = Field(ge=1)
    seed: int = Field(ge=0)
    samples: int = Field(ge=0)
    sample_tokens: int = Field(ge=16)


class Reference(Frozen):
    """See the module's docstring. ``previous``: sha256 of the reference that this one replaced."""

    asked: Asked
    digest: str
    numerics: str
    template_sha256: str
    data_digest: str
    harness: dict[str, str]
    n_items: int
    n_texts: int
    nll: Estimate | None
    accuracy: Accuracy | None
    date: str
    commit: str
    reason: str = Field(min_length=1)
    previous: str | None = None

    @property
    def sha256(self) -> str:
        return sha256_hex(canonical_json(self.model_dump(mode="json")))


def mean_nll(report: EvalReport) -> Estimate | None:
    """NLL per token with its interval clustered by document; None without two documents."""
    if not report.texts:
        return None
    return clustered_estimate(np.array([text.nll for text in report.texts]),
                              np.array([float(text.tokens) for text in report.texts]),
                              [text.document or text.id for text in report.texts])


def reference_of(report: EvalReport, asked: Asked, reason: str, *, commit: str, previous: Reference | None = None
                 ) -> Reference:
    return Reference(
        asked=asked, digest=report.target.digest, numerics=report.target.numerics, reason=reason,
        template_sha256=report.target.template_sha256, data_digest=report.data_digest, harness=report.harness,
        n_items=len(report.items), n_texts=len(report.texts), nll=mean_nll(report), accuracy=report.accuracy,
        date=datetime.now(UTC).isoformat(timespec="seconds"), commit=commit,
        previous=previous.sha256 if previous else None)


def refuse_drift(reference: Reference, report: EvalReport) -> None:
    """ComparisonError that names everything in which the baseline is not what the reference says."""
    pairs: list[tuple[str, object, object]] = [
        ("model", reference.digest, report.target.digest), ("data", reference.data_digest, report.data_digest),
        ("numerics", reference.numerics, report.target.numerics),
        ("template", reference.template_sha256, report.target.template_sha256),
        ("questions", reference.n_items, len(report.items)), ("texts", reference.n_texts, len(report.texts))]
    pairs += [(f"harness {name}", reference.harness.get(name), report.harness.get(name))
              for name in sorted({*reference.harness, *report.harness})]
    differ = [f"{what}: {_short(old)} against {_short(new)}" for what, old, new in pairs if old != new]
    for what, old, new, allowed in (("NLL", reference.nll, mean_nll(report), NLL_DRIFT),
                                    ("accuracy", reference.accuracy, report.accuracy, ANSWER_DRIFT)):
        if (old is None) != (new is None) or (old and new and abs(old.value - new.value) > allowed):
            differ.append(f"{what}: {old and f'{old.value:.5f}'} against {new and f'{new.value:.5f}'}")
    if differ:
        raise ComparisonError(f"the baseline is not what its reference of {reference.date} says: {'; '.join(differ)}",
                              "Find out what changed; if it should have, run `toolkit gate update-reference`.")


def _short(value: object) -> str:
    text = str(value)
    return text[:12] if len(text) == 64 else text


def load_reference(path: Path) -> Reference:
    """PolicyError when the file is missing or is no reference."""
    try:
        return Reference.model_validate(read_yaml(path, PolicyError, "Make it with `toolkit gate update-reference`."))
    except ValidationError as error:
        raise PolicyError(f"{path} is no reference: {' '.join(str(error).split())[:200]}",
                          "Restore it, or make it with `toolkit gate update-reference`.") from error


def save_reference(reference: Reference, path: Path) -> None:
    text = _HEAD + yaml.safe_dump(reference.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
    write_atomic(path, text.encode())


def commit_of(folder: Path) -> str:
    """The commit of the checkout that holds ``folder``, with ``+`` when it has changes; ``none`` outside of one."""
    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=True).stdout.strip()
    try:
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return "none"

"""Answers that travel as files: a machine without lm-eval (or without a network) does the scoring::

    record    every score the evaluation will ask for goes into requests.jsonl     (RequestRecorder)
    answer    any Scorer answers them, resumable, into responses.jsonl             (answer_requests)
    judge     the evaluation runs again and finds its scores by content            (RecordedScorer)

A request's key is the hash of its prompt, ``top_k`` and ``at_ids``: a response can only be used for exactly what was
asked, and a missing one is an error. float32 values survive JSON unchanged: they are written with 9 digits.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from calib.artifact import canonical_json, sha256_hex, write_atomic
from calib.progress import Progress, Report, silent
from engines.request import PromptScore
from evals.errors import EvalError
from evals.journal import Journal
from evals.target import Scorer, checked_scores


def request_key(prompt: Sequence[int], top_k: int, at_ids: np.ndarray | None) -> str:
    return sha256_hex(canonical_json([list(map(int, prompt)), top_k, None if at_ids is None else at_ids.tolist()]))


class RequestRecorder:
    """A Scorer that notes what it is asked. Its scores are zeros: whatever is computed from them must be dropped."""

    def __init__(self) -> None:
        self._requests: dict[str, bytes] = {}

    def loglikelihood(self, prompts: Sequence[Sequence[int]], *, top_k: int = 0,
                      at_ids: Sequence[np.ndarray] | None = None) -> list[PromptScore]:
        scores = []
        for i, prompt in enumerate(prompts):
            at = None if at_ids is None else at_ids[i]
            key, n = request_key(prompt, top_k, at), len(prompt) - 1
            self._requests[key] = canonical_json({"key": key, "prompt": list(map(int, prompt)), "top_k": top_k,
                                                  "at_ids": None if at is None else at.tolist()})
            scores.append(PromptScore(
                logprobs=np.zeros(n, np.float32), greedy=np.zeros(n, bool),
                top_ids=np.zeros((n, top_k), np.int32) if top_k else None,
                top_logprobs=np.full((n, top_k), -np.log(max(top_k, 1)), np.float32) if top_k else None,
                at_logprobs=None if at is None else np.full(at.shape, -np.log(at.shape[-1]), np.float32)))
        return scores

    def write(self, path: Path) -> int:
        """Write the requests as JSON Lines; returns how many. EvalError when nothing was asked."""
        if not self._requests:
            raise EvalError("the evaluation asked for nothing", "Give it texts or questions.")
        write_atomic(path, b"".join(line + b"\n" for line in self._requests.values()))
        return len(self._requests)


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                yield json.loads(line)
            except ValueError as error:
                raise EvalError(f"{path} line {number} is not JSON: {error}", "The file was cut off; copy it again."
                                ) from error


def answer_requests(requests: Path, scorer: Scorer, responses: Path, *, key: str, batch: int = 16,
                    report: Report = silent) -> int:
    """Answer a requests file into a responses file (JSON Lines); a killed run goes on. Returns the count.

    ``key`` names the target and its numerics: responses of another target are started over, never mixed.
    """
    waiting = list(_lines(requests))
    total = len(waiting)
    with Journal(responses, key) as journal:
        waiting = [request for request in waiting if request["key"] not in journal.done]
        groups: dict[tuple[int, bool], list[dict[str, Any]]] = {}
        for request in waiting:
            groups.setdefault((request["top_k"], request["at_ids"] is not None), []).append(request)
        for (top_k, has_ids), group in groups.items():
            for begin in range(0, len(group), batch):
                report(Progress("responses", len(journal.done), total, "request"))
                chunk = group[begin:begin + batch]
                at_ids = [np.asarray(request["at_ids"], np.int32) for request in chunk] if has_ids else None
                scores = checked_scores(scorer, [request["prompt"] for request in chunk], top_k=top_k, at_ids=at_ids)
                journal.add({request["key"]: _to_json(score) for request, score in zip(chunk, scores, strict=True)})
    report(Progress("responses", total, total, "request"))
    return total


_FIELDS = {"logprobs": np.float32, "greedy": np.bool_, "top_ids": np.int32, "top_logprobs": np.float32,
           "at_logprobs": np.float32}


def _to_json(score: PromptScore) -> dict[str, Any]:
    """Non-finite values become null, since JSON has none; they are read back as NaN."""
    def plain(values: np.ndarray | None) -> Any:
        if values is None:
            return None
        if values.dtype.kind != "f":
            return values.tolist()
        return [[None if not np.isfinite(v) else float(f"{v:.9g}") for v in row] if values.ndim == 2 else
                (None if not np.isfinite(row) else float(f"{row:.9g}")) for row in values]
    return {name: plain(getattr(score, name)) for name in _FIELDS}


def _from_json(values: dict[str, Any]) -> PromptScore:
    arrays: dict[str, Any] = {name: None if values[name] is None else np.array(values[name], dtype=kind)
                              for name, kind in _FIELDS.items()}
    return PromptScore(**arrays)


class RecordedScorer:
    """Gives the scores of a responses file. ``key`` is what the answering side named itself.

    With ``expected`` another key is an EvalError: answers of one engine must not be booked for another.
    """

    def __init__(self, responses: Path, expected: str | None = None) -> None:
        self._scores: dict[str, Any] = {}
        self.key = ""
        for entry in _lines(responses):
            if "key" in entry:
                self.key = entry["key"]
            else:
                self._scores.update(entry["values"])
        if not self.key or not self._scores:
            raise EvalError(f"{responses} holds no responses", "Answer a requests file into it first.")
        if expected is not None and self.key != expected:
            raise EvalError(f"{responses} was answered by {self.key!r}, not by {expected!r}",
                            "Answer the requests with the engine that is judged.")

    def loglikelihood(self, prompts: Sequence[Sequence[int]], *, top_k: int = 0,
                      at_ids: Sequence[np.ndarray] | None = None) -> list[PromptScore]:
        keys = [request_key(prompt, top_k, None if at_ids is None else at_ids[i]) for i, prompt in enumerate(prompts)]
        missing = [key for key in keys if key not in self._scores]
        if missing:
            raise EvalError(f"{len(missing)} of {len(keys)} requests have no response, the first is {missing[0][:12]}",
                            "Record the requests again with the same data, settings and baseline, and answer all.")
        return [_from_json(self._scores[key]) for key in keys]

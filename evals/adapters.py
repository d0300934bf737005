"""Answers that travel as files: a machine without lm-eval (or without a network) does the scoring and the speaking::

    record    everything the evaluation will ask for goes into requests.jsonl          (RequestRecorder)
    answer    any Scorer (and Generator) answers it, resumable, into responses.jsonl   (answer_requests)
    judge     the evaluation runs again and finds its answers by content               (RecordedAnswers)

A line asks for scores {"key", "prompt", "top_k", "at_ids"} or for a continuation {"key", "prompt", "params"}: the
written answers of exact-match tasks, and the samples of the sanity and length checks. The key is the hash of all that
decides the answer: a response can only be used for exactly what was asked, and a missing one is an error. float32
values survive JSON unchanged: they are written with 9 digits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from calib.artifact import canonical_json, sha256_hex, write_atomic
from calib.json_text import parse_object
from calib.kept import unsealed
from calib.progress import Progress, Report, silent
from engines.request import CompletionOutput, PromptScore, RequestOutput, SamplingParams
from evals.errors import EvalError
from evals.journal import Journal
from evals.target import Generator, Scorer, checked_scores


def request_key(prompt: Sequence[int], top_k: int, at_ids: np.ndarray | None) -> str:
    return sha256_hex(canonical_json([list(map(int, prompt)), top_k, None if at_ids is None else at_ids.tolist()]))


def generation_key(prompt: Sequence[int], params: SamplingParams) -> str:
    return sha256_hex(canonical_json([list(map(int, prompt)), params.model_dump(mode="json")]))


def _each(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if isinstance(params, SamplingParams) or params is None:
        return [params or SamplingParams()] * count
    return list(params)


class RequestRecorder:
    """A Scorer and Generator that notes what it is asked. Its scores are zeros and its answers empty: whatever is
    computed from them must be dropped."""

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

    def generate(self, prompts: Sequence[Sequence[int]],
                 params: SamplingParams | Sequence[SamplingParams] | None = None) -> list[RequestOutput]:
        for prompt, each in zip(prompts, _each(params, len(prompts)), strict=True):
            key = generation_key(prompt, each)
            self._requests[key] = canonical_json({"key": key, "prompt": list(map(int, prompt)),
                                                  "params": each.model_dump(mode="json")})
        return [RequestOutput(list(prompt), [CompletionOutput(0, "", [], None, "length")]) for prompt in prompts]

    def write(self, path: Path) -> int:
        """Write the requests as JSON Lines; returns how many. EvalError when nothing was asked."""
        if not self._requests:
            raise EvalError("the evaluation asked for nothing", "Give it texts or questions.")
        write_atomic(path, b"".join(line + b"\n" for line in self._requests.values()))
        return len(self._requests)


_AGAIN = "The file was cut off or changed; copy it again."
_ASKED = {"key", "prompt"}


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            yield parse_object(line, f"{path} line {number}", EvalError, _AGAIN)


def answer_requests(requests: Path, scorer: Scorer, responses: Path, *, key: str, batch: int = 16,
                    report: Report = silent) -> int:
    """Answer a requests file into a responses file (JSON Lines); a killed run goes on. Returns the count.

    ``key`` names the target and its numerics: responses of another target are started over, never mixed. EvalError when
    text is to be written and ``scorer`` only scores.
    """
    waiting = list(_lines(requests))
    if odd := next((n for n, one in enumerate(waiting, 1) if not set(one) >= _ASKED), None):
        raise EvalError(f"{requests} line {odd} is no request", _AGAIN)
    total = len(waiting)
    with Journal(responses, key) as journal:
        groups: dict[bytes, list[dict[str, Any]]] = {}
        for request in waiting:
            if request["key"] not in journal.done:
                groups.setdefault(_kind(request), []).append(request)
        for group in groups.values():
            for begin in range(0, len(group), batch):
                report(Progress("responses", len(journal.done), total, "request"))
                chunk = group[begin:begin + batch]
                found = _spoken(scorer, chunk) if "params" in chunk[0] else _scored(scorer, chunk)
                journal.add({request["key"]: one for request, one in zip(chunk, found, strict=True)})
    report(Progress("responses", total, total, "request"))
    return total


def _kind(request: dict[str, Any]) -> bytes:
    """Requests of one kind go to the target together."""
    if "params" in request:
        return canonical_json(request["params"])
    return canonical_json([request["top_k"], request["at_ids"] is not None])


def _scored(scorer: Scorer, chunk: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    has_ids = chunk[0]["at_ids"] is not None
    at_ids = [np.asarray(request["at_ids"], np.int32) for request in chunk] if has_ids else None
    return [_to_json(score) for score in
            checked_scores(scorer, [request["prompt"] for request in chunk], top_k=chunk[0]["top_k"],
                           at_ids=at_ids)]


def _spoken(scorer: Scorer, chunk: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    if not isinstance(scorer, Generator):
        raise EvalError(f"the requests ask for written answers, and {type(scorer).__name__} only scores",
                        "Answer them with an engine.")
    params = SamplingParams.model_validate(chunk[0]["params"])
    outputs = scorer.generate([request["prompt"] for request in chunk], params)
    if len(outputs) != len(chunk):
        raise EvalError(f"{len(chunk)} prompts were continued and {len(outputs)} outputs came back",
                        "The generator dropped requests.")
    if wrong := next((one.outputs[0].error for one in outputs if one.outputs[0].finish_reason == "error"), None):
        raise EvalError(f"a prompt could not be continued: {wrong}", "Nothing was written for it; run again.")
    return [{"text": one.outputs[0].text, "token_ids": list(one.outputs[0].token_ids),
             "finish_reason": one.outputs[0].finish_reason} for one in outputs]


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


class RecordedAnswers:
    """Gives the scores and continuations of a responses file. ``key`` is what the answering side named itself.

    With ``expected`` another key is an EvalError: answers of one engine must not be booked for another.
    """

    def __init__(self, responses: Path, expected: str | None = None) -> None:
        self._answers: dict[str, Any] = {}
        self.key = ""
        for entry in _lines(responses):
            if "key" in entry:
                self.key = str(entry["key"])
            else:
                values = unsealed(entry)
                if values is None:
                    raise EvalError(f"{responses} holds a line that is not what was answered", _AGAIN)
                self._answers.update(values)
        if not self.key or not self._answers:
            raise EvalError(f"{responses} holds no responses", "Answer a requests file into it first.")
        if expected is not None and self.key != expected:
            raise EvalError(f"{responses} was answered by {self.key!r}, not by {expected!r}",
                            "Answer the requests with the engine that is judged.")

    def loglikelihood(self, prompts: Sequence[Sequence[int]], *, top_k: int = 0,
                      at_ids: Sequence[np.ndarray] | None = None) -> list[PromptScore]:
        keys = [request_key(prompt, top_k, None if at_ids is None else at_ids[i]) for i, prompt in enumerate(prompts)]
        return [_from_json(answer) for answer in self._found(keys)]

    def generate(self, prompts: Sequence[Sequence[int]],
                 params: SamplingParams | Sequence[SamplingParams] | None = None) -> list[RequestOutput]:
        keys = [generation_key(prompt, each) for prompt, each in zip(prompts, _each(params, len(prompts)), strict=True)]
        return [RequestOutput(list(prompt), [CompletionOutput(0, answer["text"], answer["token_ids"], None,
                                                              answer["finish_reason"])])
                for prompt, answer in zip(prompts, self._found(keys), strict=True)]

    def _found(self, keys: Sequence[str]) -> list[dict[str, Any]]:
        missing = [key for key in keys if key not in self._answers]
        if missing:
            raise EvalError(f"{len(missing)} of {len(keys)} requests have no response, the first is {missing[0][:12]}",
                            "Record the requests again with the same data, settings and baseline, and answer all.")
        return [self._answers[key] for key in keys]

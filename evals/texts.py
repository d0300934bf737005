"""Scoring texts: NLL per document, and per token the distance to a baseline's distribution.

**Windows.** A text is cut into windows of at most ``window`` tokens, each with the model's own BOS in front (if it has
one), so that every target sees the same tokens whatever its limits. A window's first token is not predicted.

**KL, coarse-grained.** A baseline's full distributions would take 200 kB a token; kept are its k most probable tokens
and, as one bucket, all the rest. With p the baseline, q the candidate and T the tokens outside the top k::

    KL_k = sum over top k of p log(p/q)  +  p(T) log(p(T)/q(T))   <=   KL(p || q)

Merging outcomes can only lose information, so this is a lower bound of the true divergence; with k = 128 the bucket
holds a few percent of the mass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save

from calib.artifact import sha256_hex, write_atomic
from calib.progress import Progress, Report
from calib.text import Tokenizer
from engines.request import PromptScore
from evals.errors import DataError, EvalError
from evals.items import Text
from evals.journal import Journal
from evals.report import TextScore
from evals.target import Scorer, checked_scores

#: Probability below which the tail bucket is rounding noise of float32 sums.
_NOISE = 1e-6

#: Gives a text's baseline (top ids [tokens, k] int32, top log-probs [tokens, k] float32), or None without a baseline.
TopK = Callable[[str], "tuple[np.ndarray, np.ndarray] | None"]


def windows(tokenizer: Tokenizer, text: Text, window: int) -> list[list[int]]:
    """Token windows of a text; the last one is dropped if nothing in it can be predicted."""
    bos = [tokenizer.bos_id] if tokenizer.adds_bos and tokenizer.bos_id is not None else []
    ids, body = tokenizer.encode(text.text, bos=False), window - len(bos)
    cut = [bos + ids[begin:begin + body] for begin in range(0, len(ids), body)]
    found = [part for part in cut if len(part) >= 2]
    if not found:
        raise DataError(f"text {text.id[:12]} of document {text.document!r} has {len(ids)} tokens: nothing to predict",
                        "Remove texts of one token.")
    return found


def coarse_kl(top_logprobs: np.ndarray, at_logprobs: np.ndarray) -> np.ndarray:
    """KL per token [tokens] float64 (nats, >= 0) of baseline top-k log-probs [tokens, k] against the candidate's."""
    base, other = top_logprobs.astype(np.float64), at_logprobs.astype(np.float64)
    mass = np.exp(base)
    inside = (mass * (base - other)).sum(axis=1)
    tail, other_tail = 1.0 - mass.sum(axis=1), 1.0 - np.exp(other).sum(axis=1)
    bucket = np.where(tail > _NOISE, tail * (np.log(np.maximum(tail, _NOISE)) - np.log(np.maximum(other_tail, _NOISE))),
                      0.0)
    return np.maximum(inside + bucket, 0.0)


def score_texts(scorer: Scorer, tokenizer: Tokenizer, texts: Sequence[Text], work: Path, key: str, *, window: int,
                top_k: int, batch: int, baseline: TopK, report: Report) -> tuple[list[TextScore], list[str]]:
    """Score each text; returns (scores, faults). Resumable: finished texts are in ``work``, bound to ``key``.

    A text with a log-probability that is not finite gives a fault and no score. Per-token arrays (``arrays_of``) lie in
    ``work``: "nll" float32 [tokens]; "ids" and "logprobs" when ``top_k``; "kl" float32 with a baseline.
    """
    with Journal(work / "texts.jsonl", key) as journal:
        journal.drop([identity for identity, entry in journal.done.items() if _damaged(work, identity, entry)])
        for begin in range(0, len(texts), batch):
            chunk = [text for text in texts[begin:begin + batch] if text.id not in journal.done]
            report(Progress("texts", begin, len(texts), "text"))
            if chunk:
                _score_chunk(scorer, tokenizer, chunk, work, journal, window, top_k, baseline)
        report(Progress("texts", len(texts), len(texts), "text"))
        entries = [journal.done[text.id] for text in texts]
    scores = [TextScore.model_validate(entry["score"]) for entry in entries if "score" in entry]
    return scores, [entry["fault"] for entry in entries if "fault" in entry]


def _score_chunk(scorer: Scorer, tokenizer: Tokenizer, chunk: Sequence[Text], work: Path, journal: Journal,
                 window: int, top_k: int, baseline: TopK) -> None:
    cut = [windows(tokenizer, text, window) for text in chunk]
    known = [baseline(text.id) for text in chunk]
    prompts = [part for parts in cut for part in parts]
    at_ids = None
    if known[0] is not None:
        at_ids = [ids for parts, found in zip(cut, known, strict=True) if found is not None
                  for ids in _split(found[0], parts)]
    scores = iter(checked_scores(scorer, prompts, top_k=top_k, at_ids=at_ids))
    done: dict[str, Any] = {}
    for text, parts, found in zip(chunk, cut, known, strict=True):
        arrays, entry = _judge(text, [next(scores) for _ in parts], found)
        if arrays:
            content = save(arrays)
            write_atomic(array_file(work, text.id), content)
            entry["arrays"] = sha256_hex(content)
        done[text.id] = entry
    journal.add(done)


def _damaged(work: Path, identity: str, entry: dict[str, Any]) -> bool:
    """Whether the arrays that belong to a finished text are not the ones that were written."""
    path = array_file(work, identity)
    return "arrays" in entry and (not path.is_file() or sha256_hex(path.read_bytes()) != entry["arrays"])


def _split(rows: np.ndarray, parts: Sequence[Sequence[int]]) -> list[np.ndarray]:
    lengths = [len(part) - 1 for part in parts]
    if sum(lengths) != len(rows):
        raise EvalError(f"the baseline has {len(rows)} tokens of a text that has {sum(lengths)} here",
                        "Make the baseline again with this tokenizer and window.")
    return np.split(rows, np.cumsum(lengths)[:-1])


def _judge(text: Text, scores: Sequence[PromptScore], found: tuple[np.ndarray, np.ndarray] | None
           ) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    logprobs = _joined(scores, "logprobs")
    arrays = {"nll": -logprobs}
    values = [logprobs]
    if scores[0].top_ids is not None:
        arrays |= {"ids": _joined(scores, "top_ids"), "logprobs": _joined(scores, "top_logprobs")}
        values.append(arrays["logprobs"])
    if found is not None:
        at = _joined(scores, "at_logprobs")
        values.append(at)
    bad = int(sum((~np.isfinite(value)).sum() for value in values))
    if bad:
        return {}, {"fault": f"text {text.id[:12]}: {bad} log-probabilities are not finite"}
    kl = same = None
    if found is not None:
        arrays["kl"] = coarse_kl(found[1], at).astype(np.float32)
        kl = float(arrays["kl"].sum(dtype=np.float64))
        same = int((arrays["ids"][:, 0] == found[0][:, 0]).sum())
    score = TextScore(id=text.id, tokens=len(logprobs), nll=float(-logprobs.sum(dtype=np.float64)), kl=kl,
                      same_top1=same, document=text.document)
    return arrays, {"score": score.model_dump(mode="json")}


def _joined(scores: Sequence[PromptScore], name: str) -> np.ndarray:
    return np.concatenate([getattr(score, name) for score in scores])


def array_file(work: Path, identity: str) -> Path:
    return work / f"{identity}.safetensors"


def arrays_of(work: Path, identity: str, names: Sequence[str]) -> dict[str, np.ndarray]:
    """The named per-token arrays of one scored text."""
    with safe_open(array_file(work, identity), framework="numpy") as file:
        return {name: file.get_tensor(name) for name in names}

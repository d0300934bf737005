"""How far a target is from the unquantized model: one cached baseline pass, then delta NLL, KL, same-top-1 and flips.

**Delta NLL** (nats per token, paired text by text) is what gates: it is continuous, so 50 documents see what 2,000
questions miss. Its interval is clustered by document (``evals.statistics``); exp(delta) - 1 is the perplexity ratio.
**KL and flips** raise alarms and do not decide between good candidates: among near-lossless quantizations KL hardly
correlates with task accuracy ("Displacement is not direction", arXiv 2606.19558), while equal accuracy can hide many
flips ("Accuracy is not all you need", arXiv 2407.09141).

**Baseline.** An artifact with the EvalReport of the unquantized target and its top-k distributions. ``key_of`` names
everything that decides its numbers (target, numerics, tokenizer, template, data, harness, settings); it is used again
only where the whole key is the same, and a candidate is compared only where all but the target is.

**Resuming.** Finished items lie in ``.<out>.work/`` beside the output until the report is written in one piece, or for
good in a ``cache`` folder: then another sample of items, or a larger one, asks a target only what it has not answered
yet under the same numerics, template and harness (and, for a candidate, against the same baseline).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field
from safetensors import safe_open

from calib.artifact import Artifact, canonical_json, sha256_hex
from calib.progress import Progress, Report, silent
from calib.scheme import Frozen
from calib.text import Tokenizer
from evals.accuracy import HARNESS, answer, choose_questions, pooled_accuracy
from evals.adapters import RequestRecorder
from evals.compare import refuse_unequal
from evals.data import EvalData
from evals.errors import DataError, EvalError
from evals.items import Text
from evals.journal import Journal
from evals.records import load_record, save_record
from evals.report import Estimate, EvalReport, Item, Sample, Target, TextScore
from evals.sampling import sample
from evals.sanity import sample_faults, take_samples
from evals.statistics import clustered_estimate
from evals.target import Generator, Scorer
from evals.texts import arrays_of, score_texts

TOP_K_FILE, TOKENS_FILE = "top_k.safetensors", "tokens.safetensors"


class EvalSettings(Frozen):
    """What is judged. ``batch`` (items a call) decides speed and resume granularity, never the numbers."""

    tasks: tuple[str, ...] | None = Field(default=None, description="null: every task of the data; []: none")
    limit_items: int | None = Field(default=None, ge=1, description="questions of each task; null: all")
    limit_texts: int | None = Field(default=None, ge=1, description="texts to score; null: all")
    window: int = Field(default=512, ge=8, description="tokens of context at most")
    top_k: int = Field(default=128, ge=1, description="baseline tokens kept for KL")
    seed: int = Field(default=0, ge=0)
    samples: int = Field(default=4, ge=0, description="greedy continuations for the sanity check")
    sample_tokens: int = Field(default=32, ge=16)
    exact_tokens: int = Field(default=64, ge=1, description="tokens of a generated answer that are read")
    batch: int = Field(default=16, ge=1)


def harness_of(settings: EvalSettings) -> dict[str, str]:
    """The part of the settings that must agree before two reports may be compared."""
    return HARNESS | {"window": str(settings.window), "sample_tokens": str(settings.sample_tokens),
                      "exact_tokens": str(settings.exact_tokens)}


def key_of(target: Target, data: EvalData, settings: EvalSettings) -> str:
    """sha256 over everything that decides the numbers of one target's evaluation."""
    return sha256_hex(canonical_json({
        "target": target.model_dump(mode="json", exclude={"name"}), "data": data.digest,
        "harness": harness_of(settings), "settings": settings.model_dump(mode="json", exclude={"batch"})}))


def _item_key(target: Target, settings: EvalSettings, k: int) -> str:
    """sha256 over everything that decides the numbers of a single item: which others are judged is not in it."""
    return sha256_hex(canonical_json({"target": target.model_dump(mode="json", exclude={"name"}), "top_k": k,
                                      "harness": harness_of(settings)}))


def _pair_key(target: Target, settings: EvalSettings, baseline: Baseline | None) -> str:
    """``_item_key`` of a candidate: its KL also depends on who the baseline is and how many tokens were kept of it."""
    against = None if baseline is None else [
        baseline.report.target.model_dump(mode="json", exclude={"name"}), baseline.width]
    return sha256_hex(canonical_json([_item_key(target, settings, 1), against]))


class Baseline:
    """An opened baseline: ``report`` (EvalReport), ``digest``, ``key``, and each text's top-k distributions."""

    def __init__(self, artifact: Artifact, report: EvalReport, key: str) -> None:
        self._artifact, self.report, self.key = artifact, report, key

    @property
    def digest(self) -> str:
        return self._artifact.digest

    @property
    def path(self) -> Path:
        return self._artifact.path

    @property
    def width(self) -> int:
        """Tokens kept of each distribution; 0 without texts."""
        return self.top_k(self.report.texts[0].id)[0].shape[1] if self.report.texts else 0

    @classmethod
    def open(cls, path: Path | str) -> Baseline:
        """ArtifactError when the folder is no complete baseline."""
        record = load_record(path, BaselineRecord, kind="baseline")
        artifact = Artifact.open(path, "baseline")
        artifact.check(artifact.manifest.files)
        return cls(artifact, record.report, record.key)

    def top_k(self, identity: str) -> tuple[np.ndarray, np.ndarray]:
        """(ids int32, log-probs float32), each [tokens, k], best first, of one text."""
        with safe_open(self._artifact.file(TOP_K_FILE), framework="numpy") as file:
            return file.get_tensor(f"{identity}.ids"), file.get_tensor(f"{identity}.logprobs")


class BaselineRecord(Frozen):
    key: str
    report: EvalReport


class _Pass(Frozen):
    """What one pass over the data gave."""

    texts: list[TextScore]
    items: list[Item]
    samples: list[Sample]
    faults: list[str]


def make_baseline(scorer: Scorer, tokenizer: Tokenizer, target: Target, data: EvalData, out: Path | str, *,
                  settings: EvalSettings | None = None, report: Report = silent, replace: bool = False,
                  cache: Path | None = None) -> Baseline:
    """Judge the unquantized target and keep what candidates are compared with. EvalError when it is itself faulty.

    ``scorer`` may also be a Generator; then short continuations are kept too. ``cache``: see the module's docstring.
    """
    settings, out = settings or EvalSettings(), Path(out)
    key, k = key_of(target, data, settings), min(settings.top_k, tokenizer.vocab_size)
    item_key = _item_key(target, settings, k)
    work = _work_folder(out) if cache is None else cache / item_key[:16]
    found = _run(scorer, tokenizer, data, settings, work, key if cache is None else item_key, k, lambda _: None,
                 report)
    mute = sample_faults(found.samples)
    faults = found.faults + (mute if 2 * len(mute) > len(found.samples) else [])  # small models loop now and then
    if faults:
        raise EvalError(f"the baseline {target.name} is faulty: {faults[0]} ({len(faults)} faults in all)",
                        "Nothing can be compared with it; check the model and its numerics.")
    record = BaselineRecord(key=key, report=_report(target, data, settings, found, None, None))
    arrays = {f"{text.id}.{name}": value for text in found.texts
              for name, value in arrays_of(work, text.id, ("nll", "ids", "logprobs")).items()}
    artifact = save_record(record, out, [target.digest], kind="baseline", replace=replace,
                           arrays={TOP_K_FILE: arrays} if arrays else None)
    _clear(work, cache)
    return Baseline(artifact, record.report, key)


def evaluate(scorer: Scorer, tokenizer: Tokenizer, target: Target, data: EvalData, baseline: Baseline | None,
             out: Path | str, report: Report = silent, *, settings: EvalSettings | None = None,
             replace: bool = False, cache: Path | None = None) -> EvalReport:
    """Judge a target, against a baseline if one is given, and write the eval-report artifact at ``out``.

    ComparisonError when the baseline was made with another tokenizer, template, data, harness or other items. A target
    that gives NaN, or falls silent, is judged all the same: its report carries ``faults`` and no delta. ``cache``: see
    the module's docstring.
    """
    settings, out = settings or EvalSettings(), Path(out)
    _refuse_other_items(target, data, settings, baseline)
    if cache is None:
        key = sha256_hex(canonical_json([key_of(target, data, settings), baseline.digest if baseline else None]))
        work = _work_folder(out)
    else:
        key = _pair_key(target, settings, baseline)
        work = cache / key[:16]
    found = _run(scorer, tokenizer, data, settings, work, key, 1,
                 (lambda _: None) if baseline is None else baseline.top_k, report)
    faults = found.faults + sample_faults(found.samples, baseline.report.samples if baseline else ())
    found = found.model_copy(update={"faults": faults})
    arrays = {f"{text.id}.{name}": value for text in found.texts
              for name, value in arrays_of(work, text.id, ("nll",) if baseline is None else ("nll", "kl")).items()}
    kl = np.concatenate([value for name, value in arrays.items() if name.endswith(".kl")] or [np.empty(0)])
    record = _report(target, data, settings, found, baseline, kl)
    save_record(record, out, [target.digest] + ([baseline.digest] if baseline else []), replace=replace,
                arrays={TOKENS_FILE: arrays} if arrays else None)
    _clear(work, cache)
    return record


def record_requests(tokenizer: Tokenizer, data: EvalData, baseline: Baseline | None, path: Path, scratch: Path, *,
                    settings: EvalSettings | None = None) -> int:
    """Write every score that ``evaluate`` (or, without a baseline, ``make_baseline``) will ask for into ``path``.

    Another machine answers them (``adapters.answer_requests``); then the same call runs with RecordedAnswers.
    """
    settings, recorder = settings or EvalSettings(), RequestRecorder()
    k = min(settings.top_k, tokenizer.vocab_size) if baseline is None else 1
    try:
        _run(recorder, tokenizer, data, settings, scratch, "requests", k,
             (lambda _: None) if baseline is None else baseline.top_k, silent)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return recorder.write(path)


def _work_folder(out: Path) -> Path:
    return out.absolute().with_name(f".{out.name}.work")


def _clear(work: Path, cache: Path | None) -> None:
    """The report is written: what only served to resume goes; a cache keeps all but the harness's scratch files."""
    if cache is None:
        shutil.rmtree(work)
    else:
        shutil.rmtree(work / "lm_eval", ignore_errors=True)


def _chosen(data: EvalData, settings: EvalSettings) -> tuple[list[Text], list[str]]:
    texts = sample(data.texts, settings.limit_texts, settings.seed) if data.texts else []
    tasks = list(data.tasks if settings.tasks is None else settings.tasks)
    if not texts and not tasks:
        raise DataError(f"{data.path} gives neither texts nor questions to judge by", "Prepare more data.")
    return texts, tasks


def _run(scorer: Scorer, tokenizer: Tokenizer, data: EvalData, settings: EvalSettings, work: Path, key: str,
         top_k: int, baseline: Callable[[str], Any], report: Report) -> _Pass:
    texts, tasks = _chosen(data, settings)
    scores, faults = score_texts(scorer, tokenizer, texts, work, key, window=settings.window, top_k=top_k,
                                 batch=settings.batch, baseline=baseline, report=report)
    items = answer(scorer, tokenizer, data, tasks, limit=settings.limit_items, seed=settings.seed, scratch=work,
                   key=key, batch=4 * settings.batch, exact_tokens=settings.exact_tokens, report=report
                   ) if tasks else []
    faults += [f"question {item.id[:12]} of {item.task}: a log-probability is not finite"
               for item in items if item.choice is None and not item.exact]
    samples: list[Sample] = []
    if isinstance(scorer, Generator) and settings.samples and texts:
        report(Progress("continue texts", 0, len(texts[:settings.samples]), "text"))  # minutes on a slow machine
        with Journal(work / "samples.jsonl", key) as journal:
            samples = take_samples(scorer, tokenizer, texts[:settings.samples], settings.sample_tokens, journal)
        report(Progress("continue texts", len(samples), len(samples), "text"))
    return _Pass(texts=scores, items=items, samples=samples, faults=faults)


def _refuse_other_items(target: Target, data: EvalData, settings: EvalSettings, baseline: Baseline | None) -> None:
    """Before any work: everything that can be known to differ from the baseline's."""
    if baseline is None:
        return
    refuse_unequal(baseline.report, target, data.digest, harness_of(settings), settings.seed)
    texts, tasks = _chosen(data, settings)
    wanted = {text.id for text in texts} | {item.id for item in choose_questions(data, tasks, settings.limit_items,
                                                                                 settings.seed)}
    have = {text.id for text in baseline.report.texts} | {item.id for item in baseline.report.items}
    if wanted != have:
        raise EvalError(f"the baseline judged {len(have)} items and these settings choose {len(wanted)}, "
                        f"{len(wanted - have)} of them others", "Use the baseline's settings, or make it again.")


def _report(target: Target, data: EvalData, settings: EvalSettings, found: _Pass, baseline: Baseline | None,
            kl: np.ndarray | None) -> EvalReport:
    base = baseline.report if baseline else None
    whole = base is not None and len(found.texts) == len(base.texts) > 0
    tokens = sum(text.tokens for text in found.texts)
    flips = flips_of(base.items, found.items) if base and found.items else None
    generated = [item for item in found.items if item.exact]
    return EvalReport(
        target=target, baseline_digest=baseline.digest if baseline else None, data_digest=data.digest,
        harness=harness_of(settings), seed=settings.seed, texts=found.texts, items=found.items, samples=found.samples,
        faults=found.faults, accuracy=pooled_accuracy(found.items),
        delta_nll=delta_nll(base.texts, found.texts) if base and whole else None,
        kl_mean=float(kl.mean(dtype=np.float64)) if whole and kl is not None else None,
        kl_p99=float(np.quantile(kl, 0.99)) if whole and kl is not None else None,
        same_top1=sum(text.same_top1 or 0 for text in found.texts) / tokens if whole else None,
        flips=sum(flips) / len(found.items) if flips else None,
        flips_to_wrong=flips[0] if flips else None, flips_to_right=flips[1] if flips else None,
        unparsed=sum(item.answer is None for item in generated) / len(generated) if generated else None)


def delta_nll(baseline: Sequence[TextScore], candidate: Sequence[TextScore]) -> Estimate | None:
    """Mean NLL difference per token (candidate - baseline), 95 % interval clustered by document; paired by text id."""
    paired = {text.id: text for text in baseline}
    differences = np.array([text.nll - paired[text.id].nll for text in candidate])
    tokens = np.array([float(text.tokens) for text in candidate])
    return clustered_estimate(differences, tokens, [text.document or text.id for text in candidate])


def flips_of(baseline: Sequence[Item], candidate: Sequence[Item]) -> tuple[int, int]:
    """(right -> wrong, wrong -> right) over the items both answered."""
    right = {(item.task, item.id): item.correct for item in baseline}
    pairs = [(right[item.task, item.id], item.correct) for item in candidate if (item.task, item.id) in right]
    return sum(b and not c for b, c in pairs), sum(c and not b for b, c in pairs)

"""Accuracy: multiple choice through lm-eval, offline, and exact match. The one file that imports lm_eval.

**What is asked.** ``Question: <question>\\nAnswer:`` is followed by each choice in turn, `` <choice>``; the choice to
which the model gives the highest log-probability is its answer. Long choices would lose by their length alone, so tasks
whose choices are free text are decided by log-probability per character (lm-eval's ``acc_norm``), and tasks whose
questions all share one set of choices (yes/no, A-D) by the plain sum (``acc``).

**How.** lm-eval gets a task file written into the caller's scratch folder (never its own 14,000), data from local JSON
Lines, and ``HarnessModel``, which turns (context, continuation) into token ids and asks any ``Scorer``. ``evaluate`` is
called and not ``simple_evaluate`` around it, which spends 2.5 s a call on `pip list`. Its request cache is not used: it
is a pickle, and not keyed by model. Answers go to our journal, keyed by everything that matters.

Tasks that others wrote (``run_tasks``) come from a folder of lm-eval YAML files, or by the name of one of its own,
which then may fetch data. A file that holds Python (``!function``) is refused unless it is allowed by name.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from lm_eval import evaluate as run_harness
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager

from calib.artifact import canonical_json, sha256_hex
from calib.errors import UnknownNameError
from calib.progress import Progress, Report, silent
from calib.text import Tokenizer
from engines.request import SamplingParams
from evals.asking import (
    DELIMITER,
    by_context,
    choice_scores,
    chunks,
    decided_by_rule,
    prompt_hash,
    split_tokens,
    summed,
)
from evals.data import EvalData
from evals.errors import EvalError
from evals.exact import answer_exactly
from evals.items import Asked, Exact, Question
from evals.journal import Journal
from evals.report import Accuracy, Item
from evals.sampling import sample
from evals.statistics import wilson
from evals.target import Generator, Scorer, checked_choices

PROMPT = "Question: {{question}}\nAnswer:"

#: What must be equal before two sets of answers may be compared.
HARNESS = {"lm_eval": version("lm_eval"), "prompt": PROMPT, "delimiter": DELIMITER,
           "decided_by": "acc_norm; acc where all questions share one set of choices"}


class HarnessModel(LM):
    """lm-eval's model interface over a Scorer. Each finished request is journalled, so a killed run goes on."""

    def __init__(self, scorer: Scorer, tokenizer: Tokenizer, journal: Journal, batch: int, report: Report) -> None:
        super().__init__()
        self._scorer, self._tokenizer, self._journal = scorer, tokenizer, journal
        self._batch, self._report = batch, report
        self._streams = sys.stdout, sys.stderr

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        """Summed log-probability of each continuation, and whether greedy decoding would produce it."""
        with contextlib.redirect_stdout(self._streams[0]), contextlib.redirect_stderr(self._streams[1]):
            return self._scored(requests)

    def _scored(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        split = [split_tokens(self._tokenizer, *request.args) for request in requests]
        keys = [sha256_hex(canonical_json([ids, start])) for ids, start in split]
        todo = {key: one for key, one in zip(keys, split, strict=True) if key not in self._journal.done}
        waiting, done = by_context(todo), len(keys) - len(todo)
        for chunk in chunks(waiting, self._batch):
            self._report(Progress("accuracy", done, len(keys), "choice"))
            scores = checked_choices(self._scorer, [(context, [ids for _, ids in each]) for context, each in chunk])
            self._journal.add({key: summed(score) for (_, each), own in zip(chunk, scores, strict=True)
                               for (key, _), score in zip(each, own, strict=True)})
            done += sum(len(each) for _, each in chunk)
        self._report(Progress("accuracy", len(keys), len(keys), "choice"))
        return [_answer(self._journal.done[key]) for key in keys]

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        raise EvalError("this task asks for rolling perplexity through lm-eval",
                        "Give its texts with --kind text: they are scored with intervals clustered by document.")

    def generate_until(self, requests: list[Instance]) -> list[str]:
        """Greedy continuations, cut before the first of ``until``; finished ones are journalled too."""
        if not isinstance(self._scorer, Generator):
            raise EvalError(f"this task asks for generated text, and {type(self._scorer).__name__} only scores",
                            "Judge an engine, or choose tasks of multiple choice.")
        with contextlib.redirect_stdout(self._streams[0]), contextlib.redirect_stderr(self._streams[1]):
            asked = [(self._tokenizer.encode(context), generation_params(options)) for context, options in
                     (request.args for request in requests)]
            keys = [sha256_hex(canonical_json([ids, params.model_dump(mode="json")])) for ids, params in asked]
            waiting = [i for i, key in enumerate(keys) if key not in self._journal.done]
            for begin in range(0, len(waiting), self._batch):
                self._report(Progress("accuracy", len(keys) - len(waiting) + begin, len(keys), "answer"))
                chunk = waiting[begin:begin + self._batch]
                outputs = self._scorer.generate([asked[i][0] for i in chunk], [asked[i][1] for i in chunk])
                self._journal.add({keys[i]: output.outputs[0].text
                                   for i, output in zip(chunk, outputs, strict=True)})
            self._report(Progress("accuracy", len(keys), len(keys), "answer"))
        return [self._journal.done[key] for key in keys]


def generation_params(options: Mapping[str, Any]) -> SamplingParams:
    """lm-eval's generation arguments as ours. EvalError for sampling: an answer that changes by chance is no answer."""
    if options.get("do_sample") and options.get("temperature", 0.0):
        raise EvalError(f"this task samples its answers (temperature {options['temperature']})",
                        "Set do_sample: false in its generation_kwargs.")
    until = options.get("until") or []
    stop = [until] if isinstance(until, str) else list(until)
    return SamplingParams(max_tokens=int(options.get("max_gen_toks", 256)), stop=tuple(word for word in stop if word))


def _answer(entry: Mapping[str, Any]) -> tuple[float, bool]:
    """A request whose log-probability was not finite counts as impossible; ``answer`` marks its item."""
    return (-np.inf if entry["logprob"] is None else entry["logprob"]), entry["greedy"]


def choose_questions(data: EvalData, tasks: Sequence[str], limit: int | None, seed: int) -> list[Asked]:
    """Seeded random questions, ``limit`` of each task (all of a task that has fewer)."""
    chosen: list[Asked] = []
    for task in tasks:
        questions = data.task(task)
        chosen += sample(questions, None if limit is None else min(limit, len(questions)), seed)
    return chosen


def answer(target: Scorer, tokenizer: Tokenizer, data: EvalData, tasks: Sequence[str], *, limit: int | None = None,
           seed: int = 0, scratch: Path, key: str, batch: int = 64, exact_tokens: int = 64, report: Report = silent
           ) -> list[Item]:
    """Answer seeded random questions of ``tasks`` and return one Item a question, in ``choose_questions``' order.

    Exact-match tasks need a target that generates; at most ``exact_tokens`` tokens are read of each answer.

    ``scratch`` takes the task files, the data cache and the journal; ``key`` names the target and its numerics, so that
    a journal of another target is never continued. EvalError when lm-eval's view of a question is not ours.
    """
    questions = choose_questions(data, tasks, limit, seed)
    key = sha256_hex(canonical_json({"target": key, "harness": HARNESS, "tokenizer": tokenizer.digest}))
    with Journal(scratch / "answers.jsonl", key) as journal:
        model = HarnessModel(target, tokenizer, journal, batch, report)
        chosen = [question for question in questions if isinstance(question, Question)]
        items = _multiple_choice(model, tokenizer, data, chosen, scratch / "lm_eval") if chosen else []
        if exact := [question for question in questions if isinstance(question, Exact)]:
            items += answer_exactly(target, tokenizer, exact, tokens=exact_tokens, key=key, journal=journal,
                                    batch=batch, report=report)
    place = {(item.task, item.id): item for item in items}
    return [place[question.task, question.id] for question in questions]


def _multiple_choice(model: HarnessModel, tokenizer: Tokenizer, data: EvalData, questions: Sequence[Question],
                     place: Path) -> list[Item]:
    tasks = list(dict.fromkeys(question.task for question in questions))
    decided_by = {task: decided_by_rule(data.task(task)) for task in tasks}
    _write_tasks(place, questions)
    with _quiet():
        manager = TaskManager(include_path=str(place), include_defaults=False)
        results = run_harness(lm=model, task_dict=manager.load(tasks), bootstrap_iters=0, log_samples=True)
    if results is None:
        raise EvalError("lm-eval returned no results", "It runs in one process only; do not start it under torchrun.")
    logged = {(task, row["doc"]["id"]): row for task in tasks for row in results["samples"][task]}
    return [_item(question, logged[question.task, question.id], decided_by[question.task], tokenizer)
            for question in questions]


def _write_tasks(place: Path, questions: Sequence[Question]) -> None:
    place.mkdir(parents=True, exist_ok=True)
    for task in dict.fromkeys(question.task for question in questions):
        rows = [question.model_dump(mode="json", include={"id", "question", "choices", "answer"})
                for question in questions if question.task == task]
        content = "".join(json.dumps(row) + "\n" for row in rows).encode()
        file = place / f"{task}-{hashlib.sha256(content).hexdigest()[:16]}.jsonl"
        file.write_bytes(content)
        (place / f"{task}.yaml").write_text(yaml.safe_dump({
            "task": task, "dataset_path": "json", "test_split": "test", "output_type": "multiple_choice",
            "dataset_kwargs": {"data_files": {"test": str(file.absolute())},
                               "cache_dir": str((place / "cache").absolute())},
            "doc_to_text": PROMPT, "doc_to_choice": "choices", "doc_to_target": "answer",
            "target_delimiter": DELIMITER, "num_fewshot": 0,
            "metric_list": [{"metric": name, "aggregation": "mean", "higher_is_better": True}
                            for name in ("acc", "acc_norm")]}))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """stdout belongs to the caller's result, stderr to the caller's progress; the harness's own chatter goes nowhere.

    ``HarnessModel`` works on the caller's streams again while it scores. Errors are exceptions and are not hidden.
    """
    loggers = [logging.getLogger(name) for name in ("lm_eval", "datasets")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _item(question: Question, row: Mapping[str, Any], decided_by: str, tokenizer: Tokenizer) -> Item:
    doc = row["doc"]
    if (doc["question"], tuple(doc["choices"]), doc["answer"]) != (question.question, question.choices,
                                                                   question.answer):
        raise EvalError(f"lm-eval read question {question.id[:12]} of {question.task} as {doc['question']!r}",
                        "A column was taken for dates or numbers; write its values as plain text.")
    sums = np.array([response[0] for response in row["filtered_resps"]], dtype=np.float64)
    scores = choice_scores(sums, question, decided_by)
    broken = not np.isfinite(scores).all()
    choice = int(np.argmax(scores))
    margin = None if broken else float(scores[question.answer] - np.delete(scores, question.answer).max())
    prompts = [split_tokens(tokenizer, context, continuation)[0] for context, continuation in row["arguments"]]
    return Item(id=question.id, task=question.task, prompt_sha256=prompt_hash(prompts), target=question.answer,
                choice=None if broken else choice, correct=bool(row[decided_by]) and not broken,
                margin=margin, answer=None if broken else question.choices[choice],
                n_choices=len(question.choices), document=question.document)


def pooled_accuracy(items: Sequence[Item]) -> Accuracy | None:
    """Share of right answers with its Wilson interval (95 %); None without items."""
    if not items:
        return None
    right, n = sum(item.correct for item in items), len(items)
    low, high = wilson(right, n)
    return Accuracy(value=right / n, ci_low=low, ci_high=high, n=n, tasks=sorted({item.task for item in items}))


def run_tasks(target: Scorer, tokenizer: Tokenizer, names: Sequence[str], *, include: Path | None, limit: int | None,
              seed: int, scratch: Path, key: str, batch: int = 64, allow_code: bool = False, report: Report = silent
              ) -> dict[str, list[dict[str, Any]]]:
    """Run tasks of somebody else's YAML files below ``include`` (None: lm-eval's own) and give their sample rows.

    Seeded random documents, ``limit`` of each task. EvalError for a task that is not there, or one that holds Python
    while ``allow_code`` is not set.
    """
    if include is not None and not allow_code:
        _refuse_code(include)
    key = sha256_hex(canonical_json({"target": key, "harness": HARNESS["lm_eval"], "tokenizer": tokenizer.digest}))
    with Journal(scratch / "answers.jsonl", key) as journal:
        model = HarnessModel(target, tokenizer, journal, batch, report)
        with _quiet():
            manager = TaskManager(include_path=str(include) if include else None, include_defaults=include is None)
            if unknown := [name for name in names if name not in manager.all_tasks]:
                raise UnknownNameError("lm-eval task", unknown[0], manager.all_tasks)
            loaded = manager.load(list(names))
            chosen = {name: _drawn(len(task.eval_docs), limit, seed) for name, task in loaded["tasks"].items()}
            results = run_harness(lm=model, task_dict=loaded, bootstrap_iters=0, log_samples=True, samples=chosen)
    if results is None:
        raise EvalError("lm-eval returned no results", "It runs in one process only; do not start it under torchrun.")
    return results["samples"]


def _refuse_code(include: Path) -> None:
    for path in sorted(include.rglob("*.yaml")):
        if "!function" in path.read_text(encoding="utf-8"):
            raise EvalError(f"{path} runs Python of its own (!function)", "Read it, then allow it with --allow-code.")


def _drawn(count: int, limit: int | None, seed: int) -> list[int]:
    """Indices of seeded random documents, nested in ``limit``."""
    order = sorted(range(count), key=lambda i: hashlib.sha256(f"{seed}\0{i}".encode()).digest())
    return sorted(order if limit is None else order[:limit])

"""Exact match: the answer is generated, read by a fixed rule, and compared.

**What is asked.** ``Question: <question>\\nAnswer:`` is continued greedily by at most ``tokens`` tokens; the answer is
in the first line that is not blank.

**How it is read.** Where the right answer begins with a number ("9 apples", "1,234.50", "3/4"), the line's *last*
number is the model's answer (it may reason before it answers) and equality is of value: 0.50 = 1/2. Elsewhere the line
itself is compared, blind to case, spacing, articles and punctuation. A line that holds no answer is **unparsed**: it
counts as wrong, its item has ``answer`` None, and the share of such lines is a figure of its own, because a format that
got lost is another fault than arithmetic that got worse.

There is no chance level: a blind guess does not hit. One Item a question, the prompt's hash as for multiple choice.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction

from calib.artifact import canonical_json, sha256_hex
from calib.progress import Progress, Report
from calib.text import Tokenizer
from engines.request import SamplingParams
from evals.errors import EvalError
from evals.items import Exact
from evals.journal import Journal
from evals.report import Item
from evals.target import Generator

PROMPT = "Question: {question}\nAnswer:"
_NUMBER = re.compile(r"(?:(?<![\w)])-)?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:/\d+)?")
_NOISE = re.compile(r"\b(?:a|an|the)\b|[^\w\s]")


def value_of(number: str) -> Fraction:
    """The value of a number as ``_NUMBER`` finds it: thousands' commas and simple fractions are understood."""
    over, _, under = number.replace(",", "").partition("/")
    return Fraction(over) / (int(under) or 1) if under else Fraction(over)


def plain(text: str) -> str:
    return " ".join(_NOISE.sub(" ", text.lower()).split())


def read_answer(reply: str, right: str) -> tuple[str | None, bool]:
    """(the answer as read, None when unparsed; whether it is right)."""
    line = next((line.strip() for line in reply.splitlines() if line.strip()), "")
    if not _NUMBER.match(right.strip()):
        return (line or None), bool(line) and plain(line) == plain(right)
    numbers = _NUMBER.findall(line)
    if not numbers:
        return None, False
    return numbers[-1], value_of(numbers[-1]) == value_of(_NUMBER.findall(right)[0])


def answer_exactly(generator: object, tokenizer: Tokenizer, questions: Sequence[Exact], *, tokens: int, key: str,
                   journal: Journal, batch: int, report: Report) -> list[Item]:
    """One Item a question, in order; finished replies are in the journal. EvalError when the target cannot generate."""
    if not isinstance(generator, Generator):
        raise EvalError(f"{questions[0].task} needs generated answers, and {type(generator).__name__} only scores",
                        "Judge an engine, or choose tasks of multiple choice.")
    prompts = [tokenizer.encode(PROMPT.format(question=question.question)) for question in questions]
    keys = [sha256_hex(canonical_json([key, prompt, tokens])) for prompt in prompts]
    waiting = [i for i, one in enumerate(keys) if one not in journal.done]
    for begin in range(0, len(waiting), batch):
        report(Progress("exact match", len(keys) - len(waiting) + begin, len(keys), "question"))
        chunk = waiting[begin:begin + batch]
        outputs = generator.generate([prompts[i] for i in chunk], SamplingParams(max_tokens=tokens))
        if len(outputs) != len(chunk):
            raise EvalError(f"{len(chunk)} prompts were continued and {len(outputs)} outputs came back",
                            "The generator dropped requests.")
        journal.add({keys[i]: output.outputs[0].text for i, output in zip(chunk, outputs, strict=True)})
    report(Progress("exact match", len(keys), len(keys), "question"))
    return [_item(question, prompt, journal.done[one]) for question, prompt, one in
            zip(questions, prompts, keys, strict=True)]


def _item(question: Exact, prompt: Sequence[int], reply: str) -> Item:
    found, right = read_answer(reply, question.answer)
    return Item(id=question.id, task=question.task, prompt_sha256=sha256_hex(canonical_json([list(prompt)])),
                correct=right, answer=found, document=question.document, exact=True)

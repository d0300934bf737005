"""A verdict for other programs and other people: JUnit XML for a CI server, Markdown for a pull request.

Both come from the same records as the terminal's table, so the three never disagree. Pure functions over records.

**JUnit.** One ``testsuite`` a candidate, one ``testcase`` a check. FAIL is a ``failure``; INCONCLUSIVE and ANOMALOUS
are an ``error`` and never ``skipped``, because CI servers paint a skipped case green. What was found and allowed are
properties. XML 1.0 cannot hold most control characters, and model output does: they become U+FFFD.

**Markdown.** GitHub takes 1 MiB for a step summary and 65,536 characters for a comment, and drops what is longer as a
whole. So the text is built to fit: flips and then checks are left out, the last line says how many, and the verdict
itself always stands. Model output is written character by character as HTML entities, so that it can neither break out
of its cell, nor load an image, nor mention a person.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from xml.etree import ElementTree

from evals.errors import EvalError
from evals.gate import flip_counts, required_items, worst_flips
from evals.report import EvalReport, Item, Reason, Verdict

#: Documented caps: bytes of one step's summary; characters of a comment (counted in bytes here, which is stricter).
SUMMARY_BYTES = 1 << 20
COMMENT_BYTES = 65_536
#: A hidden line by which a later run finds its own comment and edits it instead of adding another.
MARKER = "<!-- toolkit-gate:{name} -->"

_SHOWN = 300
_NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_PLAIN = re.compile(r"[^0-9A-Za-z \u0080-\ud7ff\ue000-\U0010ffff]")


def junit_xml(verdicts: Mapping[str, Verdict]) -> str:
    """One document for the verdicts of one gate, by the candidate's name. EvalError without any."""
    if not verdicts:
        raise EvalError("no verdict to write as JUnit XML", "Judge at least one candidate.")
    root = ElementTree.Element("testsuites", name="toolkit gate")
    for name, verdict in verdicts.items():
        root.append(_suite(name, verdict))
    for count in ("tests", "failures", "errors"):
        root.set(count, str(sum(int(suite.get(count, "0")) for suite in root)))
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _suite(name: str, verdict: Verdict) -> ElementTree.Element:
    suite = ElementTree.Element("testsuite", name=_xml(f"{verdict.policy}: {name}"))
    words = [reason.word for reason in verdict.reasons]
    failures = words.count("FAIL")
    suite.set("tests", str(len(words)))
    suite.set("failures", str(failures))
    suite.set("errors", str(sum(word in ("INCONCLUSIVE", "ANOMALOUS") for word in words)))
    _properties(suite, {"verdict": verdict.word, "reason": verdict.reason, "candidate": verdict.candidate_digest,
                        "baseline": verdict.baseline_digest, "policy_sha256": verdict.policy_sha256,
                        "detectable": "" if verdict.detectable is None else f"{verdict.detectable:.6g}"})
    for reason in verdict.reasons:
        suite.append(_case(name, reason))
    if verdict.warnings:
        ElementTree.SubElement(suite, "system-out").text = _xml("\n".join(verdict.warnings))
    return suite


def _case(name: str, reason: Reason) -> ElementTree.Element:
    case = ElementTree.Element("testcase", name=_xml(reason.check), classname=_xml(f"gate.{name}"))
    _properties(case, {"found": reason.found, "allowed": reason.allowed})
    if reason.word not in ("PASS", "BASELINE"):
        kind = "failure" if reason.word == "FAIL" else "error"
        mark = ElementTree.SubElement(case, kind, type=reason.word, message=_xml(reason.found))
        mark.text = _xml(f"{reason.word}: {reason.found}; allowed: {reason.allowed}")
    return case


def _properties(parent: ElementTree.Element, values: Mapping[str, str]) -> None:
    holder = ElementTree.SubElement(parent, "properties")
    for name, value in values.items():
        ElementTree.SubElement(holder, "property", name=name, value=_xml(value))


def _xml(text: str) -> str:
    return _NOT_XML.sub("\ufffd", text)


def markdown(name: str, verdict: Verdict, baseline: EvalReport | None = None, candidate: EvalReport | None = None, *,
             questions: Mapping[str, str] | None = None, limit: int = SUMMARY_BYTES, flips: int = 10) -> str:
    """A verdict as Markdown of at most ``limit`` bytes (UTF-8): the word, every check, the ``flips`` worst flips.

    With both reports the flips are listed with both answers and margins; ``questions`` (text by item id) are shown
    where they are given. EvalError when not even the verdict fits.
    """
    head = [MARKER.format(name=re.sub(r"[^0-9A-Za-z._]", "-", name)),
            f"### Gate {verdict.word}: {_escaped(name)} under policy {_escaped(verdict.policy)}", "",
            _escaped(verdict.reason, 2000), ""]
    foot = [*(f"> look at: {_escaped(warning)}" for warning in verdict.warnings[:20]), "", _identity(verdict)]
    checks = [f"| {_escaped(r.check)} | {r.word} | {_escaped(r.found)} | {_escaped(r.allowed)} |"
              for r in verdict.reasons]
    lost = worst_flips(baseline, candidate, flips) if baseline is not None and candidate is not None else []
    rows = [_flip_row(before, after, questions or {}) for before, after in lost]
    extra = [] if baseline is None or candidate is None else _planning(baseline, candidate)
    for kept in [(len(checks), count) for count in range(len(rows), -1, -1)] + [
            (count, 0) for count in range(len(checks) - 1, -1, -1)]:
        text = "\n".join([*head, *_check_table(checks, kept[0]), *extra, *_flip_table(rows, kept[1]), *foot]) + "\n"
        if len(text.encode()) <= limit:
            return text
    raise EvalError(f"a verdict of {len(text.encode())} bytes does not fit into {limit}", "Raise the limit.")


def _check_table(rows: Sequence[str], shown: int) -> list[str]:
    left = [f"{len(rows) - shown} checks left out: the text would be too long."] if shown < len(rows) else []
    return ["| check | verdict | found | allowed |", "|---|---|---|---|", *rows[:shown], *left, ""]


def _flip_table(rows: Sequence[str], shown: int) -> list[str]:
    if not rows:
        return []
    left = [f"{len(rows) - shown} flips left out: the text would be too long."] if shown < len(rows) else []
    table = [f"<details><summary>The {shown} worst flips, right to wrong</summary>", "",
             "| task | question | baseline's answer | margin | candidate's answer | margin |",
             "|---|---|---|--:|---|--:|", *rows[:shown], "", "</details>"] if shown else []
    return [*table, *left, ""]


def _flip_row(before: Item, after: Item, questions: Mapping[str, str]) -> str:
    asked = _escaped(questions.get(before.id, before.id[:12]))
    answers = [_escaped("no answer" if item.answer is None else item.answer) for item in (before, after)]
    margins = ["" if item.margin is None else f"{item.margin:+.3f}" for item in (before, after)]
    return f"| {_escaped(before.task)} | {asked} | {answers[0]} | {margins[0]} | {answers[1]} | {margins[1]} |"


def _planning(baseline: EvalReport, candidate: EvalReport) -> list[str]:
    """How many items which margin takes at the flip rate that was seen: the reader's next question."""
    right = {(item.task, item.id): item.correct for item in baseline.items}
    pairs = [(item, right[item.task, item.id]) for item in candidate.items if (item.task, item.id) in right]
    if not pairs:
        return []
    rate = (sum(flip_counts(pairs)) + 1) / len(pairs)
    sizes = ", ".join(f"{margin:g} points {required_items(rate, margin):,}" for margin in (1.0, 2.0, 3.0))
    return [f"Items that decide a margin at this flip rate ({100 * rate:.1f} %): {sizes}; judged here: "
            f"{len(pairs):,}.", ""]


def _identity(verdict: Verdict) -> str:
    seen = "" if verdict.detectable is None else (
        f"; the first check sees a loss of {verdict.detectable:.4g} with 80 % power")
    return (f"<sub>candidate {verdict.candidate_digest[:12]}, baseline {verdict.baseline_digest[:12] or 'none'}, "
            f"policy {verdict.policy_sha256[:12]}{seen}</sub>")


def _escaped(text: str, limit: int = _SHOWN) -> str:
    """Text that Markdown and HTML show as it is: one line, cut to ``limit`` characters, punctuation as entities."""
    line = " ".join(_xml(text).split())
    cut = line if len(line) <= limit else line[:limit - 1] + "…"
    return _PLAIN.sub(lambda found: f"&#{ord(found.group())};", cut)

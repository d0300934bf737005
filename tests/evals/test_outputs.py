"""What other programs read of a verdict, and the length check."""

import shlex
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import typer
import yaml

from evals.errors import EvalError
from evals.gate import judge, required_items
from evals.length import judge_length
from evals.outputs import COMMENT_BYTES, junit_xml, markdown
from evals.policy import LengthRule, Policy
from evals.report import EvalReport, Item, Reason, Sample, Target, Verdict
from toolkit.cli import app

ROOT = Path(__file__).resolve().parents[2]
TARGET = Target(name="base", digest="b" * 64, numerics="cpu fp32", tokenizer_digest="t" * 64, template_sha256="c" * 64,
                bos=False)
EVIL = "</td>|@someone ![x](http://a.b/c) `code` **bold**\x00\x1b[31m\nnext <script>"


def report(right=(), lengths=(), name="base", limit=64):
    items = [Item(id=f"{i:064d}", task="quiz", prompt_sha256=f"p{i}", choice=0, target=0 if good else 1,
                  correct=bool(good), margin=1.0 if good else -1.0 - i, n_choices=4, answer=f"{name} {EVIL}")
             for i, good in enumerate(right)]
    samples = [Sample(id=f"s{i}", prompt="p", text="t", token_ids=[1] * n) for i, n in enumerate(lengths)]
    return EvalReport(target=TARGET.model_copy(update={"name": name}), baseline_digest=None, data_digest="d" * 64,
                      harness={"sample_tokens": str(limit)}, seed=0, texts=[], items=items, accuracy=None,
                      delta_nll=None, kl_mean=None, same_top1=None, flips=None, samples=samples)


def verdict(*reasons, word="FAIL"):
    return Verdict(word=word, reason="accuracy: lost", reasons=list(reasons), candidate_digest="n" * 64,
                   baseline_digest="b" * 64, policy="p", policy_sha256="e" * 64, detectable=1.25,
                   warnings=["kl_mean 0.2 is above 0.1"])


def line(word, check="accuracy", found=EVIL):
    return Reason(check=check, word=word, found=found, allowed="at most <2> & no more")


def test_junit_counts_and_colours():
    text = junit_xml({"int4": verdict(line("FAIL"), line("PASS", "delta NLL"), line("INCONCLUSIVE", "length")),
                      "fp8": verdict(line("PASS"), word="PASS")})
    root = ElementTree.fromstring(text)
    assert (root.get("tests"), root.get("failures"), root.get("errors")) == ("4", "1", "1")
    first = root[0]
    assert (first.get("tests"), first.get("failures"), first.get("errors")) == ("3", "1", "1")
    cases = {case.get("name"): case for case in first.iter("testcase")}
    assert cases["accuracy"].find("failure").get("type") == "FAIL"
    assert cases["length"].find("error").get("type") == "INCONCLUSIVE"
    assert cases["delta NLL"].find("failure") is None
    assert not list(root.iter("skipped"))
    found = {p.get("name"): p.get("value") for p in cases["accuracy"].iter("property")}
    assert found["allowed"] == "at most <2> & no more"
    assert "\x1b" not in text
    assert found["found"].startswith("</td>|@someone")
    assert "�" in found["found"]
    with pytest.raises(EvalError, match="no verdict"):
        junit_xml({})


def gated(lost):
    base = np.ones(400, bool)
    new = base.copy()
    new[:lost] = False
    return report(base), report(new, name="new")


def test_markdown_shows_both_answers_of_the_ten_worst_and_escapes_them():
    base, new = gated(40)
    policy = Policy(name="p", accuracy={"margin": 2.0})
    text = markdown("int4", judge(new, base, policy), base, new, questions={f"{39:064d}": "Which *planet*?"})
    rows = [row for row in text.splitlines() if row.startswith("| quiz |")]
    assert len(rows) == 10
    assert "Which &#42;planet&#42;&#63;" in rows[0]
    assert "+1.000" in rows[0]
    assert "-40.000" in rows[0]
    assert "base " in rows[0]
    assert "new " in rows[0]
    for forbidden in ("<script", "](", "@someone", "**bold", "\x1b"):
        assert forbidden not in text
    assert all(row.count("|") == 7 for row in rows)
    assert text.startswith("<!-- toolkit-gate:int4 -->\n### Gate FAIL")
    assert "Items that decide a margin at this flip rate (10.2 %): 1 points 6,407" in text


def test_markdown_fits_its_cap_by_leaving_out_flips_then_checks():
    base, new = gated(40)
    many = verdict(*[line("FAIL", f"check {i}", "x" * 250) for i in range(400)])
    comment = markdown("a", many, base, new, limit=COMMENT_BYTES)
    assert len(comment.encode()) <= COMMENT_BYTES
    assert "10 flips left out" in comment
    assert "checks left out" in comment
    some = markdown("a", verdict(line("FAIL")), base, new, limit=3500)
    assert 0 < some.count("| quiz |") < 10
    assert f"{10 - some.count('| quiz |')} flips left out" in some
    with pytest.raises(EvalError, match="does not fit into 100"):
        markdown("a", many, limit=100)
    assert "-->" in markdown("--><b>", many)[:40]
    assert "<b>" not in markdown("--><b>", many)


RULE = LengthRule(min_samples=10)


@pytest.mark.parametrize(("old", "new", "word"), [
    ([30, 20, 40, 10] * 10, [30, 20, 40, 10] * 10, "PASS"),
    ([30, 20, 40, 10] * 10, [15, 12, 18, 4] * 10, "FAIL"),
    ([30, 20, 40, 10] * 10, [60, 35, 64, 20] * 10, "FAIL"),
    ([30, 20, 40, 10] * 3, [60, 5, 64, 1] * 3, "INCONCLUSIVE"),
    ([64] * 20, [64] * 20, "INCONCLUSIVE"),
    ([64] * 20, [20] * 20, "FAIL"),
    ([30] * 9, [30] * 9, "INCONCLUSIVE"),
    ([30] * 20, [30] * 19, "FAIL"),
    ([], [], "FAIL"),
])
def test_output_length(old, new, word):
    found = judge_length(report(lengths=new), report(lengths=old), RULE)
    assert found.word == word, found


def test_output_length_is_part_of_the_gate():
    policy = Policy(name="p", accuracy={"margin": 2.0}, length={"min_samples": 10})
    base = report(np.ones(400, bool), lengths=[30, 20] * 10)
    same = judge(report(np.ones(400, bool), lengths=[30, 20] * 10), base, policy)
    assert same.word == "PASS"
    short = judge(report(np.ones(400, bool), lengths=[10, 8] * 10), base, policy)
    assert short.word == "FAIL"
    assert short.reason.startswith("output length: 0.3")
    assert judge_length(report(), None, RULE).found == "not measured: no baseline"


def test_workflow_runs_commands_that_exist():
    """Each toolkit command line of the example parses against the real command line: verbs, options and values."""
    workflow = yaml.safe_load((ROOT / "examples" / "github-actions-gate.yml").read_text())
    scripts = [step["run"] for step in workflow["jobs"]["gate"]["steps"] if "run" in step]
    lines = [line.strip().split("|")[0] for script in scripts for line in script.splitlines()
             if line.strip().startswith("toolkit ")]
    assert [line.split()[1] for line in lines] == ["data", "quantize", "build", "gate"]
    group = typer.main.get_command(app)
    for line in lines:
        command, words = group, shlex.split(line)[1:]
        context = command.make_context("toolkit", words)
        while hasattr(command, "commands"):
            _, command, words = command.resolve_command(context, [*context._protected_args, *context.args])
            context = command.make_context(command.name, words, parent=context)


def test_the_guides_numbers_and_figure_are_the_codes():
    guide = (ROOT / "docs" / "gate.md").read_text()
    for flips in (2, 5, 10):
        sizes = " | ".join(f"{required_items(flips / 100, margin):,}" for margin in (1, 2, 3))
        assert f"| {flips} % | {sizes} |" in guide
    policy = Policy.model_validate(yaml.safe_load(guide.split("```yaml")[1].split("```")[0]))
    assert (policy.name, policy.accuracy.aa_flips) == ("release", 0.004)
    rule = LengthRule()
    assert f"between {rule.low} and" in " ".join(guide.split())
    assert f"and {rule.high}. It asks for {rule.min_samples} continuations" in " ".join(guide.split())
    figure = ElementTree.parse(ROOT / "docs" / "figures" / "gate_power.svg").getroot()
    lines = [line.get("points").split() for line in figure.iter("{http://www.w3.org/2000/svg}polyline")]
    assert len(lines) == 5
    ours = [1 - (float(point.split(",")[1]) - 40) / 240 for point in lines[0]]
    assert ours[0] < 0.01
    assert ours[8] > 0.95
    assert ours == sorted(ours)

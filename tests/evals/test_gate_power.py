"""The power table of the gate, with fewer draws than the benchmark, and the gate on real reports end to end."""

import copy
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from evals.errors import ComparisonError
from evals.fidelity import EvalSettings, evaluate, make_baseline
from evals.gate import Policy, judge, load_policy
from evals.module import ModuleScorer
from evals.target import describe

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def gate_power():
    from benchmarks import gate_power

    return gate_power


def test_power_table_holds(gate_power):
    cells = {cell.name: cell for cell in gate_power.cells(20_000, 5.0, 2.0, seed=1)}
    none = cells["paired: no loss, looks=200/400/800/1600, flips=5%, margin=2"]
    loss = cells["paired: margin+2, looks=200/400/800/1600, flips=5%, margin=2"]
    assert none.value <= none.floor == 0.01
    assert loss.value >= loss.floor == 0.95
    assert cells["vLLM Wilson: no loss, n=200, flips=5%"].value == pytest.approx(0.49, abs=0.02)
    assert cells["MLPerf 99%: no loss, n=200, flips=5%"].value == pytest.approx(0.32, abs=0.02)
    assert cells["TensorRT-LLM: margin+2, n=200, flips=5%"].value < 0.02
    guide = (ROOT / "docs" / "gate.md").read_text()
    for title, name in (("TensorRT-LLM's", "TensorRT-LLM"), ("Wilson against 92 %", "vLLM Wilson"),
                        ("99 % of the reference", "MLPerf 99%"), ("92 % of the reference", "vLLM rtol 8%")):
        shown = guide.split(f"| {title} |")[1].split("|")[:2]
        for label, text in zip(("no loss", "margin+2"), shown, strict=True):
            assert cells[f"{name}: {label}, n=1600, flips=5%"].value == pytest.approx(float(text), abs=0.012)


def test_the_guide_shows_what_the_kept_figures_say():
    """To the last digit; and a figure is kept once."""
    kept = json.loads((ROOT / "docs" / "benchmarks" / "gate-power.json").read_text())["cells"]
    cells = {cell["name"]: cell["value"] for cell in kept}
    assert len(cells) == len(kept)
    guide = (ROOT / "docs" / "gate.md").read_text()
    rows = {"paired (this gate)": "paired: {}, looks=200/400/800/1600, flips=5%, margin=2"} | {
        title: name + ": {}, n=1600, flips=5%" for title, name in (
            ("TensorRT-LLM's", "TensorRT-LLM"), ("Wilson against 92 %", "vLLM Wilson"),
            ("99 % of the reference", "MLPerf 99%"), ("92 % of the reference", "vLLM rtol 8%"))}
    for title, name in rows.items():
        shown = [text.strip() for text in guide.split(f"| {title} |")[1].split("|")[:2]]
        assert shown == [f"{cells[name.format(what)]:.3f}" for what in ("no loss", "margin+2")], title


def test_simulated_counts_have_the_asked_loss_and_flips(gate_power):
    lost, gained, right = gate_power.simulate(4000, 0.05, 0.02, np.array([200, 1600]), np.random.default_rng(0))
    assert ((lost - gained)[:, 1] / 1600).mean() == pytest.approx(0.02, abs=5e-4)
    assert ((lost + gained)[:, 1] / 1600).mean() == pytest.approx(0.05, abs=5e-4)
    assert (right[:, 0] / 200).mean() == pytest.approx(0.70, abs=2e-3)
    assert (lost[:, 0] <= lost[:, 1]).all()


def test_recorded_answers_are_drawn_as_they_are(gate_power):
    base = "1" * 700 + "0" * 300
    lost = "0" * 40 + base[40:]
    swapped = "0" * 20 + base[20:-20] + "1" * 20
    answers = gate_power.Answers(model="m", tasks=["t"], items=1000, variants={
        "baseline": base, "again": base, "lost": lost, "swapped": swapped})
    assert answers.chances("lost") == [0.04, 0.0, 0.66, 0.3]
    assert answers.chances("swapped") == [0.02, 0.02, 0.68, 0.28]
    cells = {cell.name.split(",")[0]: cell.value for cell in gate_power.real_cells(answers, 4000, 2.0, 0)}
    assert cells["paired: real again: loss=0.00 flips=0.00%"] == 0.0
    assert cells["paired items: real again: loss=0.00 flips=0.00%"] == 200
    assert cells["paired: real lost: loss=4.00 flips=4.00%"] > 0.95
    assert cells["paired: real swapped: loss=0.00 flips=4.00%"] < 0.01
    for variants in ({"baseline": base}, {"baseline": base, "x": "01"}, {"baseline": base, "x": "2" * 1000}):
        with pytest.raises(ValueError, match=r"baseline|0 or 1"):
            gate_power.Answers(model="m", tasks=["t"], items=1000, variants=variants)


def test_the_guides_real_table_is_what_the_recorded_answers_give(gate_power):
    answers = gate_power.Answers.model_validate_json((ROOT / "docs" / "benchmarks" / "gate-answers.json").read_bytes())
    assert answers.items == 3194
    cells = {cell.name.split(": ")[0] + ": " + cell.name.split(": ")[1]: cell.value
             for cell in gate_power.real_cells(answers, 20_000, 2.0, 0) if "n=1600" not in cell.name}
    guide = (ROOT / "docs" / "gate.md").read_text()
    for title, name in (("none, other batches", "again"), *((f"noise {s}", f"layer 15 noise {s}")
                                                           for s in (0.2, 0.3, 0.5, 0.8))):
        row = [part.strip(" %") for part in guide.split(f"| {title} |")[1].split("\n")[0].strip("| ").split("|")]
        lost, gained, *_ = answers.chances(name)
        assert (float(row[0]), float(row[1])) == (round(100 * (lost - gained), 2), round(100 * (lost + gained), 1))
        for rule, shown in zip(("paired", "TensorRT-LLM", "vLLM Wilson", "MLPerf 99%"), row[2:], strict=True):
            assert cells[f"{rule}: real {name}"] == pytest.approx(float(shown), abs=0.015)


def test_example_policy_is_the_demos():
    policy = load_policy(ROOT / "examples" / "policy.yaml")
    assert (policy.name, policy.delta_nll.margin, policy.accuracy) == ("demo", 0.05, None)


@pytest.fixture(scope="module")
def trained(model, tokenizer, data):
    """The tiny model after a few seconds of training on the texts: only a model that knows something can lose it."""
    learner = copy.deepcopy(model).train()
    ids = [tokenizer.encode(text.text)[:64] for text in data.texts]
    width = min(map(len, ids))
    batch = torch.tensor([row[:width] for row in ids])
    optimizer = torch.optim.AdamW(learner.parameters(), lr=5e-3)
    for _ in range(60):
        loss = learner(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return learner.eval()


def test_real_reports_are_judged(trained, tokenizer, data, tmp_path):
    """The same model twice passes; one damaged layer fails; another template is refused."""
    scorer = ModuleScorer(trained, tokenizer)
    settings = EvalSettings(tasks=(), window=64, top_k=16)
    policy = Policy(name="p", delta_nll={"margin": 0.05, "min_documents": 10})
    target = describe("tiny", "a" * 64, "fp32", tokenizer)
    base = make_baseline(scorer, tokenizer, target, data, tmp_path / "base", settings=settings)
    again = evaluate(scorer, tokenizer, target, data, base, tmp_path / "again", settings=settings)
    assert judge(again, base.report, policy).word == "PASS"
    damaged = copy.deepcopy(trained)
    with torch.no_grad():
        damaged.model.layers[0].mlp.down_proj.weight.zero_()
    report = evaluate(ModuleScorer(damaged, tokenizer), tokenizer, describe("damaged", "d" * 64, "fp32", tokenizer),
                      data, base, tmp_path / "damaged", settings=settings)
    verdict = judge(report, base.report, policy)
    assert report.delta_nll.ci_low > 0.05
    assert verdict.word == "FAIL"
    assert verdict.reason.startswith("delta NLL: +")
    other = again.model_copy(update={"target": target.model_copy(update={"template_sha256": "x" * 64})})
    with pytest.raises(ComparisonError, match="chat template"):
        judge(other, base.report, policy)

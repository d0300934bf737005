"""``gate`` as CI runs it: a small model that was really trained, quantized, damaged and judged by command lines.

The four answers a gate must give: the same engine twice (PASS), int4 with a damaged layer (FAIL), too few items
(INCONCLUSIVE, exit 3), another chat template (refused, exit 2).
"""

import json
import re
import shutil
from xml.etree import ElementTree

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.toolkit.conftest import WORDS, prose, write_model
from toolkit import cli
from toolkit.home import Home

LAYER = "model.layers.1.mlp.down_proj.weight"


def train(folder, steps=80):
    """Teach the random model to spell the prose, so that damage costs and words are told from gibberish."""
    from transformers import LlamaForCausalLM

    from calib.text import Tokenizer

    tokenizer, model = Tokenizer.open(folder), LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for module in model.modules():
        if isinstance(module, (torch.nn.Linear, torch.nn.Embedding)):
            module.weight.data.mul_(0.1)
    torch.manual_seed(0)
    rows = torch.tensor([tokenizer.encode(prose(seed))[:64] for seed in range(3000, 3000 + 16 * 16)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    for step in range(steps):
        batch = rows[16 * (step % 16):16 * (step % 16 + 1)]
        optimizer.zero_grad()
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
    model.to(torch.bfloat16).save_pretrained(folder)


def questions(count):
    """Which of two is a word of the prose? The wrong one is its letters reversed."""
    rows = []
    for n in range(count):
        word, before = WORDS[n % 12], prose(9000 + n, words=6).rsplit(" ", 1)[0]
        choices = [word, word[::-1]] if n % 2 else [word[::-1], word]
        rows.append({"question": before, "choices": choices, "answer": 1 - n % 2})
    return rows


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    from evals.data import Source, write_folder

    home = Home(tmp_path_factory.mktemp("gate") / "home")
    write_model(home.models / "tiny")
    train(home.models / "tiny")
    for number, (name, count) in enumerate((("calibration", 40), ("choose", 24), ("evaluation", 24))):
        texts = [{"text": prose(1000 * number + n), "document": f"{name} {n}"} for n in range(count)]
        files = {"texts": Source(texts, "made by the test", "Apache-2.0")}
        if name == "evaluation":
            files["words"] = Source(questions(220), "made by the test", "Apache-2.0")
        write_folder(home.data / name, files)
    damaged = home.models / "damaged"
    shutil.copytree(home.models / "tiny", damaged)
    weights = load_file(damaged / "model.safetensors")
    noise = torch.randn(weights[LAYER].shape, generator=torch.Generator().manual_seed(0))
    weights[LAYER] = (8 * noise).to(torch.bfloat16)
    save_file(weights, damaged / "model.safetensors", metadata={"format": "pt"})
    other = home.models / "other-template"
    shutil.copytree(home.models / "tiny", other)
    settings = json.loads((other / "tokenizer_config.json").read_text())
    (other / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": "{{ messages[0].content }}!"}))
    (home.path / "policy.yaml").write_text(
        "name: both\ndelta_nll: {margin: 0.1, min_documents: 20}\naccuracy: {margin: 8}\n")
    return home


@pytest.fixture
def gate(home, capsys, tmp_path):
    """Run ``toolkit gate`` and return (exit code, the JSON document, stderr)."""
    def run(candidate, *more):
        code = cli.run_command(["gate", candidate, "--baseline", "tiny", "--policy", str(home.path / "policy.yaml"),
                                "--texts", "24", "--items", "220", "--json", "--home", str(home.path), *more])
        shown = capsys.readouterr()
        return code, json.loads(shown.out), shown.err
    return run


def engine(home, model, recipe, capsys):
    """Quantize and build through the command line; the engine's digest."""
    checkpoint, place = home.path / f"{model}-{recipe}.ckpt", home.path / f"{model}-{recipe}.engine"
    if not place.exists():
        if recipe == "bf16":
            checkpoint = home.models / model
        else:
            assert cli.run_command(["quantize", model, "--recipe", recipe, "--out", str(checkpoint), "--rows", "8",
                                    "--length", "64", "--home", str(home.path)]) == 0
        assert cli.run_command(["build", str(checkpoint), "--out", str(place), "--max-seq-len", "256", "--tune", "none",
                                "--home", str(home.path)]) == 0
    capsys.readouterr()
    return str(place)


def test_the_same_engine_twice_passes(home, gate, capsys, tmp_path):
    twin = engine(home, "tiny", "bf16", capsys)
    code, found, _ = gate(twin, "--baseline", twin)
    assert (code, found["word"]) == (0, "PASS")
    assert "0 right to wrong and 0 wrong to right" in found["reason"]
    code, found, _ = gate(twin)
    assert (code, found["word"]) == (0, "PASS"), found["reason"]


def test_int4_passes_and_int4_with_a_damaged_layer_fails(home, gate, capsys, tmp_path):
    code, found, _ = gate(engine(home, "tiny", "int4_awq", capsys))
    assert (code, found["word"]) == (0, "PASS"), found["reason"]
    xml, markdown = tmp_path / "gate.xml", tmp_path / "gate.md"
    code, found, _ = gate(engine(home, "damaged", "int4_awq", capsys), "--junit-xml", str(xml), "--markdown",
                          str(markdown))
    assert (code, found["word"]) == (1, "FAIL"), found["reason"]
    assert int(ElementTree.parse(xml).getroot().get("failures")) >= 1
    assert "Gate FAIL" in markdown.read_text()


def test_thirty_items_are_inconclusive(home, gate, capsys, tmp_path):
    policy = tmp_path / "policy.yaml"
    policy.write_text("name: few\naccuracy: {margin: 2}\n")
    code, found, _ = gate(engine(home, "tiny", "bf16", capsys), "--items", "30", "--policy", str(policy))
    assert (code, found["word"]) == (3, "INCONCLUSIVE")
    assert "over 30 items; the first look is at 200" in found["reason"]


def test_an_open_gate_draws_up_to_the_next_look(home, gate, capsys, tmp_path):
    """30 items are too few; the gate asks both for as many as the look at 200 needs, and only for those."""
    from evals.accuracy import HarnessModel

    fresh = home.models / "fresh"  # nobody has asked it anything
    shutil.copytree(home.models / "other-template", fresh)
    settings = json.loads((fresh / "tokenizer_config.json").read_text())
    (fresh / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": "{{ messages[0].content }}?"}))
    policy, twin, asked = tmp_path / "policy.yaml", engine(home, "fresh", "bf16", capsys), []
    policy.write_text("name: few\naccuracy: {margin: 2}\n")
    options = ("--policy", str(policy), "--items", "30", "--texts", "2", "--baseline", "fresh")
    code, found, _ = gate(twin, *options)
    assert (code, found["word"]) == (3, "INCONCLUSIVE")
    assert found["more"] == {"why": found["more"]["why"], "texts": 2, "items": 200}
    assert re.search(r"open after 30 questions: the next look is at 200 \(about \d+ s\)$", found["more"]["why"])
    scored = HarnessModel._scored

    def count(self, requests):
        before = len(self._journal.done)
        answers = scored(self, requests)
        asked.append(len(self._journal.done) - before)
        return answers
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HarnessModel, "_scored", count)
        code, found, said = gate(twin, *options, "--extend")
    assert (code, found["word"], found["more"]) == (0, "PASS", None)
    assert "over 200 items" in found["reason"]
    assert asked == [340, 340], "two choices of 170 more questions, of the baseline and of the candidate"
    assert "accuracy is open after 30 questions" in said


def test_where_nothing_can_be_drawn_it_says_why(home, gate, call, capsys, tmp_path):
    policy, twin = tmp_path / "policy.yaml", engine(home, "tiny", "bf16", capsys)
    policy.write_text("name: few\naccuracy: {margin: 2, looks: [400]}\n")
    code, found, _ = gate(twin, "--policy", str(policy), "--extend")
    assert (code, found["word"], found["more"]["items"]) == (3, "INCONCLUSIVE", None)
    assert "the data reaches no further look" in found["more"]["why"]
    code, report = call("eval", twin, "--items", 30, "--texts", 2)
    assert code == 0
    code, found = call("gate", report["digest"], "--baseline", report["digest"], "--policy", policy)
    assert (code, "a stored report answers no more" in found["more"]["why"]) == (3, True)


def test_a_gate_on_a_file_of_the_users_own(home, gate, call, capsys, tmp_path):
    """As ``eval`` takes it: wherever it lies, with its kind; a reference keeps both."""
    own, policy = tmp_path / "mine.jsonl", tmp_path / "policy.yaml"
    own.write_text("".join(json.dumps(row) + "\n" for row in questions(200)))
    policy.write_text("name: own\naccuracy: {margin: 8}\n")
    twin, options = engine(home, "tiny", "bf16", capsys), ("--policy", str(policy), "--data", str(own))
    code, found, _ = gate(twin, *options, "--kind", "choice")
    assert (code, found["word"]) == (0, "PASS"), found
    assert "over 200 items" in found["reason"]
    code, found, _ = gate(twin, *options)
    assert (code, found["error"]["message"]) == (2, f"{own} needs --kind")
    code, found, _ = gate(twin, "--kind", "text")
    assert (code, "goes with a .jsonl file" in found["error"]["message"]) == (2, True)
    file = tmp_path / "reference.yaml"
    code, written = call("gate", "update-reference", "tiny", "--file", file, "--data", own, "--kind", "choice",
                         "--reason", "own questions")
    assert (code, written["new"]["asked"]["kind"]) == (0, "choice"), written
    code, found = call("gate", twin, "--reference", file, "--policy", policy)
    assert (code, found["word"]) == (0, "PASS"), found


def test_another_template_is_refused(home, gate, capsys):
    code, found, _ = gate(engine(home, "other-template", "bf16", capsys))
    assert code == 2
    assert found["error"]["code"] == "not_comparable"
    assert "chat template" in found["error"]["message"]


def test_the_demo_runs_bench_gets_its_four_answers(home, capsys, tmp_path):
    """The script behind the table in docs/gate.md, on the small model."""
    from benchmarks.gate_demo import Bench, answers, table

    place = engine(home, "tiny", "int4_awq", capsys)
    bench = Bench(home.path, tmp_path / "work", ("--texts", "24", "--items", "30"),
                  ("--max-seq-len", "256", "--tune", "none"))
    found = answers(bench, place, home.path / "tiny-int4_awq.ckpt", "model.layers.0.self_attn.v_proj")
    assert [(one.found_word, one.found_code) for one in found] == [
        ("PASS", 0), ("FAIL", 1), ("INCONCLUSIVE", 3), ("not_comparable", 2)], table(found)
    assert all(one.right for one in found)


@pytest.fixture
def call(home, capsys):
    """Run any command line on this home: (exit code, the JSON document)."""
    def run(*arguments):
        code = cli.run_command([*map(str, arguments), "--json", "--home", str(home.path)])
        return code, json.loads(capsys.readouterr().out)
    return run


def test_a_length_rule_gets_the_continuations_it_needs():
    from evals.policy import Policy
    from toolkit.gating import asked_of
    from toolkit.job import Evaluation
    from toolkit.stages import eval_settings

    long = Policy(name="p", delta_nll={"margin": 0.1}, length={"min_samples": 30})
    plain = Policy(name="p", delta_nll={"margin": 0.1})
    for policy, expected in ((long, (30, 128)), (plain, (4, 32))):
        asked = asked_of("m", None, None, None, None, None, None, policy.length)
        settings = eval_settings(Evaluation(), 0, policy)
        assert (asked.samples, asked.sample_tokens) == expected
        assert (settings.samples, settings.sample_tokens) == expected


def test_a_reference_is_written_kept_and_defended(home, gate, call, capsys, tmp_path):
    from toolkit.store import RunStore

    file = tmp_path / "reference.yaml"
    update = ("gate", "update-reference", "tiny", "--file", file, "--texts", 24, "--items", 220)
    code, first = call(*update, "--reason", "first")
    assert (code, first["old"]) == (0, None)
    assert (first["new"]["n_items"], first["new"]["n_texts"], first["new"]["asked"]["seed"]) == (220, 24, 0)
    assert first["new"]["accuracy"]["value"] > 0.9
    policy = str(home.path / "policy.yaml")
    twin = engine(home, "tiny", "bf16", capsys)
    code, found = call("gate", twin, "--reference", file, "--policy", policy)
    assert (code, found["word"]) == (0, "PASS")
    code, found = call("gate", twin, "--reference", file, "--policy", policy, "--items", 100)
    assert (code, "fixes what is judged" in found["error"]["message"]) == (2, True)
    code, found = call("gate", twin, "--policy", policy)
    assert (code, "needs a baseline" in found["error"]["message"]) == (2, True)
    code, second = call(*update, "--reason", "again")
    assert (code, second["old"]) == (0, first["new"])
    assert second["new"]["previous"] == first["sha256"]
    with RunStore(home.store) as store:
        logged = [entry for entry in store.audit() if entry.action == "reference updated"][-2:]  # (the home is shared)
    assert [entry.detail["reason"] for entry in logged] == ["first", "again"]
    assert logged[1].detail["old"] == first["sha256"]
    file.write_text(file.read_text().replace(f"value: {first['new']['accuracy']['value']}", "value: 0.5"))
    code, found = call("gate", twin, "--reference", file, "--policy", policy)
    assert (code, found["error"]["code"]) == (2, "not_comparable")
    assert "accuracy: 0.50000 against" in found["error"]["message"]
    file.write_text("asked: {}\n")
    code, found = call("gate", twin, "--reference", file, "--policy", policy)
    assert (code, found["error"]["code"]) == (2, "policy")


def test_noise_of_the_same_engine(home, call, capsys):
    code, found = call("gate", "noise", engine(home, "tiny", "bf16", capsys), "--texts", 8, "--items", 60)
    assert (code, found["items"]) == (0, 60)
    assert found["flips"] <= 1
    assert found["nll"] < 1e-4
    assert found["smallest"] == pytest.approx(250 * (found["share"] / 60) ** 0.5)


def test_speed_of_an_engine_against_itself_does_not_fail(home, call, capsys):
    twin = engine(home, "tiny", "bf16", capsys)
    code, found = call("gate", "speed", twin, "--baseline", twin, "--cell", "1x8x4", "--margin", 0.9, "--blocks", 8)
    assert found["reason"]["word"] in ("PASS", "INCONCLUSIVE"), found
    assert code == {"PASS": 0, "INCONCLUSIVE": 3}[found["reason"]["word"]]
    assert found["ratio"]["n"] == 8


def test_only_new_questions_are_asked_of_the_unquantized_model(home, call, capsys, tmp_path):
    """Answers are kept item by item: a larger sample costs the difference, and an equal one nothing."""
    from evals.accuracy import HarnessModel

    asked = []
    scored = HarnessModel._scored

    def count(self, requests):
        before = len(self._journal.done)
        found = scored(self, requests)
        asked.append((len(requests), len(self._journal.done) - before))
        return found
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HarnessModel, "_scored", count)
        for items, seed in ((20, 7), (50, 7)):
            code, found = call("gate", "update-reference", "other-template", "--file", tmp_path / "r.yaml", "--items",
                               items, "--reason", "count", "--texts", 2, "--seed", seed)
            assert code == 0, found
    assert asked == [(40, 40), (100, 60)]

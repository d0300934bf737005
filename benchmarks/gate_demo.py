"""The gate's four answers on a demo run's own engine: does it say each word when it should?

One int4 engine of the run is the baseline, and four candidates come against it through the command line, as in CI:

    the same engine              PASS, exit 0           both sides really answer: nothing is kept between the two roles
    one layer damaged            FAIL, exit 1           its rows are rolled by one: each output has its neighbour's
    30 questions                 INCONCLUSIVE, exit 3   the same engine under an accuracy rule: nothing is lost, and yet
                                                        30 questions are no proof of that
    another chat template        refused, exit 2        before anything is asked

Damaged and changed checkpoints are copies in ``--work`` without a manifest (ours would not open any more, which is the
point of one), built as anybody's. It takes about six minutes on two quiet cores. Exit code 1 when an answer is another.
Run: python -m benchmarks.gate_demo --run demo --work DIR [--home HOME]
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from calib.artifact import MANIFEST
from toolkit import cli

LAYER = "model.layers.15.mlp.down_proj"
FEW = 30
POLICIES = {"loss": "name: loss\ndelta_nll: {margin: 0.05, min_documents: 20}\n",
            "points": "name: points\naccuracy: {margin: 2}\n"}


@dataclass(frozen=True, slots=True)
class Answer:
    """What a gate should say, and what it said. ``word`` of a refusal is its error's code."""

    case: str
    word: str
    code: int
    found_word: str
    found_code: int
    said: str

    @property
    def right(self) -> bool:
        return (self.word, self.code) == (self.found_word, self.found_code)


@dataclass(frozen=True, slots=True)
class Bench:
    """Where it is done: the home, a folder for copies, what is judged, and the options of ``build``."""

    home: Path | None
    work: Path
    judged: tuple[str, ...]
    build: tuple[str, ...]

    def call(self, *arguments: str | Path) -> tuple[int, dict[str, Any]]:
        """A command line: its exit code and its JSON document."""
        home = ["--home", str(self.home)] if self.home else []
        with contextlib.redirect_stdout(io.StringIO()) as out:
            code = cli.run_command([*map(str, arguments), "--json", *home])
        return code, json.loads(out.getvalue())

    def built(self, checkpoint: Path) -> str:
        """The engine of a checkpoint in the work folder."""
        place = checkpoint.with_suffix(".engine")
        code, found = (0, {}) if place.exists() else self.call("build", checkpoint, "--out", place, *self.build)
        if code:
            sys.exit(f"{checkpoint} was not built: {found['error']['message']}")
        return str(place)

    def gate(self, case: str, word: str, code: int, candidate: str, baseline: str, policy: str) -> Answer:
        rules = self.work / f"{policy}.yaml"
        rules.write_text(POLICIES[policy], encoding="utf-8")
        found_code, found = self.call("gate", candidate, "--baseline", baseline, "--policy", rules, *self.judged)
        if "error" in found:
            return Answer(case, word, code, found["error"]["code"], found_code, found["error"]["message"])
        return Answer(case, word, code, found["word"], found_code, found["reason"])


def copied(checkpoint: Path, place: Path) -> Path:
    """A checkpoint's files without its manifest, to be changed; made anew each time."""
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(checkpoint, place, ignore=shutil.ignore_patterns(MANIFEST))
    return place


def damage(checkpoint: Path, layer: str) -> None:
    """Roll the rows of one layer's weight by one; SystemExit when no file holds it."""
    for file in sorted(checkpoint.glob("*.safetensors")):
        tensors = load_file(file)
        if f"{layer}.weight" in tensors:
            tensors[f"{layer}.weight"] = tensors[f"{layer}.weight"].roll(1, 0).contiguous()
            save_file(tensors, file, metadata={"format": "pt"})
            return
    sys.exit(f"{checkpoint} has no {layer}.weight")


def change_template(checkpoint: Path) -> None:
    """One more character in the chat template, wherever it lies."""
    file, config = checkpoint / "chat_template.jinja", checkpoint / "tokenizer_config.json"
    if file.is_file():
        file.write_text(f"{file.read_text(encoding='utf-8')}!", encoding="utf-8")
        return
    settings = json.loads(config.read_text(encoding="utf-8"))
    config.write_text(json.dumps(settings | {"chat_template": f"{settings['chat_template']}!"}), encoding="utf-8")


def answers(bench: Bench, engine: str, checkpoint: Path, layer: str) -> list[Answer]:
    """The four cases against ``engine``, which was built from ``checkpoint``."""
    bench.work.mkdir(parents=True, exist_ok=True)
    hurt = copied(checkpoint, bench.work / "damaged")
    damage(hurt, layer)
    other = copied(checkpoint, bench.work / "template")
    change_template(other)
    return [bench.gate("the same engine twice", "PASS", 0, engine, engine, "loss"),
            bench.gate(f"{layer} damaged", "FAIL", 1, bench.built(hurt), engine, "loss"),
            bench.gate(f"{FEW} questions", "INCONCLUSIVE", 3, engine, engine, "points"),
            bench.gate("another chat template", "not_comparable", 2, bench.built(other), engine, "loss")]


def of_run(bench: Bench, run: str, recipe: str) -> tuple[str, Path]:
    """(the engine's digest, its checkpoint's folder) of a run's row."""
    code, shown = bench.call("runs", "show", run)
    if code:
        sys.exit(shown["error"]["message"])
    rows = [row for row in shown["rows"] if (row["recipe"], row["kv_cache"]) == (recipe, "bf16")]
    if not rows:
        sys.exit(f"run {run} has no engine of {recipe}")
    _, found = bench.call("inspect", rows[0]["checkpoint_digest"])
    return rows[0]["engine_digest"], Path(found["path"])


def table(found: Sequence[Answer]) -> str:
    lines = ["| candidate | it should say | it said | exit | why |", "|---|---|---|--:|---|"]
    lines += [f"| {answer.case} | {answer.word} | {answer.found_word} | {answer.found_code} | {answer.said} |"
              for answer in found]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", default="demo")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--home", type=Path)
    parser.add_argument("--recipe", default="int4_awq")
    parser.add_argument("--layer", default=LAYER)
    parser.add_argument("--texts", type=int, default=20)
    parser.add_argument("--task", default="piqa")
    options = parser.parse_args()
    judged = ("--texts", f"{options.texts}", "--items", f"{FEW}", "--task", options.task)
    bench = Bench(options.home, options.work, judged, ("--max-seq-len", "1024", "--max-batch-size", "8"))
    found = answers(bench, *of_run(bench, options.run, options.recipe), options.layer)
    print(table(found))
    return 0 if all(answer.right for answer in found) else 1


if __name__ == "__main__":
    sys.exit(main())

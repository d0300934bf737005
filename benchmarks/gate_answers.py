"""Record what a real model answers: twice the same, and with one layer damaged by known amounts.

The model is scored in memory in float32 on seeded questions of a prepared folder. ``again`` is the same model with
other batch mates: what a machine's arithmetic alone changes. ``layer L noise s`` adds Gaussian noise of s times the
weight's own standard deviation to every linear of decoder layer L: a damage whose size is known. ``gate_power`` runs
the gates on these answers. lm-eval is not needed: prompts and rules are ``evals.asking``'s.
Run: python -m benchmarks.gate_answers --model DIR --data DIR --items 800 --out docs/benchmarks/gate-answers.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from calib.artifact import write_atomic
from calib.model import load_hf
from calib.text import Tokenizer
from evals.asking import DELIMITER, by_context, choice_scores, context_of, decided_by_rule, split_tokens
from evals.data import EvalData
from evals.items import Question
from evals.module import ModuleScorer
from evals.sampling import sample
from evals.target import checked_choices


def damage(model: torch.nn.Module, layer: int, strength: float, seed: int = 0) -> None:
    """Add noise of ``strength`` standard deviations of each weight to the linears of one decoder layer."""
    draw = torch.Generator().manual_seed(seed)
    found = 0
    with torch.no_grad():
        for name, module in model.named_modules():
            if f".layers.{layer}." in name and isinstance(module, torch.nn.Linear):
                noise = torch.randn(module.weight.shape, generator=draw)
                module.weight += strength * module.weight.std() * noise
                found += 1
    if not found:
        raise SystemExit(f"the model has no layer {layer} with linears")


def right_answers(scorer: ModuleScorer, tokenizer: Tokenizer, questions: Sequence[Question], rules: Mapping[str, str],
                  batch: int, name: str) -> str:
    """A character a question: 1 where the choice with the highest score is the right one (``evals.asking``)."""
    bits = ""
    for begin in range(0, len(questions), batch):
        print(f"\r{name}: {begin}/{len(questions)}", end="", flush=True)
        asked = questions[begin:begin + batch]
        split = {f"{i} {choice}": split_tokens(tokenizer, context_of(question), DELIMITER + question.choices[choice])
                 for i, question in enumerate(asked) for choice in range(len(question.choices))}
        groups = by_context(split)
        scores = checked_choices(scorer, [(context, [ids for _, ids in each]) for context, each in groups])
        sums = {key: float(score.logprobs.sum(dtype=np.float64)) for (_, each), own in zip(groups, scores, strict=True)
                for (key, _), score in zip(each, own, strict=True)}
        for i, question in enumerate(asked):
            found = np.array([sums[f"{i} {choice}"] for choice in range(len(question.choices))])
            best = int(choice_scores(found, question, rules[question.task]).argmax())
            bits += str(int(best == question.answer))
    print(f"\r{name}: {bits.count('1')} of {len(bits)} right")
    return bits


def record(model: Path, data: EvalData, tasks: list[str], items: int, layer: int, strengths: list[float], device: str
           ) -> dict[str, str]:
    """Right (1) or wrong (0) of every variant, a character an item, all in one shuffled order."""
    tokenizer = Tokenizer.open(model)
    listed = [item for task in tasks for item in data.task(task) if isinstance(item, Question)]
    questions = sample(listed, min(items, len(listed)), 0)
    rules = {task: decided_by_rule(data.task(task)) for task in tasks}
    variants = {"baseline": (0.0, 64), "again": (0.0, 24)}
    variants |= {f"layer {layer} noise {strength:g}": (strength, 64) for strength in strengths}
    found = {}
    for name, (strength, batch) in variants.items():
        module = load_hf(model)
        if strength:
            damage(module, layer, strength)
        placed = torch.nn.Module.to(module, device)
        found[name] = right_answers(ModuleScorer(placed, tokenizer), tokenizer, questions, rules, batch, name)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a Hugging Face folder")
    parser.add_argument("--data", type=Path, required=True, help="a prepared evaluation folder")
    parser.add_argument("--tasks", default="piqa,openbookqa", help="comma-separated")
    parser.add_argument("--items", type=int, default=800)
    parser.add_argument("--layer", type=int, default=15)
    parser.add_argument("--noise", default="0.1,0.2,0.4", help="standard deviations of the weights, comma-separated")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    tasks = arguments.tasks.split(",")
    found = record(arguments.model, EvalData.load(arguments.data), tasks, arguments.items, arguments.layer,
                   [float(part) for part in arguments.noise.split(",")], arguments.device)
    document = {"model": arguments.model.name, "tasks": tasks, "items": len(found["baseline"]), "variants": found}
    write_atomic(arguments.out, json.dumps(document, indent=1).encode())


if __name__ == "__main__":
    main()

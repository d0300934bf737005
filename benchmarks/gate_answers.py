"""Record what a real model answers: twice the same, and with one layer damaged by known amounts.

The model is scored in memory in float32 on seeded questions of a prepared folder. ``again`` is the same model with
other batch mates: what a machine's arithmetic alone changes. ``layer L noise s`` adds Gaussian noise of s times the
weight's own standard deviation to every linear of decoder layer L: a damage whose size is known. ``gate_power`` runs
the gates on these answers. Interrupted work goes on.
Run: python -m benchmarks.gate_answers --model DIR --data DIR --items 800 --out docs/benchmarks/gate-answers.json
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch

from calib.artifact import write_atomic
from calib.model import load_hf
from calib.progress import Progress
from calib.text import Tokenizer
from evals.accuracy import answer
from evals.data import EvalData
from evals.module import ModuleScorer
from evals.sampling import shuffled


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


def record(model: Path, data: EvalData, tasks: list[str], items: int, layer: int, strengths: list[float], work: Path
           ) -> dict[str, str]:
    """Right (1) or wrong (0) of every variant, a character an item, all in one shuffled order."""
    tokenizer = Tokenizer.open(model)
    variants = {"baseline": (0.0, 64), "again": (0.0, 24)}
    variants |= {f"layer {layer} noise {strength:g}": (strength, 64) for strength in strengths}
    found = {}
    for name, (strength, batch) in variants.items():
        module = load_hf(model)
        if strength:
            damage(module, layer, strength)

        def show(event: Progress, name: str = name) -> None:
            print(f"\r{name}: {event.done}/{event.total}", end="", flush=True)

        answered = answer(ModuleScorer(module, tokenizer), tokenizer, data, tasks, limit=items // len(tasks), seed=0,
                          scratch=work / name.replace(" ", "-"), key=f"{name} {model.name}", batch=batch, report=show)
        found[name] = "".join(str(int(item.correct)) for item in shuffled(answered, 0))
        print(f"\r{name}: {found[name].count('1')} of {len(found[name])} right")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a Hugging Face folder")
    parser.add_argument("--data", type=Path, required=True, help="a prepared evaluation folder")
    parser.add_argument("--tasks", default="piqa,openbookqa", help="comma-separated")
    parser.add_argument("--items", type=int, default=800)
    parser.add_argument("--layer", type=int, default=15)
    parser.add_argument("--noise", default="0.1,0.2,0.4", help="standard deviations of the weights, comma-separated")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    tasks, work = arguments.tasks.split(","), arguments.out.with_name(f".{arguments.out.name}.work")
    found = record(arguments.model, EvalData.load(arguments.data), tasks, arguments.items, arguments.layer,
                   [float(part) for part in arguments.noise.split(",")], work)
    document = {"model": arguments.model.name, "tasks": tasks, "items": len(found["baseline"]), "variants": found}
    write_atomic(arguments.out, json.dumps(document, indent=1).encode())
    shutil.rmtree(work)


if __name__ == "__main__":
    main()

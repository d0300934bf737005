"""The table of model families (docs/families.md): every figure is measured here, on tiny random models.

For each family, a real checkpoint of its architecture, four layers deep (``tiny_families``):

* the largest difference of a logit from transformers in float32, relative to the largest logit: prompts of different
  lengths, beyond the window and the original context, then tokens one by one with the cache; of both CPU backends and
  of prompts in one piece and in chunks, the worst;
* whether greedy tokens are transformers' own;
* int8 as ``quantize`` makes it: mean negative log-likelihood per token of the engine minus that of calibration's oracle
  (the module with dequantized weights and fake-quantized activations), on the same random texts;
* the GPU path through Triton's interpreter: the largest difference of a log-probability from the CPU engine.

Run:  python -m benchmarks.families --json families.json --docs docs/families.md
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from benchmarks.families_interpreted import BOUND
from benchmarks.family_logits import differences
from benchmarks.tiny_families import (
    FAMILIES,
    FIRST_CALL,
    ORIGINAL,
    ROPES,
    WINDOW,
    Tiny,
    greedy,
    make,
    prompts,
    reference,
)
from calib.calibrate import quantize
from calib.checkpoint import QuantizedCheckpoint
from calib.dataset import CalibrationSet
from calib.model import load_model
from calib.recipe import load_recipe
from calib.text import Tokenizer
from engines.build.builder import build
from engines.llm import LLM
from engines.models.families import FAMILIES as ARCHITECTURES
from engines.models.rope import KINDS
from engines.plan import EngineSpec
from engines.request import SamplingParams
from evals.bench import BenchCell, cell_of, write_cells

_PAGE = """\
# Model families

Written by `python -m benchmarks.families`, not by hand: tiny random models of the real architectures (four layers, a
window of {window} tokens, an original context of {original}), in float32 against transformers, on a CPU.

Supported: {architectures}.
Any other architecture is refused by `plan`, by name, with this list. From GGUF files: `llama` only.

| family | what differs from the plain decoder | largest logit difference | greedy texts equal | int8: NLL minus \
oracle's | compiled CPU step | GPU path |
|---|---|--:|--:|--:|---|--:|
{families}

* **Logit differences** are relative to the largest logit: the worst of prompts of {first} to {last} tokens (longrope:
  so many beyond the original context) and {steps} tokens after each with the cache, in one piece and in chunks,
  through the compiled step and through torch's operators.
* **int8** is made by `quantize`; the oracle is the module with dequantized weights and fake-quantized activations. Nats
  per token, on random texts.
* The **GPU path** computes in bf16. Its column is the largest difference of a log-probability from the CPU engine, in
  Triton's interpreter: the kernels' arithmetic and the runner, without a GPU. The same comparison on a card, within
  {bound}, is `tests/engines/test_families_gpu.py` (marker `gpu`).
* A window is a mask: layers that have one keep their KV cache at full length all the same, and the plan says so.

## Rope variants

| variant | largest logit difference | greedy texts equal |
|---|--:|--:|
{ropes}

Kinds: {kinds}. Two of them depend on a text's length, which a KV cache cannot follow:

* **dynamic**: position p is rotated as the last one of a text of p + 1 tokens. That is what transformers does while it
  generates; a prompt longer than the original context it rotates by the whole prompt's length. The row above compares
  with transformers fed one token at a time from there on.
* **longrope**: an engine takes the short factors for all its texts if `max_seq_len` is at most the original context,
  else the long ones for all; transformers switches, and computes its cache again, when a text grows past it. The plan
  says which. The row above is of texts beyond the original context; shorter ones equal transformers in an engine that
  was built with `max_seq_len` at the original context (`tests/engines/test_families.py`).
"""
_LENGTHS = (1, 5, WINDOW, WINDOW + 1, 60, 90)
_STEPS, _GREEDY, _ROWS = 6, 24, 8


@dataclass(frozen=True, slots=True)
class Row:
    """One family's figures; None where a figure was not asked for."""

    name: str
    words: str
    logits: float
    compiled: bool
    same_tokens: int
    texts: int
    int8_nll: float | None
    interpreter: float | None


def _long(tiny: Tiny) -> bool:
    """Whether the family is compared beyond its original context only (longrope: ``engines/models/rope.py``)."""
    return "original_max_position_embeddings" in tiny.changes


def measure(work: Path, name: str, tiny: Tiny, interpreter: float | None, *, int8: bool) -> Row:
    """All figures of one model; ``work`` is an empty folder."""
    folder = make(work / "model", tiny, seed=1)
    shift = ORIGINAL if _long(tiny) else 0
    texts = prompts([length + shift for length in _LENGTHS], seed=2)
    found = differences(folder, work / "weights", texts, prompts([_STEPS] * len(texts), seed=3),
                        feed=FIRST_CALL.get(name))
    engine = build(QuantizedCheckpoint.open(folder), EngineSpec(tune="none", max_num_tokens=17), work / "engine")
    short = prompts([2, WINDOW - 3, 50, 60] if not shift else [ORIGINAL + 1, ORIGINAL + 40], seed=4)
    with LLM(engine) as llm:
        outs = llm.generate(short, SamplingParams(max_tokens=_GREEDY, ignore_eos=True))
    model = reference(folder)
    same = sum(out.outputs[0].token_ids == greedy(model, text, _GREEDY) for out, text in zip(outs, short, strict=True))
    return Row(name, tiny.words, max(found.values()),
               {choice.impl for choice in engine.plan.kernels} == {"tiles", "compiled"}, same, len(short),
               int8_difference(work, folder, short_only=_long(tiny)) if int8 else None, interpreter)


def int8_difference(work: Path, folder: Path, *, short_only: bool) -> float:
    """Mean NLL, nats per token, of an int8 engine minus its oracle's, on random rows of 60 tokens."""
    draw = random.Random(0)
    source = work / "texts.jsonl"
    words = ["".join(draw.choice("abcdefghijklmnop") for _ in range(draw.randint(2, 9))) for _ in range(50)]
    source.write_text("".join(f'{{"text": "{" ".join(draw.choice(words) for _ in range(30))}."}}\n' for _ in range(40)))
    held = CalibrationSet.build([source], Tokenizer.open(folder), work / "calibration", rows=6, length=48)
    chosen = [" ".join(reversed(draw.sample(words, 30))) for _ in range(6)]
    checkpoint = quantize(folder, load_recipe("int8"), work / "int8", calibration=held, choose_texts=chosen)
    spec = EngineSpec(tune="none", max_seq_len=ORIGINAL if short_only else None)
    rows = prompts([60] * _ROWS, seed=5)
    oracle = load_model(checkpoint)
    with LLM(build(checkpoint, spec, work / "int8-engine")) as llm, torch.inference_mode():
        ours = np.concatenate([score.logprobs for score in llm.loglikelihood(rows)])
        table = oracle(torch.tensor(rows), use_cache=False).logits[:, :-1].log_softmax(-1)
    theirs = table.gather(-1, torch.tensor(rows)[:, 1:, None]).flatten().numpy()
    return float((-ours).mean() - (-theirs).mean())


def interpreted(work: Path) -> dict[str, float]:
    """Family -> the GPU path's largest difference, from a process with the interpreter."""
    done = subprocess.run([sys.executable, "-m", "benchmarks.families_interpreted", str(work)], text=True, check=False,
                          env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True)
    if done.returncode:
        raise RuntimeError(f"the interpreter's process ended with {done.returncode}: {done.stderr[-2000:]}")
    lines = [line.partition("\t") for line in done.stdout.splitlines()]
    return {name: float(worst) for name, _, worst in lines if worst}


def cells(rows: list[Row]) -> list[BenchCell]:
    """Every figure as a benchmark cell."""
    found = []
    for row in rows:
        found += [cell_of(f"families {row.name} logits", [row.logits], "of the largest"),
                  cell_of(f"families {row.name} greedy texts equal", [float(row.same_tokens)], f"of {row.texts}")]
        if row.int8_nll is not None:
            found.append(cell_of(f"families {row.name} int8 nll - oracle", [row.int8_nll], "nats per token"))
        if row.interpreter is not None:
            found.append(cell_of(f"families {row.name} interpreter", [row.interpreter], "nats"))
    return found


def document(families: list[Row], ropes: list[Row]) -> str:
    """docs/families.md."""
    first, last = _LENGTHS[0], _LENGTHS[-1]
    measured = [f"| {row.name} | {row.words} | {row.logits:.0e} | {row.same_tokens} of {row.texts} | "
                f"{row.int8_nll:+.5f} | {'yes' if row.compiled else 'no'} | {row.interpreter:.3f} |"
                for row in families]
    variants = [f"| {row.name} | {row.logits:.0e} | {row.same_tokens} of {row.texts} |" for row in ropes]
    return _PAGE.format(window=WINDOW, original=ORIGINAL, first=first, last=last, steps=_STEPS,
                        bound=BOUND,
                        kinds=", ".join(KINDS), architectures=", ".join(f"`{name}`" for name in sorted(ARCHITECTURES)),
                        families="\n".join(measured), ropes="\n".join(variants))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--docs", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as held:
        work = Path(held)
        on_gpu = interpreted(work / "interpreter")
        families = [measure(work / f"f{index}", name, tiny, on_gpu[name], int8=True)
                    for index, (name, tiny) in enumerate(FAMILIES.items())]
        ropes = [measure(work / f"r{index}", name, tiny, None, int8=False)
                 for index, (name, tiny) in enumerate(ROPES.items())]
    text = document(families, ropes)
    args.docs.write_text(text)
    write_cells(args.json, cells([*families, *ropes]))
    print(text)


if __name__ == "__main__":
    main()

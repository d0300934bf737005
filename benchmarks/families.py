"""The table of model families (docs/families.md): every figure is measured here, on tiny random models.

For each family, a real checkpoint of its architecture, four layers deep (``tiny_families``):

* the largest difference of a logit from transformers in float32, relative to the largest logit: prompts of different
  lengths, beyond the window and the original context, then tokens one by one with the cache; of both CPU backends and
  of prompts in one piece and in chunks, the worst;
* whether greedy tokens are transformers' own;
* int8 as ``quantize`` makes it: mean negative log-likelihood per token of the engine minus that of calibration's oracle
  (the module with dequantized weights and fake-quantized activations), on the same random texts;
* the GPU path through Triton's interpreter: the largest difference of a log-probability from the CPU engine.

Run:  python -m benchmarks.families            measures, writes docs/benchmarks/families.json and the page
      python -m benchmarks.families --page     writes docs/families.md from the JSON as it is, and measures nothing
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

from benchmarks.families_page import LENGTHS, STEPS, Row, cells, page_of
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
from engines.plan import EngineSpec
from engines.request import SamplingParams
from evals.bench import write_cells

_GREEDY, _ROWS = 24, 8


def _long(tiny: Tiny) -> bool:
    """Whether the family is compared beyond its original context only (longrope: ``engines/models/rope.py``)."""
    return "original_max_position_embeddings" in tiny.changes


def measure(work: Path, name: str, tiny: Tiny, interpreter: float | None, *, int8: bool) -> Row:
    """All figures of one model; ``work`` is an empty folder."""
    folder = make(work / "model", tiny, seed=1)
    shift = ORIGINAL if _long(tiny) else 0
    texts = prompts([length + shift for length in LENGTHS], seed=2)
    found = differences(folder, work / "weights", texts, prompts([STEPS] * len(texts), seed=3),
                        feed=FIRST_CALL.get(name))
    engine = build(QuantizedCheckpoint.open(folder), EngineSpec(tune="none", max_num_tokens=17), work / "engine")
    short = prompts([2, WINDOW - 3, 50, 60] if not shift else [ORIGINAL + 1, ORIGINAL + 40], seed=4)
    with LLM(engine) as llm:
        outs = llm.generate(short, SamplingParams(max_tokens=_GREEDY, ignore_eos=True))
    model = reference(folder)
    same = sum(out.outputs[0].token_ids == greedy(model, text, _GREEDY) for out, text in zip(outs, short, strict=True))
    return Row(name, max(found.values()), same, len(short),
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=Path("docs/benchmarks/families.json"))
    parser.add_argument("--docs", type=Path, default=Path("docs/families.md"))
    parser.add_argument("--page", action="store_true", help="write the page from the JSON, measure nothing")
    args = parser.parse_args()
    if not args.page:
        _measure_all(args.json)
    text = page_of(args.json)
    args.docs.write_text(text, encoding="utf-8")
    print(text)


def _measure_all(json: Path) -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as held:
        work = Path(held)
        on_gpu = interpreted(work / "interpreter")
        families = [measure(work / f"f{index}", name, tiny, on_gpu[name], int8=True)
                    for index, (name, tiny) in enumerate(FAMILIES.items())]
        ropes = [measure(work / f"r{index}", name, tiny, None, int8=False)
                 for index, (name, tiny) in enumerate(ROPES.items())]
    write_cells(json, cells([*families, *ropes]))


if __name__ == "__main__":
    main()

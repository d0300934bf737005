"""Decode and prefill speed of engines on this CPU, beside transformers' ``generate`` in the same run.

One formula for ours and the peer's: a decode step is (T(n) - T(1)) / (n - 1), wall clock, through the public
``generate`` on the same random prompts with end tokens ignored; tokens/s = batch / step. Prefill tokens/s =
batch * isl / T(1). Systems take turns within every repeat, so that a busy machine disturbs all alike; a cell is the
median, ``spread`` max - min, ``peer`` the faster of transformers in float32 and bf16.

Run on a quiet machine:
    python -m benchmarks.cpu --model HOME/models/SmolLM2-135M-Instruct --engine DIR [--engine DIR ...] --json cpu.json
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from engines.llm import LLM
from engines.request import SamplingParams
from evals.bench import BenchCell, cell_of, table, write_cells

Generate = Callable[[list[list[int]], int], None]


def transformers_generate(model: Path, dtype: torch.dtype) -> Generate:
    """Greedy ``generate`` of a fixed length."""
    module = AutoModelForCausalLM.from_pretrained(model, dtype=dtype, local_files_only=True).eval()

    def run(prompts: list[list[int]], count: int) -> None:
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            out = module.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count,
                                  do_sample=False, pad_token_id=0)
        assert out.shape[1] == ids.shape[1] + count
    return run


def engine_generate(llm: LLM) -> Generate:
    """The same through an engine."""
    def run(prompts: list[list[int]], count: int) -> None:
        outs = llm.generate(prompts, SamplingParams(max_tokens=count, ignore_eos=True))
        assert all(len(out.outputs[0].token_ids) == count for out in outs)
    return run


def timed(run: Generate, prompts: list[list[int]], count: int) -> float:
    start = time.perf_counter()
    run(prompts, count)
    return time.perf_counter() - start


def measure(systems: dict[str, Generate], batch: int, isl: int, osl: int, repeats: int, vocab: int
            ) -> dict[str, tuple[list[float], list[float]]]:
    """System -> (decode tokens/s, prefill tokens/s) of every repeat; one warm-up each is not counted."""
    generator = torch.Generator().manual_seed(batch)
    prompts = torch.randint(vocab // 10, vocab, (batch, isl), generator=generator).tolist()
    found: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in systems}
    for repeat in range(repeats + 1):
        for name, run in systems.items():
            first, whole = timed(run, prompts, 1), timed(run, prompts, osl)
            if repeat:
                found[name][0].append(batch * (osl - 1) / (whole - first))
                found[name][1].append(batch * isl / first)
    return found


def cells(found: dict[str, tuple[list[float], list[float]]], batch: int, isl: int) -> list[BenchCell]:
    """Named as the design says: ``decode int8 kv=bf16 batch=1 isl=64``; a peer's own begin with its name."""
    made = []
    for index, kind in enumerate(("decode", "prefill")):
        where = f"batch={batch} isl={isl}"
        peers = {name: cell_of(f"{name} {kind} {where}", values[index], "tok/s")
                 for name, values in found.items() if name.startswith("transformers")}
        best_name, best = max(peers.items(), key=lambda item: item[1].value)
        made += [cell_of(f"{kind} {name} {where}", values[index], "tok/s", peer=best.value, peer_name=best_name)
                 for name, values in found.items() if name not in peers]
        made += list(peers.values())
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="bf16 Hugging Face folder, for transformers")
    parser.add_argument("--engine", type=Path, action="append", required=True, help="an engine folder; repeatable")
    parser.add_argument("--batch", type=int, action="append", help="default: 1 and 8")
    parser.add_argument("--isl", type=int, default=64)
    parser.add_argument("--osl", type=int, default=33)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    llms = [LLM(path, prefix_cache=False) for path in options.engine]
    systems = {f"{llm.engine.recipe} kv={llm.engine.kv.dtype.removesuffix('_e4m3')}": engine_generate(llm)
               for llm in llms}
    if len(systems) < len(llms):
        parser.error("two engines have the same recipe and KV cache")
    systems |= {"transformers fp32": transformers_generate(options.model, torch.float32),
                "transformers bf16": transformers_generate(options.model, torch.bfloat16)}
    vocab = min(llm.engine.plan.model.vocab_size for llm in llms)
    made: list[BenchCell] = []
    for batch in options.batch or [1, 8]:
        made += cells(measure(systems, batch, options.isl, options.osl, options.repeats, vocab), batch, options.isl)
        print(table(made), flush=True)
    if options.json:
        write_cells(options.json, made)


if __name__ == "__main__":
    main()

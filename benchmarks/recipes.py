"""Every recipe judged on one model: what it costs in quality, what it saves, and how fast the engine decodes.

For each row (a recipe, or a recipe with another KV cache or a quantized head): calibrate on the calibration texts, open
what was written, and score it as ``calib.model.load_model`` computes it (float32, activations and KV rounded) on packed
rows of evaluation text that calibration has not seen. Paired with the unquantized model, token by token:

    delta NLL      mean over tokens of log p(bf16) - log p(row), nats; its standard error from the rows of text, which
                   are the independent units (tokens of one row are not)
    KL             mean over positions of KL(bf16 || row), over the whole vocabulary
    same top-1     share of positions where both put the same token first

Speed is a second step (``--speed``), because it wants a quiet machine: engines take turns, decode tokens/s by the
formula of ``benchmarks.cpu``; a scheme that the engine does not run has the builder's sentence in its place.

``--longer`` scores the four-bit rows, as they were made, on twice the text: theirs are the figures that are asked for.

Resumable: a finished row lies as JSON in ``--work`` under a key of everything that it depends on.

    python -m benchmarks.recipes --home HOME --work DIR [--only NAME ...]
    python -m benchmarks.recipes --home HOME --work DIR --longer
    python -m benchmarks.recipes --home HOME --work DIR --speed
    python -m benchmarks.recipes --home HOME --work DIR [--only NAME ...] --write
    python -m benchmarks.recipes --redraw           the page again, from docs/benchmarks/recipes-rows.json alone
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from benchmarks.cpu import engine_generate, measure
from benchmarks.recipes_table import ASKED, LENGTH, Judged, Measured, page_of, write_page
from calib.artifact import canonical_json, installed_versions, sha256_hex, write_atomic
from calib.calibrate import quantize
from calib.checkpoint import QuantizedCheckpoint
from calib.dataset import CalibrationSet, pack_texts, refuse_overlap
from calib.errors import ToolkitError
from calib.hardware import HardwareError
from calib.model import load_hf, load_model
from calib.recipe import Recipe, load_recipe, recipe_names
from calib.text import Tokenizer
from engines.build.builder import build
from engines.llm import LLM
from engines.plan import EngineSpec
from evals.bench import device_name
from evals.data import EvalData

Kv = Literal["bf16", "fp8", "int8"]


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table: a recipe, its KV cache, and the head's format."""

    recipe: str
    kv: Kv = "bf16"
    head: Literal["fp8", "int8"] | None = None

    @property
    def name(self) -> str:
        return self.recipe + (f" kv={self.kv}" if self.kv != "bf16" else "") + (
            f" lm_head={self.head}" if self.head else "")

    def load(self, work: Path) -> Recipe:
        if self.head is None:
            return load_recipe(self.recipe)
        path = work / f"{self.recipe}-head-{self.head}.yaml"
        path.write_text(f"extends: {self.recipe}\nname: {self.recipe}-head-{self.head}\nlm_head: {self.head}\n")
        return load_recipe(path)


#: Beside the recipes themselves: KV caches and heads, each where its own price can be read off.
OPTIONS = (Row("bf16", "fp8"), Row("bf16", "int8"), Row("int8", "fp8"), Row("int8", "int8"),
           Row("int8_weight_only", head="int8"), Row("fp8_dynamic", head="fp8"))


def rows() -> list[Row]:
    return [*(Row(name) for name in recipe_names()), *OPTIONS]


@dataclass(slots=True)
class Bench:
    """The inputs that all rows share."""

    model: Path
    work: Path
    tokenizer: Tokenizer
    calibration: CalibrationSet
    choose: list[str]
    tokens: torch.Tensor
    ending: str = ".json"

    @classmethod
    def open(cls, home: Path, model: str, work: Path, calibration_rows: int, judged_rows: int,
             ending: str = ".json") -> Bench:
        work.mkdir(parents=True, exist_ok=True)
        folder = home / "models" / model
        tokenizer = Tokenizer.open(folder)
        place = work / f"calibration-{calibration_rows}"
        if not place.is_dir():
            CalibrationSet.build([home / "data/calibration/texts.jsonl"], tokenizer, place, rows=calibration_rows,
                                 length=LENGTH)
        calibration = CalibrationSet.open(place)
        judged = [text.text for text in EvalData.load(home / "data/evaluation").texts]
        refuse_overlap(calibration, judged, "calibration and evaluation")
        choose = [text.text for text in EvalData.load(home / "data/choose").texts]
        return cls(folder, work, tokenizer, calibration, choose, pack_texts(judged, tokenizer, LENGTH, judged_rows),
                   ending)

    def key(self, row: Row) -> str:
        """sha256 over what a row's numbers follow from."""
        recipe = row.load(self.work).model_dump(mode="json")
        return sha256_hex(canonical_json({
            "recipe": recipe, "kv": row.kv, "source": QuantizedCheckpoint.open(self.model).digest,
            "calibration": self.calibration.digest, "tokens": self.tokens.tolist(), "versions": installed_versions()}))

    def place(self, row: Row) -> Path:
        return self.work / row.name.replace(" ", "-").replace("=", "-")

    def judged(self, row: Row) -> Judged | None:
        """The finished row, when its inputs are still the same."""
        path = self.place(row).with_suffix(self.ending)
        held = json.loads(path.read_bytes()) if path.is_file() else {}
        return Judged.model_validate(held["row"]) if held.get("key") == self.key(row) else None

    def keep(self, row: Row, judged: Judged) -> None:
        document = {"key": self.key(row), "row": judged.model_dump(mode="json")}
        write_atomic(self.place(row).with_suffix(self.ending), canonical_json(document))


def log_probabilities(model: nn.Module, tokens: torch.Tensor) -> Iterator[torch.Tensor]:
    """Row by row of tokens [n, s]: float32 [s - 1, vocabulary]."""
    with torch.inference_mode():
        for row in tokens:
            yield torch.log_softmax(model(row[None], use_cache=False).logits[0, :-1].float(), -1)


class Base:
    """The unquantized model's log-probabilities, kept on disk: one file a row of text."""

    def __init__(self, model: Path, tokens: torch.Tensor, folder: Path) -> None:
        self.paths = [folder / f"{sha256_hex(canonical_json(row.tolist()))[:16]}.safetensors" for row in tokens]
        missing = [index for index, path in enumerate(self.paths) if not path.is_file()]
        folder.mkdir(exist_ok=True)
        found: Iterator[torch.Tensor] = log_probabilities(load_hf(model), tokens[missing]) if missing else iter(())
        for index, values in zip(missing, found, strict=True):
            partial = self.paths[index].with_suffix(".partial")
            save_file({"row": values}, partial)
            partial.rename(self.paths[index])

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (load_file(path)["row"] for path in self.paths)


def compare(base: Iterable[torch.Tensor], other: nn.Module, tokens: torch.Tensor) -> dict[str, float]:
    """delta_nll with its standard error, kl, same_top1, and the base's nll, over rows of tokens [n, s]."""
    deltas, losses, divergences, same = [], [], [], []
    for row, exact, found in zip(tokens, base, log_probabilities(other, tokens), strict=True):
        at = row[1:, None]
        losses.append(-exact.gather(1, at).mean())
        deltas.append((exact.gather(1, at) - found.gather(1, at)).mean())
        divergences.append((exact.exp() * (exact - found)).sum(-1).mean())
        same.append((exact.argmax(-1) == found.argmax(-1)).float().mean())
    delta = torch.stack(deltas).double()
    return {"delta_nll": float(delta.mean()), "delta_nll_se": float(delta.std() / len(delta)**0.5),
            "kl": float(torch.stack(divergences).mean()), "same_top1": float(torch.stack(same).mean()),
            "base_nll": float(torch.stack(losses).mean())}


def judge(bench: Bench, row: Row, base: Base) -> Judged:
    """Calibrate and score one row. A recipe that this machine cannot carry out has its reason instead of figures."""
    place = bench.place(row)
    shutil.rmtree(place, ignore_errors=True)
    recipe = row.load(bench.work)
    common: dict[str, Any] = {"name": row.name, "recipe": row.recipe, "kv": row.kv, "lm_head": row.head,
                              "summary": recipe.summary, "weight_dtype": recipe.weight.dtype}
    started = time.monotonic()
    try:
        made = quantize(bench.model, recipe, place, kv_cache=row.kv, calibration=bench.calibration,
                        choose_texts=bench.choose, measured=bench.work / "measured")
    except HardwareError as error:
        return Judged(**common, refused=error.message)
    seconds = time.monotonic() - started
    rows_used = min(recipe.rows, bench.calibration.rows) if recipe.needs_data(row.kv) else 0
    figures: dict[str, Any] = dict(compare(base, load_model(made), bench.tokens))
    scheme = next(iter(made.schemes.values()), None)
    return Judged(**common, **figures, scheme=None if scheme is None else str(scheme), layout=made.layout.name,
                  size_bytes=made.size_bytes, calibration_seconds=seconds, calibration_tokens=rows_used * LENGTH,
                  tokens=bench.tokens.numel(), digest=made.digest)


def score_longer(bench: Bench, longer: Bench) -> None:
    """The rows that a figure is asked of, as they were made, on the longer text."""
    base = Base(bench.model, longer.tokens, bench.work / "base")
    for row in rows():
        made = bench.judged(row) if row.name in ASKED and longer.judged(row) is None else None
        if made is not None:
            checkpoint = QuantizedCheckpoint.open(bench.place(row))
            figures = compare(base, load_model(checkpoint), longer.tokens)
            longer.keep(row, judged := made.model_copy(update={**figures, "tokens": longer.tokens.numel()}))
            print(f"{longer.tokens.numel()} tokens: {judged.line()}", flush=True)


def speed(bench: Bench, repeats: int, batch: int, isl: int, osl: int) -> None:
    """Decode tokens/s of every judged row that an engine runs, in turns; the builder's refusal for the others."""
    llms: dict[str, LLM] = {}
    found = {row: judged for row in rows() if (judged := bench.judged(row)) is not None and judged.refused is None}
    for row in found:
        engine = bench.place(row).with_suffix(".engine")
        try:
            if not engine.is_dir():
                build(QuantizedCheckpoint.open(bench.place(row)), EngineSpec(
                    max_seq_len=isl + osl, max_batch_size=batch, tune="none"), engine)
            llms[row.name] = LLM(engine, prefix_cache=False)
        except ToolkitError as error:
            bench.keep(row, found[row].model_copy(update={"engine": error.message, "tok_s": None}))
    load = os.getloadavg()[0]
    vocab = min(llm.engine.plan.model.vocab_size for llm in llms.values())
    systems = {name: engine_generate(llm) for name, llm in llms.items()}
    values = measure(systems, batch, isl, osl, repeats, vocab)
    for row, judged in found.items():
        if row.name in values:
            rates = sorted(values[row.name][0])
            bench.keep(row, judged.model_copy(update={"engine": "cpu", "tok_s": rates[len(rates) // 2], "load": load,
                                                      "tok_s_spread": rates[-1] - rates[0]}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--home", type=Path, help="where `toolkit data prepare` put model and texts")
    parser.add_argument("--model", default="SmolLM2-135M-Instruct")
    parser.add_argument("--work", type=Path, help="checkpoints, engines and finished rows")
    parser.add_argument("--calibration-rows", type=int, default=16, help="of 256 tokens, at most")
    parser.add_argument("--judged-rows", type=int, default=16, help="of 256 tokens")
    parser.add_argument("--only", action="append", help="a row's name, as in the table; repeatable, in that order")
    parser.add_argument("--longer", action="store_true", help="score the four-bit rows on twice the text")
    parser.add_argument("--speed", action="store_true", help="time the engines of finished rows")
    parser.add_argument("--write", action="store_true", help="write the page and the JSON (after --only)")
    parser.add_argument("--page", type=Path, default=Path("docs/recipes.md"))
    parser.add_argument("--json", type=Path, default=Path("docs/benchmarks/recipes-cpu.json"))
    parser.add_argument("--rows", type=Path, default=Path("docs/benchmarks/recipes-rows.json"),
                        help="all that the page is drawn from")
    parser.add_argument("--redraw", action="store_true", help="the page from --rows alone: nothing is measured")
    options = parser.parse_args()
    if options.redraw:
        write_atomic(options.page, page_of(Measured.model_validate_json(options.rows.read_bytes())).encode())
        return
    if options.home is None or options.work is None:
        parser.error("--home and --work are needed for anything but --redraw")
    bench = Bench.open(options.home, options.model, options.work, options.calibration_rows, options.judged_rows)
    longer = Bench.open(options.home, options.model, options.work, options.calibration_rows, 2 * options.judged_rows,
                        ".longer.json")
    if options.longer:
        score_longer(bench, longer)
    elif options.speed:
        speed(bench, repeats=3, batch=1, isl=64, osl=25)
    elif options.only or not options.write:
        unknown = sorted(set(options.only or ()) - {row.name for row in rows()})
        if unknown:
            parser.error(f"no row {unknown[0]!r}; rows: {', '.join(row.name for row in rows())}")
        base = Base(bench.model, bench.tokens, bench.work / "base")
        by_name = {row.name: row for row in rows()}
        for row in [by_name[name] for name in options.only or by_name]:
            if bench.judged(row) is None:
                bench.keep(row, judged := judge(bench, row, base))
                print(judged.line(), flush=True)
    if options.write:
        found = {row.name: bench.judged(row) for row in rows()}
        write_page(options.page, options.json, options.rows, Measured(
            model=options.model, device=device_name(), rows=tuple(held for held in found.values() if held is not None),
            missing=tuple(name for name, held in found.items() if held is None),
            longer=tuple(again for row in rows() if (again := longer.judged(row)) is not None)))


if __name__ == "__main__":
    main()

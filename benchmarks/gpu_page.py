"""The tables of docs/benchmarks/gpu-h200.md, written from the raw files beside it.

    python -m benchmarks.gpu_page                        # write the tables again
    python -m benchmarks.gpu_page --take DIR --commit C  # first take what a ``gpu_session`` left in DIR

A raw file is ``NAME-COMMIT.json``; of several of one NAME the newest counts. Words between the tables are by hand; a
test holds the tables against the files. ``--commit`` is by hand, because the card's machine has a copy of the tree and
not its history. vLLM's figures are put beside the cells of its precision that were measured in the same session.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.gpu_peers import PEERS, read_peers, with_peers
from calib.artifact import write_atomic
from evals.bench import BenchCell

FOLDER = Path("docs/benchmarks/gpu")
PAGE = Path("docs/benchmarks/gpu-h200.md")
#: What issue and README promise of one sequence, milliseconds a step.
MUST = {"bf16": 4.25, "fp8": 2.55, "int8": 2.45, "int4_awq": 2.4, "int4_awq_a8": 1.7}
BATCHES = (1, 8, 32, 128, 256)
PROMPTS = {"ttft {} batch=1 isl=2048": "TTFT of 2048 tokens, ms", "prefill {} batch=8 isl=2048": "8 x 2048, tok/s",
           "prefill {} batch=32 isl=2048": "32 x 2048, tok/s",
           **{f"decode {{}} batch={batch} isl=2048": f"a step behind {batch} x 2048, ms" for batch in (1, 8, 32)}}
LONG = ((1, 8192), (1, 32768), (16, 8192), (16, 32768))
#: Names of raw files in the order of the tables -> what they are called there.
TITLES = {"bf16": "bf16", "fp8": "fp8", "fp8-full": "fp8, `--tune full`", "int8": "int8", "int4_awq": "int4_awq",
          "int4_awq_a8": "int4_awq_a8", "int4_awq_a8-full": "int4_awq_a8, `--tune full`",
          "fp8-kv_fp8": "fp8, fp8 cache", "fp8-deterministic": "fp8, deterministic"}


@dataclass(frozen=True, slots=True)
class Run:
    """The newest raw file of a name."""

    name: str
    commit: str
    date: str
    cells: dict[str, BenchCell]

    @property
    def precision(self) -> str:
        return self.name.partition("-")[0]

    def cell(self, form: str) -> BenchCell | None:
        """The cell of a name in which ``{}`` stands for precision and cache."""
        kv = "fp8" if "kv_fp8" in self.name else "bf16"
        label = f"{self.precision} kv={kv}{' deterministic' if 'deterministic' in self.name else ''}"
        return self.cells.get(form.format(label))


def newest(folder: Path) -> dict[str, Run]:
    """Name -> its newest run, in the order of ``TITLES``, with the newest figures of vLLM at that precision where its
    own call had none. SystemExit for a file that no table shows."""
    found: dict[str, Run] = {}
    peers: dict[tuple[str, str], tuple[str, BenchCell]] = {}
    for path in sorted(folder.glob("*.json")):
        name, _, commit = path.stem.rpartition("-")
        if name == "serve":
            continue
        if name not in TITLES:
            raise SystemExit(f"{path}: no table shows {name!r}; its names are {', '.join(TITLES)}")
        document = json.loads(path.read_bytes())
        if document["commit"][:7] != commit[:7]:
            raise SystemExit(f"{path} says it is of commit {document['commit']}")
        cells = [BenchCell.model_validate(cell) for cell in document["cells"]]
        run = Run(name, commit, document["date"], {cell.name: cell for cell in cells})
        if name not in found or run.date > found[name].date:
            found[name] = run
        for cell in cells:
            key = run.precision, cell.name
            if cell.peer is not None and (key not in peers or run.date > peers[key][0]):
                peers[key] = run.date, cell
    return {name: _with_older_peers(found[name], peers) for name in TITLES if name in found}


def _with_older_peers(run: Run, peers: dict[tuple[str, str], tuple[str, BenchCell]]) -> Run:
    cells = dict(run.cells)
    for name, cell in cells.items():
        if cell.peer is None and (run.precision, name) in peers:
            older = peers[run.precision, name][1]
            cells[name] = cell.model_copy(update={"peer": older.peer, "peer_name": f"{older.peer_name} (another call)"})
    return replace(run, cells=cells)


def verdict(value: float, bound: float, smaller: bool) -> str:
    """Whether a figure keeps to its bound, and by how much not."""
    over = value / bound - 1 if smaller else bound / value - 1
    return "met" if over <= 0 else f"missed by {100 * over:.1f} %"


def peer_words(cell: BenchCell, form: str) -> tuple[str, str]:
    """vLLM's figure (with a star where it is of another call), and how many times as fast ours is."""
    if cell.peer is None:
        return "", ""
    star = " *" if "another call" in (cell.peer_name or "") else ""
    ratio = cell.value / cell.peer if cell.unit == "tok/s" else cell.peer / cell.value
    return format(cell.peer, form) + star, f"{ratio:.2f}x"


def decode(runs: dict[str, Run]) -> Iterator[str]:
    yield "| engine | batch | floor | vLLM | ours | | must | |"
    yield "|---|---|---|---|---|---|---|---|"
    for run in runs.values():
        if run.name in ("fp8-kv_fp8", "fp8-deterministic"):
            continue
        for batch in BATCHES:
            cell = run.cell(f"decode {{}} batch={batch} isl=128")
            if cell is None:
                continue
            peer, ratio = peer_words(cell, ".3f")
            must = MUST[run.precision] if batch == 1 else None
            bound = must if must is not None else cell.peer
            asked = f"{must:g}" if must is not None else "vLLM"
            kept = "" if bound is None else verdict(cell.value, bound, True)
            yield (f"| {TITLES[run.name]} | {batch} | {cell.floor:.2f} | {peer} | {cell.value:.3f} | {ratio} | {asked} "
                   f"| {kept} |")


def prompts(runs: dict[str, Run]) -> Iterator[str]:
    yield "| engine | prompts | vLLM | ours | | |"
    yield "|---|---|---|---|---|---|"
    for run in runs.values():
        for form, title in PROMPTS.items():
            cell = run.cell(form)
            if cell is None:
                continue
            shown = ",.0f" if cell.unit == "tok/s" else ".2f"
            peer, ratio = peer_words(cell, shown)
            kept = "" if cell.peer is None else verdict(cell.value, cell.peer, cell.unit == "ms")
            yield f"| {TITLES[run.name]} | {title} | {peer} | {cell.value:{shown}} | {ratio} | {kept} |"


def long(runs: dict[str, Run]) -> Iterator[str]:
    shown = [run for run in runs.values() if run.cell("decode {} batch=1 isl=8192")]
    yield f"| batch | context | {' | '.join(f'{TITLES[run.name]} ({run.commit})' for run in shown)} |"
    yield "|---|---|" + "---|" * len(shown)
    for batch, isl in LONG:
        cells = [run.cell(f"decode {{}} batch={batch} isl={isl}") for run in shown]
        words = ["" if cell is None or cell.floor is None else
                 f"{cell.value:.2f} ({100 * cell.floor / cell.value:.0f} %)" for cell in cells]
        yield f"| {batch} | {isl} | {' | '.join(words)} |"


def variants(runs: dict[str, Run]) -> Iterator[str]:
    shown = [run for name, run in runs.items() if name in ("fp8", "fp8-kv_fp8", "fp8-deterministic")]
    yield f"| batch | {' | '.join(f'{TITLES[run.name]} ({run.commit})' for run in shown)} |"
    yield "|---|" + "---|" * len(shown)
    for batch in BATCHES:
        cells = [run.cell(f"decode {{}} batch={batch} isl=128") for run in shown]
        yield f"| {batch} | {' | '.join('' if cell is None else f'{cell.value:.3f}' for cell in cells)} |"


def builds(runs: dict[str, Run]) -> Iterator[str]:
    yield "| engine | commit, date | build, s | load, s | memory without KV, GiB |"
    yield "|---|---|---|---|---|"
    for run in runs.values():
        mode = "full" if run.name.endswith("full") else "quick"
        figures = [run.cell(form) for form in (f"build {{}} tune={mode}", "load {}", "memory {} without kv")]
        words = ["" if cell is None else f"{cell.value:.{digits}f}"
                 for cell, digits in zip(figures, (1, 1, 2), strict=True)]
        yield f"| {TITLES[run.name]} | {run.commit}, {run.date[:10]} | {' | '.join(words)} |"


TABLES = {"decode": decode, "long": long, "prompts": prompts, "variants": variants, "builds": builds}


def page_with(text: str, folder: Path) -> str:
    """``text`` with every table between its marks written again. SystemExit where a mark is missing."""
    runs = newest(folder)
    for name, table in TABLES.items():
        mark = re.compile(rf"(<!-- {name}: begin -->\n).*?(<!-- {name}: end -->)", re.DOTALL)
        if len(mark.findall(text)) != 1:
            raise SystemExit(f"the page has no <!-- {name}: begin --> with its end")
        body = "\n".join(table(runs))
        text = mark.sub(lambda found, body=body: f"{found[1]}{body}\n{found[2]}", text)
    return text


def take(session: Path, commit: str, folder: Path) -> Iterable[Path]:
    """Put a session's documents into ``folder``, with their commit, and vLLM's figures beside their cells."""
    records = read_peers(session)
    documents = sorted(session.glob("*.json"))
    if unknown := [path.stem for path in documents if path.stem not in {*TITLES, "serve"}]:
        raise SystemExit(f"no table shows {', '.join(unknown)}; the names are {', '.join(TITLES)}")
    for path in documents:
        document = json.loads(path.read_bytes())
        cells = [BenchCell.model_validate(cell) for cell in document["cells"]]
        modes = {mode.partition(":")[0] for mode in PEERS.get(path.stem.partition("-")[0], ())}
        same = [record for record in records if str(record["tag"]).partition("-")[0] in modes]
        document |= {"commit": commit, "cells": [cell.model_dump(mode="json") for cell in with_peers(cells, same)]}
        target = folder / f"{path.stem}-{commit[:7]}.json"
        write_atomic(target, json.dumps(document, sort_keys=True).encode() + b"\n")
        yield target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--take", type=Path, metavar="DIR")
    parser.add_argument("--commit")
    arguments = parser.parse_args()
    if (arguments.take is None) != (arguments.commit is None):
        parser.error("--take and --commit go together")
    if arguments.take is not None:
        for path in take(arguments.take, arguments.commit, FOLDER):
            print(path)
    write_atomic(PAGE, page_with(PAGE.read_text(), FOLDER).encode())


if __name__ == "__main__":
    main()

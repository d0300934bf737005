"""How often each accuracy gate goes red: ours beside the rules in use, simulated and on recorded answers.

A question flips with probability ``flips`` when an engine is replaced; a true loss of d points means that d points more
of all answers flip right -> wrong than wrong -> right. Each rule sees the same simulated runs, at its own sample size:

    paired          evals.sequential, the very code that judges: looks at 200/400/800/1600, the cap by point estimate
    TensorRT-LLM    red when accuracy < reference + z(.05) * sqrt(2 * 50^2 / n) points, unpaired
    vLLM rtol 8%    red when accuracy < 0.92 * reference
    vLLM Wilson     red when the one-sided 95 % Wilson lower bound < 0.92 * reference
    MLPerf 99%      red when accuracy < 0.99 * reference

The others' reference is the baseline's accuracy on the same questions, which favours them. A cell's ``floor`` is what
is demanded of the paired gate: at most .01 at no loss, at least .95 at margin + 2 points.

``--answers FILE`` adds the real half: a model's answers recorded by ``gate_answers`` (the same engine twice, and one
layer damaged by known amounts). There a gate is run on draws of those answers with replacement, so flips, losses and
base accuracy are the model's own and not a formula's.
Run: python -m benchmarks.gate_power --json gate_power.json --answers docs/benchmarks/gate-answers.json   (seconds)
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from pydantic import model_validator

from calib.scheme import Frozen
from evals.bench import BenchCell, table, write_cells
from evals.policy import LOOKS
from evals.sequential import FAIL, corrected_z, decide
from evals.statistics import normal_quantile, paired_drop, wilson

BASE_ACCURACY = 0.70


def simulate(draws: int, flips: float, loss: float, sizes: np.ndarray, rng: np.random.Generator
             ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(right -> wrong, wrong -> right, baseline right) counts after each of ``sizes`` items, int64 [draws, sizes]."""
    return drawn(draws, chances_of(flips, loss), sizes, rng)


def chances_of(flips: float, loss: float) -> list[float]:
    """Chances of (lost, gained, kept right, kept wrong) for one item.

    Lost with (flips + loss)/2, gained with (flips - loss)/2 (never below 0: a loss larger than the flips is all loss),
    kept right with the rest of the base accuracy.
    """
    gained = max((flips - loss) / 2, 0.0)
    lost = gained + loss
    return [lost, gained, BASE_ACCURACY - lost, 1.0 - BASE_ACCURACY - gained]


def drawn(draws: int, chances: Sequence[float], sizes: np.ndarray, rng: np.random.Generator
          ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """As ``simulate``, from the four chances: drawing recorded items with replacement is a multinomial of them."""
    steps = np.diff(sizes, prepend=0)
    counts = np.stack([rng.multinomial(step, chances, size=draws) for step in steps], axis=1).cumsum(axis=1)
    return counts[..., 0], counts[..., 1], counts[..., 0] + counts[..., 2]


def paired_red(draws: int, flips: float, loss: float, margin: float, rng: np.random.Generator) -> tuple[float, float]:
    """(probability of FAIL, mean number of items drawn) of our gate."""
    return paired_red_of(draws, chances_of(flips, loss), margin, rng)


def paired_red_of(draws: int, chances: Sequence[float], margin: float, rng: np.random.Generator
                  ) -> tuple[float, float]:
    sizes = np.array(LOOKS)
    to_wrong, to_right, _ = drawn(draws, chances, sizes, rng)
    drop, error = paired_drop(to_wrong.astype(float), to_right.astype(float), sizes.astype(float))
    decision = decide(drop, error, margin, corrected_z(len(LOOKS)), capped=True)
    return float((decision.code == FAIL).mean()), float(sizes[decision.look].mean())


def others_red(draws: int, flips: float, loss: float, n: int, rng: np.random.Generator) -> dict[str, float]:
    """Probability that each rule in use goes red, all on ``n`` items."""
    return others_red_of(draws, chances_of(flips, loss), n, rng)


def others_red_of(draws: int, chances: Sequence[float], n: int, rng: np.random.Generator) -> dict[str, float]:
    to_wrong, to_right, base = (counts[:, 0] for counts in drawn(draws, chances, np.array([n]), rng))
    reference, accuracy = base / n, (base - to_wrong + to_right) / n
    wilson_low = np.array([wilson(share * n, n, normal_quantile(0.95))[0] for share in np.unique(accuracy)])
    lower = wilson_low[np.searchsorted(np.unique(accuracy), accuracy)]
    return {
        "TensorRT-LLM": float((accuracy < reference + normal_quantile(0.05) * np.sqrt(2 * 0.5**2 / n)).mean()),
        "vLLM rtol 8%": float((accuracy < 0.92 * reference).mean()),
        "vLLM Wilson": float((lower < 0.92 * reference).mean()),
        "MLPerf 99%": float((accuracy < 0.99 * reference).mean()),
    }


def cells(draws: int, flips: float, margin: float, seed: int) -> list[BenchCell]:
    """Every rule at no loss and at margin + 2 points. ``flips`` and ``margin`` in percent and points."""
    found = []
    for loss, label, floor in ((0.0, "no loss", 0.01), (margin + 2.0, "margin+2", 0.95)):
        what = f"{label}, looks={'/'.join(map(str, LOOKS))}, flips={flips:g}%, margin={margin:g}"
        red, items = paired_red(draws, flips / 100, loss / 100, margin / 100, np.random.default_rng([seed, int(loss)]))
        found.append(BenchCell(name=f"paired: {what}", value=red, unit="P(FAIL)", floor=floor))
        found.append(BenchCell(name=f"paired items: {what}", value=items, unit="items"))
        for n in (200, LOOKS[-1]):
            rules = others_red(draws, flips / 100, loss / 100, n, np.random.default_rng([seed, int(loss), n]))
            found += [BenchCell(name=f"{name}: {label}, n={n}, flips={flips:g}%", value=value, unit="P(FAIL)")
                      for name, value in rules.items()]
    return found


class Answers(Frozen):
    """Recorded answers: a character ``1`` (right) or ``0`` an item, in one order for all variants."""

    model: str
    tasks: list[str]
    items: int
    variants: dict[str, str]

    @model_validator(mode="after")
    def _whole(self) -> Answers:
        if "baseline" not in self.variants or len(self.variants) < 2:
            raise ValueError("answers need a baseline and at least one variant")
        for name, bits in self.variants.items():
            if len(bits) != self.items or set(bits) - {"0", "1"}:
                raise ValueError(f"{name} has not one 0 or 1 for each of {self.items} items")
        return self

    def chances(self, name: str) -> list[float]:
        """Shares of (lost, gained, kept right, kept wrong) of a variant against the baseline."""
        pairs = Counter(zip(self.variants["baseline"], self.variants[name], strict=True))
        return [pairs[pair] / self.items for pair in (("1", "0"), ("0", "1"), ("1", "1"), ("0", "0"))]


def real_cells(answers: Answers, draws: int, margin: float, seed: int) -> list[BenchCell]:
    """Every rule on every recorded variant, whose observed loss and flips are in the cell's name."""
    found = []
    for number, name in enumerate(name for name in answers.variants if name != "baseline"):
        chances = answers.chances(name)
        seen = f"real {name}: loss={100 * (chances[0] - chances[1]):.2f} flips={100 * (chances[0] + chances[1]):.2f}%"
        red, items = paired_red_of(draws, chances, margin / 100, np.random.default_rng([seed, number]))
        found.append(BenchCell(name=f"paired: {seen}, looks={'/'.join(map(str, LOOKS))}, margin={margin:g}", value=red,
                               unit="P(FAIL)"))
        found.append(BenchCell(name=f"paired items: {seen}, margin={margin:g}", value=items, unit="items"))
        for n in (200, LOOKS[-1]):
            rules = others_red_of(draws, chances, n, np.random.default_rng([seed, number, n]))
            found += [BenchCell(name=f"{rule}: {seen}, n={n}", value=value, unit="P(FAIL)")
                      for rule, value in rules.items()]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the cells here")
    parser.add_argument("--draws", type=int, default=200_000, help="simulated runs a cell")
    parser.add_argument("--flips", type=float, default=5.0, help="percent of answers that flip")
    parser.add_argument("--margin", type=float, default=2.0, help="points")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--answers", type=Path, help="recorded answers: adds the real half")
    arguments = parser.parse_args()
    found = cells(arguments.draws, arguments.flips, arguments.margin, arguments.seed)
    if arguments.answers:
        answers = Answers.model_validate_json(arguments.answers.read_bytes())
        found += real_cells(answers, arguments.draws, arguments.margin, arguments.seed)
    print(table(found))
    if arguments.json:
        write_cells(arguments.json, found)


if __name__ == "__main__":
    main()

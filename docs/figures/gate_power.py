"""Draw docs/figures/gate_power.svg: how often each gate goes red as the true loss grows.

Every point is a simulation by ``benchmarks/gate_power.py``; ours runs the code that judges. Written as plain SVG, so
that the figure depends on nothing but the numbers. Run: python -m docs.figures.gate_power   (seconds)
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from benchmarks import gate_power as power

LOSSES = tuple(step / 2 for step in range(11))
FLIPS, MARGIN, ITEMS = 5.0, 2.0, 200
COLOURS = {"paired": "#1a7f37", "vLLM Wilson": "#cf222e", "MLPerf 99%": "#9a6700", "TensorRT-LLM": "#0969da",
           "vLLM rtol 8%": "#8250df"}
LEFT, TOP, WIDTH, HEIGHT = 56, 40, 420, 240


def curves(draws: int, seed: int = 0) -> dict[str, list[float]]:
    """P(red) of each rule over ``LOSSES`` (points): ours with looks to 1,600 items, the others on ``ITEMS``."""
    found: dict[str, list[float]] = {name: [] for name in COLOURS}
    for loss in LOSSES:
        rng = np.random.default_rng([seed, round(10 * loss)])
        found["paired"].append(power.paired_red(draws, FLIPS / 100, loss / 100, MARGIN / 100, rng)[0])
        for name, value in power.others_red(draws, FLIPS / 100, loss / 100, ITEMS, rng).items():
            found[name].append(value)
    return found


def at(loss: float, chance: float) -> str:
    return f"{LEFT + WIDTH * loss / LOSSES[-1]:.1f},{TOP + HEIGHT * (1 - chance):.1f}"


def svg(found: dict[str, list[float]]) -> str:
    parts = ['<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 680 330" font-family="sans-serif" font-size="12">',
             '<rect width="680" height="330" fill="#ffffff"/>',
             f'<text x="{LEFT}" y="20" font-size="14">How often the gate goes red (margin {MARGIN:g} points, '
             f'{FLIPS:g} % of answers flip)</text>']
    for chance in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = TOP + HEIGHT * (1 - chance)
        parts.append(f'<line x1="{LEFT}" x2="{LEFT + WIDTH}" y1="{y}" y2="{y}" stroke="#d0d7de"/>'
                     f'<text x="{LEFT - 8}" y="{y + 4}" text-anchor="end">{100 * chance:.0f} %</text>')
    for loss in LOSSES[::2]:
        x = LEFT + WIDTH * loss / LOSSES[-1]
        parts.append(f'<text x="{x}" y="{TOP + HEIGHT + 18}" text-anchor="middle">{loss:g}</text>')
    edge = LEFT + WIDTH * MARGIN / LOSSES[-1]
    parts.append(f'<line x1="{edge}" x2="{edge}" y1="{TOP}" y2="{TOP + HEIGHT}" stroke="#57606a" '
                 'stroke-dasharray="4 3"/>'
                 f'<text x="{LEFT + WIDTH / 2}" y="{TOP + HEIGHT + 38}" text-anchor="middle">true loss, points</text>')
    for row, (name, values) in enumerate(found.items()):
        width = 3 if name == "paired" else 1.5
        points = " ".join(at(loss, value) for loss, value in zip(LOSSES, values, strict=True))
        label = "paired (this gate)" if name == "paired" else f"{name}, n={ITEMS}"
        y = TOP + 14 + 22 * row
        parts.append(f'<polyline points="{points}" fill="none" stroke="{COLOURS[name]}" stroke-width="{width}"/>'
                     f'<line x1="492" x2="514" y1="{y - 4}" y2="{y - 4}" stroke="{COLOURS[name]}" '
                     f'stroke-width="{width}"/><text x="520" y="{y}">{label}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".svg"))
    parser.add_argument("--draws", type=int, default=40_000, help="simulated runs a point")
    arguments = parser.parse_args()
    found = curves(arguments.draws)
    arguments.out.write_text(svg(found), encoding="utf-8")
    for name, values in found.items():
        print(f"{name:16}", " ".join(f"{value:.3f}" for value in values))


if __name__ == "__main__":
    main()

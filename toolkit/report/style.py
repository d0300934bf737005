"""One palette and one type scale, shared by plots, the page and the HTML report.

Colours are Okabe and Ito's set (distinct under the common colour blindnesses), darkened or lightened so that each
reaches 3:1 against its background. Colour never carries a meaning alone: recipes differ by marker too, an fp8 KV cache
is an open marker, a verdict is always a word with a sign.
"""

from __future__ import annotations

from dataclasses import dataclass

FONT = "Inter, 'Source Sans 3', 'Source Sans Pro', system-ui, -apple-system, 'Segoe UI', sans-serif"


@dataclass(frozen=True, slots=True)
class Palette:
    """Colours of one mode. ``series`` by recipe; a recipe that is not named takes ``other`` in order."""

    background: str
    surface: str
    text: str
    muted: str
    line: str
    accent: str
    series: dict[str, str]
    other: tuple[str, ...]
    verdict: dict[str, str]

    def of(self, recipe: str, position: int = 0) -> str:
        return self.series.get(recipe) or self.other[position % len(self.other)]


LIGHT = Palette(
    background="#ffffff", surface="#f6f7f8", text="#1c2430", muted="#5b6675", line="#d9dee4", accent="#0b6aa2",
    series={"bf16": "#5b6675", "fp8": "#0072b2", "int8": "#00855f", "int4_awq": "#c65102"},
    other=("#a0568b", "#8a6d00", "#2a7f9e", "#7a5195"),
    verdict={"PASS": "#007a57", "FAIL": "#b5341c", "INCONCLUSIVE": "#8a6100", "ANOMALOUS": "#8b3f78",
             "BASELINE": "#5b6675"})
DARK = Palette(
    background="#12161c", surface="#1a2028", text="#e6eaf0", muted="#98a4b3", line="#2c3541", accent="#58b4e8",
    series={"bf16": "#a3afbd", "fp8": "#58b4e8", "int8": "#3cc79c", "int4_awq": "#f0954f"},
    other=("#d493c0", "#d9bd3f", "#6fc3dd", "#b69ad6"),
    verdict={"PASS": "#3cc79c", "FAIL": "#ff8a70", "INCONCLUSIVE": "#e3b341", "ANOMALOUS": "#d493c0",
             "BASELINE": "#a3afbd"})

MARKERS = {"bf16": "square", "fp8": "diamond", "int8": "circle", "int4_awq": "triangle-up"}
OTHER_MARKERS = ("star", "pentagon", "hexagon", "cross")
SIGNS = {"PASS": "✓", "FAIL": "✕", "INCONCLUSIVE": "?", "ANOMALOUS": "!", "BASELINE": "○"}


def marker(recipe: str, kv_cache: str, position: int = 0) -> str:
    shape = MARKERS.get(recipe) or OTHER_MARKERS[position % len(OTHER_MARKERS)]
    return shape if kv_cache == "bf16" else f"{shape}-open"

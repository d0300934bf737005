"""One palette and one type scale, shared by plots, the page and the HTML report.

Colours are Okabe and Ito's set (distinct under the common colour blindnesses), darkened or lightened so that each
reaches 3:1 against its background. Colour never carries a meaning alone: recipes differ by marker too, an fp8 KV cache
is an open marker, a verdict is always a word with a sign.
"""

from __future__ import annotations

from dataclasses import dataclass

FONT = "Inter, 'Source Sans 3', 'Source Sans Pro', system-ui, -apple-system, 'Segoe UI', sans-serif"


def _rgb(color: str) -> tuple[int, int, int]:
    return int(color[1:3], 16), int(color[3:5], 16), int(color[5:7], 16)


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

    def tint(self, share: float) -> str:
        """The accent mixed with the background: 1 is the accent itself."""
        pairs = zip(_rgb(self.accent), _rgb(self.background), strict=True)
        return "#" + "".join(f"{round(share * over + (1 - share) * under):02x}" for over, under in pairs)

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

#: The markers as paths in a box of 16: a legend in HTML draws them like the charts do.
_PATHS = {"square": "M3 3h10v10H3z", "diamond": "M8 1.5L14.5 8L8 14.5L1.5 8z", "triangle-up": "M8 2L14.5 13.5H1.5z",
          "circle": "M8 2a6 6 0 1 0 0 12a6 6 0 1 0 0-12z"}


def marker_svg(recipe: str, kv_cache: str, color: str) -> str:
    """A recipe's marker, open for another KV cache, as a drawing of its own (for an image's data address)."""
    path = _PATHS.get(MARKERS.get(recipe, ""), _PATHS["circle"])
    fill = color if kv_cache == "bf16" else "none"
    return (f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 16 16'><path d='{path}' fill='{fill}' "
            f"stroke='{color}' stroke-width='2'/></svg>")

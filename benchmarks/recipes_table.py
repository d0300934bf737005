"""The page that ``benchmarks.recipes`` writes: the table, and advice in sentences that are computed from it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from calib.artifact import write_atomic
from calib.recipe import load_recipe, recipe_names
from calib.scheme import Frozen
from evals.bench import BenchCell, write_cells

#: Tokens of a row, of calibration and of judged text.
LENGTH = 256
_HALF_WIDTH = 1.96
_EIGHT = ("fp8_e4m3", "int8")
#: Row -> delta NLL that it is asked not to exceed, nats, on the longer text.
ASKED = dict.fromkeys(("int4_awq", "int4_awq_clip", "int4_gptq", "int4_asym"), 0.16)


class Judged(Frozen):
    """One finished row. ``refused``: why this machine cannot make it; ``engine``: "cpu", a refusal, or not asked."""

    name: str
    recipe: str
    kv: str
    lm_head: str | None
    summary: str
    weight_dtype: str
    refused: str | None = None
    scheme: str | None = None
    layout: str | None = None
    delta_nll: float | None = None
    delta_nll_se: float | None = None
    kl: float | None = None
    same_top1: float | None = None
    base_nll: float | None = None
    size_bytes: int | None = None
    calibration_seconds: float | None = None
    calibration_tokens: int | None = None
    tokens: int | None = None
    digest: str | None = None
    engine: str | None = None
    tok_s: float | None = None
    tok_s_spread: float | None = None
    load: float | None = None

    def line(self) -> str:
        if self.refused is not None:
            return f"{self.name}: {self.refused}"
        return (f"{self.name}: delta NLL {self.delta_nll:+.4f} ± {self.delta_nll_se:.4f}, KL {self.kl:.4f}, same top-1 "
                f"{self.same_top1:.3f}, {_megabytes(self):.1f} MB, calibrated in {self.calibration_seconds:.0f} s")

    @property
    def loss(self) -> float:
        """delta NLL of a row that was measured."""
        assert self.delta_nll is not None
        return self.delta_nll

    def text(self) -> str:
        return f"{self.loss:+.3f} ± {self.delta_nll_se:.3f}"


def _megabytes(row: Judged) -> float:
    return (row.size_bytes or 0) / 1e6


def table(rows: Sequence[Judged]) -> str:
    """The rows as a Markdown table, in their order."""
    lines = ["| recipe | delta NLL ± se | mean KL | same top-1 | size, MB | calibrated, s (tokens) | decode, tok/s "
             "| layout |",
             "|---|---|---|---|---|---|---|---|"]
    for row in rows:
        if row.refused is not None:
            lines.append(f"| {row.name} | refused here: {row.refused} | | | | | | |")
            continue
        speed = f"{row.tok_s:.1f} ({row.tok_s_spread:.1f})" if row.tok_s is not None else (
            "not measured" if row.engine is None else f"refused: {row.engine}")
        lines.append(f"| {row.name} | {row.text()} | {row.kl:.4f} | {row.same_top1:.3f} | {_megabytes(row):.1f} | "
                     f"{row.calibration_seconds:.0f} ({row.calibration_tokens or 0:,}) | {speed} | {row.layout} |")
    return "\n".join(lines)


def frontier(rows: Sequence[Judged]) -> list[Judged]:
    """Rows that no other one beats in both size and delta NLL, smallest first."""
    found: list[Judged] = []
    for row in sorted(rows, key=lambda row: (row.size_bytes or 0, row.loss)):
        if not found or row.loss < found[-1].loss:
            found.append(row)
    return found


def _difference(better: Judged, worse: Judged) -> str:
    """How far apart two rows are, and whether that is more than noise. (Each is paired with bf16, not with the other:
    the interval is wider than a direct pairing's would be.)"""
    gap = worse.loss - better.loss
    noise = _HALF_WIDTH * ((better.delta_nll_se or 0.0)**2 + (worse.delta_nll_se or 0.0)**2)**0.5
    if abs(gap) > noise:
        return f"{gap:.3f} nats"
    return f"nothing that can be told from noise ({gap:+.3f} ± {noise:.3f} nats)"


def advice(rows: Sequence[Judged]) -> list[str]:
    """Sentences drawn from the rows; a sentence whose rows were not measured is left out."""
    by_name = {row.name: row for row in rows if row.refused is None}
    plain = [row for row in by_name.values() if row.kv == "bf16" and row.lm_head is None and row.recipe != "bf16"]
    found = []
    if len(plain) > 1:
        best = " → ".join(f"`{row.name}` ({_megabytes(row):.0f} MB, {row.text()})" for row in frontier(plain))
        found.append(f"No other measured recipe is both smaller and better than these, smallest first: {best}.")
    eight = sorted((row for row in plain if row.weight_dtype in _EIGHT), key=lambda row: row.loss)
    both = [row for row in eight if "A 16-bit" not in (row.scheme or "")]
    if len(eight) > 1 and len(both) > 1:
        too = ("its activations are in eight bits too" if both[0] is eight[0] else
               f"with activations in eight bits too it is `{both[0].name}` ({both[0].text()})")
        found.append(f"Eight bits: `{eight[0].name}` loses least ({eight[0].text()}); {too}. Of those, "
                     f"`{both[-1].name}` is last ({both[-1].text()}), behind by {_difference(both[0], both[-1])}.")
    four = sorted((row for row in plain if row.weight_dtype == "int4"), key=lambda row: row.loss)
    if len(four) > 1:
        found.append(f"Four bits: `{four[0].name}` loses least ({four[0].text()}), ahead of `{four[1].name}` by "
                     f"{_difference(four[0], four[1])}; `{four[-1].name}` loses most ({four[-1].text()}).")
    found += _pairs(by_name)
    timed = sorted((row for row in by_name.values() if row.tok_s), key=lambda row: -(row.tok_s or 0.0))
    if len(timed) > 1 and "bf16" in by_name and by_name["bf16"].tok_s:
        top, base = timed[0], by_name["bf16"].tok_s
        found.append(f"Fastest to decode on this CPU at one sequence: `{top.name}`, {top.tok_s:.1f} tokens/s, "
                     f"{(top.tok_s or 0.0) / base:.2f} times bf16's, at {top.text()} nats.")
    return found


_PAIRS = (("int8", "int8_static", "A static activation scale instead of one per token costs"),
          ("fp8_dynamic", "fp8", "One static fp8 scale per tensor instead of channel and token costs"),
          ("int4_gptq", "w4a8_fp8", "fp8 activations under GPTQ's int4 weights cost"),
          ("int4_awq_clip", "int4_awq_a8", "int8 activations in groups under AWQ's int4 weights cost"),
          ("int4_asym", "int4_awq_clip", "Going without zero points (AWQ, clipped by output error) costs"),
          ("bf16", "bf16 kv=fp8", "An fp8 KV cache costs"), ("bf16", "bf16 kv=int8", "An int8 KV cache costs"))


def _pairs(by_name: dict[str, Judged]) -> list[str]:
    """What one change costs, all else equal."""
    found = [f"{words} {_difference(by_name[one], by_name[other])}, where `{one}` is at {by_name[one].text()}."
             for one, other, words in _PAIRS if one in by_name and other in by_name]
    for row in by_name.values():
        plain = by_name.get(row.recipe)
        if row.lm_head and plain is not None and row.tok_s and plain.tok_s:
            found.append(f"An {row.lm_head} head on `{row.recipe}` costs {_difference(plain, row)}; the file changes "
                         f"from {_megabytes(plain):.0f} to {_megabytes(row):.0f} MB, decoding from {plain.tok_s:.1f} "
                         f"to {row.tok_s:.1f} tokens/s.")
    return found


def overview() -> str:
    """What the recipes are, from their files."""
    lines = ["| recipe | weights | activations | method | layout | data |", "|---|---|---|---|---|---|"]
    for name in recipe_names():
        recipe = load_recipe(name)
        data = f"{recipe.rows} rows" if recipe.needs_data() else "none"
        lines.append(f"| `{name}` | {recipe.weight} | {recipe.activation or '16-bit'} | {recipe.method} | "
                     f"{recipe.layout} | {data} |")
    return "\n".join(lines)


def asked(longer: Sequence[Judged]) -> list[str]:
    """Sentences on the figures that are asked for: met only where the measured mean keeps them, or not measured."""
    measured = {row.name for row in longer}
    missing = [f"`{name}`: not measured; asked: at most {most:.2f}." for name, most in ASKED.items()
               if name not in measured]
    found = [f"`{row.name}` on {row.tokens:,} tokens: {row.text()} (KL {row.kl:.4f}, same top-1 {row.same_top1:.3f}); "
             f"asked: at most {ASKED[row.name]:.2f}, {'met' if row.loss <= ASKED[row.name] else 'not met'}."
             for row in longer if row.name in ASKED]
    return found + missing


def _made_with(rows: Sequence[Judged]) -> str:
    """How much text the rows of the table were calibrated and judged on."""
    first, calibrated = rows[0], max(row.calibration_tokens or 0 for row in rows) // LENGTH
    said = f"Calibrated on {calibrated} rows of {LENGTH} tokens, also where a recipe's own number of rows above is " \
        "larger" if calibrated else "Calibrated on no text"
    return (f"{said}; judged on {(first.tokens or 0) // LENGTH} rows, {first.tokens:,} tokens of evaluation text "
            f"(unquantized loss {first.base_nll:.3f} nats per token) that calibration has not seen.")


def _conditions(rows: Sequence[Judged]) -> str:
    """What the machine was doing while it timed."""
    load = max((row.load for row in rows if row.load is not None), default=None)
    return "" if load is None else (f" The load average was {load:.1f} as the timing began (engines take turns): "
                                    "tokens/s compare the rows with each other and are no measure of the machine.")


_HEAD = """# Recipes

Written by `python -m benchmarks.recipes`; edit that, not this. A recipe is a short YAML in `calib/recipes`; yours may
`extends` any of them (or several, of which the later win), and `toolkit plan MODEL --recipe R --explain` says where
each value comes from. A variant is called by its file unless it has a `name` of its own; the name of one of these is
refused where the values are others.
"""


class Measured(Frozen):
    """All that the page is drawn from. ``missing``: rows that are not finished, by name; ``longer``: rows judged on
    more text."""

    model: str
    device: str
    rows: tuple[Judged, ...]
    longer: tuple[Judged, ...] = ()
    missing: tuple[str, ...] = ()

    @property
    def finished(self) -> list[Judged]:
        return [row for row in self.rows if row.refused is None]


def page_of(measured: Measured) -> str:
    """The page's text."""
    rows, finished = measured.rows, measured.finished
    words = [_HEAD, overview(), "",
             "Every recipe goes with a KV cache in bf16, fp8 or int8, and with `lm_head: fp8` or `int8` where its "
             "layout is compressed-tensors. Group sizes are the first of the recipe's list that divides every input. "
             "`keep: [patterns]` leaves modules in 16 bits; beside four-bit weights, `raised: {int8: [patterns]}` "
             "gives modules eight-bit weights with 16-bit activations (`fp8` too where the layout is "
             "compressed-tensors). The dashboard's Layers page writes either from a sensitivity measurement.\n",
             f"## {measured.model}, {measured.device}\n",
             f"{_made_with(finished)} ± is one standard error over the rows of text. A small "
             "model is harsh: figures of this size shrink on larger ones. Its weights were dequantized from Q4_1 in "
             "groups of 32, so grids like that one flatter. Seconds and tokens/s are of a shared machine; rates are of "
             "one sequence, the median of three runs (their spread in brackets)."
             f"{_conditions(finished)}\n",
             table(rows), "",
             *([f"Not measured in this run: {', '.join(measured.missing)}.", ""] if measured.missing else []),
             "Delta NLL asked of four-bit weights, on twice the text:\n",
             *(f"- {sentence}" for sentence in asked(measured.longer)), "",
             *(["## What follows\n", *(f"- {sentence}" for sentence in advice(rows)), ""] if advice(rows) else [])]
    return "\n".join(words)


def write_page(page: Path, cells: Path, held: Path, measured: Measured) -> None:
    """The page, what it is drawn from (``held``), and the same figures as a benchmark document (``cells``)."""
    if not measured.finished:
        raise SystemExit("no finished row: run without --write first")
    write_atomic(held, measured.model_dump_json(indent=1, exclude_defaults=True).encode() + b"\n")
    write_atomic(page, page_of(measured).encode())
    made = [BenchCell(name=f"{figure} {row.name}", value=value, unit=unit, spread=spread)
            for row in measured.finished for figure, value, unit, spread in (
                ("delta_nll", row.delta_nll, "nats/token", row.delta_nll_se), ("kl", row.kl, "nats", None),
                ("same_top1", row.same_top1, "share", None), ("size", row.size_bytes, "bytes", None),
                ("calibration", row.calibration_seconds, "s", None),
                ("decode", row.tok_s, "tok/s", row.tok_s_spread)) if value is not None]
    made += [BenchCell(name=f"delta_nll {row.name} longer", value=row.loss, unit="nats/token",
                       spread=row.delta_nll_se) for row in measured.longer]
    write_cells(cells, made)

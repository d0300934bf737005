"""docs/families.md is what the script makes of docs/benchmarks/families.json, word for word."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import families
from benchmarks.families_page import Row, cells, page_of, rows_of
from benchmarks.tiny_families import FAMILIES, ROPES
from evals.bench import write_cells

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_is_what_the_json_makes() -> None:
    assert (DOCS / "families.md").read_text(encoding="utf-8") == page_of(DOCS / "benchmarks" / "families.json"), (
        "run python -m benchmarks.families --page")


def test_rows_survive_their_cells(tmp_path: Path) -> None:
    rows = [Row("Llama", 1.5e-6, 3, 4, -0.25, 0.125), Row("linear", 2e-6, 2, 2)]
    assert rows_of(cells(rows), ["Llama", "linear"]) == rows
    with pytest.raises(SystemExit, match="no figures of Qwen2"):
        rows_of(cells(rows), ["Qwen2"])


def test_one_command_writes_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                     capsys: pytest.CaptureFixture[str]) -> None:
    rows = [Row(name, 1e-6, 4, 4, 0.5, 0.25) for name in FAMILIES] + [Row(name, 1e-6, 4, 4) for name in ROPES]
    write_cells(tmp_path / "f.json", cells(rows), device="a machine")
    monkeypatch.setattr("sys.argv", ["families", "--page", "--json", str(tmp_path / "f.json"), "--docs",
                                     str(tmp_path / "f.md")])
    families.main()
    page = (tmp_path / "f.md").read_text(encoding="utf-8")
    assert "| Llama | the plain decoder; biases optional | 1e-06 | 4 of 4 | +0.50000 | 0.250 |" in page
    assert "(a machine, commit " in page
    assert capsys.readouterr().out.strip() == page.strip()

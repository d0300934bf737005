"""docs/known-faults.md names a test for every fault: each of them exists."""

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "known-faults.md"


def test_every_fault_has_a_test_that_exists():
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if re.match(r"\| \d+ \|", line)]
    assert [int(row.split("|")[1]) for row in rows] == list(range(1, 38))
    for row in rows:
        named = re.findall(r"`((?:\w+/)?test_\w+\.py)::(\w+)`", row)
        assert named, row
        for file, test in named:
            tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
            functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
            assert test in functions, f"{file}::{test}"

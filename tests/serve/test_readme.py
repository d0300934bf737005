"""README's section on serving: every snippet is run against a server, as it stands there but for the port."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SECTION = re.search(r"<!-- serve: begin -->(.*)<!-- serve: end -->",
                    (Path(__file__).parents[2] / "README.md").read_text(), re.DOTALL)
BLOCKS = re.findall(r"```(bash|python)\n(.*?)```", SECTION[1], re.DOTALL)


@pytest.fixture(scope="module")
def named(serve):
    """The command of the section, but for the engine and a free port."""
    command = next(line.split() for line in SECTION[1].splitlines() if line.startswith("    toolkit serve "))
    return serve(*command[3:])


def run(kind: str, text: str, server) -> str:
    text = text.replace("127.0.0.1:8000", server.url.removeprefix("http://"))
    command = ["bash", "-c", text] if kind == "bash" else [sys.executable, "-c", text]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_section_has_the_three_clients() -> None:
    assert [kind for kind, _ in BLOCKS] == ["bash", "python", "python"]
    assert all(word in text for word, (_, text) in zip(("curl", "openai", "tritonclient"), BLOCKS, strict=True))


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_curl_line(named) -> None:
    assert json.loads(run(*BLOCKS[0], named))["usage"]["completion_tokens"] >= 1


@pytest.mark.parametrize("index", [1, 2], ids=["openai", "tritonclient"])
def test_the_python_snippets(named, index: int) -> None:
    assert run(*BLOCKS[index], named)

"""What is compiled ahead is what a launch finds. In processes of their own, as interpreted functions do not compile."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def _not_interpreted(cache: Path, *arguments: str) -> Any:
    """The answer of a child process."""
    script = Path(__file__).with_name("compile_ahead_child.py")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, str(script), *arguments], env=environment, capture_output=True, text=True,
                          check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_compile_ahead_makes_what_a_launch_would_make(tmp_path: Path) -> None:
    """Collect, compile, then find it cached."""
    assert _not_interpreted(tmp_path) == {"collected": 1, "failed": [], "cache_hits": [True], "again": 0}


def test_cache_keys_do_not_depend_on_what_was_compiled_before(tmp_path: Path) -> None:
    """Triton's own do: what one process compiles ahead, another would not find."""
    forwards, backwards = (_not_interpreted(tmp_path, order) for order in ("forwards", "backwards"))
    assert len(forwards) > 60
    assert forwards == backwards

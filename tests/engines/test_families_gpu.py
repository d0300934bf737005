"""Every family through the GPU engine's own runner and kernels beside the CPU engine, on a card or interpreted."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.families_interpreted import BOUND, worst_difference
from benchmarks.tiny_families import FAMILIES


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run for real here")
def test_interpreted_families_equal_the_cpu_engine(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "benchmarks.families_interpreted", str(tmp_path)],
                          env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False,
                          cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    found = dict(line.split("\t") for line in done.stdout.splitlines() if "\t" in line)
    assert found.keys() == FAMILIES.keys()
    assert {name: worst for name, worst in found.items() if float(worst) > BOUND} == {}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_families_on_the_card_equal_the_cpu_engine(name: str, tmp_path: Path) -> None:
    assert worst_difference(tmp_path, name, "cuda") < BOUND

"""Shared fixtures: one tiny Llama and its bf16 engine."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # tests are imported by path: their helpers lie beside them

from tiny_models import tiny_llama

from calib.checkpoint import QuantizedCheckpoint
from engines.build.builder import build
from engines.engine import Engine
from engines.plan import EngineSpec


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("llama") / "model")


@pytest.fixture(scope="session")
def engine(llama_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """A bf16 engine of the tiny Llama with room for every test."""
    return build(QuantizedCheckpoint.open(llama_folder), EngineSpec(tune="none"),
                 tmp_path_factory.mktemp("engine") / "bf16")

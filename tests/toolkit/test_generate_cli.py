"""``generate`` on an engine that cannot: the answer is an error however it is asked for."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from calib.checkpoint import QuantizedCheckpoint
from engines.build.builder import build
from engines.plan import EngineSpec
from toolkit import cli
from toolkit.home import Home


@pytest.fixture(scope="module")
def overflowing(tiny_home: Home, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An engine whose weights are finite and whose logits are not."""
    work = tmp_path_factory.mktemp("overflowing")
    shutil.copytree(tiny_home.models / "tiny", work / "model")
    weights = load_file(work / "model" / "model.safetensors")
    weights["model.norm.weight"][:] = 3e38
    save_file(weights, work / "model" / "model.safetensors", {"format": "pt"})
    build(QuantizedCheckpoint.open(work / "model"), EngineSpec(max_seq_len=64, tune="none"), work / "engine")
    return work / "engine"


@pytest.mark.parametrize("how", [(), ("--json",), ("--quiet",)])
def test_a_failed_generation_is_an_error(overflowing: Path, capfd: pytest.CaptureFixture[str], tmp_path: Path,
                                         how: tuple[str, ...]) -> None:
    code = cli.run_command(["generate", str(overflowing), "-p", "river", "--max-tokens", "4",
                            "--home", str(tmp_path / "home"), *how])
    shown = capfd.readouterr()
    assert code == 2
    assert "generation failed: the logits at position" in shown.out + shown.err

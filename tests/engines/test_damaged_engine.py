"""An engine that was changed after it was built tells so when it is used, and a model whose norm has another width is
not built."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from calib.artifact import ArtifactError, digest_of
from calib.checkpoint import QuantizedCheckpoint
from engines.build.builder import build
from engines.engine import Engine
from engines.errors import EngineError
from engines.llm import LLM
from engines.plan import EngineSpec


@pytest.mark.parametrize("name", ["weights/rank0/layer0000.safetensors", "weights/rank0/outside.safetensors",
                                  "tokenizer/tokenizer.json"])
@pytest.mark.parametrize("at", [-3, 20])
def test_one_flipped_bit_is_told_before_a_token(engine: Engine, tmp_path: Path, name: str, at: int) -> None:
    folder = shutil.copytree(engine.path, tmp_path / "copy")
    content = bytearray((folder / name).read_bytes())
    content[at] ^= 1
    (folder / name).write_bytes(content)
    with pytest.raises(ArtifactError, match="was changed after it was written"):
        LLM(folder)


@pytest.mark.parametrize(("edit", "message"), [
    (lambda manifest: manifest["record"]["plan"]["model"].update(num_layers=1), "a plan for 1 layers"),
    (lambda manifest: manifest["record"]["plan"]["program"].update(ops=[]), "whose program has 0"),
    (lambda manifest: manifest["record"]["plan"]["limits"].update(max_seq_len=-5), "plan.limits.max_seq_len"),
    (lambda manifest: manifest["record"]["plan"]["limits"].update(num_blocks=0), "plan.limits.num_blocks"),
    (lambda manifest: manifest["parents"].clear(), "which checkpoint")])
def test_a_plan_that_contradicts_itself_is_not_opened(engine: Engine, tmp_path: Path, message: str,
                                                      edit: Callable[[dict[str, Any]], None]) -> None:
    folder = shutil.copytree(engine.path, tmp_path / "copy")
    manifest = json.loads((folder / "manifest.json").read_text())
    edit(manifest)
    kept = engine.artifact.manifest
    manifest["digest"] = digest_of(kept.kind, kept.format, manifest["parents"], manifest["record"], kept.files)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(EngineError, match=message):
        Engine.open(folder)


@pytest.mark.parametrize("shape", [(1, 64), (32,), ()])
def test_a_norm_of_another_width_is_not_built(llama_folder: Path, tmp_path: Path, shape: tuple[int, ...]) -> None:
    folder = shutil.copytree(llama_folder, tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.input_layernorm.weight"] = torch.ones(shape, dtype=torch.bfloat16)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(EngineError, match=r"layers\.1\.input_layernorm\.weight has shape"):
        build(QuantizedCheckpoint.open(folder), EngineSpec(tune="none"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_occupied_place_is_told_before_the_work(llama_folder: Path, tmp_path: Path,
                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "out").write_text("mine")
    monkeypatch.setattr("engines.build.builder.plan_for", lambda *_: pytest.fail("the work was begun"))
    with pytest.raises(ArtifactError, match="already exists"):
        build(QuantizedCheckpoint.open(llama_folder), EngineSpec(tune="none"), tmp_path / "out")
    assert (tmp_path / "out").read_text() == "mine"

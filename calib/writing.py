"""What lies beside a checkpoint's weights: config.json, tokenizer, generation_config, where the weights came from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from calib.checkpoint import QuantizedCheckpoint
from calib.formats.awq import AwqLayout
from calib.formats.compressed_tensors import CompressedTensorsLayout
from calib.formats.gguf import SOURCE_FILE
from calib.formats.gptq import GptqLayout
from calib.formats.modelopt import ModeloptLayout
from calib.head import HEAD
from calib.plan import CalibrationPlan
from calib.text import Tokenizer

#: Layouts that are written, by the name that a plan gives them.
WRITERS: dict[str, Any] = {"modelopt": ModeloptLayout(), "compressed-tensors": CompressedTensorsLayout(),
                           "awq": AwqLayout(), "gptq": GptqLayout()}


def planned_config(source: QuantizedCheckpoint, plan: CalibrationPlan) -> dict[str, Any]:
    """The source's config.json as the result's: bf16, and untied where the head becomes a matrix of its own."""
    config = {key: value for key, value in source.config.items() if key != "torch_dtype"}
    if HEAD in plan.schemes:
        config["tie_word_embeddings"] = False
    return {**config, "dtype": "bfloat16"}


def write_config(folder: Path, config: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def write_side_files(folder: Path, source: QuantizedCheckpoint, tokenizer: Tokenizer) -> None:
    """Tokenizer, template, generation_config, and the note of a dequantized source."""
    tokenizer.save(folder)
    if not (folder / "generation_config.json").is_file():
        (folder / "generation_config.json").write_text(
            json.dumps({"eos_token_id": list(tokenizer.eos_ids)}) + "\n", encoding="utf-8")
    origin = source.path / SOURCE_FILE
    if origin.is_file():
        (folder / SOURCE_FILE).write_bytes(origin.read_bytes())

"""A model before its weights: configuration and the tensors it has, from weight files or from config.json alone.

A plan needs names and shapes. Where the weights are there, their headers say them (no weight is read). Where only
config.json is, the family's own class says them on the meta device; such a plan is as exact, except that nobody has
seen the weights.

A folder without weights is planned only where nothing says that there should be some: an index, a weight file of any
kind, even a folder under such a name, or a tokenizer beside config.json is a model whose copy went wrong, and a plan
would hide that until calibration.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from calib.architecture import check_weights, expected_shapes
from calib.checkpoint import QuantizedCheckpoint, quantization_of
from calib.config import read_config
from calib.errors import CalibError
from calib.formats.hf import INDEX, SINGLE, MissingWeightsError
from calib.layers import family_of, natural_key
from calib.tokenizer_files import TOKENIZER_FILES

_WEIGHT_ENDINGS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".gguf")


@dataclass(frozen=True, slots=True)
class Outline:
    """``shapes``: tensor name -> shape. ``weights``: whether the files are there."""

    folder: Path
    config: dict[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    weights: bool


def outline_of(folder: Path) -> Outline:
    """CalibError for an unsupported architecture, a model that is quantized already, or an incomplete config;
    MissingWeightsError where weights should be, and are not."""
    config = read_config(folder)
    if not any((folder / name).is_file() for name in (INDEX, SINGLE)):
        if quantization_of(folder, config) is not None:
            raise CalibError(f"{folder} describes a quantized model", "Give the unquantized model.")
        _refuse_lost_weights(folder)
        return Outline(folder, config, _from_config(folder, config), weights=False)
    family_of(config, str(folder))
    source = QuantizedCheckpoint.open(folder)
    if source.schemes:
        raise CalibError(f"{folder} is already quantized ({source.recipe})", "Give the unquantized model.")
    check_weights(source.config, source.shards)
    return Outline(folder, source.config, {name: meta.shape for name, meta in source.shards.items()}, weights=True)


def _from_config(folder: Path, config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    family_of(config, str(folder))
    shapes = expected_shapes(config, str(folder))
    if shapes is None:
        raise CalibError(f"{folder} stores its weights under other names than its modules have",
                         "Plan with the weights beside config.json.")
    return dict(sorted(shapes.items(), key=lambda item: natural_key(item[0])))


def _refuse_lost_weights(folder: Path) -> None:
    """MissingWeightsError when a folder without ``SINGLE`` and ``INDEX`` holds what only a whole model folder holds."""
    hint = "Copy or download the weights again; to plan without any, give a folder that holds config.json alone."
    place = next((folder / name for name in (INDEX, SINGLE) if (folder / name).exists()), None)
    if place is not None:
        raise MissingWeightsError(f"{place} is no file", hint)
    names = sorted(path.name for path in folder.iterdir())
    said = next((name for name in names if name.endswith(_WEIGHT_ENDINGS) or name in TOKENIZER_FILES), None)
    if said is not None:
        raise MissingWeightsError(f"{folder / SINGLE} is missing, and so is an index; {said} is there", hint)

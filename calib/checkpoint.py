"""QuantizedCheckpoint: a Scheme per module and a lazy stream of (name, tensor), whatever tool wrote the folder.

The stream is canonical: ``<module>.weight`` [out, in] (int4 as unpacked int8), ``.weight_scale`` f32 ([] | [out] |
[out, in/g] | [out/m, in/n]), ``.weight_zero`` (asymmetric only), ``.input_scale`` [] f32, ``.pre_quant_scale`` [in]
(multiplies the activation), ``.g_idx`` [in], ``.bias``; attention modules have ``.k_scale`` and ``.v_scale`` []. All
else (norms, embeddings) passes as it lies on disk. Dequantized weight = (q - zero) * scale.

A folder of ours is an artifact (kind ``quantized-checkpoint``) *and* what the ecosystem reads; anybody's folder in a
known layout opens the same way, only without a manifest: its digest is then computed from its files when asked for.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch

from calib.artifact import MANIFEST, Artifact, canonical_json, file_sha256, sha256_hex
from calib.config import read_config
from calib.errors import ArtifactError, CalibError, UnknownNameError
from calib.formats.awq import AwqLayout
from calib.formats.coherence import check_coherent
from calib.formats.compressed_tensors import CompressedTensorsLayout
from calib.formats.gguf import SOURCE_FILE
from calib.formats.gptq import GptqLayout
from calib.formats.hf import HFLayout, Shards, read_json
from calib.formats.modelopt import ModeloptLayout
from calib.scheme import Grid, Scheme
from calib.text import Tokenizer
from calib.tokenizer_files import TOKENIZER_FILES

KIND = "quantized-checkpoint"
FORMAT = 1


class Layout(Protocol):
    """How one tool lays codes and scales down. ``config`` is config.json whole."""

    name: str

    def schemes(self, config: dict[str, Any], shards: Shards) -> tuple[dict[str, Scheme], Grid]:
        """The Scheme of each quantized module, and the KV grid."""
        ...

    def tensors(self, config: dict[str, Any], shards: Shards, schemes: dict[str, Scheme], kv: Grid
                ) -> Iterator[tuple[str, torch.Tensor]]:
        """The canonical stream."""
        ...


#: Layouts by ``quantization_config.quant_method``; None is an unquantized folder.
LAYOUTS: dict[str | None, Layout] = {None: HFLayout(), "modelopt": ModeloptLayout(),
                                     "compressed-tensors": CompressedTensorsLayout(), "awq": AwqLayout(),
                                     "gptq": GptqLayout()}


def quantization_of(folder: Path, config: dict[str, Any]) -> dict[str, Any] | None:
    """The quantization section: of config.json, or of modelopt's older hf_quant_config.json."""
    section = config.get("quantization_config") or config.get("compression_config")
    if section is None and (folder / "hf_quant_config.json").is_file():
        section = {"quant_method": "modelopt"}
    return section


def layout_of(folder: Path, config: dict[str, Any]) -> Layout:
    """The layout that a folder is written in; UnknownNameError names the known ones."""
    section = quantization_of(folder, config)
    method = None if section is None else str(section.get("quant_method"))
    if method not in LAYOUTS:
        raise UnknownNameError("checkpoint layout", str(method), [name for name in LAYOUTS if name])
    return LAYOUTS[method]


class QuantizedCheckpoint:
    """An opened checkpoint. Opening reads headers only; ``tensors`` reads one tensor at a time."""

    def __init__(self, path: Path, artifact: Artifact | None) -> None:
        self.path = path
        self.artifact = artifact
        self._checked = False
        self._whole_config = read_config(path)
        self.layout = layout_of(path, self._whole_config)
        self.shards = Shards(path)
        #: Module name -> Scheme; a module that is absent is unquantized.
        self.schemes: dict[str, Scheme]
        self.kv: Grid
        self.schemes, self.kv = self.layout.schemes(self._whole_config, self.shards)
        check_coherent(self.shards, self.schemes, quantization_of(path, self._whole_config) is not None)

    @classmethod
    def open(cls, path: Path | str) -> QuantizedCheckpoint:
        """Open a folder of ours (strictly) or of anybody's in a known layout.

        ArtifactError, MissingWeightsError or CalibError says which file is missing, truncated or not understood.
        """
        path = Path(path)
        if not path.is_dir():
            raise CalibError(f"there is no folder {path}", "Give the folder of a checkpoint.")
        artifact = Artifact.open(path, KIND, FORMAT) if (path / MANIFEST).is_file() else None
        if artifact is not None and not isinstance(artifact.record.get("recipe"), str):
            raise ArtifactError(f"{path / MANIFEST} names no recipe", "Make the checkpoint again.")
        return cls(path, artifact)

    @property
    def config(self) -> dict[str, Any]:
        """config.json without its quantization section: the architecture alone."""
        return {key: value for key, value in self._whole_config.items()
                if key not in ("quantization_config", "compression_config")}

    @property
    def recipe(self) -> str:
        """The recipe's name; for a foreign checkpoint, its layout and weight grids."""
        if self.artifact is not None:
            return str(self.artifact.record["recipe"])
        grids = sorted({str(scheme.weight) for scheme in self.schemes.values()})
        return f"{self.layout.name}: {', '.join(grids)}" if grids else "bf16"

    @property
    def source_grid(self) -> str | None:
        """What the unquantized weights themselves were dequantized from, e.g. "Q4_1 g32"; else None."""
        if self.artifact is not None:
            return self.artifact.record.get("source_grid")
        return read_json(self.path / SOURCE_FILE).get("source_grid") if (self.path / SOURCE_FILE).is_file() else None

    @functools.cached_property
    def digest(self) -> str:
        """The artifact's digest; for a foreign folder the hash over the files that decide what it computes."""
        if self.artifact is not None:
            return self.artifact.digest
        names = sorted({*(meta.file for meta in self.shards.values()), "config.json", *TOKENIZER_FILES,
                        "generation_config.json", "hf_quant_config.json"})
        return sha256_hex(canonical_json({name: file_sha256(self.path / name) for name in names
                                          if (self.path / name).is_file()}))

    @property
    def size_bytes(self) -> int:
        """Bytes of the weight files."""
        return sum((self.path / name).stat().st_size for name in {meta.file for meta in self.shards.values()})

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The canonical stream, in natural order of names, on the CPU.

        ArtifactError when a file of an artifact was changed after it was written.
        """
        self._check_bytes()
        return self.layout.tensors(self._whole_config, self.shards, self.schemes, self.kv)

    def _check_bytes(self) -> None:
        """Once an opened checkpoint: a manifest says what the bytes were; a foreign folder has none."""
        if self.artifact is not None and not self._checked:
            self.artifact.check(self.artifact.manifest.files)
            self._checked = True

    def tokenizer(self) -> Tokenizer:
        if self.artifact is not None:
            self.artifact.check(name for name in TOKENIZER_FILES if name in self.artifact.manifest.files)
        return Tokenizer.open(self.path)

"""AutoAWQ's GEMM layout, read and written: asymmetric int4 groups, packed along the outputs.

For a weight [out, in] in groups of g inputs: ``qweight`` int32 [in, out/8], ``qzeros`` int32 [in/g, out/8], ``scales``
float16 [in/g, out]. Nibble p of a word holds output 8j + (0, 2, 4, 6, 1, 3, 5, 7)[p], codes and zero points as they are
(0..15, no minus one): w = (q - z) * s. config.json: quant_method "awq", version "gemm", bits, group_size, zero_point.
AWQ's scales are folded into the layers before, so nothing else is stored. Source: AutoAWQ's ``WQLinear_GEMM``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from calib.errors import CalibError
from calib.formats.compressed_tensors import pack_columns, unpack_columns
from calib.formats.hf import Shards, write_shards
from calib.layers import check_scale_shape
from calib.scheme import BF16, Grid, PerGroup, Scheme

_ORDER = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
_PLACE = _ORDER.argsort()


def pack_outputs(codes: torch.Tensor) -> torch.Tensor:
    """Unsigned nibbles [rows, out] (8 divides out) -> int32 [rows, out/8] in AutoAWQ's order."""
    return pack_columns(codes.unflatten(1, (-1, 8))[:, :, _ORDER].flatten(1))


def unpack_outputs(words: torch.Tensor) -> torch.Tensor:
    """int32 [rows, n] -> unsigned nibbles int8 [rows, 8 n]."""
    return unpack_columns(words, words.shape[1] * 8).unflatten(1, (-1, 8))[:, :, _PLACE].flatten(1)


class AwqLayout:
    """See the module's text."""

    name = "awq"

    def schemes(self, config: Mapping[str, Any], shards: Shards) -> tuple[dict[str, Scheme], Grid]:
        section = config["quantization_config"]
        bits, version = section.get("bits", section.get("w_bit")), str(section.get("version", "gemm")).lower()
        if bits != 4 or version != "gemm" or not section.get("zero_point", True):
            raise CalibError(f"{shards.folder}: AWQ with {bits} bits, version {version!r}, zero_point "
                             f"{section.get('zero_point')} is not supported", "Supported: 4 bits, gemm, zero points.")
        found: dict[str, Scheme] = {}
        for name in shards:
            module, _, leaf = name.rpartition(".")
            if leaf == "qweight":
                found[module] = self._scheme(module, int(section.get("group_size", section.get("q_group_size"))),
                                             shards)
        return found, BF16

    @staticmethod
    def _scheme(module: str, size: int, shards: Shards) -> Scheme:
        for leaf in ("qzeros", "scales"):
            if f"{module}.{leaf}" not in shards:
                raise CalibError(f"{shards.folder}: {module}.{leaf} is missing", "The checkpoint is incomplete.")
        rows, words = shards[f"{module}.qweight"].shape
        grid = Grid(dtype="int4", granularity=PerGroup(size=rows if size == -1 else size), symmetric=False)
        scale = shards[f"{module}.scales"].shape
        check_scale_shape(module, grid, (words * 8, rows), (scale[1], scale[0]))
        return Scheme(weight=grid)

    def tensors(self, config: Mapping[str, Any], shards: Shards, schemes: Mapping[str, Scheme], kv: Grid
                ) -> Iterator[tuple[str, torch.Tensor]]:
        for name in shards:
            module, _, leaf = name.rpartition(".")
            if module not in schemes or leaf == "bias":
                yield name, shards.load(name)
            elif leaf == "qweight":
                yield f"{module}.weight", unpack_outputs(shards.load(name)).T.contiguous()
            elif leaf == "qzeros":
                yield f"{module}.weight_zero", unpack_outputs(shards.load(name)).T.contiguous().float()
            elif leaf == "scales":
                yield f"{module}.weight_scale", shards.load(name).T.contiguous().float()
            else:
                raise CalibError(f"{shards.folder}: {name} has no meaning in AutoAWQ's layout",
                                 "The checkpoint was written by another tool, or is damaged.")

    def write(self, folder: Path, config: Mapping[str, Any], schemes: Mapping[str, Scheme], kv: Grid,
              tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Write a canonical stream into ``folder``. CalibError for schemes or scales that the layout cannot hold."""
        kinds = set(schemes.values())
        scheme = kinds.pop() if len(kinds) == 1 else None
        if scheme is None or kv.quantized or scheme.weight.dtype != "int4" or scheme.weight.symmetric or \
                scheme.weight.granularity.kind != "group" or scheme != Scheme(weight=scheme.weight):
            found = ", ".join(sorted(str(one) for one in schemes.values())) or "no quantized module"
            raise CalibError(f"the awq layout cannot hold: {found}", "It holds one asymmetric int4 group size, 16-bit "
                             "activations and KV cache; write compressed-tensors.")
        left: list[str] = []

        def raw() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in tensors:
                module, _, leaf = name.rpartition(".")
                if module not in schemes or leaf == "bias":
                    if leaf == "weight" and tensor.dim() == 2 and "embed" not in module and module != "lm_head":
                        left.append(module)
                    yield name, tensor
                elif leaf == "weight":
                    yield f"{module}.qweight", pack_outputs(tensor.T)
                elif leaf == "weight_zero":
                    yield f"{module}.qzeros", pack_outputs(tensor.T)
                else:
                    yield f"{module}.scales", exact_half(name, tensor).T.contiguous()

        write_shards(folder, raw())
        section = {"quant_method": "awq", "version": "gemm", "bits": 4, "group_size": scheme.weight.granularity.size,
                   "zero_point": True, "modules_to_not_convert": sorted(left) or None}
        (folder / "config.json").write_text(json.dumps({**config, "quantization_config": section}, indent=2,
                                                       sort_keys=True) + "\n", encoding="utf-8")


def exact_half(name: str, scale: torch.Tensor) -> torch.Tensor:
    """A scale as float16. CalibError where that would change it: the codes were chosen with the scale as it was."""
    half = scale.half()
    if not torch.equal(half.float(), scale.float()) or not (half > 0).all():
        raise CalibError(f"{name} holds scales that float16 cannot", "Round them to float16 before choosing codes.")
    return half

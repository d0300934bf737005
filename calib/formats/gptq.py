"""The GPTQ layout (AutoGPTQ, GPTQModel), read in both versions, written in the first, which every runtime reads.

For a weight [out, in] in groups of g inputs: ``qweight`` int32 [in/8, out] packed along the inputs, nibble k of word j
is input 8j + k; ``qzeros`` int32 [in/g, out/8] packed along the outputs; ``scales`` float16 [in/g, out]; ``g_idx``
int32 [in], the group of each input (not in order after desc_act). w = (q - z) * s with unsigned q; version 1
(``checkpoint_format`` "gptq") stores z - 1, "gptq_v2" z itself. Symmetric means z = 8 everywhere.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from calib.errors import CalibError
from calib.formats.awq import exact_half
from calib.formats.compressed_tensors import pack_columns, unpack_columns
from calib.formats.hf import Shards, write_shards
from calib.layers import check_scale_shape
from calib.scheme import BF16, Grid, PerGroup, Scheme

_LEAVES = ("qweight", "qzeros", "scales", "g_idx")
_MIDDLE = 8


class GptqLayout:
    """See the module's text."""

    name = "gptq"

    def schemes(self, config: Mapping[str, Any], shards: Shards) -> tuple[dict[str, Scheme], Grid]:
        section = config["quantization_config"]
        if section.get("bits") != 4 or section.get("checkpoint_format", "gptq") not in ("gptq", "gptq_v2"):
            raise CalibError(f"{shards.folder}: GPTQ with {section.get('bits')} bits in checkpoint_format "
                             f"{section.get('checkpoint_format')!r} is not supported",
                             "Supported: 4 bits, gptq or gptq_v2.")
        modules = [name.rpartition(".")[0] for name in shards if name.endswith(".qweight")]
        return {module: self._scheme(module, section, shards) for module in modules}, BF16

    @staticmethod
    def _scheme(module: str, section: Mapping[str, Any], shards: Shards) -> Scheme:
        for leaf in _LEAVES:
            if f"{module}.{leaf}" not in shards:
                raise CalibError(f"{shards.folder}: {module}.{leaf} is missing", "The checkpoint is incomplete.")
        words, rows = shards[f"{module}.qweight"].shape
        size = int(section["group_size"])
        size = words * 8 if size == -1 else size
        grid = Grid(dtype="int4", granularity=PerGroup(size=size), symmetric=bool(section.get("sym", False)))
        scale = shards[f"{module}.scales"].shape
        check_scale_shape(module, grid, (rows, words * 8), (scale[1], scale[0]))
        ordered = torch.equal(shards.load(f"{module}.g_idx").long(), torch.arange(words * 8) // size)
        return Scheme(weight=grid, act_order=not ordered)

    def tensors(self, config: Mapping[str, Any], shards: Shards, schemes: Mapping[str, Scheme], kv: Grid
                ) -> Iterator[tuple[str, torch.Tensor]]:
        below = 1 if config["quantization_config"].get("checkpoint_format", "gptq") == "gptq" else 0
        for name in shards:
            module, _, leaf = name.rpartition(".")
            if module not in schemes or leaf not in _LEAVES:
                yield name, shards.load(name)
            elif leaf == "qweight":
                yield f"{module}.weight", self._codes(shards.load(name), schemes[module])
            elif leaf == "scales":
                yield f"{module}.weight_scale", shards.load(name).T.contiguous().float()
            elif leaf == "qzeros":
                zero = self._zero(shards.load(name), below)
                if not schemes[module].weight.symmetric:
                    yield f"{module}.weight_zero", zero
                elif not (zero == _MIDDLE).all():
                    raise CalibError(f"{shards.folder}: {module} is symmetric and has zero points that are not 8",
                                     "config.json does not belong to these weights.")
            elif schemes[module].act_order:
                yield name, shards.load(name).to(torch.int32)

    @staticmethod
    def _codes(words: torch.Tensor, scheme: Scheme) -> torch.Tensor:
        codes = unpack_columns(words.T.contiguous(), words.shape[0] * 8)
        return codes - _MIDDLE if scheme.weight.symmetric else codes

    @staticmethod
    def _zero(words: torch.Tensor, below: int) -> torch.Tensor:
        """Zero points f32 [out, in/g]. Version 1's 15 stands for 16, as its readers take it."""
        return unpack_columns(words, words.shape[1] * 8).T.contiguous().float() + below

    def write(self, folder: Path, config: Mapping[str, Any], schemes: Mapping[str, Scheme], kv: Grid,
              tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Write a canonical stream into ``folder``. CalibError for schemes or scales that the layout cannot hold."""
        kinds = set(schemes.values())
        scheme = kinds.pop() if len(kinds) == 1 else None
        if scheme is None or kv.quantized or scheme.weight.dtype != "int4" or not scheme.weight.symmetric or \
                scheme.weight.granularity.kind != "group" or scheme.activation or scheme.pre_quant_scale:
            found = ", ".join(sorted(str(one) for one in schemes.values())) or "no quantized module"
            raise CalibError(f"the gptq layout cannot hold: {found}", "It holds one symmetric int4 group size, 16-bit "
                             "activations and KV cache; write compressed-tensors.")
        size, ordered = scheme.weight.granularity.size, not scheme.act_order

        def raw() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in tensors:
                module, _, leaf = name.rpartition(".")
                if module not in schemes or leaf == "bias":
                    yield name, tensor
                elif leaf == "weight":
                    yield f"{module}.qweight", pack_columns(tensor + _MIDDLE).T.contiguous()
                    if ordered:
                        yield f"{module}.g_idx", (torch.arange(tensor.shape[1]) // size).to(torch.int32)
                elif leaf == "weight_scale":
                    zeros = torch.full(tuple(tensor.T.shape), _MIDDLE - 1)
                    yield f"{module}.scales", exact_half(name, tensor).T.contiguous()
                    yield f"{module}.qzeros", pack_columns(zeros)
                else:
                    yield name, tensor

        write_shards(folder, raw())
        section = {"quant_method": "gptq", "bits": 4, "group_size": size, "sym": True, "desc_act": scheme.act_order,
                   "static_groups": ordered, "checkpoint_format": "gptq", "lm_head": False}
        (folder / "config.json").write_text(json.dumps({**config, "quantization_config": section}, indent=2,
                                                       sort_keys=True) + "\n", encoding="utf-8")

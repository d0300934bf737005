"""modelopt's unified Hugging Face export (0.43 and later), read and written.

What lies on disk for a weight [out, in]:

==================  ==================  =============================  ==========================================
quant_algo          weight              weight_scale                   also
==================  ==================  =============================  ==========================================
FP8                 f8e4m3 [out, in]    f32 [] (or [out], per token)   input_scale f32 [] (static only)
fp8_pb_wo           f8e4m3 [out, in]    f32 [out/m, 1, in/n, 1]
W8A8_SQ_PER_CHANNEL int8 [out, in]      f32 [out]                      input_scale; pre_quant_scale [in]
W8A16               int8 [out, in]      f32 [out]
W4A16_AWQ           uint8 [out/2, in]   f32 [out, in/g]                pre_quant_scale [in] where it was not folded
==================  ==================  =============================  ==========================================

int4 is packed along *out*: byte row i holds output row 2i in its low nibble and 2i+1 in its high one, two's complement.
config.json knows no group size; hf_quant_config.json does, and the scale's shape decides. Flags about pre_quant_scale
lie in some exports, and W8A8_SQ_PER_CHANNEL without an input_scale is really dynamic per token: the tensors that are
present decide. FP8 KV scales lie at ``k_proj.k_scale`` and ``v_proj.v_scale`` = amax/448; the ``fp8_cast`` form
declares FP8 KV and writes none, which means a scale of one. An int8 cache is TensorRT-LLM's ``INT8``, amax/127 at the
same places (modelopt's own exporter refuses it).
"""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from calib.errors import CalibError, UnknownNameError
from calib.formats.coherence import alike, check_all_or_none
from calib.formats.hf import Shards, read_json, write_shards
from calib.layers import attention_names, check_scale_shape
from calib.scheme import BF16, Grid, PerBlock, PerChannel, PerGroup, PerTensor, PerToken, Scheme

_FP8, _FP8_TOKEN = Grid(dtype="fp8_e4m3"), Grid(dtype="fp8_e4m3", granularity=PerToken(), dynamic=True)
_INT8, _INT8_TOKEN = Grid(dtype="int8"), Grid(dtype="int8", granularity=PerToken(), dynamic=True)
_INT8_CHANNEL = Grid(dtype="int8", granularity=PerChannel())
_ALGORITHMS = ("FP8", "FP8_PB_WO", "W8A8_SQ_PER_CHANNEL", "W8A16", "W4A16_AWQ")
_KV = {"FP8": _FP8, "INT8": _INT8}


def pack_int4(codes: torch.Tensor) -> torch.Tensor:
    """int8 codes in [-8, 7], [out, in] with even out -> uint8 [out/2, in]; low nibble is the even row."""
    nibbles = codes.to(torch.uint8) & 0xF
    return nibbles[0::2] | (nibbles[1::2] << 4)


def unpack_int4(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [out/2, in] -> int8 [out, in] in [-8, 7]."""
    nibbles = torch.stack((packed & 0xF, packed >> 4), dim=1).flatten(0, 1).to(torch.int8)
    return torch.where(nibbles > 7, nibbles - 16, nibbles)


def _sections(config: Mapping[str, Any], shards: Shards) -> dict[str, Any]:
    """{quant_algo, kv_cache_quant_algo, quantized_layers} from hf_quant_config.json, else from config.json."""
    path = shards.folder / "hf_quant_config.json"
    if path.is_file():
        return dict(read_json(path).get("quantization", {}))
    section = dict(config["quantization_config"])
    if "kv_cache_quant_algo" not in section:
        scheme = section.get("kv_cache_scheme")
        section["kv_cache_quant_algo"] = None if scheme is None else (
            f"{'INT' if scheme.get('type') == 'int' else 'FP'}{scheme['num_bits']}")
    return section


def _weight_grid(dtype: str, weight: tuple[int, ...], scale: tuple[int, ...]) -> Grid:
    if dtype == "U8":
        return Grid(dtype="int4", granularity=PerGroup(size=weight[1] // scale[1]))
    code = "int8" if dtype == "I8" else "fp8_e4m3"
    if len(scale) == 4:
        return Grid(dtype="fp8_e4m3", granularity=PerBlock(rows=weight[0] // scale[0], cols=weight[1] // scale[2]))
    return Grid(dtype=code, granularity=PerChannel() if len(scale) == 1 else PerTensor())  # type: ignore[arg-type]


def _activation_grid(algorithm: str, weight: Grid, static: bool) -> Grid | None:
    if algorithm == "FP8":
        return _FP8 if static else _FP8_TOKEN
    if algorithm == "W8A8_SQ_PER_CHANNEL":
        return _INT8 if static else _INT8_TOKEN
    return None


class ModeloptLayout:
    """See the module's text."""

    name = "modelopt"

    def schemes(self, config: Mapping[str, Any], shards: Shards) -> tuple[dict[str, Scheme], Grid]:
        section = _sections(config, shards)
        kv = self._kv(section.get("kv_cache_quant_algo"))
        layers = section.get("quantized_layers")
        found: dict[str, Scheme] = {}
        algorithms: dict[str, str] = {}
        for name in shards:
            module, _, leaf = name.rpartition(".")
            if leaf != "weight_scale":
                continue
            algorithm = str(layers.get(module, {}).get("quant_algo") if layers else section.get("quant_algo")).upper()
            if algorithm not in _ALGORITHMS:
                raise UnknownNameError("modelopt quant_algo", algorithm, _ALGORITHMS)
            found[module], algorithms[module] = self._scheme(module, algorithm, shards, kv), algorithm
        self._check_excluded(section, found, shards)
        self._check_even(algorithms, shards)
        return found, kv

    @staticmethod
    def _kv(algorithm: str | None) -> Grid:
        if algorithm in (None, "", "none"):
            return BF16
        if algorithm not in _KV:
            raise UnknownNameError("modelopt KV cache algorithm", str(algorithm), _KV)
        return _KV[algorithm]

    @staticmethod
    def _scheme(module: str, algorithm: str, shards: Shards, kv: Grid) -> Scheme:
        if f"{module}.weight" not in shards:
            raise CalibError(f"{shards.folder}: {module} has a weight_scale but no weight",
                             "The checkpoint is damaged.")
        stored, scale = shards[f"{module}.weight"], shards[f"{module}.weight_scale"].shape
        expected = {"FP8": "F8_E4M3", "FP8_PB_WO": "F8_E4M3", "W4A16_AWQ": "U8"}.get(algorithm, "I8")
        if stored.dtype != expected:
            raise CalibError(f"{shards.folder}: {module}.weight is {stored.dtype}, {algorithm} stores {expected}",
                             "The checkpoint is damaged, or was written by another tool.")
        shape = (stored.shape[0] * (2 if stored.dtype == "U8" else 1), stored.shape[1])
        weight = _weight_grid(stored.dtype, shape, scale)
        flat = (scale[0], scale[2]) if len(scale) == 4 else scale
        check_scale_shape(module, weight, shape, flat)
        return Scheme(weight=weight, kv=kv, pre_quant_scale=f"{module}.pre_quant_scale" in shards,
                      activation=_activation_grid(algorithm, weight, f"{module}.input_scale" in shards))

    @staticmethod
    def _check_even(algorithms: Mapping[str, str], shards: Shards) -> None:
        """As the tensors that are present decide (see above), one that was lost must not: its like still have it."""
        for algorithm in ("FP8", "W8A8_SQ_PER_CHANNEL"):
            check_all_or_none(shards, [module for module, own in algorithms.items() if own == algorithm],
                              "input_scale")
        for modules in alike(algorithms):
            check_all_or_none(shards, modules, "pre_quant_scale")

    @staticmethod
    def _check_excluded(section: Mapping[str, Any], found: Mapping[str, Scheme], shards: Shards) -> None:
        excluded = section.get("exclude_modules") or []
        wrong = next((module for module in found for pattern in excluded if fnmatch.fnmatch(module, pattern)), None)
        if wrong:
            raise CalibError(f"{shards.folder}: {wrong} is quantized and on the exclude list",
                             "hf_quant_config.json does not belong to these weights.")

    def tensors(self, config: Mapping[str, Any], shards: Shards, schemes: Mapping[str, Scheme], kv: Grid
                ) -> Iterator[tuple[str, torch.Tensor]]:
        for name in shards:
            module, _, leaf = name.rpartition(".")
            if leaf in ("k_scale", "v_scale"):
                yield f"{module.rpartition('.')[0]}.{leaf}", shards.load(name).float().reshape(())
            elif module not in schemes:
                yield name, shards.load(name)
            else:
                yield name, self._canonical(leaf, shards.load(name), schemes[module])
        if kv.quantized and not any(name.endswith(".k_scale") for name in shards):
            if kv != _FP8:
                raise CalibError(f"{shards.folder} declares a KV cache on {kv} and has no k_scale",
                                 "Only fp8 keys and values mean something without a scale; calibrate the model again.")
            for attention in attention_names(shards):
                yield f"{attention}.k_scale", torch.ones(())
                yield f"{attention}.v_scale", torch.ones(())

    @staticmethod
    def _canonical(leaf: str, tensor: torch.Tensor, scheme: Scheme) -> torch.Tensor:
        if leaf == "weight":
            return unpack_int4(tensor) if scheme.weight.dtype == "int4" else tensor
        if leaf == "weight_scale":
            tensor = tensor.float()
            return tensor[:, 0, :, 0] if tensor.dim() == 4 else tensor
        return tensor.float() if leaf in ("pre_quant_scale", "input_scale") else tensor

    def write(self, folder: Path, config: Mapping[str, Any], schemes: Mapping[str, Scheme], kv: Grid,
              tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Write a canonical stream into ``folder``: config.json, hf_quant_config.json and weights.

        CalibError for schemes that no reader of this layout takes: FP8 per tensor static and symmetric grouped int4
        are written, the latter also beside int8 weights with 16-bit activations (``MIXED_PRECISION``, each module with
        its algorithm); int8 alone belongs to compressed-tensors.
        """
        algorithm, group = self._writable(self._main(schemes))
        wide = set(schemes) - set(self._main(schemes))
        unquantized: list[str] = []

        def raw() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in tensors:
                module, _, leaf = name.rpartition(".")
                if leaf in ("k_scale", "v_scale"):
                    yield f"{module}.{leaf[0]}_proj.{leaf}", tensor
                elif module in schemes and leaf == "weight" and schemes[module].weight.dtype == "int4":
                    yield name, pack_int4(tensor)
                elif module in schemes and leaf == "pre_quant_scale":
                    yield name, tensor.to(torch.bfloat16)
                else:
                    if leaf == "weight" and module not in schemes and tensor.dim() == 2:
                        unquantized.append(module)
                    yield name, tensor

        write_shards(folder, raw())
        excluded = sorted({*unquantized, "lm_head"})
        quantization: dict[str, Any] = {"quant_algo": algorithm, "exclude_modules": excluded,
                                        "kv_cache_quant_algo": self._kv_name(kv)}
        section: dict[str, Any] = {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": excluded}
        if group is not None:
            quantization |= {"group_size": group, "has_zero_point": False, "pre_quant_scale": any(
                scheme.pre_quant_scale for scheme in schemes.values())}
        if wide:
            four = {"quant_algo": algorithm, "group_size": group}
            mixed = {"quant_algo": "MIXED_PRECISION", "quantized_layers": {
                module: {"quant_algo": "W8A16"} if module in wide else four for module in sorted(schemes)}}
            quantization, section = {**quantization, **mixed}, {**section, **mixed}
        if kv.quantized:
            section["kv_cache_scheme"] = {"dynamic": False, "num_bits": 8,
                                          "type": "int" if kv.dtype == "int8" else "float"}
        _dump(folder / "hf_quant_config.json", {"producer": {"name": "modelopt"}, "quantization": quantization})
        _dump(folder / "config.json", {**config, "quantization_config": section})

    @staticmethod
    def _kv_name(kv: Grid) -> str | None:
        if not kv.quantized:
            return None
        name = next((name for name, grid in _KV.items() if grid == kv), None)
        if name is None:
            raise CalibError(f"the modelopt layout cannot hold a KV cache on {kv}", "It holds static fp8 or int8.")
        return name

    @staticmethod
    def _main(schemes: Mapping[str, Scheme]) -> dict[str, Scheme]:
        """Without int8 weights with 16-bit activations, where four-bit weights are beside them."""
        wide = {name for name, scheme in schemes.items() if scheme.weight == _INT8_CHANNEL and not scheme.activation}
        four = any(scheme.weight.dtype == "int4" for scheme in schemes.values())
        return {name: scheme for name, scheme in schemes.items() if not four or name not in wide}

    @staticmethod
    def _writable(schemes: Mapping[str, Scheme]) -> tuple[str, int | None]:
        kinds = {(scheme.weight, scheme.activation) for scheme in schemes.values()}
        weight, activation = kinds.pop() if kinds else (BF16, None)
        if not kinds and weight == _FP8 and activation == _FP8:
            return "FP8", None
        if not kinds and weight.dtype == "int4" and weight.granularity.kind == "group" and weight.symmetric \
                and activation is None and not any(scheme.act_order for scheme in schemes.values()):
            return "W4A16_AWQ", weight.granularity.size
        found = ", ".join(sorted({str(scheme) for scheme in schemes.values()})) or "no quantized module"
        raise CalibError(f"the modelopt layout cannot hold: {found}",
                         "It holds static per-tensor FP8 or symmetric grouped int4; write compressed-tensors.")


def _dump(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")

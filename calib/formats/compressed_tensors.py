"""The compressed-tensors layout (vLLM's own), read and written.

For a weight [out, in]: ``int-quantized`` and ``float-quantized`` keep codes [out, in] with weight_scale (1,) per
tensor, [out, 1] per channel or [out/m, in/n] per block; ``pack-quantized`` keeps weight_packed int32 [out, in/8] for
int4 (nibble k of word j is column 8j+k, stored as q + 8) or [out, in/4] for int8 with 16-bit activations (byte k is
column 4j+k, q + 128), weight_scale [out, in/g] or [out, 1], weight_shape, and for asymmetric int4 weight_zero_point
int32 [out/8, in/g] packed along its rows. Activations are dynamic per token or group (no tensor) or static
(input_scale). KV scales (fp8 or int8, one per tensor) lie on the attention module: ``self_attn.k_scale``.

Modules of one scheme are one config group. The largest has the target "Linear", the others name their modules: a reader
takes a name before a class. Where the groups' formats differ, the whole is ``mixed-precision``.

There is no place for a pre_quant_scale: smoothing must be folded into the previous layer before quantizing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from calib.errors import CalibError
from calib.formats.hf import Shards, write_shards
from calib.layers import attention_names, check_scale_shape
from calib.scheme import BF16, BITS, Grid, PerBlock, PerChannel, PerGroup, PerTensor, PerToken, Scheme

_FORMATS = {"int-quantized", "float-quantized", "naive-quantized", "pack-quantized", "dense", "mixed-precision"}
_STRATEGIES = {"tensor": PerTensor, "channel": PerChannel, "token": PerToken}
_WRITTEN = {"int8": "int-quantized", "fp8_e4m3": "float-quantized"}
_STORED = {"int8": "I8", "fp8_e4m3": "F8_E4M3"}
_KV = (Grid(dtype="fp8_e4m3"), Grid(dtype="int8"))
_NAMES = {"weight_packed": "weight", "weight_zero_point": "weight_zero", "weight_g_idx": "g_idx"}


def pack_columns(codes: torch.Tensor, bits: int = 4) -> torch.Tensor:
    """Unsigned codes [rows, columns] -> int32 [rows, ceil(columns * bits / 32)]; the first column is lowest."""
    rows, columns = codes.shape
    per_word = 32 // bits
    padded = torch.zeros(rows, -(-columns // per_word) * per_word, dtype=torch.int64)
    padded[:, :columns] = codes.to(torch.int64)
    words = (padded.view(rows, -1, per_word) << torch.arange(0, 32, bits)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def unpack_columns(words: torch.Tensor, columns: int, bits: int = 4) -> torch.Tensor:
    """int32 [rows, n] -> unsigned codes [rows, columns]: int8 for nibbles, int16 for bytes."""
    codes = (words.to(torch.int64)[:, :, None] >> torch.arange(0, 32, bits)) & (2**bits - 1)
    return codes.flatten(1)[:, :columns].to(torch.int8 if bits == 4 else torch.int16)


def _packed_bits(scheme: Scheme) -> int | None:
    """Bits of a code where this layout packs a scheme's codes into words (and adds half their range)."""
    alone = scheme.weight.dtype == "int8" and scheme.activation is None
    return BITS[scheme.weight.dtype] if alone or scheme.weight.dtype == "int4" else None


def _grid(section: Mapping[str, Any], what: str) -> Grid:
    kind, bits, strategy = section.get("type", "int"), section.get("num_bits"), section.get("strategy")
    dtype = {"float 8": "fp8_e4m3", "int 8": "int8", "int 4": "int4"}.get(f"{kind} {bits}")
    if dtype is None:
        raise CalibError(f"{what} are {bits}-bit {kind}, which is not supported",
                         "Supported: 8-bit float, 8-bit and 4-bit int.")
    granularity: Any
    if strategy in _STRATEGIES:
        granularity = _STRATEGIES[strategy]()
    elif strategy == "group":
        granularity = PerGroup(size=section["group_size"])
    elif strategy == "block":
        granularity = PerBlock(rows=section["block_structure"][0], cols=section["block_structure"][1])
    else:
        raise CalibError(f"{what} use the strategy {strategy!r}, which is not supported",
                         "Supported: tensor, channel, token, group, block.")
    return Grid(dtype=dtype, granularity=granularity, symmetric=section.get("symmetric", True),  # type: ignore[arg-type]
                dynamic=bool(section.get("dynamic", False)))


def _matches(module: str, target: str) -> bool:
    """A target is a class name ("Linear"), an exact module name, or "re:" with an expression."""
    if target.startswith("re:"):
        return re.match(target[3:], module) is not None
    return target in (module, "Linear")


def _group_of(module: str, groups: Iterable[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The config group of a module: one that names it comes before one that names its class."""
    hits = [(target == "Linear", index, group) for index, group in enumerate(groups)
            for target in group["targets"] if _matches(module, target)]
    return min(hits, key=lambda hit: hit[:2])[2] if hits else None


class CompressedTensorsLayout:
    """See the module's text."""

    name = "compressed-tensors"

    def schemes(self, config: Mapping[str, Any], shards: Shards) -> tuple[dict[str, Scheme], Grid]:
        section = config.get("quantization_config") or config["compression_config"]
        self._check_format(section, shards)
        kv_section = section.get("kv_cache_scheme")
        kv = BF16 if kv_section is None else _grid(kv_section, "KV scales")
        if kv.quantized and kv not in _KV:
            raise CalibError(f"{shards.folder}: KV cache {kv} is not supported",
                             "Supported: fp8 or int8, static, per tensor.")
        found: dict[str, Scheme] = {}
        for name in shards:
            module, _, leaf = name.rpartition(".")
            if leaf == "weight_scale":
                found[module] = self._scheme(module, section, shards, kv)
        return found, kv

    @staticmethod
    def _check_format(section: Mapping[str, Any], shards: Shards) -> None:
        groups = section["config_groups"].values()
        unknown = sorted({section.get("format"), *(group.get("format") for group in groups)} - _FORMATS - {None})
        if unknown:
            raise CalibError(f"{shards.folder}: compressed-tensors format {unknown[0]!r} is not supported",
                             f"Supported: {', '.join(sorted(_FORMATS))}.")

    @staticmethod
    def _scheme(module: str, section: Mapping[str, Any], shards: Shards, kv: Grid) -> Scheme:
        if any(_matches(module, target) and target != "Linear" for target in section.get("ignore") or []):
            raise CalibError(f"{shards.folder}: {module} is quantized and on the ignore list",
                             "config.json does not belong to these weights.")
        group = _group_of(module, section["config_groups"].values())
        if group is None:
            raise CalibError(f"{shards.folder}: {module} is quantized but in no config group",
                             "config.json is damaged.")
        weight = _grid(group["weights"], f"weights of {module}")
        activation = group.get("input_activations")
        packed = weight.dtype in ("int4", "int8") and any(
            f"{module}.{leaf}" in shards for leaf in ("weight_packed", "weight_shape"))
        stored = f"{module}.weight_packed" if packed or weight.dtype == "int4" else f"{module}.weight"
        if stored not in shards:
            raise CalibError(f"{shards.folder}: {stored} is missing", "The checkpoint is incomplete.")
        wanted = "I32" if packed or weight.dtype == "int4" else _STORED[weight.dtype]
        if shards[stored].dtype != wanted:
            raise CalibError(f"{shards.folder}: {stored} is {shards[stored].dtype}; {weight} codes lie as {wanted}",
                             "config.json does not belong to these weights, or they are damaged.")
        shape = shards[stored].shape
        scale: tuple[int, ...] = shards[f"{module}.weight_scale"].shape
        if packed:
            size = weight.granularity.size if weight.granularity.kind == "group" else 1
            shape = (shape[0], scale[-1] * size if size > 1 else shape[1] * 32 // BITS[weight.dtype])
        check_scale_shape(module, weight, shape, _canonical_scale_shape(weight, scale))
        grid = None if activation is None else _grid(activation, f"activations of {module}")
        if grid is not None and not grid.dynamic and f"{module}.input_scale" not in shards:
            raise CalibError(f"{shards.folder}: {module} has static activations but no input_scale",
                             "A missing scale would turn into infinity; calibrate the model again.")
        return Scheme(weight=weight, activation=grid, kv=kv, act_order=f"{module}.weight_g_idx" in shards)

    def tensors(self, config: Mapping[str, Any], shards: Shards, schemes: Mapping[str, Scheme], kv: Grid
                ) -> Iterator[tuple[str, torch.Tensor]]:
        for name in shards:
            module, _, leaf = name.rpartition(".")
            if leaf in ("k_scale", "v_scale"):
                yield name, shards.load(name).float().reshape(())
            elif module not in schemes:
                yield name, shards.load(name)
            elif leaf != "weight_shape" and not (leaf == "weight_zero_point" and schemes[module].weight.symmetric):
                yield f"{module}.{_NAMES.get(leaf, leaf)}", self._canonical(module, leaf, schemes[module], shards)
        missing = [name for name in attention_names(shards) if f"{name}.k_scale" not in shards] if kv.quantized else []
        if missing:
            raise CalibError(f"{shards.folder}: {missing[0]} has no k_scale",
                             "Its config.json declares a quantized KV cache; calibrate the model again.")

    @staticmethod
    def _canonical(module: str, leaf: str, scheme: Scheme, shards: Shards) -> torch.Tensor:
        tensor = shards.load(f"{module}.{leaf}")
        if leaf == "weight_packed":
            columns, bits = int(shards.load(f"{module}.weight_shape")[1]), BITS[scheme.weight.dtype]
            codes = unpack_columns(tensor, columns, bits)
            return (codes - 2**(bits - 1)).to(torch.int8) if scheme.weight.symmetric else codes
        if leaf == "weight_scale":
            return tensor.float().reshape(_canonical_scale_shape(scheme.weight, tuple(tensor.shape)))
        if leaf == "weight_zero_point":
            rows = shards[f"{module}.weight_packed"].shape[0]
            return unpack_columns(tensor.T.contiguous(), rows).T.contiguous().float()
        return tensor.float().reshape(()) if leaf == "input_scale" else tensor

    def write(self, folder: Path, config: Mapping[str, Any], schemes: Mapping[str, Scheme], kv: Grid,
              tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Write a canonical stream into ``folder``: config.json and weights.

        Without schemes it is a ``dense`` folder (for a quantized KV cache alone). No scheme may have a pre_quant_scale
        (CalibError otherwise); modules absent from ``schemes`` go on the ignore list.
        """
        groups = _groups(schemes)
        unquantized: list[str] = []

        def raw() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in tensors:
                module, _, leaf = name.rpartition(".")
                if module in schemes:
                    yield from _raw_tensors(module, leaf, tensor, schemes[module])
                else:
                    if leaf == "weight" and tensor.dim() == 2 and "embed" not in module:
                        unquantized.append(module)
                    yield name, tensor

        write_shards(folder, raw())
        kinds = {group["format"] for group in groups.values()}
        kind = "dense" if not kinds else kinds.pop() if len(kinds) == 1 else "mixed-precision"
        section = {"quant_method": "compressed-tensors", "format": kind, "quantization_status": "compressed",
                   "config_groups": groups, "ignore": sorted({*unquantized, *{"lm_head"}.difference(schemes)}),
                   "kv_cache_scheme": _section(kv) if kv.quantized else None}
        (folder / "config.json").write_text(json.dumps({**config, "quantization_config": section}, indent=2,
                                                       sort_keys=True) + "\n", encoding="utf-8")


def _groups(schemes: Mapping[str, Scheme]) -> dict[str, dict[str, Any]]:
    """The config groups of ``schemes``, largest first."""
    held = next((name for name, scheme in schemes.items() if scheme.pre_quant_scale), None)
    if held is not None:
        raise CalibError(f"the compressed-tensors layout cannot hold the pre_quant_scale of {held}",
                         "Fold it into the previous layer before quantizing, or write the modelopt layout.")
    members: dict[Scheme, list[str]] = {}
    for name, scheme in schemes.items():
        members.setdefault(scheme, []).append(name)
    ordered = sorted(members.items(), key=lambda item: (-len(item[1]), item[1]))
    return {f"group_{index}": {
        "weights": _section(scheme.weight, "group" if scheme.act_order else None), "output_activations": None,
        "targets": sorted(names) if index else ["Linear"],
        "format": "pack-quantized" if _packed_bits(scheme) else _WRITTEN[scheme.weight.dtype],
        "input_activations": None if scheme.activation is None else _section(scheme.activation)}
        for index, (scheme, names) in enumerate(ordered)}


def _canonical_scale_shape(weight: Grid, scale: tuple[int, ...]) -> tuple[int, ...]:
    """(1,) -> [], [out, 1] -> [out]; groups and blocks stay."""
    if weight.granularity.kind == "tensor" and all(side == 1 for side in scale):
        return ()
    if weight.granularity.kind == "channel" and len(scale) == 2 and scale[1] == 1:
        return scale[:1]
    return scale


def _raw_tensors(module: str, leaf: str, tensor: torch.Tensor, scheme: Scheme) -> Iterator[tuple[str, torch.Tensor]]:
    """One canonical tensor of a quantized module as this layout names and shapes it."""
    bits = _packed_bits(scheme)
    if leaf == "weight" and bits is not None:
        unsigned = tensor.to(torch.int16) + 2**(bits - 1) if scheme.weight.symmetric else tensor
        yield f"{module}.weight_packed", pack_columns(unsigned, bits)
        yield f"{module}.weight_shape", torch.tensor(tensor.shape, dtype=torch.int64)
    elif leaf == "weight_scale":
        kind = scheme.weight.granularity.kind
        yield f"{module}.{leaf}", (tensor.reshape(1) if kind == "tensor" else tensor[:, None] if kind == "channel"
                                   else tensor)
    elif leaf == "weight_zero":
        yield f"{module}.weight_zero_point", pack_columns(tensor.T).T.contiguous()
    elif leaf == "input_scale":
        yield f"{module}.{leaf}", tensor.reshape(1)
    else:
        yield f"{module}.{'weight_g_idx' if leaf == 'g_idx' else leaf}", tensor


def _section(grid: Grid, order: str | None = None) -> dict[str, Any]:
    """A grid in the words of config.json."""
    granularity = grid.granularity
    block = [granularity.rows, granularity.cols] if granularity.kind == "block" else None
    return {"num_bits": 4 if grid.dtype == "int4" else 8, "type": "float" if grid.dtype == "fp8_e4m3" else "int",
            "strategy": granularity.kind, "group_size": granularity.size if granularity.kind == "group" else None,
            "block_structure": block, "symmetric": grid.symmetric, "dynamic": grid.dynamic, "actorder": order,
            "observer": None if grid.dynamic else "minmax", "observer_kwargs": {}}

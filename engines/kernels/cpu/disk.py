"""A packed linear weight as it lies in an engine: on its own grid, stacked from its parts, one layout per code dtype.

    bf16       codes bf16 [n, k]                                       no scale
    fp8_e4m3   codes e4m3 [n, k]     scale f32 [1] or [n]
    int8       codes int8 [k, n]     scale f32 [1] or [n]    (transposed: an input column is one run of bytes, which
               the operator ``split`` reads from the mapped file a few at a time, and never as a whole)
    int4       codes uint8 [n, k/2]: byte j of a row holds code 2j in its low and 2j+1 in its high nibble, each plus 8
               (asymmetric: as it is); scale f32 [n, k/g]; zero int8 [n, k/g] for asymmetric grids
    groups and blocks of 8-bit codes: scale f32 [n, k/g]; a block's scale is repeated for each of its rows, as the rows
               of stacked parts need not begin where a block does (3 % more than the codes alone)
    + bias f32 [n] and g_idx int32 [k] where the layer has them

Numbers of groups are rounded up: the last group of a row may be smaller. A per-tensor scale of several stacked parts
becomes a per-channel one. ``pack`` and ``unpack`` are exact inverses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from calib.grids import too_large
from calib.scheme import Grid
from engines.errors import EngineError
from engines.kernels.cpu.native.grids import group_size

FIELDS = ("codes", "scale", "zero", "g_idx", "bias")
#: dtypes of scales and of weights that are no codes: any other would be read as numbers that it does not hold.
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
CODE_DTYPE = {"bf16": torch.bfloat16, "fp8_e4m3": torch.float8_e4m3fn, "int8": torch.int8, "int4": torch.uint8}


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Codes 0..15 [n, k] (k even) -> uint8 [n, k/2]."""
    pairs = codes.to(torch.uint8).view(codes.shape[0], -1, 2)
    return pairs[..., 0] | (pairs[..., 1] << 4)


def unpack_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [n, k/2] -> codes 0..15 as int8 [n, k]."""
    return torch.stack([packed & 15, packed >> 4], -1).flatten(1).to(torch.int8)


@dataclass(frozen=True, slots=True)
class Stored:
    """A linear weight in its disk form. ``codes`` are [n, k] here ([n, k/2] for int4), whatever their strides."""

    grid: Grid
    codes: torch.Tensor
    scale: torch.Tensor | None = None
    zero: torch.Tensor | None = None
    g_idx: torch.Tensor | None = None
    bias: torch.Tensor | None = None

    def tensors(self) -> dict[str, torch.Tensor]:
        """By field name, absent ones left out: what goes to disk."""
        found = {name: tensor for name in FIELDS if (tensor := getattr(self, name)) is not None}
        return found | {"codes": self.codes.t().contiguous()} if self.grid.dtype == "int8" else found

    @classmethod
    def of(cls, grid: Grid, tensors: Mapping[str, torch.Tensor]) -> Stored:
        """The inverse of ``tensors``; the codes stay views of what is given."""
        codes = tensors["codes"].t() if grid.dtype == "int8" else tensors["codes"]
        return cls(grid, **{**tensors, "codes": codes})

    def int4_codes(self) -> torch.Tensor:
        """int4 codes as int8 [n, k]: [-8, 7] symmetric, [0, 15] asymmetric."""
        codes = unpack_nibbles(self.codes)
        return codes - 8 if self.grid.symmetric else codes

    def channel_scale(self) -> torch.Tensor:
        """A per-tensor or per-channel scale as float32 [n]."""
        assert self.scale is not None
        return self.scale.reshape(-1).expand(self.codes.shape[0]).contiguous()

    def values(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(float32 weight [n, k], output scale): the dequantized weight is weight * scale[:, None].

        Tensor and channel scales stay outside, so that the weight holds the codes exactly; group scales go in.
        """
        kind = self.grid.granularity.kind
        if self.grid.dtype == "bf16":
            return self.codes.float(), None
        codes = self.int4_codes() if self.grid.dtype == "int4" else self.codes
        if kind in ("tensor", "channel"):
            values = codes.float()
            return (values if self.zero is None else values.sub_(self.zero.float().reshape(-1, 1))), self.scale
        assert self.scale is not None
        group = self.group_of_column()
        values = codes.float()
        if self.zero is not None:
            values -= self.zero.float()[:, group]
        return values.mul_(self.scale[:, group]), None

    def group_of_column(self) -> torch.Tensor:
        """The group of every input column: given by g_idx, else column // size."""
        if self.g_idx is not None:
            return self.g_idx.long()
        columns = self.codes.shape[1] * (2 if self.grid.dtype == "int4" else 1)
        return torch.arange(columns) // group_size(self.grid)


def stacked_scale(grid: Grid, parts: Sequence[Mapping[str, torch.Tensor]], rows: Sequence[int], name: str
                  ) -> torch.Tensor | None:
    """Scales (or zeros) of stacked parts: [1] if they all have one equal scale, else one a row (or row and group)."""
    if name not in parts[0]:
        return None
    tensors = [part[name] for part in parts]
    if grid.granularity.kind == "block":
        return torch.cat([tensor.repeat_interleave(grid.granularity.rows, 0)[:count]
                          for tensor, count in zip(tensors, rows, strict=True)])
    if grid.granularity.kind != "group" and tensors[0].numel() == 1:
        if all(torch.equal(tensor, tensors[0]) for tensor in tensors):
            return tensors[0].reshape(1)
        return torch.cat([tensor.reshape(1).expand(count) for tensor, count in zip(tensors, rows, strict=True)])
    return torch.cat(tensors)


def pack(grid: Grid, parts: Sequence[Mapping[str, torch.Tensor]], names: Sequence[str]) -> Stored:
    """Stack the canonical tensors (``weight``, ``weight_scale``, ...) of one or more linears into their disk form.

    EngineError names the module whose tensors are missing, not finite, or off their grid.
    """
    for part, name in zip(parts, names, strict=True):
        check_part(grid, part, name)
    rows = [part["weight"].shape[0] for part in parts]
    if grid.dtype == "int4":
        codes = torch.cat([part["weight"] for part in parts])
        codes = pack_nibbles(codes + 8 if grid.symmetric else codes)
    else:  # joined as bytes: float8 has no cat
        dtype = CODE_DTYPE[grid.dtype]
        codes = torch.cat([part["weight"].to(dtype).view(torch.uint8) for part in parts]).view(dtype)
    scale = stacked_scale(grid, parts, rows, "weight_scale")
    zero = stacked_scale(grid, parts, rows, "weight_zero")
    bias = torch.cat([part["bias"].float() for part in parts]) if "bias" in parts[0] else None
    g_idx = parts[0].get("g_idx")
    if any(not _same(part.get("g_idx"), g_idx) for part in parts):
        raise EngineError(f"{names[0]} is stacked with a layer of another g_idx", "Quantize without act_order.")
    return Stored(grid, codes.contiguous(), None if scale is None else scale.float().contiguous(),
                  None if zero is None else zero.to(torch.int8).contiguous(),
                  None if g_idx is None else g_idx.to(torch.int32).contiguous(), bias)


def _same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    return a is b if a is None or b is None else torch.equal(a, b)


def check_part(grid: Grid, part: Mapping[str, torch.Tensor], name: str) -> None:
    """EngineError unless the part has its weight and scales, finite and on their grid."""
    if "weight" not in part:
        raise EngineError(f"{name} has no weight in the checkpoint", "The checkpoint is incomplete; make it again.")
    if grid.quantized and "weight_scale" not in part:
        raise EngineError(f"{name} is {grid} but has no weight_scale", "The checkpoint is incomplete; make it again.")
    for key in ("weight_scale", "bias"):
        if key in part:
            check_float(f"{name}.{key}", part[key])
        if key in part and not torch.isfinite(part[key].float()).all():
            raise EngineError(f"{name}.{key} holds NaN or infinity", "The checkpoint is broken; calibrate again.")
    if "weight_scale" in part:
        _check_weight_scale(grid, f"{name}.weight_scale", part["weight_scale"])
    weight = part["weight"]
    if weight.dtype.is_floating_point and not torch.isfinite(weight.float()).all():
        raise EngineError(f"{name}.weight holds NaN or infinity", "The checkpoint is broken; calibrate again.")
    if grid.dtype == "bf16":
        as_bf16(f"{name}.weight", weight)
    else:
        _check_scales(grid, part, name)


def check_float(name: str, tensor: torch.Tensor) -> None:
    """EngineError for codes where numbers are meant."""
    if tensor.dtype not in FLOATS:
        what = "scales" if name.endswith("_scale") else "unquantized weights"
        raise EngineError(f"{name} is {tensor.dtype}; {what} are {', '.join(map(str, FLOATS))}",
                          "The checkpoint is broken, or its config.json has lost how it was quantized.")


def _check_weight_scale(grid: Grid, name: str, scale: torch.Tensor) -> None:
    """What ``calib/verify.py`` calls a fault is no engine."""
    if wrong := int((scale <= 0).sum()):
        raise EngineError(f"{name} is not positive: {wrong} of {scale.numel()} scales are zero or negative",
                          "The checkpoint is broken; calibrate again.")
    if grid.quantized and (found := too_large(grid, scale)):
        raise EngineError(f"{name} {found}", "The checkpoint is broken; calibrate again.")


def scale_shape(grid: Grid, n: int, k: int) -> tuple[int, ...]:
    """The shape of a weight's scales in the canonical stream."""
    granularity = grid.granularity
    if granularity.kind in ("tensor", "token"):
        return ()
    if granularity.kind == "channel":
        return (n,)
    rows = granularity.rows if granularity.kind == "block" else 1
    return (-(-n // rows), -(-k // group_size(grid)))


def _check_scales(grid: Grid, part: Mapping[str, torch.Tensor], name: str) -> None:
    """EngineError for scales or zeros of another shape, zeros on a symmetric grid, codes or groups out of range."""
    weight = part["weight"]
    wanted = scale_shape(grid, *weight.shape)
    for key in ("weight_scale", "weight_zero"):
        if (key in part) != (key == "weight_scale" or not grid.symmetric):
            raise EngineError(f"{name} is {grid} and has {'a' if key in part else 'no'} {key}",
                              "The checkpoint is broken; make it again.")
        if key in part and tuple(part[key].shape) != wanted and not (wanted == () and part[key].numel() == 1):
            raise EngineError(f"{name}.{key} is {list(part[key].shape)}, {grid} wants {list(wanted)}",
                              "The checkpoint is broken; make it again.")
    if "weight_zero" in part:
        zero = part["weight_zero"].float()
        # GPTQ's first version stores zero - 1: its 15 stands for 16.
        low, high = (0, 16) if grid.dtype == "int4" else (-128, 127)
        if not ((zero == zero.round()) & (zero >= low) & (zero <= high)).all():
            raise EngineError(f"{name}.weight_zero holds {float(zero.min()):g} to {float(zero.max()):g}; zero points "
                              f"on {grid} are whole numbers from {low} to {high}",
                              "The checkpoint is broken; make it again.")
    if grid.dtype == "int4":
        low, high = (-8, 7) if grid.symmetric else (0, 15)
        if weight.min() < low or weight.max() > high:
            raise EngineError(f"{name} has int4 codes from {int(weight.min())} to {int(weight.max())}, {grid} has "
                              f"{low} to {high}", "The checkpoint is broken; make it again.")
    if "g_idx" in part and (len(wanted) < 2 or part["g_idx"].min() < 0 or part["g_idx"].max() >= wanted[1]):
        raise EngineError(f"{name}.g_idx names groups from {int(part['g_idx'].min())} to {int(part['g_idx'].max())}, "
                          f"its scales are {list(wanted)}", "The checkpoint is broken; make it again.")


def as_bf16(name: str, weight: torch.Tensor) -> torch.Tensor:
    """An unquantized weight as bf16; EngineError when that would round it."""
    check_float(name, weight)
    narrow = weight.to(torch.bfloat16)
    lost = 0 if weight.dtype == torch.bfloat16 else int((narrow.to(weight.dtype) != weight).sum())
    if lost:
        raise EngineError(f"{name} is {weight.dtype} and {lost} values are not bf16 numbers",
                          "Quantize with the recipe bf16 first: it rounds once and says so.")
    return narrow


def unpack(stored: Stored, rows: Sequence[int]) -> list[dict[str, torch.Tensor]]:
    """The inverse of ``pack``: canonical tensors of each part (a shared per-tensor scale comes back as [])."""
    codes = stored.int4_codes() if stored.grid.dtype == "int4" else stored.codes
    parts: list[dict[str, torch.Tensor]] = [{"weight": piece} for piece in codes.split(list(rows))]
    for key, tensor in (("weight_scale", stored.scale), ("weight_zero", stored.zero), ("bias", stored.bias)):
        if tensor is None:
            continue
        single = tensor.numel() == 1
        pieces = [tensor] * len(parts) if single else list(tensor.split(list(rows)))
        for part, piece in zip(parts, pieces, strict=True):
            granularity = stored.grid.granularity
            if key != "bias" and granularity.kind == "tensor":
                piece = piece.reshape(-1)[0]
            elif key != "bias" and granularity.kind == "block":
                piece = piece[::granularity.rows]
            part[key] = piece
    if stored.g_idx is not None:
        for part in parts:
            part["g_idx"] = stored.g_idx
    return parts

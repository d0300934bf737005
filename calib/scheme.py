"""What a quantized number means: Grid and Scheme.

A ``Grid`` is a set of representable values: a code dtype and who shares a scale. A ``Scheme`` says which grid each of a
module's tensors lies on. Dequantized weight = (q - zero) * scale. How codes lie in memory (packing) is a different
question, answered by ``engines/kernels``; a Scheme travels with the weights from calibration to the kernel, so nothing
is ever guessed from names or dtypes.

Shapes of a weight scale for a weight [out, in]: tensor [], channel [out], group(n) [out, in/n], block(m, n)
[out/m, in/n], rounded up: the tiles begin at row and column 0, and those at the far edges are smaller. An activation
[tokens, in] is scaled per tensor [] (static, a calibrated ``input_scale``), per token [tokens] or per group (n
consecutive inputs of a token, the last group may be smaller), both dynamic. Keys and values have one static scale each
per layer.

``nvfp4`` and ``mxfp8`` are formats whose scales are codes themselves (e4m3 for 16 values under one f32 for the tensor;
a power of two for 32): a plan can price them, nothing here computes them yet.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Dtype = Literal["bf16", "fp8_e4m3", "int8", "int4", "nvfp4", "mxfp8"]

#: Largest code magnitude of each symmetric grid (int4 is clamped to [-8, 7] and scaled by amax/7).
CODE_MAX: dict[str, float] = {"fp8_e4m3": 448.0, "int8": 127.0, "int4": 7.0, "nvfp4": 6.0, "mxfp8": 448.0}
BITS: dict[str, int] = {"bf16": 16, "fp8_e4m3": 8, "int8": 8, "int4": 4, "nvfp4": 4, "mxfp8": 8}
#: Most rows or columns that share a scale: more than any matrix of a model has.
MAX_GROUP = 2**24
#: Values that share a scale where the format says so.
FIXED_GROUPS: dict[str, int] = {"nvfp4": 16, "mxfp8": 32}


class Frozen(BaseModel):
    """Base of every record at a boundary: immutable, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class PerTensor(Frozen):
    """One scale for the whole tensor: []."""

    kind: Literal["tensor"] = "tensor"

    def __str__(self) -> str:
        return "tensor"


class PerChannel(Frozen):
    """One scale for each output row of a weight: [out]."""

    kind: Literal["channel"] = "channel"

    def __str__(self) -> str:
        return "channel"


class PerToken(Frozen):
    """One scale for each token of an activation: [tokens]."""

    kind: Literal["token"] = "token"

    def __str__(self) -> str:
        return "token"


class PerGroup(Frozen):
    """One scale for ``size`` consecutive inputs of a row: [out, in/size]."""

    kind: Literal["group"] = "group"
    size: int = Field(gt=0, le=MAX_GROUP, strict=True)

    def __str__(self) -> str:
        return f"g{self.size}"


class PerBlock(Frozen):
    """One scale for each tile of ``rows`` x ``cols``: [out/rows, in/cols]."""

    kind: Literal["block"] = "block"
    rows: int = Field(gt=0, le=MAX_GROUP, strict=True)
    cols: int = Field(gt=0, le=MAX_GROUP, strict=True)

    def __str__(self) -> str:
        return f"{self.rows}x{self.cols}"


Granularity = Annotated[PerTensor | PerChannel | PerToken | PerGroup | PerBlock, Field(discriminator="kind")]


class Grid(Frozen):
    """A code dtype and who shares a scale. ``dynamic`` scales are computed from the values at run time."""

    dtype: Dtype
    granularity: Granularity = PerTensor()
    symmetric: bool = Field(default=True, strict=True)
    dynamic: bool = Field(default=False, strict=True)

    @model_validator(mode="after")
    def _makes_sense(self) -> Grid:
        if self.dtype == "bf16" and (self.granularity.kind != "tensor" or self.dynamic or not self.symmetric):
            raise ValueError("a bf16 grid has no scale: granularity tensor, symmetric, not dynamic")
        if self.dtype == "fp8_e4m3" and not self.symmetric:
            raise ValueError("fp8_e4m3 has a sign bit: an asymmetric fp8 grid does not exist")
        size = FIXED_GROUPS.get(self.dtype)
        if size is not None and (self.granularity != PerGroup(size=size) or not self.symmetric):
            raise ValueError(f"{self.dtype} is symmetric in groups of {size}")
        return self

    @property
    def quantized(self) -> bool:
        return self.dtype != "bf16"

    def __str__(self) -> str:
        if not self.quantized:
            return self.dtype
        tail = ("" if self.symmetric else " asym") + (" dynamic" if self.dynamic else "")
        return f"{self.dtype} {self.granularity}{tail}"


BF16 = Grid(dtype="bf16")


class Scheme(Frozen):
    """The grids of one module. ``activation`` None means the activation stays in the compute dtype."""

    weight: Grid = BF16
    activation: Grid | None = None
    kv: Grid = BF16
    pre_quant_scale: bool = False
    act_order: bool = False

    @model_validator(mode="after")
    def _makes_sense(self) -> Scheme:
        if self.weight.dynamic:
            raise ValueError("weight scales are known ahead of time: a dynamic weight grid does not exist")
        if self.activation is not None and not self.activation.quantized:
            raise ValueError("an unquantized activation is written as null, not as a bf16 grid")
        return self

    def __str__(self) -> str:
        activation = str(self.activation) if self.activation else "16-bit"
        return f"W {self.weight} · A {activation} · KV {self.kv}"

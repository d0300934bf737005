"""Every GPU linear by the name that the KernelTable uses. Which scheme takes which: ``engines/build/impls.py``."""

from __future__ import annotations

from engines.kernels.impl import LinearImpl
from engines.kernels.linear.bf16 import Bf16Linear
from engines.kernels.linear.fp8 import Fp8Linear
from engines.kernels.linear.fp8_block import Fp8BlockLinear
from engines.kernels.linear.int4_a8 import Int4A8
from engines.kernels.linear.int4_a16 import Int4A16
from engines.kernels.linear.int8 import Int8Linear
from engines.kernels.linear.weight_only import Fp8WeightOnlyLinear, Int8WeightOnlyLinear

_ALL: tuple[LinearImpl, ...] = (Bf16Linear(), Fp8Linear(), Fp8BlockLinear(), Fp8WeightOnlyLinear(), Int8Linear(),
                                Int8WeightOnlyLinear(), Int4A16(), Int4A8())
IMPLS: dict[str, LinearImpl] = {impl.name: impl for impl in _ALL}

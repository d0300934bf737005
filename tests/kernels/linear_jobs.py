"""A KernelConfig of the natural-layout linears as an offline compile job: the launchers' arguments, typed by hand."""

from __future__ import annotations

from typing import Any

from engines.kernels.impl import KernelConfig
from engines.kernels.linear.dot import dot_kernel
from engines.kernels.linear.gemv import gemv_kernel
from engines.kernels.linear.mm import mm_kernel
from engines.kernels.linear.natural import NaturalLinear
from engines.kernels.offline import CompileJob

WEIGHT = {"float": "bf16", "fp8": "fp8e4nv", "fp8_block": "fp8e4nv", "fp8_weight": "fp8e4nv", "int8": "i8",
          "int8_weight": "i8"}
WORDS = {"float": ("bf16", "bf16"), "fp8": ("i64", "i64"), "int8": ("i32", "i32"), "int8_weight": ("i64", "i32")}


def job(impl: NaturalLinear, config: KernelConfig, capability: int = 90, *, gated: bool = False, out: str = "bf16"
        ) -> CompileJob:
    """The variant that a launch with n and k multiples of 16 compiles: per-token scales, no bias, no ragged k."""
    meta: dict[str, Any] = dict(config.meta)
    common = {"KIND": impl.kind, "PER_TOKEN": True, "HAS_BIAS": False, "PDL": config.pdl}
    pointers = {"w_scale_ptr": "*fp32", "x_scale_ptr": "*fp32", "bias_ptr": "*bf16", "out_ptr": "*bf16", "m": "i32",
                "n": "i32", "k": "i32"}
    weight = WEIGHT[impl.kind]
    x = "bf16" if impl.kind.endswith("_weight") else weight
    options = {"capability": capability, "aligned": ("n", "k"), "num_warps": config.num_warps,
               "num_stages": config.num_stages, "pdl": config.pdl}
    if config.kernel == "gemv":
        words = WORDS[impl.kind]
        types = {"x_ptr": f"*{words[0]}", "w_ptr": f"*{words[1]}", "out_scale_ptr": "*fp32", **pointers,
                 "out_ptr": f"*{out}"}
        return CompileJob.of(gemv_kernel, types,
                             {**common, **meta, "EVEN_K": True, "ASM": True, "GATED": gated}, **options)
    x_desc = f"tensordesc<{x}[{meta['BLOCK_M']},{meta['BLOCK_K']}]>"
    w_desc = f"tensordesc<{weight}[{meta['BLOCK_N']},{meta['BLOCK_K']}]>"
    types = dict(pointers)
    constants: dict[str, Any] = {**common, **meta}
    if config.kernel == "dot":
        types |= {"x_ptr": f"*{x}", "w_ptr": f"*{weight}", "partial_ptr": "*fp32", "ticket_ptr": "*i32"}
        constants |= {"STAGES": config.num_stages, "EVEN_K": True}
        for name, wanted, text in (("w_desc", meta["TMA"] > 0, w_desc), ("x_desc", meta["TMA"] == 2, x_desc)):
            if wanted:
                types[name] = text
            else:
                constants[name] = None
        return CompileJob.of(dot_kernel, types, constants, **options)
    columns = meta["BLOCK_N"] // (2 if gated else meta["EPILOGUE"])
    if gated:
        w_desc = f"tensordesc<{weight}[2,{columns},{meta['BLOCK_K']}]>"
    del types["out_ptr"]
    types |= {"x_desc": x_desc, "w_desc": w_desc, "out_desc": f"tensordesc<{out}[{meta['BLOCK_M']},{columns}]>",
              "out_scale_ptr": "*fp32"}
    constants["GATED"] = gated
    constants.pop("PROGRAMS")
    constants["FLAT"] = bool(meta.get("FLAT"))
    return CompileJob.of(mm_kernel, types, constants, **options)

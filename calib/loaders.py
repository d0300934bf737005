"""Which other runtimes will load what a calibration writes, from which version, and by which source.

Nothing here was run: the answers are from reading the runtimes' loaders (mid-2026) and documents; ``source`` names
which. A version is given where a source gives one. They are about layout and grids, not about the model: what a runtime
makes of an architecture's settings is its own business. This toolkit's row is not known here either: its engines are
asked (``toolkit/foreseeing.py``).
"""

from __future__ import annotations

from calib.recipe import LayoutName
from calib.scheme import Frozen, Scheme

_UNIFIED = "NVIDIA Model-Optimizer docs, deployment/3_unified_hf"
_VLLM_MODELOPT = "vllm model_executor/layers/quantization/modelopt.py"
_VLLM_CT = "vllm model_executor/layers/quantization/compressed_tensors"
_SGLANG_CT = "sglang srt/layers/quantization/compressed_tensors"
_TRT = "TensorRT-LLM _torch/model_config.py, _torch/modules/linear.py"
#: A weight's dtype -> who shares a scale, and the activations beside it, of which any source speaks.
_SPOKEN_OF: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "bf16": (("tensor",), ()), "fp8_e4m3": (("tensor", "channel", "block"), ("fp8_e4m3",)),
    "int8": (("tensor", "channel", "group"), ("int8",)), "int4": (("channel", "group"), ("int8", "fp8_e4m3")),
    "nvfp4": (("group",), ("nvfp4",)), "mxfp8": (("group",), ("mxfp8",))}


class Loader(Frozen):
    """Whether a runtime loads the result. ``since``: the first version, where a source names it."""

    runtime: str
    loads: bool
    note: str = ""
    since: str = ""
    source: str = ""


def _vllm(layout: LayoutName, scheme: Scheme | None) -> Loader:
    if layout == "hf":
        return Loader(runtime="vLLM", loads=True, source="vllm docs, supported models")
    if scheme is not None and _mixed_groups(scheme):
        return Loader(runtime="vLLM", loads=False, note="no kernel for int8 activations in groups", source=_VLLM_CT)
    if layout == "modelopt":
        if scheme is not None and scheme.weight.dtype == "int4":
            return Loader(runtime="vLLM", loads=False, note="refuses modelopt W4A16_AWQ (issue 46929)",
                          source=_VLLM_MODELOPT)
        return Loader(runtime="vLLM", loads=True, since="0.10.1", source=f"{_UNIFIED}; {_VLLM_MODELOPT}")
    if layout in ("awq", "gptq"):
        return Loader(runtime="vLLM", loads=True, note="Marlin kernels, Turing and later",
                      source=f"vllm model_executor/layers/quantization/{layout}_marlin.py")
    if scheme is not None and scheme.weight.granularity.kind == "block":
        return Loader(runtime="vLLM", loads=True, note="sides must be multiples of the tile",
                      source=f"{_VLLM_CT}; block strategy by vllm pull 23202")
    if scheme is not None and scheme.weight.dtype == "int4":
        return Loader(runtime="vLLM", loads=True, source=f"{_VLLM_CT}; W4A16 by vllm pull 5116 (May 2024)")
    return Loader(runtime="vLLM", loads=True, source=f"{_VLLM_CT}; documented by vllm pull 7444 (August 2024)")


def _sglang(layout: LayoutName, scheme: Scheme | None) -> Loader:
    if layout == "hf":
        return Loader(runtime="SGLang", loads=True, source="sglang docs, supported models")
    if scheme is not None and _mixed_groups(scheme):
        return Loader(runtime="SGLang", loads=False, note="no kernel for int8 activations in groups", source=_SGLANG_CT)
    if layout == "modelopt":
        if scheme is not None and scheme.weight.dtype in ("int4", "mxfp8"):
            return Loader(runtime="SGLang", loads=False, note="no loader (pull 21053 was closed)" if
                          scheme.weight.dtype == "int4" else "not verified", source="sglang modelopt_quant.py")
        return Loader(runtime="SGLang", loads=True, since="0.4.10", source=_UNIFIED)
    if scheme is None:
        return Loader(runtime="SGLang", loads=False, note="a quantized KV cache alone: not verified", source=_SGLANG_CT)
    return Loader(runtime="SGLang", loads=True, source=_SGLANG_CT if layout == "compressed-tensors" else
                  f"sglang srt/layers/quantization/{layout}.py")


def _tensorrt(layout: LayoutName, scheme: Scheme | None) -> Loader:
    name = "TensorRT-LLM"
    if layout == "hf":
        return Loader(runtime=name, loads=True, note="PyTorch backend", source="TensorRT-LLM docs, supported models")
    if layout == "modelopt":
        return Loader(runtime=name, loads=True, since="1.2.0", note="PyTorch backend", source=f"{_UNIFIED}; {_TRT}")
    if layout in ("awq", "gptq"):
        return Loader(runtime=name, loads=False, note=f"no {layout} branch", source=_TRT)
    if scheme is None:
        return Loader(runtime=name, loads=False, note="a quantized KV cache alone: not verified", source=_TRT)
    if scheme.weight.dtype != "fp8_e4m3":
        note = "takes int8 for fp8" if scheme.weight.dtype == "int8" else "no int4 branch"
        return Loader(runtime=name, loads=False, note=note, source=_TRT)
    if scheme.activation is not None and scheme.activation.dynamic:
        return Loader(runtime=name, loads=True, note="PyTorch backend", source=_TRT)
    return Loader(runtime=name, loads=False, note="static per-tensor, or weights alone: raises", source=_TRT)


def _transformers(layout: LayoutName) -> Loader:
    if layout == "hf":
        return Loader(runtime="transformers", loads=True, source="its own format")
    if layout == "modelopt":
        return Loader(runtime="transformers", loads=False, note="loads silently wrong: codes taken for weights",
                      source="tried with transformers 5")
    return Loader(runtime="transformers", loads=True, note="needs the compressed-tensors package" if
                  layout == "compressed-tensors" else f"needs a package with {layout} kernels; not run",
                  source="transformers docs, quantization")


def _mixed_groups(scheme: Scheme) -> bool:
    return (scheme.weight.dtype == "int4" and scheme.activation is not None
            and scheme.activation.granularity.kind == "group")


def loaders(layout: LayoutName, scheme: Scheme | None, *, raised: bool = False) -> tuple[Loader, ...]:
    """Who loads a checkpoint of ``layout`` whose modules have ``scheme`` (None: unquantized weights), some of them
    ``raised`` to eight bits."""
    others = (_transformers(layout), _vllm(layout, scheme), _sglang(layout, scheme), _tensorrt(layout, scheme))
    if scheme is not None and not _usual(scheme):
        return tuple(_unknown(other) if other.loads else other for other in others)
    return tuple(_doubtful(other, layout) if raised and other.loads else other for other in others)


def _usual(scheme: Scheme) -> bool:
    """Whether the sources speak of such weights, and of such activations beside them."""
    weight, activation = scheme.weight, scheme.activation
    shared, beside = _SPOKEN_OF[weight.dtype]
    return weight.granularity.kind in shared and (activation is None or activation.dtype in beside)


def _unknown(loader: Loader) -> Loader:
    return Loader(runtime=loader.runtime, loads=False, note="no kernel known for this pair of grids",
                  source=loader.source)


def _doubtful(loader: Loader, layout: LayoutName) -> Loader:
    """What is read from sources of one scheme a checkpoint says little of two."""
    if layout == "modelopt":
        return Loader(runtime=loader.runtime, loads=False, note="W4A16_AWQ beside W8A16: not verified",
                      source=loader.source)
    note = "two config groups in one checkpoint: not run"
    return loader.model_copy(update={"note": f"{loader.note}; {note}" if loader.note else note})

"""The one door to modelopt: fake quantization in memory, its statistics and searches.

modelopt puts a ``TensorQuantizer`` before every linear's weight and input (and around attention's keys and values). A
calibration pass collects amax = the largest magnitude seen; afterwards each quantizer rounds to its grid and back in
full precision (*fake quantization*), which gives the numbers that a real engine computes with codes.

What differs between memory and the written file is removed here, before anybody looks at the model: a checkpoint holds
norms and pre_quant_scales in bf16 and lets readers of one input share a pre_quant_scale, folded into the norm before
them; ``settle`` does the same in memory, so that the file is the model that was inspected. (modelopt's own exporter is
not used: it wants the whole model at once, and rounds twice; the layout it writes is ``formats/modelopt``.)
"""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from calib.errors import CalibError, CalibrationDataError
from calib.layers import scale_shape
from calib.peak import give_back
from calib.progress import Progress, Report
from calib.quantizer_config import activation_attributes, quantizer_config
from calib.scheme import CODE_MAX, Grid, Scheme

with warnings.catch_warnings():  # it warns of every transformers version that it was not released with
    warnings.simplefilter("ignore")
    import modelopt.torch.quantization as mtq
    from modelopt.torch.quantization.config import QuantizerAttributeConfig
    from modelopt.torch.quantization.nn import TensorQuantizer

@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """modelopt narrates on stdout, through warnings and through logs; our output belongs to results."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


def attach(model: nn.Module, schemes: Mapping[str, Scheme], attentions: Sequence[str], kv: Grid,
           batches: Sequence[torch.Tensor], report: Report, *, alpha_step: float | None = None,
           channel_statistics: bool = False) -> None:
    """Attach quantizers for ``schemes`` (module -> Scheme), and for keys and values; calibrate them. In place.

    ``batches`` are token ids [b, s]. ``alpha_step`` runs awq_lite. With ``channel_statistics`` the inputs' amax is
    collected per channel and the inputs are not quantized as planned until ``set_activations`` is called.
    """
    config = quantizer_config(schemes, attentions, kv, channel_statistics=channel_statistics)
    algorithm: Any = "max" if alpha_step is None else {"method": "awq_lite", "alpha_step": alpha_step,
                                                        "debug": True}
    passes = 1 if alpha_step is None else 2
    with quiet(), torch.inference_mode():
        mtq.quantize(model, {"quant_cfg": config, "algorithm": algorithm},
                     forward_loop=_Loop(batches, report, passes, search=alpha_step is not None))


class _Loop:
    """modelopt calls this once per pass over the calibration data. The head is left out: its output is not needed."""

    def __init__(self, batches: Sequence[torch.Tensor], report: Report, passes: int, *, search: bool) -> None:
        self._batches, self._report, self._search = batches, report, search
        self._pass, self._passes = 0, passes

    def __call__(self, model: nn.Module) -> None:
        body: Any = getattr(model, "model")  # noqa: B009 (nn.Module types attributes as Tensor | Module)
        self._pass += 1
        stage = "search scales" if self._search and self._pass == self._passes else "calibrate"
        layers = list(body.layers)
        total, done = len(self._batches) * len(layers), 0

        def step(*_: Any) -> None:
            nonlocal done
            done += 1
            give_back()
            self._report(Progress(stage, done, total, "layer"))

        handles = [layer.register_forward_hook(step) for layer in layers]
        if stage == "search scales":  # each matrix has its own sizes, and makes temporaries for every candidate
            handles += [module.register_forward_hook(lambda *_: give_back()) for module in model.modules()
                        if hasattr(module, "awq_lite")]
        try:
            for batch in self._batches:
                body(batch, use_cache=False)
        finally:
            for handle in handles:
                handle.remove()


def _quantizer(model: nn.Module, name: str) -> TensorQuantizer:
    found = model.get_submodule(name)
    if not isinstance(found, TensorQuantizer):
        raise CalibError(f"{name} is no quantizer", "This version of modelopt arranges its quantizers differently.")
    return found


def input_amax(model: nn.Module, module: str) -> torch.Tensor:
    """amax of a module's input, [in] or []."""
    amax = _quantizer(model, f"{module}.input_quantizer").amax
    if amax is None:
        raise CalibrationDataError(f"{module} saw no calibration data", "Give longer or more calibration texts.")
    return amax.detach().flatten() if amax.numel() > 1 else amax.detach().reshape(())


def set_activations(model: nn.Module, schemes: Mapping[str, Scheme]) -> None:
    """Replace channel statistics by the planned activation grids; a static one still waits for its range."""
    for module, scheme in schemes.items():
        quantizer = _quantizer(model, f"{module}.input_quantizer")
        quantizer.reset_amax()
        if scheme.activation is None:
            quantizer.disable()
            continue
        quantizer.set_from_attribute_config(QuantizerAttributeConfig(**activation_attributes(scheme.activation)))


def set_input_amax(model: nn.Module, module: str, amax: torch.Tensor) -> None:
    """Give a static activation its range, []."""
    _quantizer(model, f"{module}.input_quantizer").amax = amax.detach().float().reshape(())


def _collect(quantizers: Sequence[TensorQuantizer], run: Callable[[], object]) -> None:
    """Let quantizers see values anew: forget amax, watch while ``run`` runs, then quantize with what was seen."""
    for quantizer in quantizers:
        quantizer.reset_amax()
        quantizer.disable_quant()
        quantizer.enable_calib()
    with quiet(), torch.inference_mode():
        run()
    for quantizer in quantizers:
        quantizer.load_calib_amax()
        quantizer.disable_calib()
        quantizer.enable_quant()


def recalibrate_weights(model: nn.Module, schemes: Mapping[str, Scheme]) -> None:
    """Collect weight amax again after the weights were changed."""
    for module in schemes:
        quantizer = _quantizer(model, f"{module}.weight_quantizer")
        _collect([quantizer], partial(quantizer, model.get_submodule(module).weight))


def calibrate_kv(model: nn.Module, attentions: Sequence[str], batches: Sequence[torch.Tensor], report: Report) -> None:
    """Collect key and value amax again (after smoothing has changed the values)."""
    _collect([_quantizer(model, name) for name in kv_quantizers(attentions)],
             partial(_Loop(batches, report, 1, search=False), model))


def kv_quantizers(attentions: Sequence[str]) -> list[str]:
    return [f"{attention}.{side}_bmm_quantizer" for attention in attentions for side in "kv"]


def weight_quantizers(schemes: Mapping[str, Scheme]) -> list[str]:
    return [f"{module}.weight_quantizer" for module in schemes]


@contextlib.contextmanager
def disabled(model: nn.Module, names: Sequence[str]) -> Iterator[None]:
    """The named quantizers let everything through inside this block."""
    quantizers = [_quantizer(model, name) for name in names]
    for quantizer in quantizers:
        quantizer.disable()
    try:
        yield
    finally:
        for quantizer in quantizers:
            quantizer.enable()


def take_search(model: nn.Module, schemes: Mapping[str, Scheme]) -> dict[str, torch.Tensor]:
    """Mean input magnitude [in] of each module, from the notes of awq_lite's search, which are removed."""
    found = {}
    for name in schemes:
        module: Any = model.get_submodule(name)
        if not module.awq_lite.is_enabled or not module.awq_lite.num_search_steps:
            raise CalibrationDataError(f"{name} saw no calibration data", "Give longer or more calibration texts.")
        found[name] = module.awq_lite.act_scale.detach()
        del module.awq_lite
    return found


def share_pre_quant_scale(model: nn.Module, modules: Sequence[str]) -> torch.Tensor:
    """Give modules that read one input one pre_quant_scale: the mean [in] of theirs, bf16-exact. Returns it."""
    quantizers = [_quantizer(model, f"{module}.input_quantizer") for module in modules]
    with torch.inference_mode():
        shared = torch.stack([quantizer.pre_quant_scale.float() for quantizer in quantizers]).mean(0)
        shared = shared.to(torch.bfloat16).float()
        for module, quantizer in zip(modules, quantizers, strict=True):
            linear: Any = model.get_submodule(module)
            linear.weight.mul_(quantizer.pre_quant_scale.float() / shared)
            quantizer.pre_quant_scale = shared
    return shared


def set_weight_amax(model: nn.Module, module: str, amax: torch.Tensor) -> None:
    quantizer = _quantizer(model, f"{module}.weight_quantizer")
    quantizer.amax = amax.reshape(quantizer.amax.shape)


def fold_into_norm(model: nn.Module, norm: str, readers: Sequence[str], offset: float) -> None:
    """Multiply a norm by the shared pre_quant_scale of its readers, which lose theirs. ``offset``: what the norm adds
    to its stored weight."""
    quantizers = [_quantizer(model, f"{module}.input_quantizer") for module in readers]
    weight: Any = model.get_submodule(norm).weight
    with torch.inference_mode():
        weight.copy_((weight + offset) * quantizers[0].pre_quant_scale.flatten() - offset)
    for quantizer in quantizers:
        delattr(quantizer, "_pre_quant_scale")


def settle(model: nn.Module, schemes: Mapping[str, Scheme]) -> None:
    """Make the model in memory the one that is written: weights and norms in bf16."""
    with quiet(), torch.inference_mode():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(torch.bfloat16))
    recalibrate_weights(model, schemes)


def project_weights(model: nn.Module, schemes: Mapping[str, Scheme]) -> None:
    """Replace each weight by its rounded value, its scale kept.

    A value that already lies on its grid finds its code again whatever the precision of the division, so that what is
    written, and whatever reads it, agrees with memory.
    """
    with quiet(), torch.inference_mode():
        for module in schemes:
            weight: Any = model.get_submodule(module).weight
            weight.copy_(_quantizer(model, f"{module}.weight_quantizer")(weight))


def check_scales(model: nn.Module, schemes: Mapping[str, Scheme], attentions: Sequence[str], kv: Grid) -> None:
    """Every quantizer of the plan saw data: amax finite and > 0. CalibrationDataError names the module."""
    names = weight_quantizers(schemes)
    names += [f"{module}.input_quantizer" for module, scheme in schemes.items()
              if scheme.activation is not None and not scheme.activation.dynamic]
    if kv.quantized:
        names += kv_quantizers(attentions)
    for name in names:
        amax = _quantizer(model, name).amax
        if amax is None:
            raise CalibrationDataError(f"{name} saw no calibration data", "Give longer or more calibration texts.")
        if not torch.isfinite(amax).all() or not (amax > 0).any() or ((amax == 0).any() and amax.numel() == 1):
            raise CalibrationDataError(f"{name} has the scale {float(amax.max()):g}",
                                       "A zero or non-finite tensor cannot be quantized; keep this module in bf16.")


def check_inputs(amax: Mapping[str, torch.Tensor]) -> None:
    """Per-channel input statistics are finite, and not all zero. CalibrationDataError names the module."""
    for module, seen in amax.items():
        if not torch.isfinite(seen).all() or not (seen > 0).any():
            raise CalibrationDataError(f"the input of {module} was {'all zero' if not seen.any() else 'not finite'}",
                                       "No data reached it, or the model overflows; keep this module in bf16.")


def of_module(model: nn.Module, module: str) -> list[str]:
    """Names of a module's enabled weight and input quantizers."""
    return [name for name in (f"{module}.weight_quantizer", f"{module}.input_quantizer")
            if _quantizer(model, name).is_enabled]


def enabled_modules(model: nn.Module) -> set[str]:
    """Modules whose weights are quantized now."""
    return {name.removesuffix(".weight_quantizer") for name, module in model.named_modules()
            if name.endswith(".weight_quantizer") and isinstance(module, TensorQuantizer) and module.is_enabled}


def kv_scales(model: nn.Module, attentions: Sequence[str], kv: Grid) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, scale []) of keys and values: amax / largest code."""
    for attention in attentions:
        for side in "kv":
            amax = _quantizer(model, f"{attention}.{side}_bmm_quantizer").amax
            yield f"{attention}.{side}_scale", (amax / CODE_MAX[kv.dtype]).detach().float().reshape(())


def weight_scale(model: nn.Module, module: str, grid: Grid) -> torch.Tensor:
    """f32 scale of a module's weight in the canonical shape. A row or group of zeros has the scale 1."""
    amax = _quantizer(model, f"{module}.weight_quantizer").amax.detach().float()
    weight: Any = model.get_submodule(module).weight
    scale = torch.where(amax > 0, amax / CODE_MAX[grid.dtype], torch.ones_like(amax))
    return scale.reshape(scale_shape(grid, (weight.shape[0], weight.shape[1])))


def input_scale(model: nn.Module, module: str, grid: Grid) -> torch.Tensor:
    """f32 scale [] of a module's static activation."""
    return (input_amax(model, module).float() / CODE_MAX[grid.dtype]).reshape(())


def pre_quant_scale(model: nn.Module, module: str) -> torch.Tensor:
    """f32 [in] that multiplies a module's input: what no norm could take. CalibError where a plan expected one."""
    found = _quantizer(model, f"{module}.input_quantizer").pre_quant_scale
    if found is None:
        raise CalibError(f"{module} was planned with a pre_quant_scale and has none",
                         "This version of modelopt folds its scales differently.")
    return found.detach().float().flatten()

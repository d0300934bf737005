"""The measuring half of ``sensitivity``: one row of tokens through a model, one layer rounded at a time.

A forward pass of the unquantized model keeps the arguments of every layer's call, every linear's input and every
layer's output. For a layer and a format the layer's linears are put on their grids, and the model runs on from that
layer's kept arguments to the end; then the weights are put back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from calib.errors import CalibError
from calib.grids import amax_scale, dequantize_weight, fake_quantize, quantize_weight
from calib.layers import family_of, planned_linears
from calib.progress import Progress, Report
from calib.scheme import CODE_MAX, Grid, Scheme

Tensor = torch.Tensor


class Probe:
    """The model and what is done to it. ``row`` measures one row of tokens [1, s]."""

    def __init__(self, model: torch.nn.Module, folder: Path, config: Mapping[str, Any],
                 schemes: Mapping[str, Mapping[str, Scheme]]) -> None:
        family = family_of(config, str(folder))
        base = model.get_submodule(family.layers.rpartition(".")[0])
        self.model, self.schemes = model, schemes
        self.norm: Any = base.norm
        self.head: Any = model.get_output_embeddings()  # type: ignore[operator]
        self.layers = list(model.get_submodule(family.layers).children())
        linears = planned_linears(family, len(self.layers))
        self.linears = [[name for name in linears if name.startswith(f"{family.layers}.{layer}.")]
                        for layer in range(len(self.layers))]

    @torch.inference_mode()
    def row(self, ids: Tensor, number: int, total: int, report: Report) -> dict[str, float]:
        calls, inputs, stream, base = self._unquantized(ids)
        found = {"loss": float(_nll(base, ids)), "tokens": float(ids.shape[1] - 1)}
        steps, at = len(self.layers) * len(self.schemes), 0
        amax = {name: x.abs().amax() for name, x in inputs.items()}
        for layer, names in enumerate(self.linears):
            found[f"amax {layer}"] = max(float(amax[name]) for name in names)
            for form, schemes in self.schemes.items():
                report(Progress("sensitivity", number * steps + at, total * steps, "layer", f"layer {layer} {form}"))
                at += 1
                found |= self._noise(names, form, schemes, inputs, amax)
                with self._rounded(names, schemes, amax):
                    out, logits = self._from(layer, calls)
                found[f"signal {layer} {form}"] = float(stream[layer].double().square().sum())
                found[f"noise {layer} {form}"] = float((out - stream[layer]).double().square().sum())
                found[f"loss {layer} {form}"] = float(_nll(logits, ids)) - found["loss"]
                found[f"kl {layer} {form}"] = float(_kl(base, logits))
        return found

    def _unquantized(self, ids: Tensor) -> tuple[list[tuple[Any, Any]], dict[str, Tensor], list[Tensor], Tensor]:
        """(arguments of every layer's call, every linear's input [s, in], every layer's output [1, s, hidden],
        log-probabilities [s, vocabulary])."""
        calls: list[tuple[Any, Any]] = []
        stream: list[Tensor] = []
        inputs: dict[str, Tensor] = {}

        def keep(name: str) -> Callable[..., None]:
            def hook(_: torch.nn.Module, arguments: tuple[Tensor, ...]) -> None:
                inputs[name] = arguments[0].flatten(0, -2)
            return hook

        hooks = [layer.register_forward_pre_hook(lambda _, args, kwargs: calls.append((args, kwargs)), with_kwargs=True)
                 for layer in self.layers]
        hooks += [layer.register_forward_hook(lambda _, args, out: stream.append(_hidden(out)))
                  for layer in self.layers]
        hooks += [self.model.get_submodule(name).register_forward_pre_hook(keep(name))
                  for names in self.linears for name in names]
        try:
            logits = self.model(input_ids=ids, use_cache=False).logits
        finally:
            for hook in hooks:
                hook.remove()
        return calls, inputs, stream, torch.log_softmax(logits[0].float(), -1)

    def _from(self, layer: int, calls: Sequence[tuple[Any, Any]]) -> tuple[Tensor, Tensor]:
        """(the layer's output, log-probabilities [s, vocabulary]) when the model runs on from its unquantized input."""
        (hidden, *rest), kwargs = calls[layer]
        first = None
        for at in range(layer, len(self.layers)):
            hidden = _hidden(self.layers[at](hidden, *rest, **kwargs))
            first = hidden if first is None else first
        assert first is not None
        return first, torch.log_softmax(self.head(self.norm(hidden))[0].float(), -1)

    @contextmanager
    def _rounded(self, names: Sequence[str], schemes: Mapping[str, Scheme], amax: Mapping[str, Tensor]
                 ) -> Iterator[None]:
        """Some linears with their weights and inputs on their schemes' grids."""
        undo: list[Callable[[], object]] = []
        try:
            for name in names:
                if (scheme := schemes.get(name)) is not None:
                    module, weight = self.model.get_submodule(name), self.weight(name)
                    undo.append(partial(setattr, module, "weight", weight))
                    module.weight = torch.nn.Parameter(round_weight(scheme.weight, weight), requires_grad=False)
                    undo.append(module.register_forward_pre_hook(_rounding(scheme, amax[name])).remove)
            yield
        finally:
            for one in undo:
                one()

    def weight(self, name: str) -> Any:
        return self.model.get_submodule(name).weight

    def _noise(self, names: Sequence[str], form: str, schemes: Mapping[str, Scheme], inputs: Mapping[str, Tensor],
               amax: Mapping[str, Tensor]) -> dict[str, float]:
        found = {}
        for name in names:
            if (scheme := schemes.get(name)) is not None:
                x, weight = inputs[name], self.weight(name)
                y = x @ weight.T
                error = round_input(scheme, x, amax[name]) @ round_weight(scheme.weight, weight).T - y
                found[f"signal {name} {form}"] = float(y.double().square().sum())
                found[f"noise {name} {form}"] = float(error.double().square().sum())
        return found


def _rounding(scheme: Scheme, amax: Tensor) -> Callable[[torch.nn.Module, tuple[Tensor, ...]], tuple[Tensor, ...]]:
    return lambda _, args: (round_input(scheme, args[0], amax), *args[1:])


def _hidden(out: Any) -> Tensor:
    """What a decoder layer hands on; some give a tuple with it in front."""
    return out[0] if isinstance(out, tuple) else out


def round_weight(grid: Grid, weight: Tensor) -> Tensor:
    """float32 [out, in] on a symmetric weight grid with amax/max scales."""
    if not grid.symmetric:
        raise CalibError(f"a weight grid {grid} cannot be measured here", "Measure its symmetric form.")
    scale = amax_scale(grid, weight)
    return dequantize_weight(grid, quantize_weight(grid, weight, scale), scale)


def round_input(scheme: Scheme, x: Tensor, amax: Tensor) -> Tensor:
    """An activation on its scheme's grid; a static scale is ``amax``/max."""
    grid = scheme.activation
    if grid is None:
        return x
    top = torch.where(amax > 0, amax, torch.ones_like(amax))
    return fake_quantize(grid, x, None if grid.dynamic else top / CODE_MAX[grid.dtype])


def _nll(logprobs: Tensor, ids: Tensor) -> Tensor:
    """Summed over the row's predicted tokens."""
    return -logprobs[:-1].gather(1, ids[0, 1:, None]).double().sum()


def _kl(base: Tensor, other: Tensor) -> Tensor:
    return (base[:-1].exp() * (base[:-1] - other[:-1])).double().sum().clamp(min=0.0)

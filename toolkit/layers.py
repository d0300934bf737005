"""What each layer costs in each format, and what changes when some layers get more bits: eight, or all sixteen.

A sensitivity file is one JSON document: for every decoder layer and format what quantizing *only that layer* does, read
here into ``Sensitivity``. From it a choice of layers gives a predicted loss (losses of single layers added up: they are
small and nearly independent, which a measurement of the whole must confirm), a predicted size, and the exact recipe.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml
from pydantic import Field, ValidationError

from calib.recipe import load_recipe, recipe_names
from calib.scheme import Frozen
from toolkit.home import Home

FOLDER = "sensitivity"
#: What a layer of fewer bits is raised to: weights alone, one scale per channel.
RAISED = "int8"
_BITS = {"bf16": 16.0, "fp8": 8.0, "int8": 8.0, "int4_awq": 4.25}


class LayerCost(Frozen):
    """One layer in one format. ``loss``: nats per token of the whole model with only this layer quantized; ``sqnr_db``:
    of the layer's output; ``amax``: largest activation that it saw; ``parameters``: of its linears."""

    layer: int = Field(ge=0)
    format: str
    loss: float | None = None
    sqnr_db: float | None = None
    amax: float | None = None
    parameters: int = Field(ge=1)


class Sensitivity(Frozen):
    """The costs of one model. ``model_digest`` ties it to runs on the same model."""

    model: str
    model_digest: str
    created: str
    costs: list[LayerCost] = Field(min_length=1)

    @property
    def layers(self) -> list[int]:
        return sorted({cost.layer for cost in self.costs})

    @property
    def formats(self) -> list[str]:
        """The one with most bits first."""
        return sorted({cost.format for cost in self.costs}, key=lambda name: (-_BITS.get(name, 16.0), name))

    def cost(self, layer: int, format: str) -> LayerCost | None:
        return next((cost for cost in self.costs if (cost.layer, cost.format) == (layer, format)), None)


#: What can be drawn, with its title.
MEASURES = {"loss": "Loss, nats/token", "sqnr_db": "SQNR, dB", "amax": "amax"}


def sensitivities(home: Home) -> tuple[list[Sensitivity], list[str]]:
    """(all that are in home, the newest first; what is wrong with the files that could not be read)."""
    found, faults = [], []
    for path in sorted((home.path / FOLDER).glob("*.json")):
        try:
            found.append(Sensitivity.model_validate(json.loads(path.read_text(encoding="utf-8"))))
        except (OSError, ValueError, ValidationError) as error:
            faults.append(f"{path.name} is no sensitivity file: {_first(error)}")
    return sorted(found, key=lambda one: one.created, reverse=True), faults


def _first(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return " ".join(str(error).split())[:120]


@dataclass(frozen=True, slots=True)
class Prediction:
    """With some layers in more bits: loss, bytes of the layers' linears, and the same with none of them."""

    loss: float | None
    loss_all: float | None
    size: int
    size_all: int

    @property
    def share_kept(self) -> float:
        """Extra bytes over those of quantizing everything."""
        return self.size / self.size_all - 1


def can_raise(format: str) -> bool:
    """Whether single layers of a format may have eight bits (``raised`` in its recipe)."""
    return format in recipe_names() and RAISED in load_recipe(format).raises


def predict(sensitivity: Sensitivity, format: str, kept: Sequence[int], raised: Sequence[int] = ()) -> Prediction:
    """``kept``: layers that stay in 16 bits; ``raised``: those in eight, whose loss is taken from the int8 that was
    measured (its activations were rounded too, so it says rather too much); None where it was not."""
    costs = [cost for layer in sensitivity.layers if (cost := sensitivity.cost(layer, format)) is not None]
    losses = [cost.loss for cost in costs]
    left = [_loss(sensitivity, cost.layer, RAISED) if cost.layer in raised else cost.loss
            for cost in costs if cost.layer not in kept]
    bits = _BITS.get(format, 16.0)
    sizes = [cost.parameters * (16.0 if cost.layer in kept else _BITS[RAISED] if cost.layer in raised else bits) / 8
             for cost in costs]
    return Prediction(_total(left), _total(losses), int(sum(sizes)), int(sum(cost.parameters * bits / 8
                                                                            for cost in costs)))


def _loss(sensitivity: Sensitivity, layer: int, format: str) -> float | None:
    found = sensitivity.cost(layer, format)
    return None if found is None else found.loss


def _total(losses: Sequence[float | None]) -> float | None:
    known = [loss for loss in losses if loss is not None]
    return sum(known) if len(known) == len(losses) else None


def predicted_tpot(prediction: Prediction, sensitivity: Sensitivity, quantized_ms: float, bf16_ms: float) -> float:
    """Between the two measured engines, by the bytes that a token reads."""
    full = sum(cost.parameters for cost in {cost.layer: cost for cost in sensitivity.costs}.values()) * 2
    if full == prediction.size_all:
        return quantized_ms
    share = (prediction.size - prediction.size_all) / (full - prediction.size_all)
    return quantized_ms + share * (bf16_ms - quantized_ms)


def advice(sensitivity: Sensitivity, format: str, count: int) -> list[int]:
    """The ``count`` layers whose loss is largest: the ones worth raising first."""
    costs = [cost for cost in sensitivity.costs if cost.format == format and cost.loss is not None]
    return sorted(cost.layer for cost in sorted(costs, key=lambda cost: -(cost.loss or 0.0))[:count])


def noise(sensitivity: Sensitivity, format: str) -> float:
    """The largest gain that a layer seems to bring by being quantized, nats per token: smaller losses are noise too."""
    return max((-cost.loss for cost in sensitivity.costs if cost.format == format and cost.loss is not None),
               default=0.0)


def recipe_text(format: str, kept: Sequence[int], raised: Sequence[int] = ()) -> str:
    """A recipe that extends the format's own and leaves those layers in 16 bits, or raises them to eight (one layer at
    least)."""
    said = [f"{_count(kept)} left in 16 bits"] if kept else []
    said += [f"{_count(raised)} raised to {RAISED}"] if raised else []
    content: dict[str, Any] = {"extends": format, "name": recipe_name(format, kept, raised),
                               "summary": f"{format} with {' and '.join(said)}, chosen by sensitivity"}
    if kept:
        content["keep"] = _patterns(kept)
    if raised:
        content["raised"] = {RAISED: _patterns(raised)}
    return str(yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=200))


def _patterns(chosen: Sequence[int]) -> list[str]:
    return [f"model.layers.{layer}.*" for layer in sorted(chosen)]


def _count(chosen: Sequence[int]) -> str:
    return f"{len(chosen)} layer{'' if len(chosen) == 1 else 's'}"


def recipe_name(format: str, kept: Sequence[int], raised: Sequence[int] = ()) -> str:
    parts = [format] + [f"{word}-{'-'.join(map(str, sorted(chosen)))}" for word, chosen in (
        ("keep", kept), (RAISED, raised)) if chosen]
    return "-".join(parts)[:60]


def matrix(sensitivity: Sensitivity, measure: str) -> list[list[float | None]]:
    """[layer][format] of a measure."""
    return [[getattr(cost, measure) if (cost := sensitivity.cost(layer, format)) else None
             for format in sensitivity.formats] for layer in sensitivity.layers]


def lines(sensitivity: Sensitivity) -> list[Mapping[str, Any]]:
    return [cost.model_dump() for cost in sensitivity.costs]



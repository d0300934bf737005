"""Calibration one decoder layer at a time: memory for a layer and a shard, scales exactly those of the whole pass.

A scale follows from a layer's weights and from what reaches the layer, and statistics are taken of the unquantized
model. So the data can stop between layers: every batch goes through layer 0, its hidden states go to disk, layer 1 is
loaded in its place and reads them. Each layer is a model of one layer of the family's own class
(``calib/layer_model.py``) and goes through the same methods as the whole model would, pass by pass
(``calib/layer_store.py``); the equality is bitwise, and tests hold it to that by comparing digests.

Methods that fit a layer to what the already rounded layers give (``calib/solve.py``) go the same way with one stream:
what the rounded layer gives is what the next one reads.

What needs the whole model's loss is measured by streams: the smoothing strength is chosen by sending the ``choose``
text through every layer once per candidate (``calib/layer_choices.py``).

Each finished layer is a file, and hidden states lie on disk, so a run that is killed goes on at the layer where it was.
At the end the layers' files are mapped and written shard by shard.

Not there layer by layer: ``inspect`` (there is no whole model to show), and generating for the sanity check, which
looks at the predictions on a calibration row instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from calib import methods, quantizer
from calib.apart import round_apart, with_rounded
from calib.errors import CalibError
from calib.layer_choices import choose_alpha
from calib.layer_model import head_model, outside_names, outside_tensors
from calib.layer_store import LayerBatches
from calib.layer_work import LayerWork, Relay
from calib.layers import natural_key
from calib.peak import release_memory
from calib.progress import Progress, Report
from calib.sanity import compare, predictions
from calib.scheme import Scheme
from calib.solve import run_solved
from calib.text import Tokenizer


class LayerCoverageError(CalibError):
    """A layer came out otherwise than planned."""

    code = "coverage"


def calibrate_layers(work: LayerWork, choose: torch.Tensor, measure: methods.Measure) -> dict[str, Any]:
    """Calibrate every layer that is not done. Returns the record of what was chosen.

    ``choose`` are token ids [n, s] for measured choices; ``measure`` remembers losses. Errors as of the whole pass.
    """
    record: dict[str, Any] = {}
    smooth = work.plan.recipe.method == "smooth"
    if smooth:
        record["alpha"] = choose_alpha(work, choose, measure)
    if not work.store.has("layer", 0):
        work.embed(work.store, "data", work.batches, rounded=smooth or work.plan.recipe.solved)
        work.embed(work.store, "before", [_row(work)], rounded=False)
        work.embed(work.store, "after", [_row(work)], rounded=True)
    for layer in range(work.plan.num_layers):
        if not work.store.has("layer", layer):
            _calibrate(work, layer, record.get("alpha"))
            release_memory()  # a quantized module refers to itself: without this, layers pile up
        work.store.drop_hidden(layer)
    return record


def _row(work: LayerWork) -> torch.Tensor:
    """Token ids [1, s] that the sanity check looks at."""
    return work.batches[0][:1]


def _calibrate(work: LayerWork, layer: int, alpha: float | None) -> None:
    report, relay = work.within("calibrate layers", layer), Relay()
    model = work.model(layer, relay)
    _pass_row(work, model, relay, layer, "before")
    solved = work.plan.recipe.solved
    data = LayerBatches(work.store, layer, "data", len(work.batches), one=solved)
    relay.to = data.take
    tensors = _solve(work, model, layer, data, report) if solved else _quantize(work, model, layer, data, report, alpha)
    tensors = with_rounded(tensors, round_apart(model, work.layer_plan(layer).raised_schemes))
    schemes = {} if solved else work.layer_schemes(layer)
    with quantizer.disabled(model, quantizer.weight_quantizers(schemes)):
        _pass_row(work, model, relay, layer, "after")
    prefix = work.prefix(layer)
    work.store.put("layer", layer, {name: tensor for name, tensor in tensors if name.startswith(prefix)})


def _quantize(work: LayerWork, model: nn.Module, layer: int, data: LayerBatches, report: Report, alpha: float | None
              ) -> Iterator[tuple[str, torch.Tensor]]:
    """By modelopt's quantizers, as the whole pass does."""
    schemes, plan = work.layer_schemes(layer), work.layer_plan(layer)
    if alpha is None:
        methods.find_scales(model, plan, schemes, data, report, work.family)
    else:
        smoother = work.smoother(model, layer)
        smoother.adopt({name: work.trials.get("statistics", layer, name).clone() for name in schemes})
        smoother.apply(alpha)
        smoother.finish(data, report)
    _check_coverage(model, schemes)
    return methods.canonical_tensors(model, plan, schemes)


def _solve(work: LayerWork, model: Any, layer: int, data: LayerBatches, report: Report
           ) -> Iterator[tuple[str, torch.Tensor]]:
    """By the solver; then the rows pass the rounded layer, whose keys and values are not rounded for the next layer."""
    solved = run_solved(model, work.layer_plan(layer), work.layer_schemes(layer), data, report, work.family)
    if work.plan.recipe.calibrates_activations or work.plan.kv.quantized:
        fake, model.config._attn_implementation = model.config._attn_implementation, "sdpa"
        with torch.inference_mode():
            data.give_out(partial(model.model, use_cache=False))
        model.config._attn_implementation = fake
    return solved.stream(model)


def _pass_row(work: LayerWork, model: Any, relay: Relay, layer: int, stream: str) -> None:
    """The sanity row through one layer."""
    relay.to = lambda output: work.store.put_hidden(f"{stream}-1", layer + 1, 0, output)
    row = LayerBatches(work.store, layer, stream, 1)
    with torch.inference_mode():
        model.model(row[0], use_cache=False)
    relay.to = None


def _check_coverage(model: nn.Module, schemes: dict[str, Scheme]) -> None:
    found = quantizer.enabled_modules(model)
    if found != set(schemes):
        wrong = min(found ^ set(schemes))
        raise LayerCoverageError(f"{wrong} is {'not ' if wrong in schemes else ''}quantized, against the plan",
                                 "This is a fault of the toolkit or of modelopt.")


def look(work: LayerWork, tokenizer: Tokenizer) -> dict[str, Any]:
    """The sanity check, on the hidden states that the last layer gave. SanityError names what broke."""
    seen = []
    for stream in ("before", "after"):
        head = head_model(work.source.path, work.family, work.source.shards, rounded=stream == "after")
        hidden = LayerBatches(work.store, work.plan.num_layers, stream, 1)[0]
        with torch.inference_mode():
            seen.append(predictions(head(hidden, use_cache=False).logits, _row(work)))
    return compare(seen[0], seen[1], tokenizer)


def layer_tensors(work: LayerWork) -> Iterator[tuple[str, torch.Tensor]]:
    """The canonical stream in natural order: layers mapped from their files, the rest from the model's own."""
    first = natural_key(f"{work.family.layers}.")
    outside = outside_names(work.source.path, work.family)
    before = [name for name in outside if natural_key(name) < first]
    yield from outside_tensors(work.source.shards, before)
    for layer in range(work.plan.num_layers):
        work.report(Progress("write layers", layer, work.plan.num_layers, "layer"))
        for name in sorted(work.store.names("layer", layer), key=natural_key):
            yield name, work.store.get("layer", layer, name)
    yield from outside_tensors(work.source.shards, [name for name in outside if name not in before])

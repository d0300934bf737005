"""Choices by the whole model's measured loss, made layer by layer.

The smoothing strength: the ``choose`` text goes through the layers once for each candidate, side by side, so every
layer is loaded once. In layer k the inputs' statistics are taken of the unquantized stream; then, for each strength,
the layer is folded and rounded, and that strength's stream passes. After the last layer the head turns each stream
into a loss. The hidden states are bit for bit those of the whole model; the head works row by row and through blocks
of the vocabulary, so a loss may differ from the whole model's in its last digits.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from calib.layer_model import head_model
from calib.layer_store import LayerBatches
from calib.layer_work import LayerWork, Relay
from calib.methods import SCORED_ROWS, Measure
from calib.peak import release_memory
from calib.progress import Progress


def choose_alpha(work: LayerWork, choose: torch.Tensor, measure: Measure) -> float:
    """Each layer's input statistics into the store, and the strength with the least loss on ``choose`` [n, s]."""
    alphas = sorted(work.plan.recipe.alphas)
    trials = list(choose.split(SCORED_ROWS)) if len(alphas) > 1 else []
    layers = range(work.plan.num_layers)
    if not work.trials.has("statistics", 0):
        work.embed(work.trials, "statistics", work.batches, rounded=False)
        for alpha in alphas:
            work.embed(work.trials, _stream(alpha), trials, rounded=True)
    for layer in layers:
        if not work.trials.has("statistics", layer):
            _collect(work, layer, alphas, len(trials))
            release_memory()
        work.trials.drop_hidden(layer)
    losses: dict[float, float] = {}
    for index, alpha in enumerate(alphas if trials else []):
        work.report(Progress("choose smoothing", index, len(alphas), "strength"))
        losses[alpha] = measure(f"alpha {alpha:g}", lambda alpha=alpha: _loss(work, alpha, trials))  # type: ignore[misc]
        work.report(Progress("choose smoothing", index + 1, len(alphas), "strength"))
    return min(alphas, key=lambda alpha: losses.get(alpha, 0.0))


def _stream(alpha: float) -> str:
    return f"alpha-{alpha:g}"


def _collect(work: LayerWork, layer: int, alphas: list[float], trials: int) -> None:
    report, relay = work.within("smoothing statistics", layer), Relay()
    model = work.model(layer, relay)
    smoother = work.smoother(model, layer)
    data = LayerBatches(work.trials, layer, "statistics", len(work.batches))
    relay.to = data.take
    smoother.collect(data, report)
    for alpha in alphas if trials else []:
        rows = LayerBatches(work.trials, layer, _stream(alpha), trials)
        smoother.apply(alpha)
        relay.to = rows.take
        with smoother.measured(), torch.inference_mode():
            for hidden in rows:
                model.model(hidden, use_cache=False)
    work.trials.put("statistics", layer, smoother.amax)


def _loss(work: LayerWork, alpha: float, trials: list[torch.Tensor]) -> float:
    """Mean negative log-likelihood, nats per token, of the trial rows whose hidden states the last layer gave."""
    head = head_model(work.source.path, work.family, work.source.shards, rounded=True)
    passed = LayerBatches(work.trials, work.plan.num_layers, _stream(alpha), len(trials))
    total, count = 0.0, 0
    with torch.inference_mode():
        for ids, hidden in zip(trials, passed, strict=True):
            for row, states in zip(ids, hidden, strict=True):
                logits = head(states[None], use_cache=False).logits[0, :-1]
                total += functional.cross_entropy(logits, row[1:], reduction="sum").item()
                count += row[1:].numel()
    return total / count

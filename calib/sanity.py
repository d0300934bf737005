"""Is the quantized model still a language model? The check that catches token salad before it is published.

Before calibration the unquantized model continues a few tokens and scores one row (of the calibration text, or of a few
plain sentences where a recipe needs none); afterwards the quantized one does the same. Logits must be finite, the loss
may not have exploded, and the continuation may not be one token repeated ("!!!!!!!!") unless the original does so too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from calib.errors import CalibError
from calib.text import Tokenizer

_PROMPT, _NEW = 32, 8
#: Nats per token above the unquantized loss that no usable quantization costs (the worst preset seen: 0.73).
LOSS_LIMIT = 2.0
_PLAIN = ("The river runs past the old mill and under the bridge. In spring the water is high, and the fields beside "
          "it lie wet until May. A farmer who lived there kept a book in which he wrote down the day of the first "
          "frost, the price of wheat, and how many lambs were born. His daughter read it many years later, and found "
          "that the winters had grown shorter. She counted the days, drew a line through the points, and sent a letter "
          "about it to the university in the city.")
_PLAIN_TOKENS = 128


class SanityError(CalibError):
    """The quantized model's output is broken."""

    code = "sanity"


@dataclass(frozen=True, slots=True)
class Before:
    """The unquantized model's loss (nats per token) on a row and its greedy continuation."""

    loss: float
    continuation: tuple[int, ...]


def plain_row(tokenizer: Tokenizer, positions: int | None) -> torch.Tensor:
    """int64 token ids [1, s] of plain sentences, at most 128 and no more than the model has positions for."""
    ids = tokenizer.encode(_PLAIN)[:min(_PLAIN_TOKENS, positions or _PLAIN_TOKENS)]
    return torch.tensor([ids])


def observe(model: nn.Module, row: torch.Tensor) -> Before:
    """Loss on ``row`` [1, s] and 8 greedy tokens after its first 32. SanityError when logits are not finite."""
    with torch.inference_mode():
        logits = model(row, use_cache=False).logits[:, :-1].float()
        if not torch.isfinite(logits).all():
            raise SanityError("the model's logits are not finite", "Check its weights; they may overflow.")
        loss = functional.cross_entropy(logits.flatten(0, 1), row[:, 1:].flatten()).item()
        ids = row[:, :_PROMPT]
        for _ in range(_NEW):
            following = model(ids, use_cache=False).logits[:, -1:].argmax(-1)
            ids = torch.cat((ids, following), dim=1)
    return Before(loss, tuple(ids[0, -_NEW:].tolist()))


def predictions(logits: torch.Tensor, row: torch.Tensor) -> Before:
    """The same look without generating, from logits [1, s, v] of ``row`` [1, s]: loss, and its last 8 predictions.

    For a model that passes layer by layer, where a token more costs a reading of every weight.
    """
    if not torch.isfinite(logits).all():
        raise SanityError("the model's logits are not finite", "Check its weights; they may overflow.")
    loss = functional.cross_entropy(logits[0, :-1].float(), row[0, 1:]).item()
    return Before(loss, tuple(logits[0, -_NEW:].argmax(-1).tolist()))


def check_after(model: nn.Module, before: Before, row: torch.Tensor, tokenizer: Tokenizer) -> dict[str, Any]:
    """Observe again; SanityError names what broke. Returns both observations for the record of evidence."""
    return compare(before, observe(model, row), tokenizer)


def compare(before: Before, after: Before, tokenizer: Tokenizer) -> dict[str, Any]:
    """SanityError when the loss rose beyond any use, or one token is all that is left; else both, for the evidence."""
    if after.loss > before.loss + LOSS_LIMIT:
        raise SanityError(f"quantizing raised the loss from {before.loss:.2f} to {after.loss:.2f} nats per token",
                          "Choose another recipe, more calibration text, or keep sensitive modules in bf16.")
    if len(set(after.continuation)) == 1 and len(set(before.continuation)) > 1:
        token = tokenizer.decode(after.continuation[:1], skip_special=False)
        raise SanityError(f"the quantized model only repeats {token!r}",
                          "Choose another recipe, more calibration text, or keep sensitive modules in bf16.")
    return {"loss_before": before.loss, "loss_after": after.loss,
            "continuation_before": tokenizer.decode(before.continuation, skip_special=False),
            "continuation_after": tokenizer.decode(after.continuation, skip_special=False)}

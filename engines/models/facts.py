"""ModelFacts: everything about an architecture that the program, the plan and the runner need.

A family (``families.py``) is a function from config.json to these facts. The plain decoder is what the defaults say;
every other fact is one difference from it.
"""

from __future__ import annotations

from collections import Counter
from typing import Literal

from pydantic import Field, model_validator

from calib.scheme import Frozen
from engines.models.rope import RopeFacts

Activation = Literal["silu", "gelu_tanh"]


class ModelFacts(Frozen):
    """An architecture in numbers.

    ``windows``: per layer the number of last tokens that it attends to, 0 for all (empty: all layers all tokens).
    ``local_rope``: the rotary frequencies of layers with a window, where they have their own.
    ``norm_offset``: added to every norm's stored weight. ``post_norms``: a norm after attention and after the MLP too.
    ``attention_scale``: what q k is multiplied by (None: 1 / sqrt(head_dim)). Softcaps: cap * tanh(x / cap) of
    attention's scores, of the logits. ``fused_weights``: the checkpoint holds qkv and gate_up as one matrix each.
    """

    family: str
    vocab_size: int = Field(gt=0)
    hidden_size: int = Field(gt=0)
    intermediate_size: int = Field(gt=0)
    num_layers: int = Field(gt=0)
    num_heads: int = Field(gt=0)
    num_kv_heads: int = Field(gt=0)
    head_dim: int = Field(gt=0)
    norm_eps: float = Field(gt=0)
    rope: RopeFacts
    max_position: int = Field(gt=0)
    tied_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    activation: Activation = "silu"
    windows: tuple[int, ...] = ()
    local_rope: RopeFacts | None = None
    qk_norm: bool = False
    norm_offset: float = 0.0
    post_norms: bool = False
    embedding_scale: float = 1.0
    attention_scale: float | None = Field(default=None, gt=0)
    attention_softcap: float | None = Field(default=None, gt=0)
    logit_softcap: float | None = Field(default=None, gt=0)
    fused_weights: bool = False

    @model_validator(mode="after")
    def _one_window_a_layer(self) -> ModelFacts:
        if self.windows and len(self.windows) != self.num_layers:
            raise ValueError(f"{len(self.windows)} windows for {self.num_layers} layers")
        if any(window < 0 for window in self.windows):
            raise ValueError(f"a window of {min(self.windows)} tokens")
        return self

    def window(self, layer: int) -> int:
        """Tokens that a layer attends to; 0 for all."""
        return self.windows[layer] if self.windows else 0

    def is_local(self, layer: int) -> bool:
        """Whether a layer rotates by ``local_rope``."""
        return self.local_rope is not None and self.window(layer) > 0

    def rope_of(self, local: bool) -> RopeFacts:
        """The rotary frequencies of all layers, or of those with a window."""
        return self.local_rope if local and self.local_rope is not None else self.rope

    def notes(self, max_seq_len: int) -> tuple[str, ...]:
        """What a user of an engine of this length should know of it, in sentences."""
        found = []
        for window, count in sorted(Counter(self.windows).items()):
            if 0 < window < max_seq_len:
                found.append(f"{count} of {self.num_layers} layers attend to the last {window} tokens; their KV cache "
                             "is kept at full length all the same")
        if self.rope.kind == "longrope":
            which = "long" if max_seq_len > self.rope.original else "short"
            found.append(f"longrope takes the {which} factors for every text, as max_seq_len is {max_seq_len} and the "
                         f"original context {self.rope.original}")
        if self.rope.kind == "dynamic" and max_seq_len > self.rope.original:
            found.append(f"dynamic rope: a position p beyond {self.rope.original} is rotated as the last one of a text "
                         "of p + 1 tokens, whatever the prompt's length")
        return tuple(found)

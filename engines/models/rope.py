"""Rotary position embedding: what config.json may ask for, and the cosines and sines that follow.

Position p turns the pair (i, i + d/2) of a head by p * f_i with f_i = theta^(-2i/d). Models are stretched beyond the
length they were trained on (``original``) by changing f:

    linear     f_i / factor                                            (Chen et al. 2023, position interpolation)
    dynamic    theta grows with the length n beyond ``original``: theta * (factor n / original - factor + 1)^(d/(d-2))
    yarn       slow pairs as linear, fast ones unchanged, a ramp between; cosines and sines times ``attention_factor``
    llama3     as yarn, with the ramp over wavelengths
    longrope   f_i / short_factor_i up to ``original``, f_i / long_factor_i beyond; times ``attention_factor``

**A cache must not move.** Keys are stored rotated, so a position's frequencies have to be the same for every length
that it will ever be seen from; two variants are not, as transformers 5.24 writes them, and this is what is done here:

* dynamic: position p is rotated as the last one of a text of p + 1 tokens. That is transformers' own arithmetic while
  it generates with a cache. (A *prompt* longer than ``original`` it rotates by the whole prompt's length at once, and
  cached keys stay as they were when later tokens use other frequencies: the same text then depends on how it was cut
  into calls. Here it equals transformers fed one token at a time.)
* longrope: an engine takes one of the two sets for all its texts, the short one if ``max_seq_len`` is at most
  ``original``, else the long one. (transformers switches when a text passes ``original`` and computes its whole cache
  again.) Texts beyond ``original`` then equal transformers; shorter ones equal it in an engine built for short texts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from pydantic import Field, ValidationError

from calib.config import ROPE_KINDS as KINDS
from calib.config import RopeKind as Kind
from calib.faults import fault_words
from calib.scheme import Frozen
from engines.errors import EngineError


class RopeFacts(Frozen):
    """Rotary frequencies (module docstring). ``original``: positions the unstretched model was trained on.

    ``partial`` is the part of a head that is rotated: its first ``partial * head_dim`` dimensions.
    """

    kind: Kind = "default"
    theta: float = Field(gt=0)
    partial: float = Field(default=1.0, gt=0, le=1)
    factor: float = Field(default=1.0, gt=0)
    attention_factor: float = Field(default=1.0, gt=0)
    original: int = Field(default=0, ge=0)
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = Field(default=32.0, gt=0)
    beta_slow: float = Field(default=1.0, gt=0)
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    def rotary_dim(self, head_dim: int) -> int:
        """Dimensions of a head that are rotated."""
        return int(head_dim * self.partial)

    def longest(self, max_position: int) -> int:
        """Positions that the model can be asked for: ``max_position`` of config.json, or what stretching makes of it.

        Configurations with linear and dynamic scaling give the unstretched length, with yarn often so.
        """
        if self.kind in ("linear", "dynamic"):
            return int(max_position * max(self.factor, 1.0))
        return max(max_position, int(self.original * self.factor)) if self.kind == "yarn" else max_position


def rope_facts(config: Mapping[str, Any], *, theta: float = 10000.0, partial: bool = False,
               section: Mapping[str, Any] | None = None) -> RopeFacts:
    """Read either layout of rope settings (``rope_parameters``, or ``rope_theta`` with ``rope_scaling``).

    ``section`` is one layer type's part where they differ; ``theta`` the family's own default; ``partial`` whether the
    family rotates parts of heads. EngineError names a variant or a setting that is not supported.
    """
    found = dict(section if section is not None else config.get("rope_scaling") or config.get("rope_parameters") or {})
    kind = found.get("rope_type", found.get("type", "default"))
    if kind not in KINDS:
        raise EngineError(f"rope type {kind!r} is not supported", f"Supported: {', '.join(KINDS)}.")
    part = found.get("partial_rotary_factor", config.get("partial_rotary_factor")) or 1.0
    if part != 1.0 and not partial:
        raise EngineError(f"partial_rotary_factor {part} is not supported in this family", "Supported in Phi-3 only.")
    common = {"kind": kind, "theta": float(found.get("rope_theta") or config.get("rope_theta") or theta),
              "partial": part}
    try:
        return RopeFacts(**common, **_scaling(kind, found, config))
    except KeyError as error:
        raise EngineError(f"the {kind} rope of config.json has no {error.args[0]!r}", "Copy the model folder again."
                          ) from error
    except ValidationError as error:
        first = error.errors()[0]
        raise EngineError(f"the {kind} rope of config.json: {first['loc'][0]} {fault_words(first)}",
                          "Correct config.json, or copy the model folder again.") from error
    except (TypeError, ValueError, ArithmeticError) as error:  # a text or a negative number that is reckoned with
        raise EngineError(f"the {kind} rope of config.json cannot be reckoned with: {error}",
                          "Its factors and lengths are positive numbers; copy the model folder again.") from error


def _scaling(kind: Kind, found: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """What a variant adds, under our names."""
    if kind == "default":
        return {}
    if kind == "linear":
        return {"factor": found["factor"]}
    if kind == "dynamic":
        return {"factor": found["factor"], "original": config["max_position_embeddings"]}
    original = config.get("original_max_position_embeddings") or found.get("original_max_position_embeddings") or (
        config["max_position_embeddings"])
    if kind == "llama3":
        return {"factor": found["factor"], "original": original, "low_freq_factor": found["low_freq_factor"],
                "high_freq_factor": found["high_freq_factor"]}
    stated = found["factor"] if kind == "yarn" else found.get("factor")  # as transformers: null, not absent, is a ratio
    factor = stated or config["max_position_embeddings"] / original
    given = found.get("attention_factor")
    if kind == "yarn":
        return {"factor": factor, "original": original, "beta_fast": found.get("beta_fast") or 32.0,
                "beta_slow": found.get("beta_slow") or 1.0, "truncate": found.get("truncate", True),
                "attention_factor": _yarn_attention(factor, found) if given is None else given}
    stretched = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return {"factor": factor, "original": original, "attention_factor": stretched if given is None else given,
            "short_factor": tuple(found["short_factor"]), "long_factor": tuple(found["long_factor"])}


def _yarn_attention(factor: float, found: Mapping[str, Any]) -> float:
    def temperature(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    top, bottom = found.get("mscale"), found.get("mscale_all_dim")
    return temperature(top) / temperature(bottom) if top and bottom else temperature(1.0)


def frequencies(rope: RopeFacts, head_dim: int, max_seq_len: int) -> torch.Tensor:
    """float32 [rotary_dim / 2], or [max_seq_len, rotary_dim / 2] where they differ from position to position."""
    dim = rope.rotary_dim(head_dim)
    exponent = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
    inverse = 1.0 / rope.theta ** exponent
    if rope.kind == "linear":
        return inverse / rope.factor
    if rope.kind == "dynamic":
        lengths = torch.arange(1, max_seq_len + 1, dtype=torch.float32).clamp_min(rope.original)
        theta = rope.theta * (rope.factor * lengths / rope.original - (rope.factor - 1)) ** (dim / (dim - 2))
        return 1.0 / theta[:, None] ** exponent
    if rope.kind == "yarn":
        return _yarn(rope, dim, inverse)
    if rope.kind == "llama3":
        low, high = rope.low_freq_factor, rope.high_freq_factor
        wavelength = 2 * math.pi / inverse
        blend = ((rope.original / wavelength - low) / (high - low)).clamp(0.0, 1.0)
        return (1 - blend) * inverse / rope.factor + blend * inverse
    if rope.kind == "longrope":
        factors = rope.long_factor if max_seq_len > rope.original else rope.short_factor
        if len(factors) != dim // 2:
            raise EngineError(f"longrope gives {len(factors)} factors, a head has {dim // 2} pairs",
                              "config.json belongs to another model.")
        return 1.0 / (torch.tensor(factors, dtype=torch.float32) * rope.theta ** exponent)
    return inverse


def _yarn(rope: RopeFacts, dim: int, inverse: torch.Tensor) -> torch.Tensor:
    """Interpolated where a pair turns less than beta_slow times over the original length, kept beyond beta_fast."""
    def pair_of(turns: float) -> float:
        return dim * math.log(rope.original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_of(rope.beta_fast), pair_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low or 0.001)).clamp(0, 1)
    return inverse / rope.factor * ramp + inverse * (1 - ramp)


def cosines_and_sines(rope: RopeFacts, head_dim: int, max_seq_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [max_seq_len, rotary_dim / 2] each, with the attention factor in them."""
    angle = torch.arange(max_seq_len, dtype=torch.float32)[:, None] * frequencies(rope, head_dim, max_seq_len)
    return angle.cos() * rope.attention_factor, angle.sin() * rope.attention_factor

"""What a gate demands: a YAML file in the user's repository, frozen, unknown keys refused.

    name: release
    delta_nll: {margin: 0.05}            # nats per token; gates first, because it sees most
    accuracy: {margin: 2.0}              # percentage points, paired, over all tasks that can gate
    length: {low: 0.9, high: 1.1}        # tokens of the candidate's continuations / the baseline's
    speed:
      - {figure: tpot_ms, max: 40, batch_size: 1, isl: 128, osl: 32}
    warn: {kl_mean: 0.05, flips: 0.10}

Margins are judgement, not statistics. Customary: accuracy 1 point for fp8, 2 for int8, 2-3 for int4; perplexity ratio
+1 %, +2 %, +5 % (exp(margin) - 1 of the delta NLL).
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from calib.artifact import canonical_json, sha256_hex
from calib.errors import shown
from calib.scheme import Frozen
from calib.yaml_text import read_yaml
from evals.errors import PolicyError
from evals.sequential import POCOCK

LOOKS = (200, 400, 800, 1600)


class NllRule(Frozen):
    """The loss in NLL must stay below ``margin`` nats per token, judged over at least ``min_documents`` documents."""

    margin: float = Field(gt=0, le=10)
    min_documents: int = Field(default=20, ge=5)


class AccuracyRule(Frozen):
    """The paired loss over ``tasks`` (null: all) must stay below ``margin`` percentage points.

    ``looks``: item counts at which a verdict may fall; the last is the cap. A single task fails only by twice the
    margin. ``aa_flips``: the share of answers that change when the same engine runs twice on this kind of machine; a
    margin that this noise alone could break is refused.
    """

    margin: float = Field(gt=0, le=100)
    tasks: tuple[str, ...] | None = None
    looks: tuple[int, ...] = LOOKS
    aa_flips: float | None = Field(default=None, ge=0, le=1)

    @field_validator("looks")
    @classmethod
    def _ascending(cls, looks: tuple[int, ...]) -> tuple[int, ...]:
        if len(looks) not in POCOCK or any(a >= b for a, b in pairwise(looks)) or looks[0] < 50:
            raise ValueError(f"looks {list(looks)} must be 1 to {max(POCOCK)} ascending counts from 50 on")
        return looks


class LengthRule(Frozen):
    """Continuations must stay between ``low`` and ``high`` times the baseline's length, over at least ``min_samples``.

    A quantized model that stops early or rambles can keep every multiple-choice answer; .9 to 1.1 is MLPerf's window.
    """

    low: float = Field(default=0.9, gt=0, lt=1)
    high: float = Field(default=1.1, gt=1, le=10)
    min_samples: int = Field(default=20, ge=2)


class SpeedRule(Frozen):
    """One cell of the sweep must reach a figure. ``peak_memory_bytes`` belongs to the sweep, not to a cell."""

    figure: Literal["ttft_ms", "tpot_ms", "e2e_ms", "out_tok_s", "total_tok_s", "peak_memory_bytes"]
    max: float | None = Field(default=None, gt=0)
    min: float | None = Field(default=None, gt=0)
    batch_size: int | None = Field(default=None, ge=1)
    isl: int | None = Field(default=None, ge=1)
    osl: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _complete(self) -> SpeedRule:
        if (self.max is None) == (self.min is None):
            raise ValueError("a speed rule has either max or min")
        place = (self.batch_size, self.isl, self.osl)
        if self.figure == "peak_memory_bytes":
            if place != (None, None, None):
                raise ValueError("peak_memory_bytes belongs to the whole sweep: no batch_size, isl or osl")
        elif None in place:
            raise ValueError(f"{self.figure} needs batch_size, isl and osl to name its cell")
        return self


class WarnRule(Frozen):
    """Alarms that are printed and decide nothing: KL and flips above, same-top-1 below the number."""

    kl_mean: float | None = Field(default=None, gt=0)
    flips: float | None = Field(default=None, gt=0, le=1)
    same_top1: float | None = Field(default=None, gt=0, le=1)


class Policy(Frozen):
    name: str = Field(min_length=1, max_length=100)
    delta_nll: NllRule | None = None
    accuracy: AccuracyRule | None = None
    length: LengthRule | None = None
    speed: tuple[SpeedRule, ...] = ()
    warn: WarnRule = WarnRule()

    @model_validator(mode="after")
    def _judges(self) -> Policy:
        if self.delta_nll is None and self.accuracy is None:
            raise ValueError("a policy must judge delta_nll or accuracy: speed alone says nothing about quality")
        return self

    @property
    def sha256(self) -> str:
        """Over the policy's content: comments and spacing do not change it, a margin does."""
        return sha256_hex(canonical_json(self.model_dump(mode="json")))


def load_policy(path: Path | str) -> Policy:
    """Read a policy file. PolicyError names the key and the value that is wrong."""
    path = Path(path)
    content = read_yaml(path, PolicyError, "Give a policy file; see examples/policy.yaml.")
    try:
        return Policy.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "policy"
        raise PolicyError(f"{path}: {place}: {first['msg']} (found {shown(first['input'])})",
                          "See examples/policy.yaml.") from error

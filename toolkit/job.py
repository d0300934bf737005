"""Job: one YAML file says what is made, judged and measured. Frozen; an unknown key is an error.

Paths in a job are relative and stay inside the job file's folder or home: a job that was sent by somebody else cannot
read or write elsewhere. Names of data and models are looked up in the job's folder first, then in home.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import ConfigDict, Field, ValidationError, field_validator, model_validator

from calib.choices import KvChoice
from calib.faults import fault_words
from calib.scheme import Frozen
from calib.yaml_text import read_yaml
from toolkit.errors import JobError
from toolkit.home import Home

if TYPE_CHECKING:
    from engines.plan import EngineSpec

NAME = r"^[a-z0-9][a-z0-9._-]{0,63}$"


class _Plain(Frozen):
    """Numbers are numbers: YAML's ``yes`` is not 1 row."""

    model_config = ConfigDict(strict=True)


class Calibration(_Plain):
    """What calibration sees: ``rows`` of ``length`` tokens packed from the texts of ``data``.

    ``choose`` holds the texts that measured choices (strengths, layers) are made on; ``chat`` applies the model's chat
    template.
    """

    data: str = "calibration"
    choose: str = "choose"
    rows: int = Field(default=16, ge=1)
    length: int = Field(default=256, ge=8)
    chat: bool = False


class EngineJob(Frozen):
    """One row of the result: a recipe and a KV cache format."""

    recipe: str
    kv_cache: KvChoice = "bf16"


REFERENCE = EngineJob(recipe="bf16")
#: Tokens of a sequence where nobody says: enough for a chat, and a KV cache that any machine has.
LENGTH = 1024


class Limits(_Plain):
    """The limits every engine of the job is built with. ``max_seq_len`` None: ``LENGTH``, or the model's positions
    where those are fewer."""

    device: str = "cpu"
    max_seq_len: int | None = Field(default=None, ge=2)
    max_batch_size: int = Field(default=8, ge=1)
    max_num_tokens: int = Field(default=2048, ge=16)
    deterministic: bool = False
    tune: Literal["none", "quick", "full"] = "quick"

    @model_validator(mode="after")
    def _batch(self) -> Limits:
        if self.max_batch_size > self.max_num_tokens:
            raise ValueError(f"max_batch_size {self.max_batch_size:,} is more than max_num_tokens "
                             f"{self.max_num_tokens:,}: every sequence of a step needs a token")
        return self

    def spec(self, config: Mapping[str, Any]) -> EngineSpec:
        """What is asked of an engine of the model with this config.json."""
        from engines.models.families import model_facts
        from engines.plan import EngineSpec

        length = self.max_seq_len or min(LENGTH, model_facts(config).max_position)
        return EngineSpec(**self.model_dump() | {"max_seq_len": length})


class Evaluation(_Plain):
    """How much is judged. ``texts`` documents for delta NLL; ``items`` questions of each of ``tasks``."""

    data: str = "evaluation"
    texts: int = Field(default=64, ge=2)
    tasks: list[str] = Field(default_factory=list)
    items: int | None = Field(default=None, ge=1)
    window: int = Field(default=512, ge=8)


class Sweep(Frozen):
    """Latency cells as [batch, ISL, OSL]; the first is the headline of the table."""

    cells: list[tuple[int, int, int]] = Field(min_length=1)
    warmup: int = Field(default=1, ge=0, le=10_000)
    repeats: int = Field(default=3, ge=1, le=10_000)

    @field_validator("cells")
    @classmethod
    def _positive(cls, cells: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
        for cell in cells:
            if min(cell) < 1:
                raise ValueError(f"cell {list(cell)} needs batch, ISL and OSL of at least 1")
        if len(set(cells)) < len(cells):
            raise ValueError("a cell is listed twice")
        return cells


class Job(Frozen):
    """The whole job. ``model``: a name in home, a folder, a .gguf file, or a hub name."""

    name: str = Field(pattern=NAME)
    model: str
    seed: int = Field(default=0, ge=0)
    calibration: Calibration = Calibration()
    engines: list[EngineJob] = Field(min_length=1)
    limits: Limits = Limits()
    evaluation: Evaluation = Evaluation()
    sweep: Sweep
    policy: str = Field(description="gate policy, a YAML file beside the job")

    @model_validator(mode="after")
    def _consistent(self) -> Job:
        if len(set(self.engines)) < len(self.engines):
            raise ValueError("an engine is listed twice")
        if REFERENCE not in self.engines:
            raise ValueError("engines need {recipe: bf16}: it is the baseline that the others are compared with")
        if fault := self.too_long(self.limits.max_seq_len or LENGTH):
            raise ValueError(fault)
        largest = max(batch for batch, _, _ in self.sweep.cells)
        if largest > self.limits.max_batch_size:
            raise ValueError(f"a sweep cell has batch {largest}, limits.max_batch_size is {self.limits.max_batch_size}")
        return self

    def too_long(self, limit: int) -> str:
        """What needs more than ``limit`` tokens of a sequence; empty where nothing does."""
        longest = max(isl + osl for _, isl, osl in self.sweep.cells)
        if longest > limit:
            return f"a sweep cell needs {longest} tokens, limits.max_seq_len is {limit}"
        window = self.evaluation.window
        return f"evaluation.window {window} is longer than limits.max_seq_len {limit}" if window > limit else ""


def load_job(path: Path) -> Job:
    """Read a job file. JobError names the key and what is wrong with its value."""
    if not path.is_file():
        raise JobError(f"there is no job file {path}", "Give a YAML file, such as examples/demo.yaml.")
    content = read_yaml(path, JobError, "Correct the file; it begins with `name: ...`.")
    try:
        return Job.model_validate(content)
    except ValidationError as error:
        raise JobError(*_first_fault(path, error)) from error


def _first_fault(path: Path, error: ValidationError) -> tuple[str, str]:
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"]) or "job"
    if first["type"] == "extra_forbidden":
        model: Any = Job
        for part in first["loc"][:-1]:
            field = getattr(model, "model_fields", {}).get(part) if isinstance(part, str) else None
            model = field.annotation if field is not None else model
        known = sorted(getattr(model, "model_fields", {}))
        return f"{path}: unknown key {place!r}", f"Known here: {', '.join(known)}." if known else "Remove it."
    return f"{path}: {place}: {fault_words(first)}", "Correct the job file."


def inside(name: str, job_folder: Path, home_folder: Path) -> Path:
    """The path a job names, in the job's folder or else in ``home_folder``; JobError when it leaves both."""
    if Path(name).is_absolute():
        candidates = [Path(name)]
    else:
        candidates = [job_folder / name, home_folder / name]
    for path in candidates:
        resolved = path.resolve()
        allowed = any(resolved.is_relative_to(root.resolve()) for root in (job_folder, home_folder))
        if not allowed:
            raise JobError(f"path {name!r} leaves the job's folder and home", "Use a path below one of them.")
        if resolved.exists():
            return resolved
    raise JobError(f"{name!r} is neither in {job_folder} nor in {home_folder}",
                   "Run `toolkit data prepare`, or correct the job file.")


def model_of(job: Job, job_folder: Path, home: Home) -> str | Path:
    """The model as a path where it is one, else as the hub name it must be."""
    if job.model.count("/") == 1 and not (job_folder / job.model).exists() and not (home.models / job.model).exists():
        return job.model
    return inside(job.model, job_folder, home.models)

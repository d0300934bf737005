"""Artifacts in words, and their faults: what ``inspect`` and ``verify`` print."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from calib.artifact import MANIFEST, Artifact
from toolkit.packing import check_bytes
from toolkit.refs import Ref

if TYPE_CHECKING:
    from rich.console import RenderableType

    from engines.engine import Engine
    from engines.plan import Plan


def describe(ref: Ref) -> tuple[dict[str, Any], list[RenderableType]]:
    """(document for --json, parts for people) of any REF."""
    if ref.kind in ("model", "quantized-checkpoint"):
        facts = _checkpoint_facts(ref)
    else:
        artifact = Artifact.open(ref.path)
        facts = {"kind": artifact.kind, "path": str(artifact.path), "digest": artifact.digest,
                 "created": artifact.manifest.created, "size_bytes": artifact.size_bytes,
                 "files": len(artifact.manifest.files), "parents": artifact.parents,
                 "versions": artifact.manifest.versions}
        if ref.kind == "engine":
            facts |= _engine_facts(ref)
        elif ref.kind == "prepared-engine":
            facts |= _prepared_facts(ref)
        else:
            facts["record"] = _outline(artifact.record)
    return facts, [_facts_table(facts)]


def _outline(record: dict[str, Any]) -> dict[str, Any]:
    """The record with long lists as their lengths: a report of a thousand items is not read in a terminal."""
    def short(value: Any) -> Any:
        if isinstance(value, list) and len(value) > 8:
            return f"{len(value)} entries"
        if isinstance(value, dict):
            return {key: short(inner) for key, inner in value.items()}
        return value if not isinstance(value, str) or len(value) < 400 else f"{value[:400]}..."
    return {key: short(value) for key, value in record.items()}


def _checkpoint_facts(ref: Ref) -> dict[str, Any]:
    from calib.checkpoint import QuantizedCheckpoint
    from calib.source import resolve_model

    found = QuantizedCheckpoint.open(resolve_model(ref.path))
    schemes = Counter(str(scheme) for scheme in found.schemes.values())
    facts = {"kind": ref.kind, "path": str(found.path), "digest": found.digest, "recipe": found.recipe,
             "architecture": (found.config.get("architectures") or ["unknown"])[0],
             "layers": found.config.get("num_hidden_layers"), "hidden_size": found.config.get("hidden_size"),
             "kv_cache": str(found.kv), "size_bytes": found.size_bytes, "source_grid": found.source_grid,
             "schemes": {scheme: f"{count} modules" for scheme, count in schemes.most_common()} or
             "every module unquantized"}
    if found.artifact is not None:
        facts |= {"created": found.artifact.manifest.created, "versions": found.artifact.manifest.versions,
                  "record": _outline(found.artifact.record)}
    return facts


def _engine_facts(ref: Ref) -> dict[str, Any]:
    from engines.engine import Engine

    engine = Engine.open(ref.path)
    return {"recipe": engine.recipe, "kv_cache": str(engine.kv), "kv_cache_held_in": _held(engine.plan),
            "device": engine.device, "emulated": engine.emulated,
            "checkpoint_digest": engine.checkpoint_digest, "source_grid": engine.source_grid,
            "limits": engine.plan.limits.model_dump(mode="json"), "memory": engine.plan.memory.model_dump(mode="json")}


def _prepared_facts(ref: Ref) -> dict[str, Any]:
    from engines.build.prepare import Prepared

    prepared = Prepared.open(ref.path)
    record = prepared.record
    return {"recipe": record.recipe, "target": record.target, "kv_cache": str(record.kv),
            "checkpoint_digest": prepared.artifact.parents[0], "source_grid": record.source_grid,
            "asked": record.spec.model_dump(mode="json")}


def _held(plan: Plan) -> str:
    """In what the cache lies: an unquantized one on a CPU lies in what the CPU computes in."""
    return str(plan.kv) if plan.kv.quantized or plan.device.runs_triton else "float32"


def _facts_table(facts: dict[str, Any]) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    from toolkit.report import words

    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True, vertical="top")
    table.add_column(overflow="fold")

    def add(name: str, value: Any, indent: int) -> None:
        title = "  " * indent + (name if indent else name.removesuffix("_bytes").replace("_", " "))
        if isinstance(value, dict):
            table.add_row(title, "")
            for key, inner in value.items():
                add(key, inner, indent + 1)
        else:
            sized = isinstance(value, int) and (name == "size_bytes" or value >= 10**6)
            written = (words.size(value) if sized else words.MISSING if value is None else
                       ("yes" if value else "no") if isinstance(value, bool) else
                       ", ".join(map(str, value)) if isinstance(value, list) else str(value))
            table.add_row(title, Text(written))
    for name, value in facts.items():
        add(name, value, 0)
    return table


def describe_plan(ref: Ref) -> tuple[dict[str, Any], list[RenderableType]]:
    """An engine's plan: the program after fusion, what each rewrite did, kernels, limits and memory."""
    from engines.engine import Engine

    engine = Engine.open(ref.path)
    return ({"digest": engine.digest, "plan": engine.plan.model_dump(mode="json")}, _plan_parts(engine))


def _plan_parts(engine: Engine) -> list[RenderableType]:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from toolkit.report import words

    plan = engine.plan
    fusions = Table(box=box.SIMPLE_HEAD, pad_edge=False, title="Fusions", title_justify="left")
    for name in type(plan.fusions[0]).model_fields if plan.fusions else ():
        fusions.add_column(name)
    for step in plan.fusions:
        fusions.add_row(*[str(value) for value in step.model_dump(mode="json").values()])
    kernels = Table(box=box.SIMPLE_HEAD, pad_edge=False, title="Kernels", title_justify="left")
    for name in ("op", "shape", "tokens", "operator", "config"):
        kernels.add_column(name, overflow="fold")
    for choice in sorted(plan.kernels, key=lambda choice: choice.op):  # stable: of one Op in the order of its entries
        up_to = "" if choice.max_tokens >= plan.limits.max_num_tokens else f"<= {choice.max_tokens}"
        kernels.add_row(choice.op, choice.shape, up_to, choice.impl, str(choice.config or ""))
    limits, memory = plan.limits, plan.memory
    return [Text.assemble((f"{engine.recipe} for {plan.device}", "bold")),
            Text(f"{plan.ops_unfused} operations before fusion, {len(plan.program.ops)} after; computes in "
                 f"{plan.compute_dtype}; KV cache {plan.kv}, held in {_held(plan)}"), fusions, kernels,
            Text(f"limits: {limits.max_batch_size} sequences of {limits.max_seq_len} tokens, {limits.max_num_tokens} "
                 f"tokens a step, {limits.num_blocks} KV blocks of {limits.block_size}"),
            Text(f"memory: weights {words.size(memory.weights)}, activations {words.size(memory.activations)}, "
                 f"KV cache up to {words.size(memory.kv_cache)} when every block is in use"),
            *(Text(f"note: {note}") for note in plan.notes)]


def faults_of(ref: Ref) -> list[str]:
    """Every fault of a checkpoint (anybody's) or an artifact; empty when all checks pass."""
    if ref.kind in ("model", "quantized-checkpoint"):
        from calib.verify import verify_checkpoint

        return [str(fault) for fault in verify_checkpoint(ref.path)]
    if not (ref.path / MANIFEST).is_file():
        return [f"{ref.path} has no {MANIFEST}"]
    if ref.packed is not None:  # what was unpacked of it once says nothing of the file today
        check_bytes(ref.packed)
    artifact = Artifact.open(ref.path)
    changed = [f"{name}: its bytes are not those that the manifest names" for name in artifact.verify()]
    return changed + _record_faults(artifact)


def _record_faults(artifact: Artifact) -> list[str]:
    """What keeps an artifact's record from being what its kind says, whatever its digest."""
    from pydantic import BaseModel, ValidationError

    from engines.build.prepare import PreparedRecord
    from engines.engine import EngineRecord
    from evals.fidelity import BaselineRecord
    from evals.report import EvalReport, LatencySweep, Verdict

    kinds: dict[str, type[BaseModel]] = {"engine": EngineRecord, "prepared-engine": PreparedRecord,
                                         "baseline": BaselineRecord, "eval-report": EvalReport,
                                         "latency-sweep": LatencySweep, "verdict": Verdict}
    if artifact.kind not in kinds:
        return []
    try:
        kinds[artifact.kind].model_validate(artifact.record)
    except ValidationError as error:
        first = error.errors()[0]
        return [f"{MANIFEST}: its record is no {artifact.kind}: {'.'.join(map(str, first['loc']))}: {first['msg']}"]
    return []

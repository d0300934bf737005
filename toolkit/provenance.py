"""What a release says about where it comes from, in the field's own shapes.

``provenance.json`` is an in-toto statement with a SLSA v1 predicate: subjects are all files of the release by sha256;
the build definition names what was asked; resolved dependencies are the digests that it was made from (checkpoint,
calibration set, data); run details hold versions, verdict, approval, and the head of the target's audit log before this
release, which ties the log's past to whoever signs the statement.

``.eval_results/*.yaml`` are the measured scores as the Hugging Face Hub reads them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import yaml

from evals.report import EvalReport
from toolkit.release import STATEMENT, ReleaseRecord
from toolkit.version import __version__

STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "https://slsa.dev/provenance/v1"
BUILD_TYPE = "urn:llm-quant-toolkit:quantize-build-judge:v1"


def statement(record: ReleaseRecord, files: Mapping[str, str], audit_head: str, engine_record: Mapping[str, Any],
              dependencies: Mapping[str, str], versions: Mapping[str, str]) -> dict[str, Any]:
    """``files``: path -> sha256; ``dependencies``: what it was made from -> digest."""
    verdict = record.verdict
    return {
        "_type": STATEMENT_TYPE,
        "subject": [{"name": name, "digest": {"sha256": hexed}} for name, hexed in sorted(files.items())],
        "predicateType": PREDICATE_TYPE,
        "predicate": {
            "buildDefinition": {
                "buildType": BUILD_TYPE,
                "externalParameters": {"recipe": record.row.recipe, "kvCache": record.row.kv_cache,
                                       "engine": dict(engine_record), "parts": record.parts},
                "resolvedDependencies": [{"name": name, "digest": {"sha256": digest}}
                                         for name, digest in sorted(dependencies.items())]},
            "runDetails": {
                "builder": {"id": f"urn:llm-quant-toolkit:{__version__}", "version": dict(versions)},
                "metadata": {"invocationId": record.engine_digest, "finishedOn": record.created,
                             "auditHead": audit_head},
                "verdict": {"word": record.word, "digest": record.verdict_digest,
                            "policy": verdict.policy if verdict else None,
                            "policySha256": verdict.policy_sha256 if verdict else None},
                "approval": record.approval.model_dump()}}}


def as_files(said: Mapping[str, Any]) -> dict[str, bytes]:
    """The statement as the file of a release."""
    return {STATEMENT: json.dumps(said, indent=1, sort_keys=True, ensure_ascii=False).encode() + b"\n"}


def eval_results(report: EvalReport | None, at: str) -> dict[str, str]:
    """``.eval_results/<task>.yaml`` for every task that was judged, and one for delta NLL."""
    if report is None:
        return {}
    found = {}
    harness = report.harness.get("lm_eval", "unknown")
    for task in sorted({item.task for item in report.items}):
        answers = [item.correct for item in report.items if item.task == task]
        found[f".eval_results/{task}.yaml"] = _result(
            task, "accuracy", sum(answers) / len(answers), at,
            f"{len(answers)} questions, data {report.data_digest[:12]}, lm-eval {harness}")
    if report.delta_nll is not None:
        delta = report.delta_nll
        found[".eval_results/delta_nll.yaml"] = _result(
            "texts", "delta_nll", delta.value, at, f"nats per token against the unquantized model, 95 % interval "
            f"[{delta.ci_low:.5f}, {delta.ci_high:.5f}], {delta.n} documents, data {report.data_digest[:12]}")
    return found


def _result(dataset: str, task: str, value: float, at: str, notes: str) -> str:
    return str(yaml.safe_dump([{"dataset": {"id": dataset, "task_id": task}, "value": round(value, 6), "date": at[:10],
                                "source": {"name": f"llm-quant-toolkit {__version__}"}, "notes": notes}],
                              sort_keys=False, allow_unicode=True, width=110))

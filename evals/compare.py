"""When two judgements may be compared at all.

A missing BOS has cost 60 points of arc_easy, another template 4: most "regressions" that were ever reported were two
different questions. So everything that shapes a prompt is in the report, and a difference in any of it is refused by
name before a single figure is computed.
"""

from __future__ import annotations

from collections.abc import Mapping

from evals.errors import ComparisonError
from evals.report import EvalReport, Target

_TARGET_FIELDS = {"tokenizer_digest": "tokenizer", "template_sha256": "chat template", "bos": "BOS rule"}


def refuse_unequal(baseline: EvalReport, target: Target, data_digest: str, harness: Mapping[str, str],
                   seed: int) -> None:
    """ComparisonError naming each thing in which a target's evaluation differs from the baseline's."""
    pairs: list[tuple[str, object, object]] = [
        (what, getattr(baseline.target, field), getattr(target, field)) for field, what in _TARGET_FIELDS.items()]
    pairs += [("data", baseline.data_digest, data_digest), ("seed", baseline.seed, seed)]
    pairs += [(f"harness {name}", baseline.harness.get(name), harness.get(name))
              for name in sorted({*baseline.harness, *harness})]
    _refuse([(what, old, new) for what, old, new in pairs if old != new], target.name)


def refuse_incomparable(baseline: EvalReport, candidate: EvalReport) -> None:
    """As ``refuse_unequal``, and the items themselves: the same questions, each with the very same token ids."""
    refuse_unequal(baseline, candidate.target, candidate.data_digest, candidate.harness, candidate.seed)
    prompts = {(item.task, item.id): item.prompt_sha256 for item in baseline.items}
    found = {(item.task, item.id): item.prompt_sha256 for item in candidate.items}
    lengths = {text.id: text.tokens for text in baseline.texts}
    scored = {text.id: text.tokens for text in candidate.texts}
    differ: list[tuple[str, object, object]] = []
    if set(prompts) != set(found):
        differ.append(("questions", f"{len(prompts)} questions", f"{len(found)}, {len(set(found) ^ set(prompts))} "
                       "of them not in both"))
    elif changed := [key for key in prompts if prompts[key] != found[key]]:
        differ.append((f"prompts of {len(changed)} questions", prompts[changed[0]], found[changed[0]]))
    if not set(scored) <= set(lengths) or (set(scored) != set(lengths) and not candidate.faults):
        differ.append(("texts", f"{len(lengths)} texts", f"{len(scored)}, {len(set(scored) ^ set(lengths))} of them "
                       "not in both"))
    elif any(lengths[name] != count for name, count in scored.items()):
        differ.append(("tokens of the same texts", sum(lengths.values()), sum(scored.values())))
    _refuse(differ, candidate.target.name)


def _refuse(differ: list[tuple[str, object, object]], name: str) -> None:
    if differ:
        what = "; ".join(f"{what}: {_short(old)} against {_short(new)}" for what, old, new in differ)
        raise ComparisonError(f"{name} may not be compared with this baseline: {what}",
                              "Judge both with the same tokenizer, template, data and settings.")


def _short(value: object) -> str:
    text = str(value)
    return text[:12] if len(text) == 64 else text

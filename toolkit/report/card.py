"""The model card of a release: what it is, what was measured, under which policy it passed, and where it came from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from evals.report import Row, Verdict
from evals.tradeoff import label
from toolkit.report import tables


def render(name: str, row: Row, verdict: Verdict, baseline: Row | None, licences: Mapping[str, str],
           limits: Sequence[tuple[str, str]], alias: str, versions: Mapping[str, str]) -> str:
    """The card as Markdown. ``limits`` and ``versions`` are facts of the engine; every text is escaped."""
    safe = tables.escape_markdown
    shown = [row] if baseline is None or baseline.engine_digest == row.engine_digest else [baseline, row]
    checks = "\n".join(f"| {safe(reason.check)} | {reason.word} | {safe(reason.found)} | {safe(reason.allowed)} |"
                       for reason in verdict.reasons)
    data = "\n".join(f"- {safe(what)}: {safe(licence)}" for what, licence in licences.items()) or "- none recorded"
    facts = "\n".join(f"- {safe(what)}: {safe(value)}" for what, value in limits)
    built = ", ".join(f"{safe(package)} {safe(version)}" for package, version in versions.items())
    notes = "\n".join(f"- {safe(line)}" for line in tables.caption(shown))
    return f"""---
library_name: llm-quant-toolkit
tags: [quantized, {row.recipe}]
---

# {safe(name)}, {safe(label(row))}

An inference engine for {safe(row.device)}, built from calibrated weights and released with the evidence beside it.

## Measured

{tables.markdown(shown)}
{notes}

## Verdict: {verdict.word}

{safe(verdict.reason)} (policy {safe(verdict.policy)}, sha256 `{verdict.policy_sha256[:16]}`)

| check | verdict | found | allowed |
|:--|:--|--:|--:|
{checks}

## Use

```
toolkit generate alias:{alias} -p "Hello"
```

The engine opens only on the device it was built for; elsewhere it says what it needs and how to rebuild it.

## Limits

{facts}

## Data and licences

{data}

## Provenance

- engine `{row.engine_digest}`
- checkpoint `{row.checkpoint_digest}`
- baseline of the verdict `{verdict.baseline_digest}`
- weights before quantization: {safe(row.source_grid) if row.source_grid else "as published by the model's authors"}
- built with {built}
"""

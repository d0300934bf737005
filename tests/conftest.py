"""Fixtures that several rooms' tests share: a run's rows as records, and a home whose store holds them.

Without a GPU, Triton's kernels run in its interpreter. The switch must be set before ``triton`` is imported anywhere in
the process, and one test process runs tests of many rooms: so it stands here, above everything.
"""

import hashlib
import os
import sys
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

sys.path.insert(0, str(Path(__file__).parent / "support"))  # what tests of several rooms import

from evals.report import Accuracy, Cell, Estimate, Row


def digest(text):
    return hashlib.sha256(text.encode()).hexdigest()


#: recipe, kv cache, delta NLL, half interval, accuracy, TPOT ms, size MB, verdict
FIGURES = [("bf16", "bf16", 0.0002, 0.0004, 0.371, 42.0, 272, "BASELINE"),
           ("fp8", "bf16", 0.0121, 0.0040, 0.367, 41.0, 140, "PASS"),
           ("int8", "bf16", 0.0144, 0.0050, 0.369, 19.5, 164, "PASS"),
           ("int4_awq", "bf16", 0.1483, 0.0250, 0.332, 17.0, 112, "FAIL"),
           ("int8", "fp8", 0.0191, 0.0060, 0.366, 20.5, 164, "INCONCLUSIVE")]


def make_row(recipe, kv_cache, delta, half, accuracy, tpot, megabytes, verdict):
    cells = [Cell(batch_size=batch, isl=64, osl=32, n=3, ttft_ms=4 * tpot, ttft_ms_spread=2.0,
                  tpot_ms=tpot * (1 + 0.2 * (batch - 1)), tpot_ms_spread=1.0, e2e_ms=36 * tpot,
                  out_tok_s=1000 * batch / tpot, total_tok_s=3000 * batch / tpot) for batch in (1, 8)]
    return Row(recipe=recipe, kv_cache=kv_cache, device="cpu test", emulated="fp8" in (recipe, kv_cache),
               engine_digest=digest(f"engine {recipe} {kv_cache}"),
               checkpoint_digest=digest(f"checkpoint {recipe} {kv_cache}"),
               source_grid="Q4_1 g32", size_bytes=megabytes * 10**6,
               accuracy=Accuracy(value=accuracy, ci_low=accuracy - .04, ci_high=accuracy + .04, n=240,
                                 tasks=["commonsenseqa"]),
               delta_nll=Estimate(value=delta, ci_low=delta - half, ci_high=delta + half, n=64), kl_mean=1.3 * delta,
               same_top1=1 - delta, flips=delta, ttft_ms=4 * tpot, tpot_ms=tpot, out_tok_s=1000 / tpot, batch_size=1,
               isl=64, osl=32, peak_memory_bytes=3 * megabytes * 10**6, verdict=verdict,
               verdict_reason=f"reason of {recipe} <b>{kv_cache}</b>", cells=cells)


@pytest.fixture(scope="session")
def report_rows():
    """Five engines: a baseline, two that pass, one that fails, one that is open."""
    return [make_row(*figures) for figures in FIGURES]


FACTS = {"model": "tiny", "model_digest": digest("model"), "device": "cpu test", "evaluation": "64 texts",
         "evaluation_digest": digest("data"), "calibration": "16 rows of 256 tokens", "policy": "demo",
         "policy_sha256": digest("policy"), "margin": 0.05, "seed": 0, "versions": {"torch": "2.13.0"},
         "licences": {"calibration texts.jsonl": "CC-BY-SA-3.0"}}


@pytest.fixture
def stored_home(tmp_path, report_rows):
    """A home whose store holds one finished run, ``demo-0123456789ab``, of job ``demo``."""
    from toolkit.home import Home
    from toolkit.store import RunStore, StoredRow

    home = Home(tmp_path / "home")
    deltas = [row.delta_nll.model_copy(update={"value": row.delta_nll.value + 0.0003}) for row in report_rows]
    with RunStore(home.store) as store:
        store.begin("demo-0123456789ab", "demo", FACTS)
        store.finish("demo-0123456789ab", [StoredRow(row, delta) for row, delta in
                                           zip(report_rows, deltas, strict=True)], home.reports / "demo.html")
    return home


@pytest.fixture
def unhurried(monkeypatch):
    """Other work on the machine holds the client of a load up, and a cell is marked for that. Tests of something else
    take this: every other mark stays, so a fault of a server is still one."""
    from evals import endpoint

    reasons = endpoint._invalid
    monkeypatch.setattr(endpoint, "_invalid", lambda *seen: reasons(*seen[:-1], 0.0))

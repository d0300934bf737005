"""vLLM beside us on the same card: its cells, put beside ours of the same shape.

Its archive and scripts lie in ``.peers`` (not part of the project): ``run_peers.sh OUT STAGE...`` writes one JSON line
a cell to OUT/peers.jsonl.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

from evals.bench import BenchCell

#: Our precision -> vLLM's stages (its own choice of kernels and, for four bits, the other one forced).
PEERS = {"bf16": ("bf16",), "fp8": ("fp8",), "int8": ("int8",),
         "int4_awq": ("awq", "awq:VLLM_DISABLED_KERNELS=MacheteLinearKernel;TAG=-marlin"),
         "int4_awq_a8": ("awq", "awq:VLLM_DISABLED_KERNELS=MacheteLinearKernel;TAG=-marlin")}
SCRIPT = Path(".peers/run_peers.sh")
Record = dict[str, float | str]


def run_peers(stages: Sequence[str], folder: Path) -> None:
    """Run vLLM's stages now; its cells are added to ``folder``/peers.jsonl. SystemExit without the archive."""
    if not SCRIPT.is_file():
        raise SystemExit(f"vLLM's figures need its archive and scripts: {SCRIPT} is not there")
    subprocess.run(["bash", str(SCRIPT), str(folder), *stages], check=True)


def read_peers(folder: Path) -> list[Record]:
    """The cells in ``folder``/peers.jsonl; none where it is not there."""
    path = folder / "peers.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def with_peers(cells: Sequence[BenchCell], records: Sequence[Record]) -> list[BenchCell]:
    """Each cell with the fastest peer's figure of the same shape; 16-bit caches only, as vLLM's is one."""
    found = []
    for cell in cells:
        words = dict(word.split("=") for word in cell.name.split() if "=" in word)
        same = [r for r in records if str(r["b"]) == words.get("batch") and str(r["isl"]) == words.get("isl")]
        key, best = {"decode": ("step_ms", min), "ttft": ("prefill_ms", min), "prefill": ("prefill_tok_s", max)}.get(
            cell.name.split()[0], ("", min))
        if not same or not key or words.get("kv") != "bf16":
            found.append(cell)
            continue
        record = best(same, key=lambda r: float(r[key]))
        found.append(cell.model_copy(update={"peer": float(record[key]), "peer_name": f"vllm 0.20.2 {record['tag']}"}))
    return found

"""Our server and transformers' own OpenAI server under the same loads, from one plan file, in one table."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time

import pytest

from toolkit import cli

pytest.importorskip("fastapi")
pytest.importorskip("openai")
pytestmark = pytest.mark.timeout(600)
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@contextlib.contextmanager
def started(command, port, log):
    """A server process, once somebody listens on its port."""
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env=ENVIRONMENT)
        try:
            for _ in range(1200):
                if process.poll() is not None:
                    raise RuntimeError(f"{command[2:4]} ended: {log.read_text()[-2000:]}")
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                    break
                time.sleep(0.2)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(30)


def test_one_plan_two_servers(tiny_home, tmp_path, capsys, unhurried):
    model, ports = tiny_home.models / "tiny", (free_port(), free_port())
    engine = str(tmp_path / "engine")
    assert cli.run_command(["build", str(model), "--out", engine, "--max-seq-len", "128", "--tune", "none", "--home",
                            str(tiny_home.path)]) == 0
    capsys.readouterr()
    ours = [sys.executable, "-m", "toolkit", "serve", engine, "--port", str(ports[0]), "--model-id", "tiny",
            "--home", str(tiny_home.path)]
    theirs = [sys.executable, "-m", "transformers.cli.transformers", "serve", str(model), "--device",
              "cpu", "--host", "127.0.0.1", "--port", str(ports[1])]
    with (started(ours, ports[0], tmp_path / "ours.log") as one,
          started(theirs, ports[1], tmp_path / "theirs.log") as other):
        plan = tmp_path / "plan.yaml"
        plan.write_text(json.dumps({
            "name": "side-by-side", "tokenizer": "tiny", "repeats": 2, "warmup": 1, "timeout_s": 120,
            "loads": [{"isl": 12, "osl": 6, "concurrency": [1, 2], "requests": 5}],
            "targets": [{"name": "toolkit", "url": one, "model": "tiny", "prompts": "text"},
                        {"name": "transformers", "url": other, "model": str(model), "prompts": "text",
                         "ignore_eos": False}]}))
        common = ["--home", str(tiny_home.path)]
        code, out = cli.run_command(["sweep", "--plan", str(plan), "--json", *common]), capsys.readouterr().out
        assert code == 0, out
        found = json.loads(out)["sweeps"]
        assert cli.run_command(["sweep", "--plan", str(plan), *common]) == 0
        table = capsys.readouterr().out
    assert [sweep["target"]["name"] for sweep in found] == ["toolkit", "transformers"]
    assert [cell["invalid"] for cell in found[0]["cells"]] == [None, None]
    for sweep in found:
        for run in sweep["loads"]:
            assert (run["completed"] + run["failed"], run["isl"]) == (4, 12.0), run
            # an untrained model may end at once; that server does not know ignore_eos, and the cell says what happened
            assert set(run["failures"]) <= ({"empty"} if sweep is found[1] else set()), run
        assert all(cell["ttft_ms"] > 0 and cell["out_tok_s"] > 0 for cell in sweep["cells"])
    assert [cell["osl"] for cell in found[0]["cells"]] == [6, 6]
    assert table.index("toolkit") < table.index("transformers")

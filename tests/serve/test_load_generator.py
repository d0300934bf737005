"""A public load generator (Locust) drives the server; its report parses and has no failures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def test_locust_reports_no_failures(server) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "locust", "--locustfile", str(Path(__file__).with_name("locustfile.py")), "--headless",
         "--users", "8", "--spawn-rate", "8", "--run-time", "4s", "--host", server.url, "--json",
         "--exit-code-on-error", "1"], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(done.stdout)
    assert {entry["name"] for entry in report} == {"/v1/completions", "/v1/chat/completions"}
    assert sum(entry["num_requests"] for entry in report) > 16
    assert all(entry["num_failures"] == 0 for entry in report)
    assert server.metric("toolkit_requests_running") == 0

"""One tiny engine, and servers on it that the tests drive over real sockets with real clients."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "engines"))  # the tiny models' builder lies there

from tiny_models import tiny_llama

from calib.checkpoint import QuantizedCheckpoint
from engines.build.builder import build
from engines.plan import EngineSpec

#: A template in the way of Hermes and Qwen, which takes tools.
TEMPLATE = """{% if tools %}<|special_1|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Call like <tool_call>{"name": ..., "arguments": ...}</tool_call><|special_2|>
{% endif %}{% for m in messages %}<|special_1|>{{ m.role }}
{{ m.content }}{% if m.tool_calls %}{% for c in m.tool_calls %}<tool_call>
{{ {"name": c.function.name, "arguments": c.function.arguments} | tojson }}
</tool_call>{% endfor %}{% endif %}<|special_2|>
{% endfor %}{% if add_generation_prompt %}<|special_1|>assistant
{% endif %}"""


class Server:
    """``toolkit serve`` in a process of its own."""

    def __init__(self, engine: Path, home: Path, *options: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "toolkit", "serve", str(engine), "--home", str(home), "--port", "0", "--json",
             "--model-id", "tiny", *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"})
        self.log: list[str] = []
        self._reader = threading.Thread(target=self._read_log, daemon=True)
        self._reader.start()
        text = ""
        while (line := self.process.stdout.readline()):
            text += line
            if line.rstrip() == "}":
                break
        if not text:
            self.process.wait(10)
            raise RuntimeError(f"the server did not start: {self.process.returncode} {''.join(self.log)[-3000:]}")
        self.info = json.loads(text)
        self.url = self.info.get("url", "")

    def _read_log(self) -> None:
        for line in self.process.stderr:
            self.log.append(line)

    @property
    def engine_process(self) -> int:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return int(children[0])

    def metric(self, name: str, labels: str = "") -> float:
        text = httpx.get(f"{self.url}/metrics", timeout=10).text
        found = re.search(rf"^{name}{re.escape(labels)} (\S+)$", text, re.MULTILINE)
        assert found, (name, labels, text)
        return float(found[1])

    def stop(self, patience: float = 30) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(patience)


@pytest.fixture(scope="session")
def tiny_engine(tmp_path_factory) -> Path:
    work = tmp_path_factory.mktemp("served")
    folder = tiny_llama(work / "model", max_position_embeddings=2048)
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {
        "chat_template": TEMPLATE, "tokenizer_class": "PreTrainedTokenizerFast"}))
    spec = EngineSpec(tune="none", max_seq_len=1024, max_batch_size=8, max_num_tokens=128)
    build(QuantizedCheckpoint.open(folder), spec, work / "engine")
    return work / "engine"


@pytest.fixture(scope="session")
def serve(tiny_engine, tmp_path_factory):
    """Start servers; all are stopped at the end."""
    started: list[Server] = []

    def start(*options: str) -> Server:
        started.append(Server(tiny_engine, tmp_path_factory.mktemp("home"), *options))
        return started[-1]
    yield start
    for server in started:
        if server.process.poll() is None:
            server.stop()


@pytest.fixture(scope="session")
def server(serve) -> Server:
    return serve()


@pytest.fixture
def http(server):
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client

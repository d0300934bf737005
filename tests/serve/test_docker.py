"""The Dockerfiles: linted by rules of hadolint's kind, and their commands run (no image is built here)."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
KNOWN = {"FROM", "WORKDIR", "COPY", "RUN", "ENV", "USER", "EXPOSE", "STOPSIGNAL", "HEALTHCHECK", "ENTRYPOINT", "CMD"}


def instructions(path: Path) -> list[tuple[str, str]]:
    """(instruction, its arguments on one line), comments left out."""
    text = re.sub(r"\\\n\s*", " ", "\n".join(line for line in path.read_text().splitlines()
                                              if not line.startswith("#")))
    return [tuple(line.split(None, 1)) for line in text.splitlines() if line.strip()]


def one(path: Path, name: str) -> str:
    [found] = [arguments for instruction, arguments in instructions(path) if instruction == name]
    return found


def faults(path: Path) -> list[str]:
    """What a linter would say."""
    found, steps = [], instructions(path)
    found += [f"unknown instruction {name}" for name, _ in steps if name not in KNOWN]
    stages: set[str] = set()
    for name, arguments in steps:
        words = arguments.split()
        if name == "FROM":
            if words[0] not in stages and not re.search(r":[^:]*\d+\.\d+", words[0]):
                found.append(f"{words[0]} is not pinned")
            stages |= {words[2]} if words[1:2] == ["AS"] else set()
        if name == "RUN":
            if "apt-get install" in arguments and not ("--no-install-recommends" in arguments and "--yes" in arguments
                                                       and "rm -rf /var/lib/apt/lists/*" in arguments):
                found.append("apt-get leaves its lists or asks")
            if "pip install" in arguments and "--no-cache-dir" not in arguments:
                found.append("pip keeps its cache")
            if re.search(r"\b(sudo|curl|wget)\b|\bcd ", arguments) or ";" in arguments:
                found.append(f"RUN {arguments[:40]}: a failing part would go unseen, or a tool is missing")
        if name == "COPY" and not words[0].startswith("--from"):
            found += [f"{source} is not there" for source in words[:-1] if not (ROOT / source).exists()]
        if name == "WORKDIR" and not arguments.startswith("/"):
            found.append("WORKDIR is relative")
        if name in ("CMD", "ENTRYPOINT") and not arguments.startswith("["):
            found.append(f"{name} is not in exec form: signals would not arrive")
        if name == "ENV" and re.search(r"(KEY|TOKEN|SECRET|PASSWORD)=", arguments):
            found.append("a secret is in the image")
    users = [arguments for name, arguments in steps if name == "USER"]
    if not users or users[-1] in ("root", "0"):
        found.append("it runs as root")
    names = [name for name, _ in steps]
    found += [f"no {name}" for name in ("HEALTHCHECK", "STOPSIGNAL", "EXPOSE") if name not in names]
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_nothing_to_lint(path: Path) -> None:
    assert faults(path) == []
    assert (path.parent / f"{path.name}.dockerignore").is_file()


def test_there_is_one_for_each_kind_of_device() -> None:
    assert [path.stem for path in FILES] == ["cpu", "cuda"]


def test_the_linter_sees_faults(tmp_path: Path) -> None:
    path = tmp_path / "Dockerfile"
    path.write_text("FROM python:latest\nRUN apt-get install gcc; pip install x\nCOPY nowhere /\nADD x y\n"
                    "ENV API_KEY=1\nWORKDIR here\nCMD toolkit serve\n")
    assert len(faults(path)) >= 10


def test_the_ignore_file_lets_in_what_is_copied() -> None:
    for path in FILES:
        allowed = (path.parent / f"{path.name}.dockerignore").read_text().split()
        copied = {source for name, arguments in instructions(path) if name == "COPY"
                  and not arguments.startswith("--from") for source in arguments.split()[:-1]}
        assert all(f"!{source.removeprefix('./')}" in allowed for source in copied)
        assert allowed[0] == "*"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_its_command_serves_is_healthy_and_stops_gracefully(path: Path, serve, tmp_path: Path) -> None:
    """The image's own arguments, but for the engine's place, the keys' place and the port."""
    entry, command = json.loads(one(path, "ENTRYPOINT")), json.loads(one(path, "CMD"))
    assert (entry, command[:2]) == (["toolkit"], ["serve", "/engine"])
    keys = tmp_path / "keys"
    keys.write_text("someone:0123456789abcdef\n")
    options = [str(keys) if word == "/run/secrets/api-keys" else word for word in command[2:]]
    at = options.index("--port")
    assert options[at + 1] == one(path, "EXPOSE")
    server = serve(*options[:at], *options[at + 2:])
    port = server.url.rsplit(":", 1)[1]
    check = json.loads(one(path, "HEALTHCHECK").partition("CMD ")[2])
    probe = [sys.executable if word == "python" else word.replace("8000", port) for word in check]
    assert subprocess.run(probe, check=False).returncode == 0
    found = httpx.get(f"http://127.0.0.1:{port}/v1/models", headers={"Authorization": "Bearer 0123456789abcdef",
                                                                     "Host": "engine.example"})
    assert found.status_code == 200
    assert httpx.get(f"http://127.0.0.1:{port}/v1/models").status_code == 401
    assert one(path, "STOPSIGNAL") == "SIGTERM"
    assert server.stop() == 0
    assert subprocess.run(probe, check=False, stderr=subprocess.DEVNULL).returncode != 0


def test_the_commands_in_the_comments_name_their_own_file() -> None:
    for path in FILES:
        builds = [line for line in path.read_text().splitlines() if "docker build" in line]
        assert [shlex.split(line.lstrip("# "))[3] for line in builds] == [f"docker/{path.name}"]

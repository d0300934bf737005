"""``build`` killed with SIGKILL at each of its stages: started again it writes the same engine and leaves no scraps."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from toolkit import cli

ROOT = Path(__file__).parents[2]
BUILD = ("--max-seq-len", "128", "--max-batch-size", "4")
#: A build whose process is killed where argument 1 says: at a stage's event, or when the manifest is about to be made.
CHILD = """
import os, signal, sys
import calib.artifact_writer
from toolkit import cli, console

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

where, seen = sys.argv[1], console.Watcher.__call__
if where == "manifest":
    calib.artifact_writer.digest_of = die
else:
    console.Watcher.__call__ = lambda watch, at: (die if f"{at.stage} {at.done:g}" == where else seen)(watch, at)
sys.exit(cli.run_command(sys.argv[2:]))
"""


@pytest.fixture(scope="module")
def unkilled(tiny_home, tmp_path_factory):
    """(build's arguments but for --out, the digest of an engine that was built in one go)."""
    place = tmp_path_factory.mktemp("unkilled")
    home = ("--home", str(tiny_home.path))
    assert cli.run_command(["quantize", "tiny", "--recipe", "int8", "--out", str(place / "ckpt"), "--rows", "4",
                            "--length", "64", *home]) == 0
    arguments = ["build", str(place / "ckpt"), *BUILD, *home]
    assert cli.run_command([*arguments, "--out", str(place / "engine")]) == 0
    return arguments, digest(place / "engine")


def digest(engine):
    return json.loads((engine / "manifest.json").read_text())["digest"]


@pytest.mark.parametrize("where", ["tune 1", "pack weights 0", "pack weights 1", "manifest"])
def test_a_killed_build_is_built_again_to_the_same_digest(unkilled, tmp_path, where):
    arguments, expected = unkilled
    out = tmp_path / "engine"
    process = subprocess.run([sys.executable, "-c", CHILD, where, *arguments, "--out", str(out)], cwd=ROOT,
                             env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert process.returncode == -signal.SIGKILL, process.stderr
    assert not out.exists(), "a half-written engine is never at its place"
    assert cli.run_command([*arguments, "--out", str(out)]) == 0
    assert digest(out) == expected
    assert cli.run_command(["verify", str(out), *arguments[-2:]]) == 0
    assert not list(tmp_path.glob(".engine.partial")), "what the killed one left is cleared away"

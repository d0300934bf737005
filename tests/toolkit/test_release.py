"""Releases: only with a PASS for exactly this engine, whole or not at all, and one flipped byte is found."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from calib.artifact import Artifact, ArtifactWriter
from evals.report import Verdict
from toolkit import release
from toolkit.errors import DamagedReleaseError, ReleaseError
from toolkit.store import RunStore


def engine(folder, content=b"weights"):
    with ArtifactWriter(folder, "engine", parents=["c" * 64]) as writer:
        writer.record = {"recipe": "int8"}
        (writer.folder / "weights").mkdir()
        (writer.folder / "weights" / "layer0.bin").write_bytes(content * 1000)
        writer.evidence("timings.json").write_text("{}")
    return writer.artifact


def judged(store, folder, digest, word="PASS"):
    found = Verdict(word=word, reason="ΔNLL +0.0144 is below 0.05", reasons=[], candidate_digest=digest,
                    baseline_digest="b" * 64, policy="demo", policy_sha256="a" * 64)
    with ArtifactWriter(folder, "verdict") as writer:
        writer.record = found.model_dump(mode="json")
    store.add_verdict(writer.artifact, found)


@pytest.fixture
def shop(tmp_path, report_rows):
    with RunStore(tmp_path / "toolkit.db") as store:
        made = engine(tmp_path / "engine")
        row = report_rows[2].model_copy(update={"engine_digest": made.digest})

        def publish(path=made.path, alias="production", **changes):
            settings = {"evidence": {}, "row": row, "card": "# card\n", "name": "tiny", "licences": {}} | changes
            return release.publish(store, path, tmp_path / "out", alias, **settings)
        yield store, made, publish, tmp_path


def test_without_a_verdict_nothing_is_released(shop):
    _, _, publish, tmp_path = shop
    with pytest.raises(ReleaseError, match="has no verdict"):
        publish()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("word", ["FAIL", "INCONCLUSIVE", "ANOMALOUS"])
def test_only_pass_is_released(shop, word):
    store, made, publish, tmp_path = shop
    judged(store, tmp_path / "v", made.digest, word)
    with pytest.raises(ReleaseError, match=word):
        publish()
    assert not (tmp_path / "out").exists()


def test_a_verdict_on_another_engine_does_not_count(shop):
    store, _, publish, tmp_path = shop
    judged(store, tmp_path / "v", engine(tmp_path / "other", b"others").digest)
    with pytest.raises(ReleaseError, match="has no verdict"):
        publish()


def test_a_release_is_a_whole_copy_with_card_and_evidence(shop):
    store, made, publish, tmp_path = shop
    judged(store, tmp_path / "v", made.digest)
    done = publish()
    assert Artifact.open(done.path / "engine", "engine").digest == made.digest
    assert not (done.path / "engine" / "weights" / "layer0.bin").samefile(made.path / "weights" / "layer0.bin")
    assert (done.path / "README.md").read_text() == "# card\n"
    assert Artifact.open(done.path / "evidence" / "verdict", "verdict").record["word"] == "PASS"
    assert release.engine_of_alias(tmp_path / "out", "production") == done.path / "engine"
    [listed] = release.list_releases(tmp_path / "out")
    assert (listed.digest, listed.aliases, listed.verdict) == (done.digest, ("production",), "PASS")
    assert release.verify_releases(tmp_path / "out").faults == []


def test_publishing_again_makes_no_second_copy(shop):
    store, made, publish, tmp_path = shop
    judged(store, tmp_path / "v", made.digest)
    first = publish()
    second = publish(alias="canary")
    assert (first.digest, first.path) == (second.digest, second.path)
    assert release.list_releases(tmp_path / "out")[0].aliases == ("canary", "production")


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


@pytest.mark.parametrize("name", ["engine/weights/layer0.bin", "engine/timings.json", "engine/manifest.json",
                                  "README.md", "evidence/verdict/manifest.json", "manifest.json"])
def test_one_flipped_byte_is_found(shop, name):
    store, made, publish, tmp_path = shop
    judged(store, tmp_path / "v", made.digest)
    flip(publish().path / name)
    assert release.verify_releases(tmp_path / "out").faults != []


def test_a_changed_log_and_a_moved_alias_are_found(shop):
    store, made, publish, tmp_path = shop
    judged(store, tmp_path / "v", made.digest)
    publish()
    alias = tmp_path / "out" / "aliases" / "production.json"
    whole = alias.read_text()
    alias.write_text(json.dumps({"digest": "d" * 64, "folder": "elsewhere"}))
    assert "alias production" in release.verify_releases(tmp_path / "out").faults[0]
    alias.write_text(whole)
    flip(tmp_path / "out" / "audit.jsonl")
    assert "audit.jsonl" in release.verify_releases(tmp_path / "out").faults[0]


def test_an_alias_cannot_lead_out_of_its_folder(shop):
    store, made, publish, tmp_path = shop
    judged(store, tmp_path / "v", made.digest)
    done = publish()
    alias = tmp_path / "out" / "aliases" / "production.json"
    alias.write_text(json.dumps({"digest": done.digest, "folder": f"../../{done.path.name}"}))
    assert release.engine_of_alias(tmp_path / "out", "production").is_relative_to(tmp_path / "out" / "releases")


@pytest.mark.parametrize("alias", ["", "../x", "Prod", "a b", "x" * 65])
def test_a_bad_alias_is_refused(shop, alias):
    _, _, publish, _ = shop
    with pytest.raises(ReleaseError, match="not a name"):
        publish(alias=alias)


def test_a_publish_killed_half_way_leaves_the_old_alias_serving(shop):
    """Killed for real, while the second engine is being copied; started again, it ends."""
    store, made, publish, tmp_path = shop
    judged(store, tmp_path / "v", made.digest)
    old = publish()
    newer = engine(tmp_path / "newer", b"other weights")
    judged(store, tmp_path / "v2", newer.digest)
    script = f"""
import os, signal, shutil
from pathlib import Path
from evals.report import Row
from toolkit import release
from toolkit.store import RunStore
copy = shutil.copytree
def half(*a, **k):
    copy(*a, **k)
    os.kill(os.getpid(), signal.SIGKILL)
shutil.copytree = half
row = Row.model_validate_json(Path({str(tmp_path / 'row.json')!r}).read_text())
with RunStore(Path({str(tmp_path / 'toolkit.db')!r})) as store:
    release.publish(store, Path({str(newer.path)!r}), Path({str(tmp_path / 'out')!r}), "production", evidence={{}},
                    row=row, card="x", name="tiny", licences={{}})
"""
    row = release.ReleaseRecord.model_validate(Artifact.open(old.path).record).row
    (tmp_path / "row.json").write_text(row.model_dump_json())
    root = str(Path(release.__file__).parent.parent)
    killed = subprocess.run([sys.executable, "-c", script], env=os.environ | {"PYTHONPATH": root})
    assert killed.returncode == -signal.SIGKILL
    assert release.engine_of_alias(tmp_path / "out", "production") == old.path / "engine"
    assert release.verify_releases(tmp_path / "out").faults == []
    new = publish(newer.path)
    assert release.engine_of_alias(tmp_path / "out", "production") == new.path / "engine"
    assert release.verify_releases(tmp_path / "out").faults == []


def test_the_copy_is_read_back(shop, monkeypatch):
    store, made, publish, tmp_path = shop
    judged(store, tmp_path / "v", made.digest)
    done = publish()
    flip(done.path / "engine" / "weights" / "layer0.bin")
    with pytest.raises(DamagedReleaseError, match="differs"):
        publish()

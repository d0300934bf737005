"""Releases: only with a PASS for exactly this engine, whole or not at all, and one flipped byte is found."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from calib.artifact import Artifact, sha256_hex
from calib.artifact_writer import ArtifactWriter
from calib.errors import UnknownNameError
from evals.report import Verdict
from toolkit import approving, history, oci, provenance, release, unpacking
from toolkit.errors import DamagedReleaseError, ReleaseError, UsageError
from toolkit.store import RunStore
from toolkit.target import FolderTarget, open_target
from toolkit.verifying import verify_releases

AT = "2026-11-29T20:00:00+00:00"


def engine(folder, content=b"weights"):
    with ArtifactWriter(folder, "engine", parents=["c" * 64]) as writer:
        writer.record = {"recipe": "int8"}
        (writer.folder / "weights").mkdir()
        (writer.folder / "weights" / "layer0.bin").write_bytes(content * 1000)
        writer.evidence("timings.json").write_text("{}")
    return writer.artifact


def judged(store, folder, digest, word="PASS", policy="a"):
    found = Verdict(word=word, reason="ΔNLL +0.0144 is below 0.05", reasons=[], candidate_digest=digest,
                    baseline_digest="b" * 64, policy="demo", policy_sha256=policy * 64)
    with ArtifactWriter(folder, "verdict") as writer:
        writer.record = found.model_dump(mode="json")
    store.add_verdict(writer.artifact, found)
    return store.verdict_of(digest)


def bundle_of(made, verdict, row, override=None, reason="passed"):
    record = release.ReleaseRecord(
        name="tiny", engine_digest=made.digest, checkpoint_digest="c" * 64, verdict_digest=verdict.digest,
        verdict=verdict.verdict, row=row, licences={}, parts=["engine"],
        approval=release.Approval(who="ada", at=AT, reason=reason, override=override), created=AT, publisher="ada")

    def said(files, head):
        return provenance.as_files(provenance.statement(record, files, head, {"device": "cpu"}, {}, {}))

    return release.Bundle(record, {"engine": made, "evidence/verdict": Artifact.open(verdict.path, "verdict")},
                          {"README.md": "# card\n"}, said)


@pytest.fixture
def shop(tmp_path, report_rows):
    """(store, engine, publish, folder); ``publish`` judges PASS first unless told otherwise."""
    with RunStore(tmp_path / "toolkit.db") as store:
        made = engine(tmp_path / "engine")
        count = iter(range(100))

        def publish(artifact=made, alias="production", word="PASS", target=None, **changes):
            verdict = store.verdict_of(artifact.digest) or judged(store, tmp_path / f"v{next(count)}", artifact.digest,
                                                                  word)
            row = report_rows[2].model_copy(update={"engine_digest": artifact.digest})
            return release.publish(store, target or FolderTarget(tmp_path / "out"),
                                   bundle_of(artifact, verdict, row, **changes), alias)
        yield store, made, publish, tmp_path


def target_of(tmp_path):
    return FolderTarget(tmp_path / "out")


def test_without_a_verdict_nothing_may_be_released(shop):
    store, made, _, _ = shop
    for refused in (lambda: approving.passing_verdict(store, made.digest, None),
                    lambda: approving.approval_of(store, made.digest)):
        with pytest.raises(ReleaseError, match="has no verdict") as found:
            refused()
        assert found.value.exit_code == 2


@pytest.mark.parametrize(("word", "code"), [("FAIL", 1), ("INCONCLUSIVE", 3), ("ANOMALOUS", 3)])
def test_only_pass_may_be_released_and_a_refusal_has_the_verdicts_exit_code(shop, word, code):
    store, made, _, tmp_path = shop
    judged(store, tmp_path / "v", made.digest, word)
    for refused in (lambda: approving.passing_verdict(store, made.digest, None),
                    lambda: approving.approve(store, made.digest, "ada", "looks good"),
                    lambda: approving.approval_of(store, made.digest)):
        with pytest.raises(ReleaseError, match=word) as found:
            refused()
        assert found.value.exit_code == code


def test_a_pass_under_another_policy_or_on_another_engine_does_not_count(shop):
    store, made, _, tmp_path = shop
    judged(store, tmp_path / "v", engine(tmp_path / "other", b"others").digest)
    judged(store, tmp_path / "w", made.digest, policy="d")
    with pytest.raises(ReleaseError, match="no verdict under this policy"):
        approving.passing_verdict(store, made.digest, "a" * 64)
    assert approving.passing_verdict(store, made.digest, "d" * 64).verdict.word == "PASS"


def test_an_approval_is_for_one_engine_and_one_verdict(shop):
    store, made, _, folder = shop
    with pytest.raises(ReleaseError, match="has no verdict"):
        approving.approve(store, made.digest, "ada", "looks good")
    first = judged(store, folder / "v1", made.digest)
    with pytest.raises(ReleaseError, match="is not approved"):
        approving.approval_of(store, made.digest)
    for who, why in (("", "x"), ("ada", " ")):
        with pytest.raises(ReleaseError, match="a name and a reason"):
            approving.approve(store, made.digest, who, why)
    given = approving.approve(store, made.digest, "ada", "looks good")
    assert approving.approval_of(store, made.digest) == given
    assert (given.verdict, given.word, given.policy, given.override) == (first.digest, "PASS", "demo", False)
    judged(store, folder / "v2", made.digest, policy="d")
    with pytest.raises(ReleaseError, match="on another verdict than its newest"):
        approving.approval_of(store, made.digest)
    assert approving.approval_of(store, made.digest, "a" * 64) == given, "under the policy it was given on it holds"
    approving.approve(store, made.digest, "grace", "again")
    assert approving.approval_of(store, made.digest).who == "grace"
    approving.withdraw(store, made.digest, "ada", "recalled")
    with pytest.raises(ReleaseError, match="is not approved"):
        approving.approval_of(store, made.digest)
    with pytest.raises(ReleaseError, match="is not approved"):
        approving.withdraw(store, made.digest, "ada", "twice")
    assert [entry.action for entry in store.audit()] == ["approve", "approve", "withdraw"]


def test_without_a_pass_an_approval_needs_an_override_and_is_marked(shop):
    store, made, _, folder = shop
    judged(store, folder / "v", made.digest, word="FAIL")
    with pytest.raises(ReleaseError, match="has the verdict FAIL"):
        approving.approve(store, made.digest, "ada", "in a hurry")
    given = approving.approve(store, made.digest, "ada", "a demo", override=True)
    assert (given.word, given.override) == ("FAIL", True)
    judged(store, folder / "v2", made.digest)
    with pytest.raises(ReleaseError, match="nothing to override"):
        approving.approval_of(store, made.digest)


def test_what_was_approved_on_a_day(shop, monkeypatch):
    from toolkit import audit
    from toolkit.history import parse_moment

    store, made, _, folder = shop
    judged(store, folder / "v", made.digest)
    for day, act in ((1, approving.approve), (3, approving.withdraw), (5, approving.approve)):
        monkeypatch.setattr(audit, "now", lambda day=day: f"2026-01-0{day}T12:00:00+00:00")
        act(store, made.digest, "ada", f"day {day}")
    held = [approving.standing(store.audit(), parse_moment(f"2026-01-0{day}")) for day in range(1, 6)]
    assert [one[made.digest].reason if one else None for one in held] == ["day 1", "day 1", None, None, "day 5"]
    assert approving.standing(store.audit(), parse_moment("2025-12-31")) == {}


def test_a_release_is_a_whole_copy_in_an_oci_layout(shop):
    _, made, publish, tmp_path = shop
    done = publish()
    out = tmp_path / "out"
    assert json.loads((out / "oci-layout").read_text()) == {"imageLayoutVersion": "1.0.0"}
    index = json.loads((out / "index.json").read_text())
    assert index["schemaVersion"] == 2
    named = [entry for entry in index["manifests"] if entry.get("annotations", {}).get(oci.REF_NAME) == "production"]
    assert [entry["digest"] for entry in named] == [f"sha256:{done.digest}"]
    manifest = json.loads((out / "blobs" / "sha256" / done.digest).read_text())
    assert manifest["mediaType"] == oci.MANIFEST_TYPE
    assert {layer["annotations"][oci.TITLE] for layer in manifest["layers"]} == {
        "engine/manifest.json", "engine/timings.json", "engine/weights/layer0.bin", "evidence/verdict/manifest.json",
        "README.md", "provenance.json"}
    for blob in (out / "blobs" / "sha256").iterdir():
        assert sha256_hex(blob.read_bytes()) == blob.name
        assert not blob.samefile(made.path / "weights" / "layer0.bin")
    outcome = verify_releases(target_of(tmp_path))
    assert (outcome.faults, outcome.notes, outcome.releases, outcome.files) == ([], [], 1, 6)


def test_the_statement_names_every_file_and_the_logs_head(shop):
    _, _, publish, tmp_path = shop
    publish()
    done = publish(engine(tmp_path / "newer", b"newer"))
    target = target_of(tmp_path)
    said = json.loads(target.read(done.manifest.files()["provenance.json"].blob))
    assert said["_type"] == "https://in-toto.io/Statement/v1"
    subjects = {subject["name"] for subject in said["subject"]}
    assert subjects == set(done.manifest.files()) - {"provenance.json"}
    log = release.read_audit(target)
    assert [entry.action for entry in log] == ["publish", "alias", "publish", "alias"]
    assert said["predicate"]["runDetails"]["metadata"]["auditHead"] == log[1].hash
    assert said["predicate"]["runDetails"]["approval"]["who"] == "ada"


def test_what_an_alias_names_is_unpacked_once_and_is_the_engine(shop):
    _, made, publish, tmp_path = shop
    publish()
    place = unpacking.engine_of_alias(tmp_path / "out", "production", tmp_path / "cache")
    assert Artifact.open(place, "engine").digest == made.digest
    assert Artifact.open(place, "engine").verify() == []
    before = (place / "weights" / "layer0.bin").stat().st_mtime_ns
    assert unpacking.engine_of_alias(tmp_path / "out", "production", tmp_path / "cache") == place
    assert (place / "weights" / "layer0.bin").stat().st_mtime_ns == before
    with pytest.raises(UnknownNameError, match="productoin"):
        unpacking.engine_of_alias(tmp_path / "out", "productoin", tmp_path / "cache")


def test_publishing_again_makes_no_second_release(shop):
    _, _, publish, tmp_path = shop
    first, second = publish(), publish(alias="canary")
    assert first.digest == second.digest
    [listed] = release.list_releases(target_of(tmp_path))
    assert listed.aliases == ("canary", "production")


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


@pytest.mark.parametrize("name", ["engine/weights/layer0.bin", "engine/timings.json", "engine/manifest.json",
                                  "README.md", "evidence/verdict/manifest.json", "provenance.json", "manifest",
                                  "config"])
def test_one_flipped_byte_is_found(shop, name):
    _, _, publish, tmp_path = shop
    done = publish()
    files = done.manifest.files()
    blob = {"manifest": f"{oci.BLOBS}/{done.digest}", "config": done.manifest.config.blob}.get(name) or files[name].blob
    flip(tmp_path / "out" / blob)
    faults = verify_releases(target_of(tmp_path)).faults
    assert faults
    assert name not in files or any(name in fault for fault in faults)


def test_a_changed_log_a_moved_alias_and_a_cut_log_are_found(shop):
    _, _, publish, tmp_path = shop
    old, target = publish(), target_of(tmp_path)
    publish(engine(tmp_path / "newer", b"newer"))
    index, log = (tmp_path / "out" / name for name in ("index.json", "audit.jsonl"))
    whole = index.read_bytes()
    found = release.read_index(target)
    index.write_bytes(found.pointing("production", found.releases()[old.digest]).to_bytes())
    assert "alias production" in verify_releases(target).faults[0]
    index.write_bytes(whole)
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join(lines[:1]))
    assert any("has lost the entry" in fault for fault in verify_releases(target).faults)
    log.write_bytes(b"".join(lines))
    assert verify_releases(target).faults == []
    flip(log)
    assert any("audit.jsonl" in fault for fault in verify_releases(target).faults)


def test_an_index_that_says_one_thing_twice_is_refused(shop):
    _, _, publish, tmp_path = shop
    publish()
    index = tmp_path / "out" / "index.json"
    index.write_bytes(index.read_bytes().replace(b"{", b'{"manifests": [], ', 1))
    with pytest.raises(DamagedReleaseError, match=r"index\.json in .*: the name 'manifests' occurs twice"):
        release.read_index(target_of(tmp_path))


def test_an_override_is_marked_everywhere(shop):
    _, _, publish, tmp_path = shop
    done = publish(word="FAIL", override="customer asked, on record")
    assert done.record.word == "FAIL (override)"
    assert release.list_releases(target_of(tmp_path))[0].as_dict()["verdict"] == "FAIL (override)"
    [entry] = [entry for entry in release.read_audit(target_of(tmp_path)) if entry.action == "publish"]
    assert entry.detail["override"] == "customer asked, on record"
    assert entry.detail["verdict_word"] == "FAIL (override)"


def test_rollback_moves_the_alias_and_history_says_who_when_why(shop, monkeypatch):
    store, _, publish, tmp_path = shop
    moments = iter(f"2026-11-2{day}T12:00:00+00:00" for day in range(1, 9))
    monkeypatch.setattr("toolkit.audit.now", lambda: next(moments))
    first = publish()
    second = publish(engine(tmp_path / "newer", b"newer"))
    target = target_of(tmp_path)
    back = history.roll_back(store, target, "production", "grace", "p99 doubled")
    assert back.digest == first.digest
    assert release.release_of_alias(target, "production").digest == first.digest
    log = release.read_audit(target)
    last = history.moves(log, "production")[-1]
    assert (last.action, last.who, last.reason, last.before) == ("rollback", "grace", "p99 doubled", second.digest)
    held = history.as_of(log, history.parse_moment(history.moves(log)[1].at))
    assert held["production"].digest == second.digest
    assert history.as_of(log, history.parse_moment("2026-11-01")) == {}
    assert verify_releases(target).faults == []
    assert store.aliases("production")[0].digest == first.digest


def test_a_rollback_needs_a_reason_a_past_and_a_whole_release(shop):
    store, _, publish, tmp_path = shop
    first, target = publish(), target_of(tmp_path)
    with pytest.raises(ReleaseError, match="never named another"):
        history.roll_back(store, target, "production", "ada", "why not")
    with pytest.raises(ReleaseError, match="needs a reason"):
        history.roll_back(store, target, "production", "ada", " ")
    with pytest.raises(UsageError, match="no date"):
        history.parse_moment("yesterday")
    second = publish(engine(tmp_path / "newer", b"newer"))
    flip(tmp_path / "out" / first.manifest.files()["engine/weights/layer0.bin"].blob)
    with pytest.raises(DamagedReleaseError, match="layer0"):
        history.roll_back(store, target, "production", "ada", "p99")
    assert release.release_of_alias(target, "production").digest == second.digest


@pytest.mark.parametrize("alias", ["", "../x", "Prod", "a b", "x" * 65])
def test_a_bad_alias_is_refused(shop, alias):
    _, _, publish, _ = shop
    with pytest.raises(ReleaseError, match="not a name"):
        publish(alias=alias)


@pytest.mark.parametrize("killed_in", ["put", "move_alias"])
def test_a_publish_killed_half_way_leaves_the_old_alias_serving_and_resumes(shop, killed_in):
    """Killed for real: while blobs are being copied, and right before the alias moves."""
    store, _, publish, tmp_path = shop
    old = publish()
    newer = engine(tmp_path / "newer", b"other weights")
    verdict = judged(store, tmp_path / "v-new", newer.digest)
    (tmp_path / "row.json").write_text(old.record.row.model_dump_json())
    script = f"""
import os, signal, sys
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_release import bundle_of
from calib.artifact import Artifact
from evals.report import Row
from toolkit import release
from toolkit.store import RunStore
from toolkit.target import FolderTarget
if {killed_in!r} == "put":
    put, count = FolderTarget.put, []
    def half(self, source, name):
        put(self, source, name)
        count.append(name)
        if len(count) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
    FolderTarget.put = half
else:
    release.move_alias = lambda *a: os.kill(os.getpid(), signal.SIGKILL)
with RunStore(Path({str(tmp_path / 'toolkit.db')!r})) as store:
    made = Artifact.open({str(newer.path)!r}, "engine")
    row = Row.model_validate_json(Path({str(tmp_path / 'row.json')!r}).read_text())
    release.publish(store, FolderTarget(Path({str(tmp_path / 'out')!r})),
                    bundle_of(made, store.verdict_of(made.digest), row), "production")
"""
    root = str(Path(release.__file__).parent.parent)
    killed = subprocess.run([sys.executable, "-c", script], env=os.environ | {"PYTHONPATH": root})
    assert killed.returncode == -signal.SIGKILL
    target = target_of(tmp_path)
    assert release.release_of_alias(target, "production").digest == old.digest
    assert verify_releases(target).faults == []
    copied = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out" / oci.BLOBS).iterdir()}
    new = publish(newer)
    assert verdict.digest == new.record.verdict_digest
    assert release.release_of_alias(target, "production").digest == new.digest
    assert verify_releases(target).faults == []
    again = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out" / oci.BLOBS).iterdir()}
    assert all(again[name] == stamp for name, stamp in copied.items()), "what was there was not copied again"


def test_the_copy_is_read_back(shop):
    _, _, publish, tmp_path = shop
    done = publish()
    flip(tmp_path / "out" / done.manifest.files()["engine/weights/layer0.bin"].blob)
    with pytest.raises(DamagedReleaseError, match="differs"):
        publish()


def test_any_fsspec_store_is_a_target(shop):
    _, made, publish, tmp_path = shop
    target = open_target(f"memory://{tmp_path.name}/releases")
    done = publish(target=target)
    assert verify_releases(target).faults == []
    place = unpacking.engine_of_alias(target.name, "production", tmp_path / "cache")
    assert Artifact.open(place, "engine").digest == made.digest
    target.write(done.manifest.files()["README.md"].blob, b"# another card\n")
    assert any("README.md" in fault for fault in verify_releases(target).faults)


def test_two_publishers_do_not_meet(tmp_path):
    for target in (FolderTarget(tmp_path / "out"), open_target(f"memory://{tmp_path.name}/lock")):
        with target.lock():
            if isinstance(target, FolderTarget):
                with pytest.raises(ReleaseError, match="another process"), target.lock():
                    pass
            else:
                held = json.loads(target.read(".lock"))
                target.write(".lock", json.dumps(held | {"host": "elsewhere"}).encode())
                with pytest.raises(ReleaseError, match="elsewhere is publishing"), target.lock():
                    pass
                target.write(".lock", json.dumps(held | {"host": "elsewhere", "at": 0}).encode())
                with target.lock():
                    pass
                target.write(".lock", b"{}")


def test_a_release_cannot_write_outside_its_folder(shop):
    _, _, publish, tmp_path = shop
    done = publish()
    layers = [layer.model_copy(update={"annotations": {oci.TITLE: "../../evil"}}) for layer in done.manifest.layers[:1]]
    changed = release.Release(done.digest, done.record, done.manifest.model_copy(update={"layers": layers}), AT)
    with pytest.raises(DamagedReleaseError, match="leaves its release"):
        unpacking.unpack(target_of(tmp_path), changed, tmp_path / "place")
    assert not (tmp_path / "evil").exists()

"""Artifacts: content digests, strict opening, atomic writing, evidence outside the digest."""

import json
import os
import subprocess
import sys

import pytest

from calib.artifact import MANIFEST, Artifact, canonical_json, digest_of, file_sha256, sha256_hex
from calib.artifact_writer import ArtifactWriter
from calib.errors import ArtifactError, UnknownNameError
from calib.progress import Progress, silent
from calib.scheme import BF16, Grid, PerGroup, PerToken, Scheme


def write(path, *, content=b"data", evidence=b"log", record=None, parents=(), replace=False):
    with ArtifactWriter(path, "verdict", 1, parents, replace=replace) as writer:
        (writer.folder / "deep").mkdir()
        (writer.folder / "deep" / "file.bin").write_bytes(content)
        writer.evidence("log.txt").write_bytes(evidence)
        writer.record = record or {"a": 1}
    return Artifact.open(path, "verdict", 1)


def test_the_digest_is_what_the_contract_says(tmp_path):
    made = write(tmp_path / "a", parents=["p" * 64])
    inner = sha256_hex(bytes.fromhex(sha256_hex(b"data")))
    content = {"kind": "verdict", "format": 1, "parents": ["p" * 64], "record": {"a": 1},
               "files": {"deep/file.bin": {"sha256": inner, "bytes": 4}}}
    assert made.digest == sha256_hex(canonical_json(content))
    assert json.loads((tmp_path / "a" / MANIFEST).read_text())["files"]["log.txt"]["evidence"] is True


def test_evidence_does_not_change_the_digest_content_does(tmp_path):
    digests = [write(tmp_path / name, **options).digest for name, options in {
        "a": {}, "b": {"evidence": b"later"}, "c": {"content": b"other"}, "d": {"record": {"a": 2}}}.items()]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3


def test_files_are_hashed_in_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr("calib.artifact.CHUNK", 4)
    (tmp_path / "f").write_bytes(b"abcdefgh" + b"ij")
    joined = b"".join(bytes.fromhex(sha256_hex(chunk)) for chunk in (b"abcd", b"efgh", b"ij"))
    assert file_sha256(tmp_path / "f") == sha256_hex(joined)


def rewrite(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@pytest.mark.parametrize(("damage", "what"), [
    (lambda p: (p / "deep/file.bin").write_bytes(b"dat"), "3 bytes"),
    (lambda p: (p / "deep/file.bin").unlink(), "missing"),
    (lambda p: (p / "new").write_bytes(b""), "does not list"),
    (lambda p: os.symlink("log.txt", p / "link"), "is a link"), (lambda p: os.mkfifo(p / "pipe"), "no plain file"),
    (lambda p: (p / MANIFEST).write_text("{}"), "damaged"),
    (lambda p: rewrite(p / MANIFEST, '"a": 1', '"a": 2'), "says digest"),
    (lambda p: rewrite(p / MANIFEST, "deep/file.bin", "../file.bin"), "leaves")])
def test_a_changed_artifact_does_not_open(tmp_path, damage, what):
    write(tmp_path / "a")
    damage(tmp_path / "a")
    with pytest.raises(ArtifactError, match=what):
        Artifact.open(tmp_path / "a")


def test_a_manifest_that_says_one_thing_twice_does_not_open(tmp_path):
    place = write(tmp_path / "a").path / MANIFEST
    said = place.read_text().rstrip()
    place.write_text(said[:-1] + ', "kind": "engine"}')
    with pytest.raises(ArtifactError, match=r"manifest\.json: the name 'kind' occurs twice, with .* and 'engine'"):
        Artifact.open(tmp_path / "a")
    place.write_text(said.replace('"parents"', '"parent"'))
    with pytest.raises(ArtifactError, match=r"manifest\.json is damaged: parents: is missing"):
        Artifact.open(tmp_path / "a")


def test_kind_and_format_must_match_and_verify_rereads(tmp_path):
    made = write(tmp_path / "a")
    with pytest.raises(ArtifactError, match="not a engine"):
        Artifact.open(tmp_path / "a", "engine")
    with pytest.raises(ArtifactError, match="format 1"):
        Artifact.open(tmp_path / "a", "verdict", 2)
    assert made.verify() == []
    (tmp_path / "a" / "deep/file.bin").write_bytes(b"dato")
    assert Artifact.open(tmp_path / "a").verify() == ["deep/file.bin"]


def test_a_failing_writer_leaves_nothing_and_an_occupied_place_is_refused(tmp_path):
    with pytest.raises(ArtifactError, match=r"No such file .*nothing"), ArtifactWriter(tmp_path / "a", "verdict") as w:
        (w.folder / "half").write_bytes((tmp_path / "nothing").read_bytes())
    with pytest.raises(ArtifactError, match="No space"), ArtifactWriter(tmp_path / "a", "verdict"):
        raise OSError(28, "No space left on device")
    assert [path.name for path in tmp_path.iterdir()] == [".a.lock"]
    first = write(tmp_path / "a")
    with pytest.raises(ArtifactError, match="already exists"):
        write(tmp_path / "a")
    assert write(tmp_path / "a", content=b"new", replace=True).digest != first.digest
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(ArtifactError, match="already exists"):
        write(tmp_path / "mine", replace=True)


def test_a_disk_that_fills_up_under_safetensors_is_said_in_words(tmp_path):
    """A limit on the size of files, in a process of its own: the writer is Rust, and its error no OSError."""
    code = ("import resource, signal, sys, torch\nfrom pathlib import Path\nfrom safetensors.torch import save_file\n"
            "from calib.artifact_writer import ArtifactWriter\nfrom calib.errors import ArtifactError\n"
            "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\nresource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
            "try:\n    with ArtifactWriter(Path(sys.argv[1]), 'engine', 1) as writer:\n"
            "        save_file({'a': torch.zeros(4096)}, writer.folder / 'a')\n"
            "except ArtifactError as error:\n    print(error.message, '|', error.hint)\n")
    said = subprocess.run([sys.executable, "-c", code, str(tmp_path / "out")], capture_output=True, text=True,
                          check=True)
    assert "cannot write" in said.stdout
    assert "File too large" in said.stdout
    assert "Free disk space" in said.stdout
    assert not (tmp_path / "out").exists()


def test_two_writers_of_one_place(tmp_path):
    with ArtifactWriter(tmp_path / "a", "verdict"), pytest.raises(ArtifactError, match="another process"):
        write(tmp_path / "a")


@pytest.mark.parametrize("make", [
    lambda: Grid(dtype="bf16", dynamic=True), lambda: Grid(dtype="fp8_e4m3", symmetric=False),
    lambda: Scheme(weight=Grid(dtype="int8", dynamic=True)), lambda: Scheme(activation=BF16),
    lambda: Grid(dtype="int3"), lambda: Grid(dtype="int8", zero=1), lambda: PerGroup(size=0)])
def test_grids_and_schemes_that_make_no_sense_are_refused(make):
    with pytest.raises(ValueError):
        make()


def test_schemes_survive_json_and_speak_plainly():
    scheme = Scheme(weight=Grid(dtype="int4", granularity=PerGroup(size=64), symmetric=False),
                    activation=Grid(dtype="int8", granularity=PerToken(), dynamic=True), pre_quant_scale=True)
    assert Scheme.model_validate_json(scheme.model_dump_json()) == scheme
    assert str(scheme) == "W int4 g64 asym · A int8 token dynamic · KV bf16"
    assert Scheme.model_validate_json(scheme.model_dump_json()).weight.granularity.size == 64


def test_unknown_names_and_progress():
    error = UnknownNameError("recipe", "fp9", ["fp8", "int8"])
    assert str(error) == "unknown recipe 'fp9'\nDid you mean 'fp8'? Known: fp8, int8."
    assert digest_of("verdict", 1, [], {}, {}) == digest_of("verdict", 1, [], {}, {})
    silent(Progress("stage", 1, None))

"""An engine as one file: the same bytes each time, opened only when every byte is what its manifest says."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from calib.artifact import MANIFEST, Artifact
from calib.artifact_writer import ArtifactWriter
from calib.errors import ArtifactError
from engines.engine import Engine
from toolkit import cli, zip_layout
from toolkit.describe import faults_of
from toolkit.packing import opened, pack, read_manifest, unpack
from toolkit.refs import Ref

ROOMS = {"weights/rank0/a.safetensors": bytes(range(256)) * 40, "tokenizer/tokenizer.json": b"{}", "empty": b""}


@pytest.fixture
def artifact(tmp_path: Path) -> Artifact:
    with ArtifactWriter(tmp_path / "engine", "engine", 1, ["0" * 64]) as writer:
        writer.record = {"a": 1}
        for name, data in ROOMS.items():
            (writer.folder / name).parent.mkdir(parents=True, exist_ok=True)
            (writer.folder / name).write_bytes(data)
        writer.evidence("timings.json").write_text("{}")
    assert writer.artifact is not None
    return writer.artifact


@pytest.fixture
def packed(artifact: Artifact, tmp_path: Path) -> Path:
    return pack(artifact, tmp_path / "one.engine")


def test_the_way_there_and_back(artifact: Artifact, packed: Path, tmp_path: Path) -> None:
    assert read_manifest(packed) == artifact.manifest
    back = unpack(packed, tmp_path / "back")
    assert back.manifest == artifact.manifest
    assert back.verify() == []
    assert {name: back.file(name).read_bytes() for name in ROOMS} == ROOMS


def test_the_same_engine_gives_the_same_bytes(artifact: Artifact, packed: Path, tmp_path: Path) -> None:
    for path in artifact.path.rglob("*"):
        path.touch()
        path.chmod(0o700)
    again = pack(artifact, tmp_path / "two.engine")
    assert hashlib.sha256(again.read_bytes()).digest() == hashlib.sha256(packed.read_bytes()).digest()
    assert zipfile.ZipFile(packed).namelist() == [MANIFEST, *sorted([*ROOMS, "timings.json"])]


def test_it_is_unpacked_once_under_its_digest(artifact: Artifact, packed: Path, tmp_path: Path) -> None:
    first = opened(packed, tmp_path / "cache")
    inode = first.file("empty").stat().st_ino
    assert first.path.name == artifact.digest[:32]
    assert opened(packed, tmp_path / "cache").file("empty").stat().st_ino == inode


def test_a_damaged_file_does_not_pass_for_the_sound_one_that_was_unpacked_before(
        artifact: Artifact, packed: Path, tmp_path: Path) -> None:
    cache, data, found = tmp_path / "cache", packed.read_bytes(), packed.stat()
    opened(packed, cache)
    at = data.index(ROOMS["weights/rank0/a.safetensors"]) + 5000
    copy = tmp_path / "copy.engine"
    copy.write_bytes(data[:at] + b"\xff" + data[at + 1:])
    for bad in (copy, packed):
        bad.write_bytes(data[:at] + b"\xff" + data[at + 1:])
        os.utime(bad, ns=(found.st_atime_ns, found.st_mtime_ns))
        with pytest.raises(ArtifactError, match=r"a\.safetensors"):
            opened(bad, cache)
    packed.write_bytes(data)
    assert opened(packed, cache).digest == artifact.digest
    with pytest.raises(ArtifactError, match=r"a\.safetensors"):
        faults_of(Ref("copy", "engine", artifact.path, copy))
    assert not any("safetensors" in fault for fault in faults_of(Ref("one", "engine", artifact.path, packed)))


def test_a_changed_folder_is_not_packed(artifact: Artifact, tmp_path: Path) -> None:
    place = artifact.path / "weights/rank0/a.safetensors"
    place.write_bytes(b"\x01" + place.read_bytes()[1:])
    with pytest.raises(ArtifactError, match="was changed after it was made"):
        pack(artifact, tmp_path / "one.engine")
    assert not (tmp_path / "one.engine").exists()


def test_nothing_is_overwritten(artifact: Artifact, packed: Path, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="already exists"):
        pack(artifact, packed)
    with pytest.raises(ArtifactError, match="already exists"):
        unpack(packed, tmp_path)


def rewritten(packed: Path, out: Path, change: Callable[[list[tuple[zipfile.ZipInfo, bytes]]], object]) -> Path:
    """The archive with its members changed."""
    with zipfile.ZipFile(packed) as archive:
        members = [(member, archive.read(member)) for member in archive.infolist()]
    change(members)
    with zipfile.ZipFile(out, "w") as archive:
        for member, data in members:
            archive.writestr(member, data, compress_type=member.compress_type)
    return out


def renamed(old: str, new: str) -> Callable[[list[tuple[zipfile.ZipInfo, bytes]]], None]:
    """A member under another name, in the manifest too."""
    def change(members: list[tuple[zipfile.ZipInfo, bytes]]) -> None:
        for at, (member, data) in enumerate(members):
            if member.filename == MANIFEST:
                document = json.loads(data)
                document["files"][new] = document["files"].pop(old)
                members[at] = (member, json.dumps(document).encode())
            elif member.filename == old:
                members[at] = (zipfile.ZipInfo(new), data)
                members[at][0].external_attr = member.external_attr
        members[1:] = sorted(members[1:], key=lambda one: one[0].filename)
    return change


def other_bytes(members: list[tuple[zipfile.ZipInfo, bytes]]) -> None:
    at = next(at for at, (member, _) in enumerate(members) if member.filename.endswith(".safetensors"))
    members[at] = (members[at][0], bytes(len(members[at][1])))


def as_link(members: list[tuple[zipfile.ZipInfo, bytes]]) -> None:
    members[-1][0].external_attr = (stat.S_IFLNK | 0o777) << 16


def squeezed(members: list[tuple[zipfile.ZipInfo, bytes]]) -> None:
    members[-1][0].compress_type = zipfile.ZIP_DEFLATED


@pytest.mark.parametrize(("change", "words"), [
    (other_bytes, "was changed after it was packed"), (as_link, "no plain file"), (squeezed, "is compressed"),
    (renamed("empty", "../empty"), "leaves its artifact"), (renamed("empty", "/tmp/empty"), "leaves its artifact"),
    (renamed("empty", "a\\..\\empty"), "leaves its artifact"), (lambda members: members.pop(), "does not hold what"),
    (lambda members: members.pop(0), f"holds no {MANIFEST}"),
    (lambda members: members.append((zipfile.ZipInfo("extra.py"), b"1")), "does not hold what its manifest lists"),
    (lambda members: members.__setitem__(0, (members[0][0], b"{")), "is not JSON"),
    (renamed("empty", "other"), "its content gives")], ids=[
        "bytes", "link", "compressed", "above", "absolute", "backslash", "member missing", "manifest missing", "extra",
        "manifest broken", "other name"])
def test_what_is_not_as_it_should_be_is_refused_and_leaves_nothing(packed: Path, tmp_path: Path, change, words: str
                                                                   ) -> None:
    bad = rewritten(packed, tmp_path / "bad.engine", change)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ArtifactError, match=words):
        unpack(bad, tmp_path / "out")
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("cut", [10, 3000, -30])
def test_a_truncated_file_is_refused(packed: Path, tmp_path: Path, cut: int) -> None:
    packed.write_bytes(packed.read_bytes()[:cut])
    with pytest.raises(ArtifactError, match="no packed engine"):
        unpack(packed, tmp_path / "out")


def refused(data: bytes, tmp_path: Path) -> str:
    """What is said about a file of these bytes; nothing of it stays."""
    bad = tmp_path / "bad.engine"
    bad.write_bytes(data)
    with pytest.raises(ArtifactError) as error:
        unpack(bad, tmp_path / "out")
    assert error.value.hint
    assert not (tmp_path / "out").exists()
    return error.value.message


@pytest.mark.parametrize("more", [b"x", b"\0" * 1000, b"PK\x05\x06", b"PK\x05\x06" + bytes(18), b"PK\x06\x07" * 30])
def test_bytes_behind_the_end_are_refused(packed: Path, tmp_path: Path, more: bytes) -> None:
    words = refused(packed.read_bytes() + more, tmp_path)
    if more[:1] != b"P":
        assert words.endswith(f"is not as it was packed: {len(more):,} bytes behind its end record")
    with pytest.raises(ArtifactError):
        read_manifest(tmp_path / "bad.engine")


def test_bytes_before_and_between_are_refused(packed: Path, tmp_path: Path) -> None:
    whole = packed.read_bytes()
    refused(b"PK\x03\x04" + whole, tmp_path)
    with zipfile.ZipFile(packed) as archive:
        start = archive.start_dir
    moved = bytearray(whole[:start] + b"hidden" + whole[start:])
    moved[-6:-2] = (start + 6).to_bytes(4, "little")
    assert "6 bytes between the members and the directory" in refused(bytes(moved), tmp_path)
    with zipfile.ZipFile(packed, "a") as archive:
        archive.comment = b"said beside"
    assert "its end record" in refused(packed.read_bytes(), tmp_path)


@pytest.mark.timeout(300)
def test_a_flipped_bit_anywhere_is_refused(tmp_path: Path) -> None:
    with ArtifactWriter(tmp_path / "engine", "engine", 1, []) as writer:
        (writer.folder / "a").write_bytes(b"weights")
    assert writer.artifact is not None
    whole = pack(writer.artifact, tmp_path / "small.engine").read_bytes()
    for at in range(len(whole)):
        for bits in (0x01, 0x20, 0xFF):
            refused(whole[:at] + bytes([whole[at] ^ bits]) + whole[at + 1:], tmp_path)
    for cut in range(len(whole)):
        refused(whole[:cut], tmp_path)
    assert unpack(tmp_path / "small.engine", tmp_path / "out").digest == writer.artifact.digest


def test_sizes_of_64_bits_are_read_back_as_strictly(artifact: Artifact, tmp_path: Path,
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 100)  # what 2 GiB are otherwise
    monkeypatch.setattr(zip_layout, "WIDE_ABOVE", 100)
    packed = pack(artifact, tmp_path / "wide.engine")
    assert b"PK\x06\x06" in packed.read_bytes()
    assert unpack(packed, tmp_path / "back").digest == artifact.digest
    refused(packed.read_bytes() + b"x", tmp_path)


def test_a_name_twice_in_the_manifest_is_refused(packed: Path, tmp_path: Path) -> None:
    def doubled(members: list[tuple[zipfile.ZipInfo, bytes]]) -> None:
        data = members[0][1].rstrip()
        members[0] = (members[0][0], data[:-1] + b',"kind":"engine"}')
    with pytest.raises(ArtifactError, match=r"manifest\.json in .*: the name 'kind' occurs twice"):
        unpack(rewritten(packed, tmp_path / "bad.engine", doubled), tmp_path / "out")


def test_members_that_share_bytes_are_refused(packed: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(packed) as archive:
        members = archive.infolist()
    large = max(members, key=lambda member: member.file_size)
    with zipfile.ZipFile(packed, "a") as archive:
        for number in range(3):  # further entries of the directory that point at the same bytes
            twin = zipfile.ZipInfo(f"twin{number}", (1980, 1, 1, 0, 0, 0))
            twin.header_offset = large.header_offset
            twin.file_size = twin.compress_size = large.file_size
            twin.CRC, twin.create_system = large.CRC, 3
            archive.filelist.append(twin)
            archive.NameToInfo[twin.filename] = twin
        archive._didModify = True
    with pytest.raises(ArtifactError, match="more bytes than it has"):
        unpack(packed, tmp_path / "out")


@pytest.mark.timeout(600)
def test_every_verb_takes_the_file(tiny_home, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def call(*arguments: object) -> str:
        code = cli.run_command([*map(str, arguments), "--home", str(tiny_home.path)])
        shown = capsys.readouterr()
        assert code == 0, shown.err
        return shown.out

    folder, file = tmp_path / "folder", tmp_path / "tiny.engine"
    call("build", "tiny", "--out", folder, "--max-seq-len", 64, "--tune", "none")
    assert json.loads(call("pack", folder, "-o", file, "--json"))["digest"] == Engine.open(folder).digest
    asked = ("-p", "river town", "--max-tokens", 6, "--json")
    assert json.loads(call("generate", file, *asked)) == json.loads(call("generate", folder, *asked))
    assert "every check passed" in call("verify", file)
    call("unpack", file, "--out", tmp_path / "back")
    assert Engine.open(tmp_path / "back").digest == Engine.open(folder).digest

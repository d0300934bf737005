"""Releases beyond a folder: an S3 server on this machine, signatures with a real key, and the Hub's face."""

import hashlib
import socket
import threading
from types import SimpleNamespace

import pytest

from calib.artifact import Artifact
from toolkit import history, hub, release, signing, unpacking
from toolkit.errors import DamagedReleaseError, ReleaseError
from toolkit.provenance import as_files
from toolkit.store import RunStore
from toolkit.target import FolderTarget, open_target
from toolkit.verifying import verify_releases

from .test_release import bundle_of, engine, judged  # type: ignore[import-not-found]


@pytest.fixture
def made(tmp_path, report_rows):
    """(store, engine, its bundle)."""
    with RunStore(tmp_path / "toolkit.db") as store:
        artifact = engine(tmp_path / "engine")
        verdict = judged(store, tmp_path / "v", artifact.digest)
        yield store, artifact, bundle_of(artifact, verdict, report_rows[2])


@pytest.fixture
def bucket(monkeypatch):
    """A bucket on moto's S3 server, reached through fsspec like any other."""
    pytest.importorskip("s3fs")
    server = pytest.importorskip("moto.server")
    from werkzeug.serving import make_server

    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    serving = make_server("127.0.0.1", port, server.DomainDispatcherApplication(server.create_backend_app),
                          threaded=True)
    thread = threading.Thread(target=serving.serve_forever, daemon=True)
    thread.start()
    for name, value in (("AWS_ACCESS_KEY_ID", "test"), ("AWS_SECRET_ACCESS_KEY", "test"),
                        ("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}"), ("AWS_DEFAULT_REGION", "us-east-1")):
        monkeypatch.setenv(name, value)
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()
    s3fs.S3FileSystem().mkdir("models")
    yield "s3://models/team/releases"
    s3fs.S3FileSystem.clear_instance_cache()
    serving.shutdown()
    thread.join(timeout=10)


def test_an_s3_bucket_holds_releases(made, bucket, tmp_path, report_rows):
    store, artifact, bundle = made
    target = open_target(bucket)
    first = release.publish(store, target, bundle, "production")
    newer = engine(tmp_path / "newer", b"newer")
    second = release.publish(store, target, bundle_of(newer, judged(store, tmp_path / "w", newer.digest),
                                                      report_rows[2]), "production")
    outcome = verify_releases(target)
    assert (outcome.faults, outcome.releases) == ([], 2)
    assert target.read(".lock") is None
    assert Artifact.open(unpacking.engine_of_alias(bucket, "production", tmp_path / "cache")).digest == newer.digest
    history.roll_back(store, target, "production", "ada", "slower")
    assert Artifact.open(unpacking.engine_of_alias(bucket, "production", tmp_path / "cache")).digest == artifact.digest
    assert release.release_of_alias(target, "production").digest == first.digest
    blob = second.manifest.files()["engine/weights/layer0.bin"].blob
    target.write(blob, b"x" * target.size(blob))
    assert any("layer0.bin" in fault for fault in verify_releases(target).faults)


@pytest.fixture
def keys(tmp_path):
    pytest.importorskip("model_signing")
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    pairs = []
    for name in ("ours", "theirs"):
        key = ec.generate_private_key(ec.SECP256R1())
        private, public = tmp_path / f"{name}.pem", tmp_path / f"{name}.pub"
        private.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8,
                                              serialization.NoEncryption()))
        public.write_bytes(key.public_key().public_bytes(serialization.Encoding.PEM,
                                                         serialization.PublicFormat.SubjectPublicKeyInfo))
        pairs.append((private, public))
    return pairs


def test_a_signature_holds_for_its_key_and_its_statement_only(made, keys, tmp_path):
    store, _, bundle = made
    (private, public), (_, other) = keys
    said = bundle.statement

    def signed(files, head):
        written = said(files, head)
        return written | signing.sign_statement(written, private)

    target = FolderTarget(tmp_path / "out")
    done = release.publish(store, target, release.Bundle(bundle.record, bundle.artifacts, bundle.texts, signed), "a")
    assert verify_releases(target).faults == []
    assert signing.check_signature(target, done, public) is None
    assert "does not hold" in signing.check_signature(target, done, other)
    statement = done.manifest.files()["provenance.json"].blob
    target.write(statement, target.read(statement).replace(b'"ada"', b'"eve"'))
    assert "does not hold" in signing.check_signature(target, done, public)


def test_an_unsigned_release_says_so_and_a_wrong_key_cannot_sign(made, keys, tmp_path):
    store, _, bundle = made
    target = FolderTarget(tmp_path / "out")
    done = release.publish(store, target, bundle, "a")
    assert "is not signed" in signing.check_signature(target, done, keys[0][1])
    (tmp_path / "bad.pem").write_text("no key")
    with pytest.raises(ReleaseError, match="cannot sign"):
        signing.sign_statement(as_files({}), tmp_path / "bad.pem")


class LocalHub:
    """The Hub's face over a folder: commits are copies, large files are known by sha256, small ones by git's hash."""

    def __init__(self, root, damage=None):
        self.root, self.damage, self.tags, self.calls = root, damage, {}, []

    def create_repo(self, repo_id, *, private, exist_ok):
        assert private
        self.calls.append("create_repo")

    def upload_folder(self, *, repo_id, folder_path, commit_message, delete_patterns):
        self.calls.append("upload_folder")
        self.files = {path.relative_to(folder_path).as_posix(): path.read_bytes()
                      for path in folder_path.rglob("*") if path.is_file()}
        if self.damage:
            self.files[self.damage] += b"!"
        return SimpleNamespace(oid=hashlib.sha1(commit_message.encode()).hexdigest())

    def list_repo_tree(self, repo_id, *, recursive, revision):
        for name, content in self.files.items():
            large = SimpleNamespace(sha256=hashlib.sha256(content).hexdigest()) if len(content) > 1000 else None
            git = hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()
            yield SimpleNamespace(path=name, lfs=large, blob_id=git, size=len(content))

    def list_repo_refs(self, repo_id):
        return SimpleNamespace(tags=[SimpleNamespace(name=name) for name in self.tags])

    def create_tag(self, repo_id, *, tag, revision):
        self.calls.append("create_tag")
        assert tag not in self.tags
        self.tags[tag] = revision

    def delete_tag(self, repo_id, *, tag):
        del self.tags[tag]


def test_the_hub_gets_the_files_and_the_tag_last(made, tmp_path):
    store, _, bundle = made
    target = FolderTarget(tmp_path / "out")
    done = release.publish(store, target, bundle, "production")
    api = LocalHub(tmp_path)
    for number in range(2):
        folder = unpacking.unpack(target, done, tmp_path / f"unpacked{number}")
        commit = hub.push(api, "hf://team/tiny", folder, done, "production")
        assert api.tags == {"production": commit}
    assert {"README.md", "engine/weights/layer0.bin", "provenance.json", "release.json"} <= set(api.files)
    assert api.calls[:3] == ["create_repo", "upload_folder", "create_tag"]
    with pytest.raises(ReleaseError, match="no repository"):
        hub.push(api, "hf://tiny", folder, done, "production")


def test_a_damaged_upload_moves_no_tag(made, tmp_path):
    store, _, bundle = made
    target = FolderTarget(tmp_path / "out")
    done = release.publish(store, target, bundle, "production")
    for name in ("README.md", "engine/weights/layer0.bin"):
        api = LocalHub(tmp_path, damage=name)
        folder = unpacking.unpack(target, done, tmp_path / name.replace("/", "-"))
        with pytest.raises(DamagedReleaseError, match=name):
            hub.push(api, "hf://team/tiny", folder, done, "a")
        assert api.tags == {}


def test_the_hubs_client_has_the_face_that_is_used():
    import inspect

    api = hub.hub_api()
    for name, member in inspect.getmembers(hub.Api, inspect.isfunction):
        if not name.startswith("_"):
            wanted = set(inspect.signature(member).parameters) - {"self"}
            assert wanted <= set(inspect.signature(getattr(api, name)).parameters), name

"""What `verify` says of artifacts whose bytes or records are not what their kind says."""

import pytest

from calib.artifact_writer import ArtifactWriter
from toolkit.describe import faults_of
from toolkit.refs import Ref


@pytest.mark.parametrize(("kind", "missing"), [("engine", "plan"), ("baseline", "key"), ("eval-report", "target"),
                                               ("latency-sweep", "target"), ("verdict", "word")])
def test_a_record_of_nothing_is_a_fault_whatever_its_digest(tmp_path, kind, missing):
    with ArtifactWriter(tmp_path / "a", kind) as writer:
        writer.record = {"x": 1}
    [fault] = faults_of(Ref("a", kind, tmp_path / "a"))
    assert fault.startswith(f"manifest.json: its record is no {kind}: {missing}")


def test_a_changed_byte_is_a_fault(tmp_path):
    with ArtifactWriter(tmp_path / "a", "calibration-set") as writer:
        (writer.folder / "tokens").write_bytes(b"abc")
    assert faults_of(Ref("a", "calibration-set", tmp_path / "a")) == []
    (tmp_path / "a" / "tokens").write_bytes(b"abd")
    assert faults_of(Ref("a", "calibration-set", tmp_path / "a")) == [
        "tokens: its bytes are not those that the manifest names"]

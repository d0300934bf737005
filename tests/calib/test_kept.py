"""Kept measurements: believed under their key and hash, else as if there were none."""

import pytest

from calib.kept import read_kept, write_kept


def test_values_come_back_under_their_key_only(tmp_path):
    path = tmp_path / "deep" / "losses.json"
    write_kept(path, "k", {"alpha 0.5": 2.125, "top": {7: 1, 10: [2, None]}})
    assert read_kept(path, "k") == {"alpha 0.5": 2.125, "top": {"7": 1, "10": [2, None]}}
    assert read_kept(path, "other") == {}


@pytest.mark.parametrize("damage", [
    lambda data: data.replace(b"2.125", b"2.135"), lambda data: data[:-5], lambda data: b"",
    lambda data: b"[" * 100_000,
    lambda data: b"[1]", lambda data: b"\xff" + data, lambda data: b'{"key": "k", "losses": {"alpha 0.5": 1}}'])
def test_a_damaged_file_is_as_good_as_none(tmp_path, damage):
    path = tmp_path / "losses.json"
    write_kept(path, "k", {"alpha 0.5": 2.125})
    path.write_bytes(damage(path.read_bytes()))
    assert read_kept(path, "k") == {}

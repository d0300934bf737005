"""Jobs: strict, inside their folder, and every mistake is named with its value."""

from pathlib import Path

import pytest
import yaml

from toolkit.errors import JobError
from toolkit.home import Home
from toolkit.job import inside, load_job, model_of

DEMO = Path(__file__).parent.parent.parent / "examples" / "demo.yaml"


def write(tmp_path, **changes):
    content = yaml.safe_load(DEMO.read_text()) | changes
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump({key: value for key, value in content.items() if value is not ...}))
    return path


def test_the_demo_job_is_what_the_readme_says():
    job = load_job(DEMO)
    assert [(engine.recipe, engine.kv_cache) for engine in job.engines] == [
        ("bf16", "bf16"), ("fp8", "bf16"), ("int8", "bf16"), ("int4_awq", "bf16"), ("int8", "fp8")]
    assert job == load_job(DEMO)


@pytest.mark.parametrize(("changes", "message"), [
    ({"enignes": []}, "unknown key 'enignes'"),
    ({"evaluation": {"txts": 3}}, "unknown key 'evaluation.txts'"),
    ({"engines": [{"recipe": "fp8"}]}, "recipe: bf16"),
    ({"engines": [{"recipe": "bf16"}, {"recipe": "bf16"}]}, "listed twice"),
    ({"engines": [{"recipe": "bf16", "kv_cache": "fp4"}]}, "kv_cache"),
    ({"engines": ...}, "engines: is missing"),
    ({"name": "Bad Name"}, "name"),
    ({"seed": -1}, "seed"),
    ({"sweep": {"cells": [[1, 4000, 32]]}}, "max_seq_len is 1024"),
    ({"sweep": {"cells": [[64, 64, 32]]}}, "max_batch_size is 8"),
    ({"sweep": {"cells": [[0, 64, 32]]}}, "at least 1"),
    ({"sweep": {"cells": []}}, "cells"),
    ({"evaluation": {"window": 4096}}, "window 4096"),
    ({"calibration": {"rows": True}}, "calibration.rows"), ({"evaluation": {"texts": 8.5}}, "evaluation.texts"),
    ({"limits": {"max_batch_size": "8"}}, "limits.max_batch_size"),
])
def test_a_mistake_is_named(tmp_path, changes, message):
    with pytest.raises(JobError) as caught:
        load_job(write(tmp_path, **changes))
    assert message in caught.value.message


def test_an_unknown_key_comes_with_the_known_ones(tmp_path):
    with pytest.raises(JobError) as caught:
        load_job(write(tmp_path, evaluation={"txts": 3}))
    assert "texts" in caught.value.hint


@pytest.mark.parametrize("content", ["", "- a\n- b\n", "a: [", "\x00"])
def test_what_is_no_job_is_refused(tmp_path, content):
    path = tmp_path / "job.yaml"
    path.write_text(content)
    with pytest.raises(JobError):
        load_job(path)


def test_paths_stay_inside(tmp_path):
    job, home = tmp_path / "job", tmp_path / "home"
    for folder in (job, home):
        folder.mkdir()
    (tmp_path / "secret").write_text("x")
    (job / "policy.yaml").write_text("x")
    (home / "data").write_text("x")
    assert inside("policy.yaml", job, home) == job / "policy.yaml"
    assert inside("data", job, home) == home / "data"
    for name in ("../secret", str(tmp_path / "secret"), "/etc/hostname"):
        with pytest.raises(JobError, match="leaves"):
            inside(name, job, home)
    with pytest.raises(JobError, match="neither"):
        inside("nothing", job, home)


def test_a_link_cannot_lead_out(tmp_path):
    job = tmp_path / "job"
    job.mkdir()
    (tmp_path / "secret").write_text("x")
    (job / "link").symlink_to(tmp_path / "secret")
    with pytest.raises(JobError, match="leaves"):
        inside("link", job, job)


def test_a_hub_name_is_left_to_the_hub(tmp_path):
    job = load_job(write(tmp_path, model="owner/name"))
    assert model_of(job, tmp_path, Home(tmp_path / "home")) == "owner/name"

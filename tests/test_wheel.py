"""The built wheel, installed in a fresh environment, is the application: packages, data files, the command."""

import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def files():
    """Every file of the five rooms."""
    return [path for room in ("calib", "engines", "evals", "toolkit", "ui") for path in (ROOT / room).rglob("*")
            if path.is_file() and "__pycache__" not in path.parts]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    out = tmp_path_factory.mktemp("dist")
    copy = tmp_path_factory.mktemp("source") / "toolkit"
    copy.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        (copy / name).write_bytes((ROOT / name).read_bytes())
    for path in files():
        place = copy / path.relative_to(ROOT)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(path.read_bytes())
    subprocess.run([sys.executable, "-c", "import sys; from setuptools import build_meta; "
                    f"build_meta.build_wheel({str(out)!r})"], cwd=copy, check=True, capture_output=True)
    return next(out.glob("*.whl"))


def test_the_wheel_holds_every_module_and_data_file(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    for path in files():
        if path.suffix in (".py", ".yaml", ".css", ".toml"):
            assert path.relative_to(ROOT).as_posix() in names
    assert not [name for name in names if name.startswith(("tests/", "benchmarks/", "docs/", "examples/"))]


def test_installed_in_a_fresh_environment_it_answers(wheel, tmp_path):
    """Fresh environment; dependencies are borrowed by a path file, so that nothing is downloaded."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "env")], check=True)
    python = tmp_path / "env" / "bin" / "python"
    site = Path(subprocess.run([python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"], check=True,
                               capture_output=True, text=True).stdout.strip())
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--disable-pip-version-check"]
    subprocess.run([*pip, "--target", str(site), str(wheel)], check=True)
    (site / "borrowed.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    done = subprocess.run([python, "-m", "toolkit", "--help"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Calibrate, build, judge" in done.stdout
    script = "import toolkit, calib.recipe as r, toolkit.report.html; print(toolkit.__file__, r.recipe_names())"
    where = subprocess.run([python, "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert where.stdout.startswith(str(site)), where.stderr
    assert "int4_awq" in where.stdout
    assert (site / "bin" / "toolkit").exists(), "the console script"

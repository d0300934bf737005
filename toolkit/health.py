"""``doctor``: what this machine can do. Each check names what it found and, where something is missing, the mend."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Literal

from toolkit.home import Home

#: Distribution -> what needs it.
PACKAGES = {"torch": "calibrating, building and running engines", "transformers": "reading models",
            "nvidia-modelopt": "calibrating fp8 and int4_awq",
            "numba": "the compiled CPU step", "lm_eval": "accuracy on tasks",
            "plotly": "charts and the HTML report", "streamlit": "the dashboard"}


@dataclass(frozen=True, slots=True)
class Check:
    """``state``: ok, missing (something cannot be done here) or note (worth knowing)."""

    name: str
    state: Literal["ok", "missing", "note"]
    found: str
    mend: str = ""

    def as_dict(self) -> dict[str, str]:
        return asdict(self)


def check(home: Home) -> list[Check]:
    """All checks, in the order in which a pipeline would meet them."""
    return [_python(), *_packages(), _memory(), _disk(home), _cpu(), _gpu(), *_prepared(home)]


def _python() -> Check:
    return Check("python", "ok", f"{platform.python_version()} on {platform.system()} {platform.machine()}")


def _packages() -> Iterator[Check]:
    for name, use in PACKAGES.items():
        try:
            yield Check(name, "ok", f"{metadata.version(name)}: {use}")
        except metadata.PackageNotFoundError:
            yield Check(name, "missing", f"not installed; needed for {use}", f"pip install {name}")


def _memory() -> Check:
    import psutil

    memory = psutil.virtual_memory()
    found = f"{memory.available / 1e9:.1f} GB free of {memory.total / 1e9:.1f} GB"
    if memory.available < 6e9:
        return Check("memory", "note", found, "The demo needs up to 6 GB.")
    return Check("memory", "ok", found)


def _disk(home: Home) -> Check:
    place = next(path for path in (home.path, *home.path.parents) if path.exists())
    free = shutil.disk_usage(place).free
    found = f"{free / 1e9:.1f} GB free for {home.path}"
    if not os.access(place, os.W_OK):
        return Check("home", "missing", f"{home.path} cannot be written", "Choose another with --home.")
    if free < 5e9:
        return Check("home", "note", found, "The demo writes about 3 GB.")
    return Check("home", "ok", found)


def _cpu() -> Check:
    try:
        import torch
    except ImportError as error:
        return Check("cpu engines", "missing", f"torch cannot be imported: {error}", "Install the toolkit again.")
    isa = torch.backends.cpu.get_cpu_capability()
    found = f"{torch.get_num_threads()} threads, {isa}; bf16, int8 and int4 run, fp8 is emulated (accurate, not faster)"
    if isa not in ("AVX2", "AVX512"):
        return Check("cpu engines", "note", f"{found}; the compiled step needs AVX2: torch's operators run instead",
                     "Expect a third of the speed.")
    return Check("cpu engines", "ok", found)


def _gpu() -> Check:
    try:
        import torch
    except ImportError:
        return Check("gpu", "missing", "torch cannot be imported", "Install the toolkit again.")
    if not torch.cuda.is_available():
        found = "none found; engines are built for the CPU"
        if _installed("triton"):
            return Check("gpu", "note", found)
        return Check("gpu", "note", f"{found}. Triton is not installed: nothing is prepared for a card (--target sm_*)",
                     "pip install 'llm-quant-toolkit[gpu]'")
    names = [f"{torch.cuda.get_device_name(i)} (compute capability "
             f"{'.'.join(map(str, torch.cuda.get_device_capability(i)))})" for i in range(torch.cuda.device_count())]
    if not _installed("triton"):
        return Check("gpu", "missing", f"{', '.join(names)}, but Triton is not installed", "pip install triton")
    return Check("gpu", "ok", f"{', '.join(names)}: engines are built for it with --device cuda")


def _installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def _prepared(home: Home) -> Iterator[Check]:
    model = home.demo_model
    if (model / "config.json").is_file():
        yield Check("demo model", "ok", str(model))
    else:
        yield Check("demo model", "missing", f"not in {home.models}", "toolkit data prepare")
    absent = [name for name in ("calibration", "choose", "evaluation")
              if not (home.data / name / "manifest.json").is_file()]
    if absent:
        yield Check("data", "missing", f"{', '.join(absent)} not in {home.data}", "toolkit data prepare")
    else:
        yield Check("data", "ok", str(home.data))

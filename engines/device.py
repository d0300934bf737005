"""What an engine is tied to: the device it was built on, in a form that can be stored and compared.

A CPU engine's numbers depend on the instruction set that torch's kernels choose (AVX2, AVX-512, ...) and its tuned
operators on the processor model, so both are part of the plan. Thread count is not: it changes speed, and a sum's
order only within the bound that the kernels state.

A CUDA engine is tied to the card's name, its compute capability and multiprocessor count (they decide which kernels
were chosen, and where sums are cut) and to torch's and Triton's versions, which make the code. ``interpreter`` is the
CUDA engine with its kernels in Triton's interpreter, on a CPU: slow, the same arithmetic, for tests.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch

from calib.errors import ENVIRONMENT, UnknownNameError
from calib.scheme import Frozen
from engines.errors import EngineError
from engines.kernels.impl import DeviceFacts

_TorchDevice = torch.device  # a field of Device is called torch
#: Compute capabilities that the kernels are written for and Triton's assembler knows.
CAPABILITIES = (80, 86, 87, 89, 90, 100, 101, 103, 120, 121)
#: Shared memory of one multiprocessor that a program may use, by compute capability (bytes).
_SHARED_BYTES = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 120: 101376}


class Device(Frozen):
    """``kind`` cpu, cuda or interpreter; ``name`` the processor's or card's name; ``isa`` the instruction set.

    The last three fields are a GPU's: Triton's version, multiprocessors, and L2 in bytes.
    """

    kind: str
    name: str
    isa: str
    torch: str
    triton: str | None = None
    num_sms: int = 0
    l2_bytes: int = 0

    @property
    def capability(self) -> int:
        """90 for sm_90; 0 for everything that is no GPU."""
        return int(self.isa.removeprefix("sm_")) if self.kind == "cuda" else 0

    @property
    def facts(self) -> DeviceFacts:
        """What kernels may know of it."""
        if self.kind == "cpu":
            return DeviceFacts(name=self.name, capability=0, num_sms=torch.get_num_threads(), shared_bytes=0,
                               l2_bytes=0)
        return DeviceFacts(name=self.name, capability=self.capability, num_sms=self.num_sms,
                           shared_bytes=_SHARED_BYTES.get(self.capability, 101376), l2_bytes=self.l2_bytes)

    @property
    def runs_triton(self) -> bool:
        """Whether engines on it are Triton kernels (else torch's CPU operators)."""
        return self.kind != "cpu"

    @property
    def memory_bytes(self) -> int:
        """All memory of a GPU or of the machine; for the interpreter a small, fixed number."""
        if self.kind == "cuda":
            return int(torch.cuda.get_device_properties(0).total_memory)
        return 4 * 1024**3 if self.kind == "interpreter" else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    @property
    def torch_device(self) -> _TorchDevice:
        """Where tensors lie."""
        return _TorchDevice("cuda" if self.kind == "cuda" else "cpu")

    def __str__(self) -> str:
        tail = "" if self.triton is None else f", triton {self.triton}"
        return f"{self.kind} {self.name} ({self.isa}), torch {self.torch}{tail}"


def _processor_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


class NoDeviceError(EngineError):
    """The device that was asked for is not here, or has no operators."""

    code = "no_device"
    exit_code = ENVIRONMENT


def _triton() -> ModuleType:
    """Triton, which a CPU installation may lack."""
    try:
        import triton
    except ImportError as error:
        raise NoDeviceError("triton is not installed", "Install the extra: pip install 'llm-quant-toolkit[gpu]'."
                            ) from error
    return triton


def _cpu() -> Device:
    return Device(kind="cpu", name=_processor_name(), isa=torch.backends.cpu.get_cpu_capability(),
                  torch=torch.__version__)


def _cuda() -> Device:
    triton = _triton()
    if not torch.cuda.is_available():
        raise NoDeviceError("this machine has no CUDA device that torch can use",
                            "Build for cpu, or look at the driver with nvidia-smi.")
    found = torch.cuda.get_device_properties(0)
    if found.major < 8:
        raise NoDeviceError(f"{found.name} has compute capability {found.major}.{found.minor}; the kernels need 8.0",
                            "Use an Ampere card or newer.")
    return Device(kind="cuda", name=found.name, isa=f"sm_{found.major}{found.minor}", torch=torch.__version__,
                  triton=triton.__version__, num_sms=found.multi_processor_count, l2_bytes=found.L2_cache_size)


def _interpreter() -> Device:
    triton = _triton()
    if not triton.knobs.runtime.interpret:
        raise NoDeviceError("Triton's interpreter is off", "It is for tests: set TRITON_INTERPRET=1 before importing.")
    return Device(kind="interpreter", name=_processor_name(), isa="interpreter", torch=torch.__version__,
                  triton=triton.__version__, num_sms=4, l2_bytes=1 << 20)


_DETECT: dict[str, Callable[[], Device]] = {"cpu": _cpu, "cuda": _cuda, "interpreter": _interpreter}


def detect(kind: str) -> Device:
    """The device of that kind on this machine. NoDeviceError in words when there is none."""
    if kind not in _DETECT:
        raise UnknownNameError("device", kind, ("cpu", "cuda"))
    return _DETECT[kind]()


def nominal(isa: str) -> Device:
    """A device that stands for all of its kind, for preparing what does not depend on more: "cpu", "interpreter", or
    "sm_90" and the like. UnknownNameError for what is none; NoDeviceError for a GPU that is too old, or without Triton.
    """
    old = re.fullmatch(r"sm_[2-7]\d", isa)
    if isa not in ("cpu", "interpreter") and not old and isa not in (known := [f"sm_{one}" for one in CAPABILITIES]):
        raise UnknownNameError("target", isa, ("cpu", *known))
    if isa == "cpu":
        return _cpu()
    if isa == "interpreter":
        return Device(kind=isa, name="any", isa=isa, torch=torch.__version__, triton=_triton().__version__)
    found = Device(kind="cuda", name=f"any {isa}", isa=isa, torch=torch.__version__, triton=_triton().__version__)
    if found.capability < 80:
        raise NoDeviceError(f"{isa} is compute capability {found.capability / 10:.1f}; the kernels need 8.0",
                            "Use an Ampere card or newer.")
    return found

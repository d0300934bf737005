"""What an engine is tied to: the device it was built on, in a form that can be stored and compared.

A CPU engine's numbers depend on the instruction set that torch's kernels choose (AVX2, AVX-512, ...) and its tuned
operators on the processor model, so both are part of the plan. Thread count is not: it changes speed, and a sum's
order only within the bound that the kernels state.
"""

from __future__ import annotations

import platform
from pathlib import Path

import torch

from calib.errors import ENVIRONMENT
from calib.scheme import Frozen
from engines.errors import EngineError
from engines.kernels.impl import DeviceFacts


class Device(Frozen):
    """``kind`` cpu; ``name`` the processor's name; ``isa`` the instruction set that torch dispatches to."""

    kind: str
    name: str
    isa: str
    torch: str

    @property
    def facts(self) -> DeviceFacts:
        """What kernels may know of it."""
        return DeviceFacts(name=self.name, capability=0, num_sms=torch.get_num_threads(), shared_bytes=0, l2_bytes=0)

    def __str__(self) -> str:
        return f"{self.kind} {self.name} ({self.isa}), torch {self.torch}"


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


def detect(kind: str) -> Device:
    """The device of that kind on this machine. NoDeviceError in words when there is none."""
    if kind != "cpu":
        raise NoDeviceError(f"no operators for device {kind!r} in this version", "Known devices: cpu.")
    return Device(kind="cpu", name=_processor_name(), isa=torch.backends.cpu.get_cpu_capability(),
                  torch=torch.__version__)

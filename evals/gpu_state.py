"""What the GPU was like while a cell was measured: clocks, temperature, power, throttling, and the energy it took.

A figure from a GPU that was hot or capped is a figure about its cooling. So each cell carries the state at its end and
the reasons for slowing down that were set at its beginning or end; where the driver says that heat or a power brake
slowed the clocks, the cell is marked ``invalid``, never dropped. (A power *cap* is how these cards are run, and marks
nothing.) Energy is the difference of the driver's own counter; without the counter it is None.

NVML (nvidia-ml-py) is optional: without it, or without a GPU, there is no state, and nothing is guessed.
"""

from __future__ import annotations

from types import ModuleType, TracebackType
from typing import Any

from pydantic import Field

from calib.scheme import Frozen

#: NVML's bits of reasons for lower clocks that spoil a measurement.
_SLOWED = {0x08: "hardware slowdown", 0x20: "software thermal slowdown", 0x40: "hardware thermal slowdown",
           0x80: "power brake"}


class GpuState(Frozen):
    """``joules`` over the whole cell; None where the driver has no counter."""

    name: str
    sm_clock_mhz: int
    temperature_c: int
    power_limit_w: float
    slowed: tuple[str, ...]
    joules: float | None = None
    joules_per_token: float | None = Field(default=None, description="joules / output tokens of the cell")

    @property
    def invalid(self) -> str | None:
        """Why a cell measured in this state must not be used, if so."""
        return f"the GPU was slowed: {', '.join(self.slowed)}" if self.slowed else None


def nvml() -> ModuleType | None:
    """The NVML binding, initialised; None where it, or a driver, is missing."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


class GpuWatch:
    """Context manager around a cell. ``gpu``: NVML's index, or a UUID; None watches nothing."""

    def __init__(self, gpu: int | str | None) -> None:
        self._lib = None if gpu is None else nvml()
        self._gpu, self._handle, self._before = gpu, None, 0
        self._energy: int | None = None
        self.state: GpuState | None = None

    def __enter__(self) -> GpuWatch:
        if self._lib is not None:
            by_uuid = isinstance(self._gpu, str)
            find = self._lib.nvmlDeviceGetHandleByUUID if by_uuid else self._lib.nvmlDeviceGetHandleByIndex
            self._handle = find(self._gpu)
            self._before, self._energy = self._reasons(), self._joules()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        if self._lib is None or kind is not None:
            return
        lib, handle, used = self._lib, self._handle, self._joules()
        name = lib.nvmlDeviceGetName(handle)
        bits = self._before | self._reasons()
        self.state = GpuState(
            name=name if isinstance(name, str) else name.decode(),
            sm_clock_mhz=lib.nvmlDeviceGetClockInfo(handle, lib.NVML_CLOCK_SM),
            temperature_c=lib.nvmlDeviceGetTemperature(handle, lib.NVML_TEMPERATURE_GPU),
            power_limit_w=lib.nvmlDeviceGetEnforcedPowerLimit(handle) / 1e3,
            slowed=tuple(word for bit, word in _SLOWED.items() if bits & bit),
            joules=None if used is None or self._energy is None else (used - self._energy) / 1e3)

    def _reasons(self) -> int:
        lib: Any = self._lib
        return int(lib.nvmlDeviceGetCurrentClocksThrottleReasons(self._handle))

    def _joules(self) -> int | None:
        """Millijoules since the driver was loaded."""
        lib: Any = self._lib
        try:
            return int(lib.nvmlDeviceGetTotalEnergyConsumption(self._handle))
        except lib.NVMLError:
            return None

    def seen(self, tokens: int) -> GpuState | None:
        """The state, with its energy shared out over the cell's output tokens."""
        if self.state is None or self.state.joules is None or tokens < 1:
            return self.state
        return self.state.model_copy(update={"joules_per_token": self.state.joules / tokens})


def cuda_uuid(index: int = 0) -> str | None:
    """NVML's name of torch's CUDA device (their numbers differ when some devices are hidden); None without one."""
    import torch

    if not torch.cuda.is_available():
        return None
    return f"GPU-{torch.cuda.get_device_properties(index).uuid}"

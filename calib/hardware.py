"""Formats that only some chips multiply: a recipe of such a format can be planned anywhere and is refused in words.

NVFP4 and MXFP8 are multiplied by the tensor cores of NVIDIA Blackwell (compute capability 10 and later); modelopt
calibrates them with CUDA kernels only (on a CPU it stops at "amax must be a CUDA tensor"), and this toolkit has no
kernel for them yet, which is said too where the chip is there.
"""

from __future__ import annotations

import torch

from calib.errors import ENVIRONMENT, CalibError
from calib.recipe import Recipe

_CAPABILITY = 10
_INSTEAD = {"nvfp4": "int4_awq or w4a8_fp8 for four bits, fp8 for speed", "mxfp8": "fp8_dynamic or fp8_block"}


class HardwareError(CalibError):
    """The recipe's format needs another chip, or a program asked for another device."""

    code = "hardware"
    exit_code = ENVIRONMENT


def obstacle(recipe: Recipe) -> str:
    """Why the recipe cannot be carried out on this machine; empty where it can."""
    if not recipe.needs_hardware:
        return ""
    name = recipe.weight.dtype
    needed = f"{name} needs an NVIDIA Blackwell GPU (compute capability {_CAPABILITY}.0 or later)"
    if not torch.cuda.is_available():
        return f"{needed}; this machine has no CUDA GPU"
    major, minor = torch.cuda.get_device_capability()
    if major < _CAPABILITY:
        return f"{needed}; this machine has {torch.cuda.get_device_name()} ({major}.{minor})"
    return f"{name} has no kernel in this toolkit yet, though {torch.cuda.get_device_name()} could multiply it"


def check_hardware(recipe: Recipe) -> None:
    """HardwareError that says what is missing and what to use instead."""
    if reason := obstacle(recipe):
        raise HardwareError(f"recipe {recipe.name}: {reason}", f"Use {_INSTEAD[recipe.weight.dtype]}.")


def check_default_device() -> None:
    """HardwareError where a caller's program has set torch's default device: half of a calibration would lie there."""
    device = torch.get_default_device()
    if device.type != "cpu":
        raise HardwareError(f"torch's default device is {str(device)!r}, and calibration runs on one device, the CPU",
                            "Leave torch.set_default_device and `with torch.device(...)` out around it.")

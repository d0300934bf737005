"""Kernel tests run for real on a GPU, and in Triton's interpreter (tests/conftest.py) where there is none."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from engines.kernels.impl import DeviceFacts


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where kernel tests run."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session")
def facts() -> DeviceFacts:
    """What candidate lists may ask: the real device, or a CPU (capability 0: no PDL) for the interpreter."""
    if not torch.cuda.is_available():
        return DeviceFacts("interpreter", 0, 4, 232448, 1 << 20)
    found = torch.cuda.get_device_properties(0)
    return DeviceFacts(found.name, found.major * 10 + found.minor, found.multi_processor_count, 232448,
                       found.L2_cache_size)


@pytest.fixture(scope="session")
def judge() -> Callable[..., None]:
    """judge(found, wanted, max_error, rms_error): both normalised by the rms of ``wanted``; says where it is worst."""

    def check(found: torch.Tensor, wanted: torch.Tensor, max_error: float, rms_error: float) -> None:
        assert found.shape == wanted.shape
        found, wanted = found.double().cpu(), wanted.double().cpu()
        if not wanted.numel():
            return
        assert bool(torch.isfinite(found).all()), f"not finite at {(~torch.isfinite(found)).nonzero()[0].tolist()}"
        norm = wanted.square().mean().sqrt().clamp(min=1e-12)
        error = (found - wanted).abs() / norm
        worst = int(error.argmax())
        place = [int(i) for i in torch.unravel_index(torch.tensor(worst), error.shape)]
        assert error.max() <= max_error, (f"max error {error.max():.3g} > {max_error} at {place}: found "
                                          f"{found.flatten()[worst]:.6g}, wanted {wanted.flatten()[worst]:.6g}")
        rms = error.square().mean().sqrt()
        assert rms <= rms_error, f"rms error {rms:.3g} > {rms_error} (max {error.max():.3g} at {place})"

    return check

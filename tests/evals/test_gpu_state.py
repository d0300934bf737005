"""The state of a GPU beside a cell: none without a driver, and a slowed card marks its figures."""

import pytest
import torch

from evals.gpu_state import GpuState, GpuWatch, cuda_uuid, nvml


def state(slowed=(), joules=30.0):
    return GpuState(name="card", sm_clock_mhz=1500, temperature_c=60, power_limit_w=700.0, slowed=slowed, joules=joules)


def test_only_heat_and_brakes_spoil_a_cell():
    assert state().invalid is None
    assert state(("hardware thermal slowdown",)).invalid == "the GPU was slowed: hardware thermal slowdown"


def test_energy_is_shared_out_over_the_tokens():
    watch = GpuWatch(None)
    with watch:
        pass
    assert (watch.state, watch.seen(10)) == (None, None)
    watch.state = state()
    assert watch.seen(10).joules_per_token == 3.0
    watch.state = state(joules=None)
    assert watch.seen(10).joules_per_token is None


@pytest.mark.skipif(nvml() is not None, reason="this machine has a driver")
def test_without_a_driver_there_is_no_state():
    with GpuWatch(0) as watch:
        pass
    assert watch.state is None
    assert cuda_uuid() is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_real_card():
    with GpuWatch(cuda_uuid()) as watch:
        x = torch.ones(4096, 4096, device="cuda")
        for _ in range(200):
            x = (x @ x).clamp(max=1.0)
        torch.cuda.synchronize()
    assert watch.state.sm_clock_mhz > 100
    assert watch.state.power_limit_w > 20
    assert watch.state.joules is None or watch.state.joules > 0

"""The platforms' ways to move tensors, which must agree."""

import pytest
import torch

from inducekv_vllm.vllm_seams.device import CpuDevice, CudaDevice, Device, device_of

KINDS = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=KINDS)
def device(request: pytest.FixtureRequest) -> Device:
    device = device_of(torch.device(request.param))
    assert isinstance(device, CudaDevice if request.param == "cuda" else CpuDevice)
    return device


def test_a_host_copy_has_what_the_tensor_held_when_it_was_asked_for(device: Device) -> None:
    tensor = torch.arange(1000.0, device=device.torch_device)
    copy = device.to_host(tensor * 2)
    tensor.zero_()
    host = copy.wait()
    assert host.device.type == "cpu"
    assert torch.equal(host, 2 * torch.arange(1000.0))


def test_uploads(device: Device) -> None:
    assert device.index([3, 1]).tolist() == [3, 1]
    assert device.index([3, 1]).device.type == device.torch_device.type
    assert torch.equal(device.upload(torch.arange(5.0)).cpu(), torch.arange(5.0))


def test_work_beside_the_steps_is_done_at_the_end_of_its_context(device: Device) -> None:
    target = torch.zeros(1 << 20, device=device.torch_device)
    with device.beside_steps():
        target.copy_(device.upload(torch.ones(1 << 20)))
    assert bool((target == 1).all())
    assert device.free_bytes() > 0

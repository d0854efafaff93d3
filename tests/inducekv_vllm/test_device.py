"""The platforms' ways to move tensors, which must agree."""

from __future__ import annotations

import pytest
import torch

from inducekv_vllm.device import CpuDevice, CudaDevice, Device, device_of

KINDS = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=KINDS)
def device(request: pytest.FixtureRequest) -> Device:
    return device_of(torch.device(request.param))


def test_the_platform_decides() -> None:
    assert isinstance(device_of(torch.device("cpu")), CpuDevice)


@pytest.mark.gpu
def test_cuda_is_another_platform() -> None:
    assert isinstance(device_of(torch.device("cuda")), CudaDevice)


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


def test_what_an_upload_leaves_is_overwritten(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    source = torch.randn(3, 4, 5)[:, 1:3].transpose(1, 2)
    expected, buffers = source.clone(), []
    original = CudaDevice._pinned
    monkeypatch.setattr(CudaDevice, "_pinned", lambda *arguments: buffers.append(original(*arguments)) or buffers[-1])
    with device.beside_steps(), device.uploaded(source) as uploaded:
        kept = uploaded.clone()
    assert torch.equal(kept.cpu(), expected)
    assert torch.equal(source, expected)  # it is its owner's to overwrite
    if device.torch_device.type == "cuda":
        assert not uploaded.any()
        assert not buffers[0].any()


def test_the_gpus_way_to_upload_overwrites_both_copies() -> None:
    """On the CPU, without pinned memory: what is copied and overwritten, and in which order."""
    buffers = []

    class Unpinned(CudaDevice):
        def __init__(self) -> None:
            self.torch_device = torch.device("cpu")

        def _pinned(self, tensor: torch.Tensor) -> torch.Tensor:
            buffers.append(torch.empty(tensor.shape).copy_(tensor))
            return buffers[-1]

    source = torch.randn(3, 4, 5)[:, 1:3].transpose(1, 2)
    expected = source.clone()
    with Unpinned().uploaded(source) as uploaded:
        assert torch.equal(uploaded, expected)
        assert uploaded.data_ptr() != buffers[0].data_ptr()
        assert uploaded.is_contiguous()
    assert not uploaded.any()
    assert not buffers[0].any()
    assert torch.equal(source, expected)


def test_work_beside_the_steps_is_done_at_the_end_of_its_context(device: Device) -> None:
    target = torch.zeros(1 << 20, device=device.torch_device)
    with device.beside_steps():
        target.copy_(device.upload(torch.ones(1 << 20)))
    assert bool((target == 1).all())
    assert device.free_bytes() > 0

"""What differs between platforms: work and copies that no running step waits for, or that run beside it."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import psutil  # type: ignore[import-untyped]
import torch
from torch import Tensor


class HostCopy(Protocol):
    """A tensor on its way to the host."""

    def wait(self) -> Tensor:
        """The tensor on the host. Only this call waits for the device."""
        ...


class Device(Protocol):
    """The device of a worker. `device_of` chooses its class."""

    torch_device: torch.device

    def to_host(self, tensor: Tensor) -> HostCopy:
        """Begin to copy a tensor to the host, after the work that is queued now."""
        ...

    def index(self, numbers: list[int]) -> Tensor:
        """The numbers as int64 on the device."""
        ...

    def upload(self, tensor: Tensor) -> Tensor:
        """The tensor on the device, after the work that is queued now."""
        ...

    def write(self, target: Tensor, source: Tensor) -> None:
        """Copy a tensor of the host to one of the device, after the work that is queued now."""
        ...

    def begin_step(self) -> None:
        """The calling thread is about to queue a step's work."""
        ...

    def beside_steps(self) -> AbstractContextManager[object]:
        """Within this context a thread's work runs beside the steps, after those that are queued at its beginning.

        At its end that work is done, and steps that begin later see it.
        """
        ...

    def free_bytes(self) -> int:
        """The device's memory that nobody uses."""
        ...


def device_of(torch_device: torch.device) -> Device:
    """The operations of a device of this kind."""
    return CudaDevice(torch_device) if torch_device.type == "cuda" else CpuDevice(torch_device)


class CpuDevice:
    def __init__(self, torch_device: torch.device) -> None:
        self.torch_device = torch_device

    def to_host(self, tensor: Tensor) -> HostCopy:
        return _OnHost(tensor)

    def index(self, numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64)

    def upload(self, tensor: Tensor) -> Tensor:
        return tensor

    def write(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source)

    def begin_step(self) -> None:
        pass

    def beside_steps(self) -> AbstractContextManager[object]:
        return nullcontext()

    def free_bytes(self) -> int:
        return int(psutil.virtual_memory().available)


class _OnHost:
    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def wait(self) -> Tensor:
        return self._tensor


class CudaDevice:
    def __init__(self, torch_device: torch.device) -> None:
        self.torch_device = torch_device
        self._steps = torch.cuda.current_stream(torch_device)  # of the thread that runs the steps
        self._side = torch.cuda.Stream(torch_device)  # type: ignore[no-untyped-call]

    def to_host(self, tensor: Tensor) -> HostCopy:
        return _PinnedCopy(tensor)

    def index(self, numbers: list[int]) -> Tensor:
        return self.upload(torch.tensor(numbers, dtype=torch.int64))

    def upload(self, tensor: Tensor) -> Tensor:
        # A fresh pinned buffer each time: one that is used again could change before the copy has run.
        return tensor.pin_memory().to(self.torch_device, non_blocking=True)

    def write(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source.pin_memory(), non_blocking=True)

    def begin_step(self) -> None:
        # vLLM gives a thread a stream of its own when it first asks for one, which may be after the model is loaded.
        self._steps = torch.cuda.current_stream(self.torch_device)

    @contextmanager
    def beside_steps(self) -> Iterator[None]:
        self._side.wait_stream(self._steps)
        # A thread starts with device 0, and a stream's context ends by setting that, which opens a context there.
        with torch.cuda.device(self.torch_device), torch.cuda.stream(self._side):
            yield
        self._side.synchronize()

    def free_bytes(self) -> int:
        return torch.cuda.mem_get_info(self.torch_device)[0]


class _PinnedCopy:
    def __init__(self, tensor: Tensor) -> None:
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._host.copy_(tensor, non_blocking=True)
        self._copied = torch.Event(tensor.device)
        self._copied.record()

    def wait(self) -> Tensor:
        self._copied.synchronize()
        return self._host

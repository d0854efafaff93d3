"""Data-parallel runs: `torchrun --nproc-per-node N -m selector.cli.select ...` (gloo on CPUs, NCCL for CUDA tensors).

Every process runs the whole program on the same input. Only forward and backward passes of the backbone are split, by
example; their results are summed, so that all processes continue with the same numbers. Only the main process writes,
prints and shows progress.

The result equals that of one process up to float32 rounding: losses are summed in another order, and matrix products
have other shapes if a batch is split. Keys and payloads come from whole batches and do not differ.

In a process that `torchrun` has not started, everything here does nothing, at no cost. All processes must call
functions marked *collective*, in the same order.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, Final, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from inducekv_vllm import errors
from inducekv_vllm.errors import InduceKVError

_T = TypeVar("_T")
# How long a failing process waits for the main one to print the error, before it prints it itself.
PRINT_SECONDS: Final = 10.0
_PRINTED: Final = "inducekv/printed"
_PR_SET_PDEATHSIG: Final = 1  # of <linux/prctl.h>
_store: Store | None = None


@contextlib.contextmanager
def process_group() -> Iterator[None]:
    """Join the processes that `torchrun` has started, with a share of the machine's cores.

    Processes on one machine communicate over the loopback interface. None of them outlives its `torchrun`: a restarted
    run would meet them.
    """
    global _store
    if not dist.is_torchelastic_launched():
        yield
        return
    local = int(os.environ["LOCAL_WORLD_SIZE"])
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if local == int(os.environ["WORLD_SIZE"]):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local))
    backend = "gloo"
    if torch.cuda.is_available() and local <= torch.cuda.device_count():  # NCCL wants a GPU for each
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        backend = "cpu:gloo,cuda:nccl"
    _store, number, size = next(rendezvous("env://", timeout=timedelta(minutes=5)))
    dist.init_process_group(backend, store=PrefixStore("inducekv", _store), rank=number, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def leave(status: int) -> NoReturn:
    """End the process with this exit status.

    Under `torchrun` this skips Python's finalisation: gloo's threads may outlive their group, and abort the process
    when the interpreter is shutting down.
    """
    if dist.is_torchelastic_launched():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


def world_size() -> int:
    """How many processes there are."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """Which of them this is, from 0."""
    return dist.get_rank() if dist.is_initialized() else 0


def is_main() -> bool:
    """Whether it is the one that writes, prints and shows progress."""
    return rank() == 0


def shard(rows: Sequence[_T]) -> list[_T]:
    """This process's part of `rows`: every `world_size()`-th, from its rank on; maybe none."""
    return list(rows[rank() :: world_size()])


def in_step(items: Sequence[_T]) -> list[list[_T]]:
    """This process's part of `items`, in the same number of steps for every process: at most one item in each.

    With `together` around each step, an error ends all processes at the end of that step.
    """
    return [shard(items[first : first + world_size()]) for first in range(0, len(items), world_size())]


def barrier() -> None:
    """Go on when all processes are here. Collective."""
    if world_size() > 1:
        dist.barrier()


def all_reduce_sum(tensors: Sequence[Tensor]) -> None:
    """Replace each tensor by its sum over all processes, the same bits for all of them. Collective.

    Args:
        tensors: of the same shapes and types in every process; contiguous.
    """
    if world_size() > 1:
        for tensor in tensors:
            dist.all_reduce(tensor)


def merge_rows(tensors: Sequence[Tensor]) -> None:
    """Merge tensors of which each process has filled some rows and left the others 0. Collective.

    Adds bits, not numbers, so that nothing is rounded and a negative zero stays one.
    """
    all_reduce_sum([tensor.view(-1).view(torch.uint8) for tensor in tensors if tensor.numel()])


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Raise an `InduceKVError` of one process in all of them, at the end of the block. Collective.

    Of several errors, the first process's. Other exceptions end their process, and `torchrun` then ends the others.
    """
    if world_size() == 1:
        yield
        return
    failure: InduceKVError | None = None
    try:
        yield
    except InduceKVError as error:
        failure = error
    failed = torch.zeros(world_size(), dtype=torch.int64)
    failed[rank()] = failure is not None
    dist.all_reduce(failed)
    if failed.any():
        first = int(failed.argmax())
        name, message = json.loads(_broadcast(json.dumps([type(failure).__name__, str(failure)]), first))
        raise failure if first == rank() and failure else getattr(errors, name)(message)


def print_error(message: str) -> None:
    """Print an error on standard error, once: the main process prints it, and the others wait.

    An error that only another process has is printed by that one after `PRINT_SECONDS`.
    """
    if is_main() or _store is None:
        print(message, file=sys.stderr, flush=True)
        if _store is not None:
            _store.set(_PRINTED, "")
        return
    try:
        _store.wait([_PRINTED], timedelta(seconds=PRINT_SECONDS))
    except RuntimeError:  # the time is over, or there is no main process any more
        print(message, file=sys.stderr, flush=True)


def replicated(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The same tensors, for a computation that each process does a part of: their gradients are summed over all.

    Differentiable as often as the computation is; its counterpart is `summed`. The backward pass is collective.
    """
    if world_size() == 1:
        return tensors
    result: tuple[Tensor, ...] = _Replicated.apply(*tensors)  # type: ignore[no-untyped-call]
    return result


def summed(tensor: Tensor) -> Tensor:
    """The sum of every process's part of a result, differentiable in this process's part. Collective."""
    if world_size() == 1:
        return tensor
    (result,) = _Summed.apply(tensor)  # type: ignore[no-untyped-call]
    return result  # type: ignore[no-any-return]


class _Replicated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor.clone() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return tuple(
            _Summed.apply(gradient)[0] if wanted else None  # type: ignore[no-untyped-call]
            for gradient, wanted in zip(gradients, ctx.needs_input_grad, strict=True)
        )


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        totals = tuple(tensor.clone(memory_format=torch.contiguous_format) for tensor in tensors)
        all_reduce_sum(totals)
        return totals

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        result: tuple[Tensor, ...] = _Replicated.apply(*gradients)  # type: ignore[no-untyped-call]
        return result


def _broadcast(text: str, source: int) -> str:
    """The text that process `source` has."""
    data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    size = torch.tensor([len(data)])
    dist.broadcast(size, source)
    content = data if rank() == source else torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(content, source)
    return content.numpy().tobytes().decode()

"""How the workers load a bundle, for callers that wait in a thread and for those on an event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from typing import Any, NamedTuple

from .. import errors
from ..errors import CapacityError, InduceKVError
from ..pace import POLL_S


class _Call(NamedTuple):
    """One call of every worker."""

    method: str
    args: tuple[str, ...]
    delay: float = 0.0  # seconds to wait before it


def load(rpc: Callable[..., list[Any]], path: str, digest: str) -> int:
    """Load a bundle on every rank; return its bytes in the pool of the first rank.

    Args:
        rpc: `LLM.collective_rpc`.
        digest: of the content that was read at `path`.

    Raises:
        InduceKVError: of the class of a worker's refusal; no rank keeps the bundle.
    """
    steps = _loading(path, digest)
    call = next(steps)
    try:
        while True:
            time.sleep(call.delay)
            call = steps.send(rpc(call.method, args=call.args))
    except StopIteration as end:
        return int(end.value)
    except InduceKVError as refusal:
        # Without room it may be tried again, once others have left.
        rpc("inducekv_unload_bundle", args=(digest, isinstance(refusal, CapacityError)))
        raise


async def load_async(rpc: Callable[..., Awaitable[list[Any]]], path: str, digest: str) -> int:
    """`load`, while requests run. If it fails, or is given up, some ranks may have it: load it again, or unload it."""
    steps = _loading(path, digest)
    call = next(steps)
    try:
        while True:
            await asyncio.sleep(call.delay)
            call = steps.send(await rpc(call.method, args=call.args))
    except StopIteration as end:
        return int(end.value)


def _loading(path: str, digest: str) -> Generator[_Call, list[Any], int]:
    """What the workers are asked, each time with an answer for each rank."""
    answers = yield _Call("inducekv_load_bundle", (path, digest))
    while None in answers:
        answers = yield _Call("inducekv_load_outcome", (digest,), POLL_S)
    if not all(answer["ok"] for answer in answers):
        raise _refusal(path, answers)
    return int(answers[0]["resident_bytes"])


def _refusal(path: str, answers: Sequence[Mapping[str, Any]]) -> InduceKVError:
    """What the ranks say; if one of them has no room, that it is."""
    refused = {rank: answer for rank, answer in enumerate(answers) if not answer["ok"]}
    kinds = [getattr(errors, answer["kind"]) for answer in refused.values()]
    kind = next((each for each in kinds if issubclass(each, CapacityError)), kinds[0])
    reasons = "; ".join(f"rank {rank}: {answer['error']}" for rank, answer in refused.items())
    error: InduceKVError = kind(f"the engine cannot load {path}: {reasons}")
    return error

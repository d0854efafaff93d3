"""Bundles on the workers of every engine of a server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable

from vllm.engine.protocol import EngineClient
from vllm.lora.request import LoRARequest

from inducekv_vllm.errors import BundleError, CapacityError, UnsupportedModel
from inducekv_vllm.frontend.served_bundle import ServedBundle
from inducekv_vllm.pace import poll_delays
from inducekv_vllm.vllm_seams.logs import logger_of

from .names import task_adapters

logger = logger_of(__name__)


async def load(client: EngineClient, memory: ServedBundle) -> int:
    """Load a bundle and its tasks' adapters while requests run; return its bytes in the pool of the first rank.

    If this fails, or is given up, some ranks may have it: unload it.

    Raises:
        CapacityError: it does not fit.
        BundleError: a worker cannot load it otherwise.
        UnsupportedModel: an adapter of one of its tasks cannot be loaded.
    """
    delays = poll_delays()
    await client.collective_rpc("inducekv_load_bundle", args=(memory.path, memory.digest))
    while None in (answers := await client.collective_rpc("inducekv_load_outcome", args=(memory.digest,))):
        await asyncio.sleep(next(delays))
    if refusals := [f"rank {rank}: {answer['error']}" for rank, answer in enumerate(answers) if not answer["ok"]]:
        kind = CapacityError if any(answer.get("is_full") for answer in answers) else BundleError
        raise kind(f"the engine cannot load {memory.path}: {'; '.join(refusals)}")
    for task, adapter in task_adapters(memory).items():
        try:
            await client.add_lora(adapter)
        except Exception as error:
            raise UnsupportedModel(f"cannot load the adapter of task {task!r}: {error}") from error
    return int(answers[0]["resident_bytes"])


async def unload(client: EngineClient, memory: ServedBundle, but: Iterable[LoRARequest] = ()) -> None:
    """Drop a bundle, or its load; running requests keep it until they end. `but`: adapters that others use."""
    needed = {adapter.lora_int_id for adapter in but}
    for adapter in task_adapters(memory).values():
        if adapter.lora_int_id not in needed:
            await client.collective_rpc("remove_lora", args=(adapter.lora_int_id,))
    await client.collective_rpc("inducekv_unload_bundle", args=(memory.digest,))


async def wait_until_erased(client: EngineClient, digest: str, seconds: float) -> bool:
    """Whether every rank has overwritten the memory of an unloaded bundle, within so many seconds."""
    deadline, delays = time.monotonic() + seconds, poll_delays()
    while not all(await client.collective_rpc("inducekv_is_erased", args=(digest,))):
        if time.monotonic() > deadline:
            logger.warning("the memory of digest %s is not erased yet: the engine still reads it", digest)
            return False
        await asyncio.sleep(next(delays))
    return True

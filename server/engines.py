"""Bundles on the workers of every engine of a server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import Final

from vllm.engine.protocol import EngineClient
from vllm.lora.request import LoRARequest

from inducekv_vllm.errors import UnsupportedModel
from inducekv_vllm.frontend.loading import load_async
from inducekv_vllm.frontend.served_bundle import ServedBundle
from inducekv_vllm.pace import poll_delays
from inducekv_vllm.vllm_seams.logs import logger_of

from .adapters import task_adapters

logger = logger_of(__name__)
LOAD_S: Final = 600.0  # so long a load may take
ERASE_S: Final = 5.0  # so long changes wait for the memory of a bundle to be overwritten


async def load(client: EngineClient, memory: ServedBundle) -> int:
    """Load a bundle and its tasks' adapters while requests run; return its bytes in the pool of the first rank.

    If this fails, or is given up, some ranks may have it: load it again, or unload it.

    Raises:
        CapacityError: it does not fit.
        BundleError: a worker cannot load it otherwise.
        UnsupportedModel: this engine cannot serve it, or an adapter of one of its tasks cannot be loaded.
    """
    resident_bytes = await load_async(client.collective_rpc, memory.path, memory.digest)
    for task, adapter in task_adapters(memory).items():
        try:
            await client.add_lora(adapter)
        except Exception as error:
            raise UnsupportedModel(f"cannot load the adapter of task {task!r}: {error}") from error
    return resident_bytes


async def unload(
    client: EngineClient, memory: ServedBundle, but: Iterable[LoRARequest] = (), *, keep: bool = False
) -> None:
    """Drop a bundle, or its load; running requests keep it until they end.

    Args:
        but: adapters that others use.
        keep: the workers may keep a copy in host memory, to load it again.
    """
    needed = {adapter.lora_int_id for adapter in but}
    for adapter in task_adapters(memory).values():
        if adapter.lora_int_id not in needed:
            await client.collective_rpc("remove_lora", args=(adapter.lora_int_id,))
    await client.collective_rpc("inducekv_unload_bundle", args=(memory.digest, keep))


async def erase_kept(client: EngineClient, digest: str) -> bool | None:
    """Drop a bundle that has left the pool from the workers' host memory; whether it is gone, None if the engine is."""
    try:
        await client.collective_rpc("inducekv_unload_bundle", args=(digest, False))
        return await _is_erased_in_time(client, digest)
    except Exception as error:
        logger.warning("could not drop digest %s from host memory: %r", digest, error)
        return None


async def release(client: EngineClient, memory: ServedBundle, but: Iterable[LoRARequest]) -> bool | None:
    """`unload`, of a bundle that nothing uses; whether its memory is overwritten, None if the engine is gone."""
    try:
        await unload(client, memory, but)
        is_erased = await _is_erased_in_time(client, memory.digest)
    except Exception as error:  # the bundle is gone with the engine
        logger.warning("could not release the memory of digest %s: %r", memory.digest, error)
        return None
    logger.info("memory of digest %s released: no name and no request uses it", memory.digest)
    return is_erased


async def _is_erased_in_time(client: EngineClient, digest: str) -> bool:
    """Whether every rank has overwritten the memory of an unloaded bundle, within `ERASE_S`."""
    deadline, delays = time.monotonic() + ERASE_S, poll_delays()
    while not all(await client.collective_rpc("inducekv_is_erased", args=(digest,))):
        if time.monotonic() > deadline:
            logger.warning("the memory of digest %s is not erased yet: the engine still reads it", digest)
            return False
        await asyncio.sleep(next(delays))
    return True

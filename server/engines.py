"""Bundles on the workers of every engine of a server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from vllm.engine.protocol import EngineClient
from vllm.lora.request import LoRARequest

from inducekv_vllm.bundle.adapters import tensor_names
from inducekv_vllm.errors import UnsupportedModel
from inducekv_vllm.frontend.loading import load_async
from inducekv_vllm.frontend.served_bundle import ServedBundle
from inducekv_vllm.pace import POLL_S
from inducekv_vllm.vllm_seams.logs import logger_of

from .adapters import task_adapters
from .pool import PoolSize

logger = logger_of(__name__)
LOAD_S: Final = 600.0  # so long a load may take
SHOWN: Final = 3  # names of tensors in an error
ERASE_S: Final = 5.0  # so long changes wait for the memory of a bundle to be overwritten


class Engines:
    def __init__(self, client: EngineClient, pool: PoolSize | None = None) -> None:
        """`pool`: that of each rank."""
        self.client, self.pool = client, pool or PoolSize()

    async def load(self, memory: ServedBundle, path: str) -> int:
        """Load a bundle and its tasks' adapters while requests run; return its bytes in the pool of the first rank.

        Args:
            path: where its file is now.

        If this fails, or is given up, some ranks may have it: load it again, or unload it.

        Raises:
            CapacityError: it does not fit.
            BundleError: a worker cannot load it otherwise.
            UnsupportedModel: this engine cannot serve it, or an adapter of one of its tasks not, or not all of it.
            TimeoutError: it takes too long.
        """
        async with asyncio.timeout(LOAD_S):
            adapters = task_adapters(memory)
            for task, adapter in adapters.items():
                await self._require_modules(task, adapter)
            resident_bytes = await load_async(self.client.collective_rpc, path, memory.digest)
            for task, adapter in adapters.items():
                try:
                    await self.client.add_lora(adapter)
                except Exception as error:
                    raise UnsupportedModel(f"cannot load the adapter of task {task!r}: {error}") from error
        return resident_bytes

    async def _require_modules(self, task: str, adapter: LoRARequest) -> None:
        """Raises UnsupportedModel: vLLM would leave out weights of an adapter without a word."""
        names = await asyncio.to_thread(tensor_names, Path(adapter.lora_path))
        unmet, *_ = await self.client.collective_rpc("inducekv_unmet_tensors", args=(names,))
        if unmet:
            raise UnsupportedModel(
                f"the adapter of task {task!r} in {adapter.lora_path}: {len(names) - len(unmet)} of {len(names)} "
                f"tensors meet a module that vLLM adapts in this model, not {', '.join(unmet[:SHOWN])}"
            )
        logger.info("the adapter of task %r: all %d tensors meet a module", task, len(names))

    async def unload(self, digest: str, adapters: Iterable[LoRARequest] = (), *, keep: bool = False) -> None:
        """Drop a bundle, or its load; running requests keep it until they end.

        Args:
            adapters: go with it.
            keep: the workers may keep a copy in host memory, to load it again.
        """
        for adapter in adapters:
            await self.client.collective_rpc("remove_lora", args=(adapter.lora_int_id,))
        await self.client.collective_rpc("inducekv_unload_bundle", args=(digest, keep))

    async def release(self, digest: str, adapters: Iterable[LoRARequest] = ()) -> bool | None:
        """`unload`, of a bundle that nobody needs; whether nothing is left of it, None if the engine is gone."""
        try:
            await self.unload(digest, adapters)
            is_erased = await self._is_erased_in_time(digest)
        except Exception as error:  # the bundle is gone with the engine
            logger.warning("could not release the memory of digest %s: %r", digest, error)
            return None
        logger.info("memory of digest %s released: no name and no request uses it", digest)
        return is_erased

    async def _is_erased_in_time(self, digest: str) -> bool:
        """Whether every rank has overwritten the memory of an unloaded bundle, within `ERASE_S`."""
        deadline = time.monotonic() + ERASE_S
        while not all(await self.client.collective_rpc("inducekv_is_erased", args=(digest,))):
            if time.monotonic() > deadline:
                logger.warning("the memory of digest %s is not erased yet: the engine still reads it", digest)
                return False
            await asyncio.sleep(POLL_S)
        return True

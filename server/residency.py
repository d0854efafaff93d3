"""Bundles and their adapters on the engine's workers: loads, unloads, and what goes on in the background."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from vllm.engine.protocol import EngineClient
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.lora.request import LoRARequest

from inducekv_vllm.bundle import AdapterRecord
from inducekv_vllm.engine.memory import Memory
from inducekv_vllm.engine.wire import poll_delays
from inducekv_vllm.errors import BundleError, CapacityError, UnsupportedModel
from inducekv_vllm.host.logs import logger_of

logger = logger_of(__name__)


def adapter_folder(memory: Memory, record: AdapterRecord) -> Path:
    """The folder of a task's adapter; a relative path is relative to the bundle's folder."""
    return Path(memory.path).parent / record.path


class EngineMemory:
    """What the workers of one engine hold. It belongs to the server's event loop."""

    def __init__(self, client: EngineClient, models: OpenAIServingModels) -> None:
        self._client = client
        self._models = models
        self.background: set[asyncio.Task[Any]] = set()

    async def load(self, memory: Memory) -> int:
        """Load on every rank, while requests run; return its bytes in the pool of the first one.

        If a rank fails, unload on all and raise CapacityError, or BundleError if it lacks no room.
        """
        ask, delays = self._client.collective_rpc, poll_delays()
        try:
            await ask("inducekv_load_bundle", args=(memory.path, memory.digest))
            while None in (answers := await ask("inducekv_load_outcome", args=(memory.digest,))):
                await asyncio.sleep(next(delays))
        except asyncio.CancelledError:  # out of time: the workers may still load it
            self.in_background(ask("inducekv_unload_bundle", args=(memory.digest,)))
            raise
        refusals = [f"rank {rank}: {a['error']}" for rank, a in enumerate(answers) if not a["ok"]]
        if refusals:
            await self._client.collective_rpc("inducekv_unload_bundle", args=(memory.digest,))
            kind = CapacityError if any(answer.get("is_full") for answer in answers) else BundleError
            raise kind(f"the engine cannot load {memory.path}: {'; '.join(refusals)}")
        return int(answers[0]["resident_bytes"])

    async def load_adapters(self, name: str, memory: Memory) -> dict[str, LoRARequest]:
        """Load the tasks' adapters into the engine. If one fails, unload what was loaded and raise UnsupportedModel."""
        adapters: dict[str, LoRARequest] = {}
        try:
            for record in memory.metadata.task_adapters:
                adapters[record.task] = LoRARequest(
                    # The prefix cache tells adapters apart by name.
                    lora_name=f"inducekv-{record.digest}",
                    lora_int_id=self._models.lora_id_counter.inc(1),
                    lora_path=str(adapter_folder(memory, record)),
                )
                await self._client.add_lora(adapters[record.task])
        except asyncio.CancelledError:  # out of time
            self.in_background(self.unload(memory.digest, adapters))
            raise
        except Exception as error:
            await self.unload(memory.digest, adapters)
            task = list(adapters)[-1]
            raise UnsupportedModel(f"bundle {name!r}: cannot load the adapter of task {task!r}: {error}") from error
        return adapters

    async def unload(self, digest: str, adapters: dict[str, LoRARequest]) -> None:
        for adapter in adapters.values():
            await self._client.collective_rpc("remove_lora", args=(adapter.lora_int_id,))
        await self._client.collective_rpc("inducekv_unload_bundle", args=(digest,))

    async def wait_until_erased(self, digest: str, seconds: float) -> bool:
        """Whether every rank has overwritten the memory of an unloaded bundle, within so many seconds."""
        deadline, delays = time.monotonic() + seconds, poll_delays()
        while not all(await self._client.collective_rpc("inducekv_is_erased", args=(digest,))):
            if time.monotonic() > deadline:
                logger.warning("the memory of digest %s is not erased yet: the engine still reads them", digest)
                return False
            await asyncio.sleep(next(delays))
        return True

    def in_background(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self.background.add(task)
        task.add_done_callback(self.background.discard)

"""An `AsyncLLM` with memory, shared by the tests of the engine and of the registry."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from typing import Any

import pytest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

from inducekv_vllm.bundle import read_bundle
from inducekv_vllm.errors import UnknownBundle
from inducekv_vllm.frontend.loading import load_async
from inducekv_vllm.frontend.memory_engine import Lease, MemoryEngine, MemoryRequest
from inducekv_vllm.frontend.observation import BundleMetrics
from inducekv_vllm.frontend.served_bundle import ServedBundle
from inducekv_vllm.vllm_seams.config import SCHEDULER_CLS, WORKER_CLS, InduceKVConfig
from tests.engine.parity import FEWER_PROCESSES, World, prompts

ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_PLUGINS": "inducekv", **FEWER_PROCESSES}


class Memories:
    """The simplest source: fixed memories and a count of leases."""

    def __init__(self, **memories: ServedBundle) -> None:
        self.memories = memories
        self.leases = 0

    @contextlib.contextmanager
    def lease(self, name: str) -> Iterator[Lease]:
        if name not in self.memories:
            raise UnknownBundle(f"no memory bundle {name!r} is loaded")
        self.leases += 1
        try:
            yield Lease(self.memories[name], metrics=BundleMetrics(name, exported=False))
        finally:
            self.leases -= 1


def handle(name: str = "m") -> MemoryRequest:
    return MemoryRequest(lora_name=name, lora_int_id=1, lora_path="/nowhere")


async def last(stream: AsyncGenerator[Any, None]) -> Any:
    """The last output: that of the finished request."""
    return [output async for output in stream][-1]


class Served:
    """The engine with the bundle "first" as its memory "m"."""

    def __init__(self, llm: AsyncLLM, memories: Memories) -> None:
        self.llm, self.memories = llm, memories
        self.engine = MemoryEngine(llm, memories, InduceKVConfig())
        self.plain = llm.generate
        self._count = 0

    async def render(self, seed: int = 0, text: str = "What colour is the circle?") -> Any:
        (prompt,) = prompts(1, seed=seed)
        raw = {"prompt": f"<image> {text}", "multi_modal_data": {"image": prompt.image}}
        (rendered,) = await self.llm.renderer.render_cmpl_async([raw])
        return rendered

    def stream(self, prompt: Any, **options: Any) -> AsyncGenerator[Any, None]:
        self._count += 1
        settings = {"temperature": 0, "max_tokens": 8, "ignore_eos": True, **options}
        return self.engine.generate(prompt, SamplingParams(**settings), f"r{self._count}", lora_request=handle())

    async def answer(self, prompt: Any, **options: Any) -> Any:
        return await last(self.stream(prompt, **options))

    async def nothing_is_left(self) -> None:
        """No request, key or slot on either side. The worker hears of finished requests in the next step."""
        for _ in range(100):
            await self.plain_answer()
            (stats,) = await self.llm.collective_rpc("inducekv_stats")
            left = (self.memories.leases, self.llm.output_processor.get_num_unfinished_requests())
            if left == (0, 0) and stats["requests_known"] == stats["slots_used"] == 0:
                return
            await asyncio.sleep(0.05)
        raise AssertionError(f"left behind: {left}, {stats}")

    async def plain_answer(self) -> Any:
        prompt = {"type": "token", "prompt_token_ids": [5, 6, 7]}
        self._count += 1
        return await last(self.plain(prompt, SamplingParams(max_tokens=2, temperature=0), f"p{self._count}"))


@contextlib.asynccontextmanager
async def serve_world(world: World, max_model_len: int = 256) -> AsyncIterator[Served]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        llm = AsyncLLM.from_engine_args(
            AsyncEngineArgs(
                model=str(world.model),
                dtype="float32",
                max_model_len=max_model_len,
                max_num_seqs=4,
                enforce_eager=True,
                worker_cls=WORKER_CLS,
                scheduler_cls=SCHEDULER_CLS,
                additional_config={"inducekv": {}},
            )
        )
    try:
        path = str(world.paths["first"])
        memory = ServedBundle.from_bundle(read_bundle(path), path)
        await load_async(llm.collective_rpc, path, memory.digest)
        yield Served(llm, Memories(m=memory))
    finally:
        llm.shutdown()

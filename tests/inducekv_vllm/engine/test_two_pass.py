"""The two-pass client over a real `AsyncLLM`: cancellation in either pass, shared key passes, refusals, no leaks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Coroutine, Iterator
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import VLLMNotFoundError, VLLMValidationError
from vllm.multimodal.cache import MultiModalCacheMissError
from vllm.multimodal.cache.lru import LruKeyReplicatedReceiverCache, LruKeyReplicatedSenderCache
from vllm.multimodal.inputs import MultiModalBatchedField, MultiModalFieldElem, MultiModalKwargsItem, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

from inducekv_vllm.bundle import read_bundle
from inducekv_vllm.config import WORKER_CLS, InduceKVConfig
from inducekv_vllm.engine.memory_index import MemoryIndex
from inducekv_vllm.engine.passes import answer_pass_prompt, prompt_identity
from inducekv_vllm.engine.two_pass import Lease, MemoryRequest, TwoPassEngine
from inducekv_vllm.engine.wire import InjectionSpec
from inducekv_vllm.errors import UnknownBundle
from inducekv_vllm.retrieval import PrefixIndex
from tests.inducekv_vllm.bundles import random_bundle
from tests.inducekv_vllm.parity import World, make_world, prompts
from tests.tiny_models import save_tiny_llava


class Memories:
    """The simplest source: fixed memories, and a count of leases."""

    def __init__(self, **memories: MemoryIndex) -> None:
        self.memories = memories
        self.leases = 0

    @contextlib.contextmanager
    def lease(self, name: str) -> Iterator[Lease]:
        if name not in self.memories:
            raise UnknownBundle(f"no memory bundle {name!r} is loaded")
        self.leases += 1
        try:
            yield Lease(self.memories[name], None)
        finally:
            self.leases -= 1


def handle(name: str = "m") -> MemoryRequest:
    return MemoryRequest(lora_name=name, lora_int_id=1, lora_path="/nowhere")


class Served:
    """An `AsyncLLM` with the two-pass client, on an event loop that lives as long as the tests."""

    def __init__(self, runner: asyncio.Runner, llm: AsyncLLM, memories: Memories) -> None:
        self.run, self.llm, self.memories = runner.run, llm, memories
        self.engine = TwoPassEngine(llm, memories, InduceKVConfig())
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
        return [output async for output in self.stream(prompt, **options)][-1]

    async def nothing_is_left(self) -> None:
        """No request, no key and no slot on any side; a step must run before the worker hears of what has finished."""
        for _ in range(100):
            await self.plain_answer()
            (stats,) = await self.llm.collective_rpc("inducekv_stats")
            left = (self.memories.leases, self.llm.output_processor.get_num_unfinished_requests())
            if left == (0, 0) and stats["keys_pending"] == stats["slots_used"] == 0:
                return
            await asyncio.sleep(0.05)
        raise AssertionError(f"left behind: {left}, {stats}")

    async def plain_answer(self) -> Any:
        prompt = {"type": "token", "prompt_token_ids": [5, 6, 7]}
        self._count += 1
        outputs = self.plain(prompt, SamplingParams(max_tokens=2, temperature=0), f"p{self._count}")
        return [output async for output in outputs][-1]


@contextlib.contextmanager
def serve_world(world: World) -> Iterator[Served]:
    """An engine with the bundle "sqrt" as its memory "m"."""
    with pytest.MonkeyPatch.context() as patch, asyncio.Runner() as runner:
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        patch.setenv("VLLM_PLUGINS", "inducekv")

        async def start() -> tuple[AsyncLLM, MemoryIndex]:
            llm = AsyncLLM.from_engine_args(
                AsyncEngineArgs(
                    model=str(world.model),
                    dtype="float32",
                    max_model_len=256,
                    max_num_seqs=4,
                    enforce_eager=True,
                    worker_cls=WORKER_CLS,
                    additional_config={"inducekv": {}},
                )
            )
            path = str(world.paths["sqrt"])
            memory = MemoryIndex.from_bundle(read_bundle(path), path)
            (loaded,) = await llm.collective_rpc("inducekv_load_bundle", args=(path, memory.digest))
            assert loaded["ok"], loaded
            return llm, memory

        llm, memory = runner.run(start())
        try:
            yield Served(runner, llm, Memories(m=memory))
        finally:
            llm.shutdown()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("engine")
    with serve_world(make_world(save_tiny_llava(folder / "model"), folder)) as served:
        yield served


def run(served: Served, test: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(test, 240)
        await served.nothing_is_left()

    served.run(bounded())


def test_the_memory_is_used(served: Served) -> None:
    async def test() -> None:
        prompt = await served.render(seed=1)
        first, second = await served.answer(prompt), await served.answer(prompt)
        plain = served.plain(prompt, SamplingParams(max_tokens=8, temperature=0, ignore_eos=True), "plain")
        without = [output async for output in plain][-1]
        assert first.outputs[0].token_ids == second.outputs[0].token_ids != without.outputs[0].token_ids
        # The prompt came with the picture's data; the engine took it from there three times.
        assert all(item is not None for item in prompt["mm_kwargs"]["image"])

    run(served, test())


def test_equal_prompts_at_once_share_one_key_pass(served: Served) -> None:
    async def test() -> None:
        asked = [await served.render(seed=2) for _ in range(5)]
        traced = {"inducekv_trace": 1}
        answers = await asyncio.gather(*(served.answer(prompt, extra_args=traced) for prompt in asked))
        sources = [a.kv_transfer_params["inducekv"]["timings"]["key_source"] for a in answers]
        assert sorted(sources) == ["computed", "shared", "shared", "shared", "shared"]
        assert len({tuple(answer.outputs[0].token_ids) for answer in answers}) == 1

    run(served, test())


def test_cancelled_in_the_key_pass(served: Served) -> None:
    async def test() -> None:
        for wait in (0, 0, 0.001, 0.003, 0.01):
            task = asyncio.create_task(served.answer(await served.render(seed=3, text=f"yes {wait}")))
            await asyncio.sleep(wait)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        assert served.engine._keys._running == {}
        await served.answer(await served.render(seed=3))  # its picture is not taken for one the engine has

    run(served, test())


def test_who_shares_a_key_pass_survives_the_cancellation_of_who_began_it(served: Served) -> None:
    async def test() -> None:
        tasks = [asyncio.create_task(served.answer(await served.render(seed=4))) for _ in range(3)]
        await asyncio.sleep(0)
        tasks[0].cancel()
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(answers[0], asyncio.CancelledError)
        assert [answer.finished for answer in answers[1:]] == [True, True]  # type: ignore[union-attr]

    run(served, test())


@pytest.mark.parametrize("n", [1, 3])
def test_cancelled_in_the_answer(served: Served, n: int) -> None:
    async def test() -> None:
        options = {"n": n, "temperature": 1.0, "max_tokens": 150}
        stream = served.stream(await served.render(seed=5), **options)
        await anext(stream)
        assert served.memories.leases == 1
        await stream.aclose()
        assert served.memories.leases == 0

        task = asyncio.create_task(served.answer(await served.render(seed=5), **options))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(served, test())


def test_refusals(served: Served) -> None:
    async def streamed() -> AsyncGenerator[Any, None]:
        yield {"prompt_token_ids": [1]}

    async def test() -> None:
        prompt = await served.render(seed=6)
        params = SamplingParams(max_tokens=2)
        for raw in ("a text", {"prompt": "a text"}, streamed()):
            with pytest.raises(VLLMValidationError, match="rendered prompt"):
                served.engine.generate(raw, params, "raw", lora_request=handle())
        with pytest.raises(VLLMValidationError, match="type 'embeds'"):
            served.engine.generate({"type": "embeds"}, params, "embeds", lora_request=handle())
        with pytest.raises(VLLMNotFoundError, match="nobody"):
            served.engine.generate(prompt, params, "unknown", lora_request=handle("nobody"))
        with pytest.raises(VLLMValidationError, match="maximum model length of 256"):
            await served.answer({"type": "token", "prompt_token_ids": [5] * 256})
        assert (await served.answer(await served.render(seed=6))).finished  # refused above before its picture was sent

    run(served, test())


def test_without_memory_nothing_stands_between(served: Served) -> None:
    """The very generator of vLLM comes back: not a wrapper that could change or slow it."""
    prompt = {"type": "token", "prompt_token_ids": [5, 6]}
    stream = served.engine.generate(prompt, SamplingParams(max_tokens=1), "plain", lora_request=None)
    assert stream.ag_code is AsyncLLM.generate.__code__  # type: ignore[attr-defined]


class TestPictureCaches:
    """vLLM's own two caches, which must evict alike, behind a stand-in for the engine that only moves pictures."""

    BYTES, ROOM = 4000, 3

    def setup_method(self) -> None:
        room_gb = self.ROOM * self.BYTES * 1.1 / 2**30
        config: Any = SimpleNamespace(
            get_multimodal_config=lambda: SimpleNamespace(mm_processor_cache_gb=room_gb, mm_processor_cache_type="lru")
        )
        self.sender, self.receiver = LruKeyReplicatedSenderCache(config), LruKeyReplicatedReceiverCache(config)
        self.gates: dict[str, asyncio.Event] = {}
        bundle = random_bundle()
        index_memory = MemoryIndex(
            digest=bundle.digest,
            path="",
            file_bytes=0,
            index=PrefixIndex(bundle.retrieval_keys.numpy()),
            temperature=0.07,
            weighting="sqrt",
            entries=bundle.metadata.entries,
            budget=5,
            payload_tokens=4,
            adapter=None,
        )
        key = bundle.retrieval_keys[:2].float().numpy()

        async def rpc(method: str, args: tuple[Any, ...] = ()) -> list[dict[str, Any]]:
            return [{"key": key.tobytes(), "tokens": 1}]

        client: Any = SimpleNamespace(
            generate=self._engine, collective_rpc=rpc, renderer=SimpleNamespace(mm_processor_cache=self.sender)
        )
        self.two_pass = TwoPassEngine(client, Memories(m=index_memory), InduceKVConfig())

    async def _engine(self, prompt: Any, params: Any, request_id: str, **_: Any) -> AsyncGenerator[Any, None]:
        """A request arrives, and its pictures with it; it finishes when its gate opens."""
        (picture,), (item,) = prompt["mm_hashes"]["image"], prompt["mm_kwargs"]["image"]
        self.receiver.touch_receiver_cache_item(picture)
        self.receiver.get_and_update_item(item, picture)
        await self.gates.setdefault(request_id, asyncio.Event()).wait()
        yield SimpleNamespace(finished=True, outputs=[SimpleNamespace(finish_reason="stop")], kv_transfer_params=None)

    def render(self, picture: str, token: int) -> Any:
        element = MultiModalFieldElem(data=np.zeros(self.BYTES, dtype=np.uint8), field=MultiModalBatchedField())
        known = self.sender.is_cached_item(picture)
        new = None if known else (MultiModalKwargsItem({"pixels": element}), [])
        item, _ = self.sender.get_and_update_item(new, picture)
        return {
            "type": "multimodal",
            "prompt_token_ids": [token],
            "mm_kwargs": {"image": [item]},
            "mm_hashes": {"image": [picture]},
            "mm_placeholders": {"image": [PlaceholderRange(offset=0, length=1)]},
        }

    async def scenario(self) -> None:
        """The answer of A, asked before B, begins after the answer of B; then a new picture needs room."""

        async def ask(picture: str, token: int, name: str) -> None:
            generated = self.two_pass.generate(
                self.render(picture, token), SamplingParams(max_tokens=1), name, lora_request=handle()
            )
            assert [output.finished async for output in generated] == [True]

        def open_gate(name: str) -> None:
            for request_id, gate in self.gates.items():
                if request_id.startswith(name):
                    gate.set()

        async def settle() -> None:
            for _ in range(10):
                await asyncio.sleep(0)

        tasks = [asyncio.create_task(ask(picture, token, picture)) for token, picture in enumerate("ABC")]
        for name in "BCA":  # pass one ends in this order, so pass two begins in it
            await settle()
            open_gate(f"{name}-key")
        await settle()
        tasks.append(asyncio.create_task(ask("D", 9, "D")))  # evicts one of A, B, C
        await settle()
        tasks += [asyncio.create_task(ask(picture, 10 + i, f"{picture}2")) for i, picture in enumerate("BA")]
        for _ in range(5):
            await settle()
            for gate in self.gates.values():
                gate.set()
        await asyncio.gather(*tasks)

    def test_stay_in_step(self) -> None:
        asyncio.run(asyncio.wait_for(self.scenario(), 10))
        assert list(self.sender._cache.order) == list(self.receiver._cache.order)

    def test_would_part_without_care(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(TwoPassEngine, "_sync_mm_lru", lambda self, prompt: None)
        with pytest.raises(MultiModalCacheMissError):
            asyncio.run(asyncio.wait_for(self.scenario(), 10))


class TestPromptIdentity:
    PROMPT: ClassVar[dict[str, Any]] = {
        "type": "multimodal",
        "prompt_token_ids": [1, 2, 3],
        "mm_hashes": {"image": ["a"]},
        "mm_kwargs": {"image": [None]},
        "mm_placeholders": {"image": [PlaceholderRange(offset=1, length=1)]},
    }

    @pytest.mark.parametrize(
        "change",
        [
            {"prompt_token_ids": [1, 2, 4]},
            {"mm_hashes": {"image": ["b"]}},
            {"mm_placeholders": {"image": [PlaceholderRange(offset=2, length=1)]}},
            {"cache_salt": "tenant"},
        ],
    )
    def test_differs_where_the_key_or_the_tenant_does(self, change: dict) -> None:
        assert prompt_identity({**self.PROMPT, **change}, None) != prompt_identity(self.PROMPT, None)  # type: ignore[typeddict-item, arg-type]
        assert prompt_identity(self.PROMPT, "style") != prompt_identity(self.PROMPT, None)  # type: ignore[arg-type]

    def test_is_the_same_for_what_does_not_matter(self) -> None:
        later = {**self.PROMPT, "arrival_time": 3.0, "mm_kwargs": {"image": ["data"]}}
        assert prompt_identity(later, None) == prompt_identity(self.PROMPT, None)  # type: ignore[arg-type]

    def test_the_salt_of_an_answer_names_all_it_depends_on(self) -> None:
        orders = [
            InjectionSpec("d", (0, 1), (0.75, 0.25), True),
            InjectionSpec("e", (0, 1), (0.75, 0.25), True),
            InjectionSpec("d", (1, 0), (0.75, 0.25), True),
            InjectionSpec("d", (0, 1), (0.5, 0.5), True),
            InjectionSpec("d", (0, 1), (0.75, 0.25), False),
        ]
        salts = [answer_pass_prompt(self.PROMPT, order)["cache_salt"] for order in orders]  # type: ignore[arg-type, typeddict-item]
        salted = {**self.PROMPT, "cache_salt": "tenant"}
        salts.append(answer_pass_prompt(salted, orders[0])["cache_salt"])  # type: ignore[arg-type, typeddict-item]
        assert len(set(salts)) == len(salts)
        assert "cache_salt" not in self.PROMPT

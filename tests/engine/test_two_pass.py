"""The two-pass client over a real `AsyncLLM`: cancellation in either pass, shared key passes, leases, refusals."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from vllm.exceptions import RetryableRequestError, VLLMNotFoundError, VLLMValidationError
from vllm.multimodal.cache import MultiModalCacheMissError
from vllm.multimodal.cache.lru import LruKeyReplicatedReceiverCache, LruKeyReplicatedSenderCache
from vllm.multimodal.inputs import MultiModalBatchedField, MultiModalFieldElem, MultiModalKwargsItem, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

from inducekv_vllm.engine.memory_index import MemoryIndex
from inducekv_vllm.engine.passes import answer_pass_prompt, prompt_identity
from inducekv_vllm.engine.two_pass import TwoPassEngine
from inducekv_vllm.engine.wire import InjectionSpec
from inducekv_vllm.errors import ConfigError
from inducekv_vllm.host.config import InduceKVConfig
from tests.bundles import random_bundle
from tests.engine.served import Memories, Served, handle, last

pytestmark = pytest.mark.anyio


async def test_the_memory_is_used(served: Served) -> None:
    prompt = await served.render(seed=1)
    first, second = await served.answer(prompt), await served.answer(prompt)
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    without = await last(served.plain(prompt, params, "plain"))
    assert first.outputs[0].token_ids == second.outputs[0].token_ids != without.outputs[0].token_ids
    # The prompt carries the image's data, which the engine received three times.
    assert all(item is not None for item in prompt["mm_kwargs"]["image"])


async def test_equal_prompts_at_once_share_one_key_pass(served: Served) -> None:
    equal = [await served.render(seed=2) for _ in range(5)]
    traced = {"inducekv_trace": 1}
    answers = await asyncio.gather(*(served.answer(prompt, extra_args=traced) for prompt in equal))
    sources = [a.kv_transfer_params["inducekv"]["timings"]["key_source"] for a in answers]
    assert sorted(sources) == ["computed", "shared", "shared", "shared", "shared"]
    assert len({tuple(answer.outputs[0].token_ids) for answer in answers}) == 1


async def test_cancelled_in_the_key_pass(served: Served) -> None:
    for wait in (0, 0, 0.001, 0.003, 0.01):
        task = asyncio.create_task(served.answer(await served.render(seed=3, text=f"yes {wait}")))
        await asyncio.sleep(wait)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    assert served.engine._keys._running == {}
    await served.answer(await served.render(seed=3))  # its image does not count as cached in the engine


@pytest.mark.parametrize("n", [1, 3])
async def test_cancelled_in_the_answer(served: Served, n: int) -> None:
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


@pytest.mark.parametrize("ending", ["dropped", "closed", "cancelled"])
async def test_a_request_that_never_begins_ends_its_lease(served: Served, ending: str) -> None:
    prompt = {"type": "token", "prompt_token_ids": [5, 6]}
    stream = served.stream(prompt)
    assert served.memories.leases == 1  # from the call on

    async def consume(outputs: AsyncGenerator[Any, None]) -> None:
        assert [output async for output in outputs]

    if ending == "closed":
        await stream.aclose()
    elif ending == "cancelled":
        task = asyncio.create_task(consume(stream))
        del stream
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        del task  # with its traceback
    else:
        del stream
    await asyncio.sleep(0.05)
    assert served.memories.leases == 0


async def test_refusals(served: Served) -> None:
    async def streamed() -> AsyncGenerator[Any, None]:
        yield {"prompt_token_ids": [1]}

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
    assert (await served.answer(await served.render(seed=6))).finished  # its image was not sent before the refusal


def test_without_memory_nothing_stands_between(served: Served) -> None:
    """The very generator of vLLM comes back: not a wrapper that could change or slow it."""
    prompt = {"type": "token", "prompt_token_ids": [5, 6]}
    stream = served.engine.generate(prompt, SamplingParams(max_tokens=1), "plain", lora_request=None)
    assert stream.ag_code is AsyncLLM.generate.__code__  # type: ignore[attr-defined]


class TestImageCaches:
    """vLLM's own two caches, which must evict alike, behind a stand-in for the engine that only moves images."""

    BYTES, ROOM = 4000, 3

    def setup_method(self) -> None:
        room_gb = self.ROOM * self.BYTES * 1.1 / 2**30
        config: Any = SimpleNamespace(
            get_multimodal_config=lambda: SimpleNamespace(mm_processor_cache_gb=room_gb, mm_processor_cache_type="lru")
        )
        self.sender, self.receiver = LruKeyReplicatedSenderCache(config), LruKeyReplicatedReceiverCache(config)
        self.gates: dict[str, asyncio.Event] = {}
        bundle = random_bundle()
        memory = MemoryIndex.from_bundle(bundle, __file__)
        key = bundle.retrieval_keys[0].float().numpy()

        async def rpc(method: str, args: tuple[Any, ...] = ()) -> list[dict[str, Any]]:
            return [{"key": key.tobytes(), "evidence": None, "tokens": 1}]

        client: Any = SimpleNamespace(
            generate=self._engine,
            collective_rpc=rpc,
            renderer=SimpleNamespace(mm_processor_cache=self.sender),
            model_config=SimpleNamespace(hf_config=SimpleNamespace()),
            vllm_config=SimpleNamespace(observability_config=SimpleNamespace(otlp_traces_endpoint=None)),
        )
        self.two_pass = TwoPassEngine(client, Memories(m=memory), InduceKVConfig())

    async def _engine(self, prompt: Any, params: Any, request_id: str, **_: Any) -> AsyncGenerator[Any, None]:
        """A request arrives with its image; it finishes when its gate opens."""
        (image,), (item,) = prompt["mm_hashes"]["image"], prompt["mm_kwargs"]["image"]
        self.receiver.touch_receiver_cache_item(image)
        self.receiver.get_and_update_item(item, image)
        await self.gates.setdefault(request_id, asyncio.Event()).wait()
        yield SimpleNamespace(finished=True, outputs=[SimpleNamespace(finish_reason="stop")], metrics=None)

    def render(self, image: str, token: int) -> Any:
        element = MultiModalFieldElem(data=np.zeros(self.BYTES, dtype=np.uint8), field=MultiModalBatchedField())
        cached = self.sender.is_cached_item(image)
        new = None if cached else (MultiModalKwargsItem({"pixels": element}), [])
        item, _ = self.sender.get_and_update_item(new, image)
        return {
            "type": "multimodal",
            "prompt_token_ids": [token],
            "mm_kwargs": {"image": [item]},
            "mm_hashes": {"image": [image]},
            "mm_placeholders": {"image": [PlaceholderRange(offset=0, length=1)]},
        }

    async def scenario(self) -> None:
        """A is requested before B, but its answer begins after B's; then a new image needs room."""

        async def ask(image: str, token: int, name: str) -> None:
            generated = self.two_pass.generate(
                self.render(image, token), SamplingParams(max_tokens=1), name, lora_request=handle()
            )
            assert [output.finished async for output in generated] == [True]

        def open_gate(name: str) -> None:
            for request_id, gate in self.gates.items():
                if request_id.startswith(name):
                    gate.set()

        async def settle() -> None:
            for _ in range(10):
                await asyncio.sleep(0)

        tasks = [asyncio.create_task(ask(image, token, image)) for token, image in enumerate("ABC")]
        for name in "BCA":  # pass one ends in this order, so pass two begins in it
            await settle()
            open_gate(f"{name}-key")
        await settle()
        tasks.append(asyncio.create_task(ask("D", 9, "D")))  # evicts one of A, B, C
        await settle()
        tasks += [asyncio.create_task(ask(image, 10 + i, f"{image}2")) for i, image in enumerate("BA")]
        for _ in range(5):
            await settle()
            for gate in self.gates.values():
                gate.set()
        await asyncio.gather(*tasks)

    async def test_stay_in_step(self) -> None:
        await self.scenario()
        assert list(self.sender._cache.order) == list(self.receiver._cache.order)

    async def test_would_part_without_care(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(TwoPassEngine, "_sync_mm_lru", lambda self, prompt: None)
        with pytest.raises(MultiModalCacheMissError):
            await self.scenario()


class TestPromptIdentity:
    PROMPT: ClassVar[dict[str, Any]] = {
        "type": "multimodal",
        "prompt_token_ids": [1, 2, 3],
        "mm_hashes": {"image": ["a"]},
        "mm_kwargs": {"image": [None]},
        "mm_placeholders": {"image": [PlaceholderRange(offset=1, length=1)]},
    }

    def test_differs_with_all_that_its_key_and_evidence_depend_on(self) -> None:
        """Evidence is that of one gate's prototypes; what one tenant has computed is not another's."""
        changes: list[dict[str, Any]] = [
            {},
            {"prompt_token_ids": [1, 2, 4]},
            {"mm_hashes": {"image": ["b"]}},
            {"mm_placeholders": {"image": [PlaceholderRange(offset=2, length=1)]}},
            {"cache_salt": "tenant"},
        ]
        asked = ({"gate": "d"}, {"gate": "e"}, {"gate": "d", "retrieval": False}, {"gate": "d", "owner": "somebody"})
        found = [prompt_identity({**self.PROMPT, **change}, None) for change in changes]  # type: ignore[typeddict-item, arg-type]
        found += [prompt_identity(self.PROMPT, None, **each) for each in asked]  # type: ignore[arg-type]
        found.append(prompt_identity(self.PROMPT, "style"))  # type: ignore[arg-type]
        assert len(set(found)) == len(found) == 10

    def test_the_salt_of_an_answer_covers_all_it_depends_on(self) -> None:
        spec = InjectionSpec("d", (0, 1), (0.75, 0.25), True)
        changes: list[dict[str, Any]] = [
            {},
            {"bundle": "e"},
            {"entries": (1, 0)},
            {"weights": (0.5, 0.5)},
            {"remainder": False},
        ]
        salts = {answer_pass_prompt(self.PROMPT, replace(spec, **change))["cache_salt"] for change in changes}  # type: ignore[arg-type, typeddict-item]
        salts.add(answer_pass_prompt({**self.PROMPT, "cache_salt": "tenant"}, spec)["cache_salt"])  # type: ignore[arg-type, typeddict-item]
        assert len(salts) == 6
        assert "cache_salt" not in self.PROMPT


async def test_an_answer_that_cannot_be_recorded_is_not_given(served: Served) -> None:
    """And leaves nothing behind: the picture that the engine did not get is sent with the next request."""
    recorded: list[tuple[str, str, dict[str, Any]]] = []

    async def record(request_id: str, owner: str, trace: dict[str, Any]) -> None:
        if not recorded:
            recorded.append((request_id, owner, trace))
            raise ConfigError("audit.jsonl: No space left on device")
        recorded.append((request_id, owner, trace))

    engine = TwoPassEngine(served.llm, served.memories, InduceKVConfig(), record_answer=record)
    params = SamplingParams(max_tokens=2, temperature=0, extra_args={"inducekv_trace": 1})
    with pytest.raises(RetryableRequestError, match="No space left"):
        await last(engine.generate(await served.render(seed=81), params, "refused", lora_request=handle()))
    answer = await last(engine.generate(await served.render(seed=81), params, "given", lora_request=handle()))
    assert [request_id for request_id, *_ in recorded] == ["refused", "given"]
    shown = answer.kv_transfer_params["inducekv"]
    assert {name: shown[name] for name in recorded[1][2]} == recorded[1][2]


async def test_forgetting_a_version_drops_its_traces_and_the_keys_it_was_last_used_with(served: Served) -> None:
    engine = TwoPassEngine(served.llm, served.memories, InduceKVConfig())
    params = SamplingParams(max_tokens=2, temperature=0, extra_args={"inducekv_trace": 1})

    async def source(request_id: str) -> str:
        prompt = await served.render(seed=82)
        answer = await last(engine.generate(prompt, params, request_id, lora_request=handle()))
        return str(answer.kv_transfer_params["inducekv"]["timings"]["key_source"])

    assert [await source("a"), await source("b")] == ["computed", "cached"]
    digest = served.memories.memories["m"].digest
    engine.forget("another")
    assert await source("c") == "cached"
    assert engine.traces.of_response("", None, "a")
    engine.forget(digest)
    assert not engine.traces.of_response("", None, "a")
    assert await source("d") == "computed"

"""The engine client over a real `AsyncLLM`: cancellation at any time, decisions, leases, versions, refusals."""

import asyncio
import contextlib
import shutil
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
from vllm.exceptions import RetryableRequestError, VLLMNotFoundError, VLLMValidationError
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

from inducekv_vllm.bundle import AdapterRecord, read_bundle
from inducekv_vllm.errors import BundleError, ConfigError
from inducekv_vllm.frontend.loading import load_async
from inducekv_vllm.frontend.memory_engine import MemoryEngine
from inducekv_vllm.frontend.served_bundle import ServedBundle
from inducekv_vllm.protocol import Decision
from inducekv_vllm.vllm_seams.config import InduceKVConfig
from tests.engine.parity import World
from tests.engine.served import Served, handle, last

pytestmark = pytest.mark.anyio
AUDITED = InduceKVConfig(audit_answers=True, state="/nowhere")


class Journal:
    """An `EngineJournal` that notes nothing, but for what it is given."""

    def __init__(self, **methods: Any) -> None:
        vars(self).update(methods)

    def note_decision(self, name: str, memory: ServedBundle, decision: Decision) -> None:
        pass

    def note_fact(self, name: str, fact: str) -> None:
        raise AssertionError(f"{name} has no facts")

    async def record_answer(self, request_id: str, owner: str, trace: dict[str, Any]) -> None:
        raise AssertionError("answers are not audited")

    async def put_trace(self, owner: str, cache_salt: str | None, request_id: str, trace: dict[str, Any]) -> None:
        pass


def audited(served: Served) -> tuple[MemoryEngine, list[str]]:
    """An engine, and the requests of which it has recorded an answer."""
    noted: list[str] = []

    async def record(request_id: str, *_: Any) -> None:
        noted.append(request_id)

    return MemoryEngine(served.llm, served.memories, AUDITED, journal=Journal(record_answer=record)), noted


async def test_the_memory_is_used(served: Served) -> None:
    prompt = await served.render(seed=1)
    first, second = await served.answer(prompt), await served.answer(prompt)
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    without = await last(served.plain(prompt, params, "plain"))
    assert first.outputs[0].token_ids == second.outputs[0].token_ids != without.outputs[0].token_ids
    # The prompt carries the image's data, which the engine received twice.
    assert all(item is not None for item in prompt["mm_kwargs"]["image"])


async def test_cancelled_before_the_first_token(served: Served) -> None:
    for wait in (0, 0, 0.001, 0.003, 0.01):
        task = asyncio.create_task(served.answer(await served.render(seed=3, text=f"yes {wait}")))
        await asyncio.sleep(wait)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
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


async def test_a_bundle_comes_back_from_host_memory_as_it_was(
    served: Served, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit, without its file, until it is unloaded for good."""
    rpc, path = served.llm.collective_rpc, str(shutil.copy(world.paths["second"], tmp_path))
    memory = ServedBundle.from_bundle(read_bundle(path), path)

    async def answered(salt: str) -> Any:
        prompt = {**await served.render(seed=8), "cache_salt": salt}  # no block is shared
        (output,) = (await served.answer(prompt, logprobs=1)).outputs
        return output.token_ids, [{token: each.logprob for token, each in step.items()} for step in output.logprobs]

    with monkeypatch.context() as patch:
        patch.setitem(served.memories.memories, "m", memory)
        await load_async(rpc, path, memory.digest)
        before = await answered("a")
        await rpc("inducekv_unload_bundle", args=(memory.digest, True))
        Path(path).unlink()
        await load_async(rpc, path, memory.digest)
        assert await answered("b") == before
    await rpc("inducekv_unload_bundle", args=(memory.digest,))
    while not all(await rpc("inducekv_is_erased", args=(memory.digest,))):
        await asyncio.sleep(0.01)
    with pytest.raises(BundleError, match="no such file"):
        await load_async(rpc, path, memory.digest)


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


async def test_an_answer_that_cannot_be_recorded_is_not_given(served: Served) -> None:
    """And leaves nothing behind: the picture that the engine did not get is sent with the next request."""
    recorded: list[tuple[str, str, dict[str, Any]]] = []

    async def record(request_id: str, owner: str, trace: dict[str, Any]) -> None:
        if not recorded:
            recorded.append((request_id, owner, trace))
            raise ConfigError("state: No space left on device")
        recorded.append((request_id, owner, trace))

    engine = MemoryEngine(served.llm, served.memories, AUDITED, journal=Journal(record_answer=record))
    params = SamplingParams(max_tokens=2, temperature=0, extra_args={"inducekv_trace": 1})
    with pytest.raises(RetryableRequestError, match="No space left"):
        await last(engine.generate(await served.render(seed=81), params, "refused", lora_request=handle()))
    answer = await last(engine.generate(await served.render(seed=81), params, "given", lora_request=handle()))
    assert [request_id for request_id, *_ in recorded] == ["refused", "given"]
    shown = answer.kv_transfer_params["inducekv"]
    assert {name: shown[name] for name in recorded[1][2]} == recorded[1][2]


async def test_the_first_output_of_a_stream_tells_the_decision(served: Served) -> None:
    engine, noted = audited(served)
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
    stream = engine.generate(await served.render(seed=83), params, "streamed", lora_request=handle())
    first = await anext(stream)
    assert noted == ["streamed"]
    assert first.kv_transfer_params is None  # vLLM's routes would show it
    rest = [output async for output in stream]
    assert sum(len(output.outputs[0].token_ids) for output in (first, *rest)) == 6
    assert noted == ["streamed"]


async def test_a_reader_that_is_late_hears_the_decision_with_its_first_text(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has not been read yet is merged by vLLM, which keeps the fields of the last output."""
    begin = served.llm.add_request

    async def begin_and_wait(*args: Any, **kwargs: Any) -> Any:
        queue = await begin(*args, **kwargs)
        while queue.output is None or len(queue.output.outputs[0].token_ids) < 2:
            await asyncio.sleep(0)
        return queue

    monkeypatch.setattr(served.llm, "add_request", begin_and_wait)
    engine, noted = audited(served)
    params = SamplingParams(max_tokens=100, temperature=0, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
    stream = engine.generate(await served.render(seed=83), params, "late", lora_request=handle())
    first = await anext(stream)
    assert 2 <= len(first.outputs[0].token_ids) < 100
    assert (noted, first.kv_transfer_params) == (["late"], None)
    await stream.aclose()


async def test_an_answer_that_a_stop_string_ends_has_its_decision(served: Served) -> None:
    """The API process finds the string, in the middle of what the engine goes on with."""
    text = (await served.answer(await served.render(seed=83))).outputs[0].text
    engine, noted = audited(served)
    params = SamplingParams(
        min_tokens=2,
        max_tokens=100,
        temperature=0,
        stop=sorted(set(text)),
        output_kind=RequestOutputKind.FINAL_ONLY,
        extra_args={"inducekv_trace": 1},
    )
    answer = await last(engine.generate(await served.render(seed=83), params, "stopped", lora_request=handle()))
    assert answer.outputs[0].finish_reason == "stop"
    assert 1 < len(answer.outputs[0].token_ids) < 100
    assert noted == ["stopped"]
    assert answer.kv_transfer_params["inducekv"]["timings"]["decision_source"] == "computed"


def test_a_tasks_adapter_acts_on_the_prompt(world: World) -> None:
    """As memory of the generation does not."""
    metadata = world.bundles["first"].metadata.model_copy(
        update={"form": "decoupled", "activations": {"t": "generation"}}
    )
    adapter = AdapterRecord(task="u", path="u", digest="0" * 64, rank=1)
    routed = metadata.model_copy(update={"task_adapters": (adapter,)})
    assert [ServedBundle(each, "/nowhere", 0).acts_on_prompt for each in (metadata, routed)] == [False, True]

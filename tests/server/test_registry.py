"""The registry over a real engine: versions, leases and releases, down to the worker's memory."""

import asyncio
import shutil
from argparse import Namespace
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.datastructures import State
from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.exceptions import VLLMNotFoundError
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams

from inducekv_vllm.bundle import AdapterRecord, write_bundle
from inducekv_vllm.errors import (
    BundleError,
    CapacityError,
    ConfigError,
    FingerprintMismatch,
    LoadTimeout,
    TooManyChanges,
    UnsupportedModel,
)
from inducekv_vllm.frontend.memory_engine import MemoryEngine
from inducekv_vllm.frontend.served_bundle import ServedBundle
from inducekv_vllm.vllm_seams.config import InduceKVConfig
from server import changes, names, reader
from server.access import Access
from server.endpoint import InduceKVEndpoint, check_server, guard_adapters
from server.engines import Engines
from server.pool import PoolSize
from server.reader import Checked
from server.registry import BundleRegistry
from server.state import ServerState
from tests.bundles import random_bundle
from tests.engine.parity import World
from tests.engine.served import Served, handle, last

pytestmark = pytest.mark.anyio


class Registered:
    """A registry on a running engine, new for each test."""

    def __init__(self, served: Served, world: World, folder: Path) -> None:
        self.llm, self.world = served.llm, world
        self.models = OpenAIServingModels(served.llm, [BaseModelPath(name="base", model_path=str(world.model))])
        self.state = ServerState(folder / "state", keeps_bundles=False)
        self.registry = BundleRegistry(Engines(served.llm), self.models, world.backbone.fingerprint, self.state)
        self.engine = MemoryEngine(served.llm, self.registry, InduceKVConfig())
        self.render = served.render

    def stream(self, name: str, prompt: Any, max_tokens: int = 4, **options: Any) -> Any:
        extra = {"inducekv_trace": 1, **options}
        params = SamplingParams(temperature=0, max_tokens=max_tokens, extra_args=extra)
        return self.engine.generate(prompt, params, f"{name}-{id(prompt)}", lora_request=handle(name))

    async def resident(self) -> set[str]:
        (stats,) = await self.llm.collective_rpc("inducekv_stats")
        return set(stats["resident"])

    async def released(self) -> set[str]:
        """The resident bundles after all releases."""
        await self.registry.versions.follow()
        while self.registry.versions.background:
            await asyncio.gather(*self.registry.versions.background)
        return await self.resident()

    def digest(self, name: str) -> str:
        return self.world.bundles[name].digest

    async def load(self, name: str, content: str, *, replace: bool = False) -> None:
        await self.registry.load(name, str(self.world.paths[content]), replace=replace)


@pytest.fixture
async def registered(served: Served, world: World, tmp_path: Path) -> AsyncIterator[Registered]:
    """The engine must be empty again after each test."""
    registered = Registered(served, world, tmp_path)
    before = await registered.resident()
    yield registered
    for card in registered.registry.shown().data:
        await registered.registry.unload(card.name)
    assert await registered.released() == before
    assert registered.registry.shown().draining == []


async def test_a_request_runs_on_the_version_that_its_name_has_when_its_stream_begins(registered: Registered) -> None:
    """The version is replaced, and its name removed, between the call and the first iteration."""
    await registered.load("m", "sqrt")
    streams = [registered.stream("m", await registered.render(seed=34), inducekv_top_k=2) for _ in range(2)]
    await registered.load("m", "prior", replace=True)
    assert not any(each.active_requests for each in registered.registry.shown().draining)
    trace = (await last(streams[0])).kv_transfer_params["inducekv"]
    assert (trace["digest"], len(trace["entries"])) == (registered.digest("prior"), 2)
    await registered.registry.unload("m")
    with pytest.raises(VLLMNotFoundError):
        await last(streams[1])
    assert not {registered.digest("other"), registered.digest("prior")} & await registered.released()


async def test_a_worker_that_refuses_leaves_everything_as_it_was(
    registered: Registered, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file changes after the server has checked it and before the worker reads it."""
    path = tmp_path / "m.safetensors"
    shutil.copy(registered.world.paths["other"], path)
    await registered.load("m", "second")
    read = registered.registry._reader._read

    def read_and_change(name: str, path: str, *options: Any) -> Any:
        checked = read(name, path, *options)
        shutil.copy(registered.world.paths["first"], path)
        return checked

    monkeypatch.setattr(registered.registry._reader, "_read", read_and_change)
    before = registered.registry.shown(), await registered.resident(), dict(registered.models.lora_requests)
    for name, replacing in (("m", True), ("new", False)):
        shutil.copy(registered.world.paths["other"], path)
        with pytest.raises(BundleError, match="changed while it was loaded"):
            await registered.registry.load(name, str(path), replace=replacing)
    assert (registered.registry.shown(), await registered.resident(), registered.models.lora_requests) == before


async def test_a_server_with_a_bundle_of_another_backbone_does_not_start(
    registered: Registered, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_bundle(random_bundle(), tmp_path / "foreign.safetensors")
    settings = {"bundles": {"m": str(tmp_path / "foreign.safetensors")}}
    monkeypatch.setitem(registered.llm.vllm_config.additional_config, "inducekv", settings)
    state = State({"openai_serving_models": registered.models})
    with pytest.raises(FingerprintMismatch, match=r"'m' .* was made for another backbone: .*hidden_size"):
        await InduceKVEndpoint().init_state(registered.llm, state, Namespace())


class TestLimits:
    """Each refusal leaves everything as it was; the fixture checks the engine."""

    async def test_of_bundles(self, registered: Registered, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(names, "MAX_NAMES", 1)
        await registered.load("m", "other")
        with pytest.raises(CapacityError, match="1 bundles are loaded, and no more are allowed"):
            await registered.load("n", "other")
        await registered.load("m", "second", replace=True)

    async def test_of_bytes(self, registered: Registered, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(reader, "MAX_SERVED_BYTES", 1000)
        with pytest.raises(BundleError, match="more than the limit of 1000"):
            await registered.load("m", "other")

    async def test_of_waiting_changes(self, registered: Registered, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(changes, "WAITING", 1)
        outcomes = await asyncio.gather(*(registered.load(n, "other") for n in "abcd"), return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [type(None)] * 2 + [TooManyChanges] * 2

    async def test_of_time(self, registered: Registered, monkeypatch: pytest.MonkeyPatch) -> None:
        """The workers load what was given up, and drop it again."""
        monkeypatch.setattr(changes, "LOAD_S", 0.2)
        rpc = registered.llm.collective_rpc

        async def slow(method: str, **options: Any) -> Any:
            answer = await rpc(method, **options)
            if method == "inducekv_load_bundle":
                await asyncio.sleep(5)
            return answer

        monkeypatch.setattr(registered.llm, "collective_rpc", slow)
        with pytest.raises(LoadTimeout, match=r"load of 'm' took longer than 0.2 s; nothing has changed"):
            await registered.load("m", "other")
        assert registered.registry.shown().data == []
        assert registered.digest("other") not in await registered.released()


async def test_what_a_version_takes_of_the_pool_is_known_before_it_is_loaded(registered: Registered) -> None:
    """With maps, and without."""
    (stats,) = await registered.llm.collective_rpc("inducekv_stats")
    size, seen = PoolSize.of(stats), set()
    for content in ("other", "prior"):
        path = str(registered.world.paths[content])
        card = await registered.registry.load("m", path, replace=True)
        memory = ServedBundle.from_bundle(registered.world.bundles[content], path)
        assert size.bytes_of(memory) == card.resident_bytes > 0
        seen.add(card.resident_bytes)
    assert len(seen) > 1


async def test_adapters_of_a_bundle_must_lie_in_an_allowed_folder_too(
    registered: Registered, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle, outside = registered.world.paths["other"], tmp_path / "outside"
    outside.mkdir()
    read = registered.registry._reader._read
    record = AdapterRecord(task="t", path=str(outside), digest="d", rank=1)

    def read_routed(*arguments: Any) -> Checked:
        return with_metadata(read(*arguments), task_adapters=(record,))

    monkeypatch.setattr(registered.registry._reader, "_read", read_routed)
    access = Access([str(bundle.parent)], "key")
    with pytest.raises(BundleError, match=r"the adapter of task 't': .*outside' is not in a folder"):
        await registered.registry.load("m", str(bundle), access=access)


def with_metadata(checked: Checked, **changes: Any) -> Checked:
    memory = checked.memory
    return replace(checked, memory=replace(memory, metadata=memory.metadata.model_copy(update=changes)))


async def test_loras_routes_and_names_leave_bundles_alone(registered: Registered) -> None:
    registered.models.lora_requests["style"] = LoRARequest("style", 77, "/style")
    guard_adapters(registered.models, registered.registry)
    with pytest.raises(ConfigError, match="taken by a LoRA adapter"):
        await registered.load("style", "other")
    await registered.load("m", "other")
    before = dict(registered.models.lora_requests)
    for name in ("m", "m@0123456789ab"):
        body: Any = SimpleNamespace(lora_name=name, lora_path="/else", load_inplace=True)
        for change in (registered.models.load_lora_adapter, registered.models.unload_lora_adapter):
            answer = await change(body)
            assert isinstance(answer, ErrorResponse)
            assert answer.error.code == 400
            assert name in answer.error.message
    assert registered.models.lora_requests == before


async def test_a_server_whose_workers_know_no_memory_is_refused() -> None:
    async def no_such_method(method: str) -> None:
        raise AttributeError(method)

    client: Any = SimpleNamespace(collective_rpc=no_such_method)
    with pytest.raises(UnsupportedModel, match=r"--worker-cls inducekv_vllm\.worker\.InduceKVWorker"):
        await check_server(client)

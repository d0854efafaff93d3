"""Shared by all tests: skips, engines and servers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from tests.inducekv_vllm.engine.served import Served
    from tests.inducekv_vllm.parity import World
    from tests.server.launch import Adapted


# Fixtures that start an engine or a server, and the group of the tests that use them.
GROUPS = {"server": "servers", "adapted": "servers", "served": "engine"}
# Groups that take a minute or longer begin first, so that no worker is left with one of them at the end.
LONGEST = (
    "servers",
    "tests/benchmarks/test_continual_smoke.py",
    "tests/inducekv_vllm/test_parity.py",
    "tests/selector/runtime/test_distributed.py",
    "tests/benchmarks/test_continual_run.py",
    "engine",
    "tests/server/test_start.py",
)


def group_of(item: pytest.Item) -> str:
    """The tests of a group run in one pytest-xdist worker: those of a file, or all that share an engine or a server."""
    fixtures = getattr(item, "fixturenames", ())
    return next((group for name, group in GROUPS.items() if name in fixtures), item.nodeid.partition("::")[0])


def pytest_itemcollected(item: pytest.Item) -> None:
    # Not in pytest_collection_modifyitems: pytest-xdist has read the marks by then.
    item.add_marker(pytest.mark.xdist_group(group_of(item)))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with the longest groups. Skip `gpu` tests if there is no CUDA device, and `slow` tests unless they are
    selected by marker.
    """
    order = {group: position for position, group in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(group_of(item), len(LONGEST)))
    skip_gpu = pytest.mark.skip(reason="needs a CUDA device")
    skip_slow = pytest.mark.skip(reason="slow; select it with -m slow")
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(skip_gpu)
        if item.get_closest_marker("slow") and "slow" not in config.option.markexpr:
            item.add_marker(skip_slow)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Workers share the cores, and results must not depend on how many there are."""
    torch.set_num_threads(1)


# The fixtures import what they need when they are first used: most tests do without vLLM.


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """A tiny LLaVA with three bundles."""
    from tests.server.launch import make_tiny_world

    return make_tiny_world(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Async tests share an event loop, and so an engine."""
    return "asyncio"


@pytest.fixture(scope="session")
async def served_world(anyio_backend: str, world: World) -> AsyncIterator[Served]:
    from tests.inducekv_vllm.engine.served import serve_world

    async with serve_world(world) as served:
        yield served


@pytest.fixture
async def served(served_world: Served) -> AsyncIterator[Served]:
    """An engine of that model: see `serve_world`. After each test, nothing may be left in it."""
    yield served_world
    await served_world.nothing_is_left()


@pytest.fixture(scope="session")
def server(world: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Base URL of a server of that model, with few KV blocks: see `serving_bundles`."""
    from tests.server.launch import serving_bundles

    with serving_bundles(world, tmp_path_factory.mktemp("server") / "server.log") as url:
        yield url


@pytest.fixture(scope="session")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Adapted]:
    """A server with LoRA: see `serving_adapter`."""
    from tests.server.launch import serving_adapter

    with serving_adapter(tmp_path_factory.mktemp("lora")) as adapted:
        yield adapted

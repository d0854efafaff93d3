"""Shared by all tests: skips, engines and servers."""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from tests.groups import group_of, seconds_of

if TYPE_CHECKING:
    from xdist.remote import Producer

    from tests.engine.parity import World
    from tests.engine.served import Served
    from tests.scheduling import GroupScheduling
    from tests.server.launch import Adapted

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a name that is no folder is refused at once
# vLLM imports numba for n-grams, which gives torch as many threads as there are cores, for all tests after it.
os.environ.setdefault("NUMBA_NUM_THREADS", "1")
# Triton decides when it is first imported whether kernels are compiled or interpreted.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

RESEARCH = Path(__file__).with_name("research")
LAST_OF_A_GROUP = "tests/server/test_shutdown.py"  # ends the server that the group shares


@pytest.fixture
def caplog(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    """It hears vLLM's loggers, and ours below them, however an earlier test of the process has configured them."""
    vllm = logging.getLogger("vllm")
    monkeypatch.setattr(vllm, "propagate", True)
    if vllm.level > logging.INFO:
        caplog.set_level(logging.INFO, "vllm")
    return caplog


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> GroupScheduling | None:
    if config.option.dist != "loadfile":
        return None
    from tests.scheduling import GroupScheduling  # not where pytest-xdist is missing

    return GroupScheduling(config, log)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave research out, unless the command line names it or selects by its marker."""
    asked = " ".join([config.option.markexpr, *config.args])
    return True if collection_path == RESEARCH and "research" not in asked else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with the longest groups, so that no worker is left with one of them, and end the shared server last.

    Skip `gpu` tests if there is no CUDA device, and `slow` tests unless they are selected by marker.
    """

    def place(item: pytest.Item) -> tuple[int, bool]:
        return -seconds_of().get(group_of(item.nodeid), 0), item.nodeid.startswith(LAST_OF_A_GROUP)

    items.sort(key=place)
    skip_gpu = pytest.mark.skip(reason="needs a CUDA device")
    skip_slow = pytest.mark.skip(reason="slow; select it with -m slow")
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(skip_gpu)
        if item.nodeid.startswith("tests/nightly/"):
            item.add_marker("slow")
        if item.path.is_relative_to(RESEARCH):
            item.add_marker("research")
        if item.get_closest_marker("slow") and "slow" not in config.option.markexpr:
            item.add_marker(skip_slow)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Workers share the cores, and results must not depend on how many there are."""
    torch.set_num_threads(1)


# The fixtures import what they need when they are first used: most tests do without vLLM.


@pytest.fixture(scope="session")
def admin_key() -> Iterator[None]:
    """INDUCEKV_ADMIN_KEY is that of the servers of the tests."""
    from inducekv_vllm.vllm_seams.config import ADMIN_KEY_VARIABLE
    from tests.server.launch import ADMIN_KEY

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ADMIN_KEY_VARIABLE, ADMIN_KEY)
        yield


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """A tiny LLaVA with bundles: see `make_world`."""
    from tests.server.launch import make_tiny_world

    return make_tiny_world(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny LLaVA; not to be changed."""
    from tests.tiny_models import save_tiny_llava

    return save_tiny_llava(tmp_path_factory.mktemp("models") / "llava")


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Async tests share an event loop, and so an engine."""
    return "asyncio"


@pytest.fixture(scope="session")
async def served_world(anyio_backend: str, world: World) -> AsyncIterator[Served]:
    from tests.engine.served import serve_world

    async with serve_world(world) as served:
        yield served


@pytest.fixture
async def served(served_world: Served) -> AsyncIterator[Served]:
    """An engine of that model: see `serve_world`. After each test, nothing may be left in it."""
    yield served_world
    await served_world.nothing_is_left()


@pytest.fixture(scope="session")
def server(admin_key: None, world: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Base URL of a server of that model, with few KV blocks: see `serving_bundles`."""
    from tests.server.launch import serving_bundles

    with serving_bundles(world, tmp_path_factory.mktemp("server") / "server.log") as url:
        yield url


@pytest.fixture(scope="session")
def adapted(admin_key: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Adapted]:
    """A server with LoRA: see `serving_adapter`."""
    from tests.server.launch import serving_adapter

    with serving_adapter(tmp_path_factory.mktemp("lora")) as adapted:
        yield adapted

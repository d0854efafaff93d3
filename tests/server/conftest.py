"""The clients of the server that all HTTP tests share (tests/conftest.py), and a bundle behind a gate."""

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from inducekv_vllm.bundle import Bundle, write_bundle
from tests.engine import parity
from tests.engine.parity import Prompt, World, prompts
from tests.server.http import Bundles
from tests.server.launch import GATED_TASKS


@pytest.fixture
def client(server: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0, timeout=300) as client:
        yield client


@pytest.fixture(scope="session")
def bundles(server: str) -> Bundles:
    return Bundles(server)


@pytest.fixture
def server_folder(server: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The server's own: its log and state."""
    (log,) = tmp_path_factory.getbasetemp().glob("server[0-9]*/server.log")
    return log.parent


@pytest.fixture(scope="session")
def questions() -> list[Prompt]:
    return prompts(4, seed=61)


@pytest.fixture(scope="session")
def gated_bundle(
    world: World, questions: list[Prompt], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Bundle, Path]:
    """Open for the first and third question; the file is there to load."""
    return written(parity.gated_bundle(world, questions, GATED_TASKS), tmp_path_factory.mktemp("gated"))


@pytest.fixture(scope="session")
def gated_merged_bundle(
    world: World, questions: list[Prompt], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Bundle, Path]:
    """The same, merged: which entries a request gets depends on its prompt."""
    bundle = parity.gated_bundle(world, questions, GATED_TASKS, form="merged")
    return written(bundle, tmp_path_factory.mktemp("gated"))


def written(bundle: Bundle, folder: Path) -> tuple[Bundle, Path]:
    path = folder / "gated.safetensors"
    write_bundle(bundle, path)
    return bundle, path

"""One real server for all HTTP tests: a tiny LLaVA, three bundles, few KV blocks, on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from benchmarks.server_process import serving
from tests.inducekv_vllm.parity import World, make_world
from tests.tiny_models import save_tiny_llava

# What a test server needs to start at all beside other work on a small machine.
ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
FLAGS = ["--dtype", "float32", "--max-model-len", "256", "--max-num-seqs", "8", "--enforce-eager"]
FEW_BLOCKS = ["--block-size", "32", "--num-gpu-blocks-override", "16"]


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("world")
    return make_world(save_tiny_llava(folder / "model"), folder)


@pytest.fixture(scope="session")
def server(world: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Base URL of a server of the model "base" with the bundles "sqrt" and "prior"; "other" is left to load."""
    log = tmp_path_factory.mktemp("server") / "server.log"
    memory = [f"--memory={name}={world.paths[name]}" for name in ("sqrt", "prior")]
    with serving(
        [str(world.model), *memory, *FLAGS, *FEW_BLOCKS, "--served-model-name", "base"], Path(log), ENVIRONMENT
    ) as url:
        yield url


@pytest.fixture
def client(server: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0, timeout=300) as client:
        yield client

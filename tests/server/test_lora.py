"""A server with LoRA: its bundles run without an adapter, beside requests that have one."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest

from inducekv_vllm.errors import UnsupportedModel
from inducekv_vllm.frontend.served_bundle import ServedBundle
from server.engines import Engines
from server.registry import BundleRegistry
from server.state import ServerState
from tests.engine.parity import TOLERANCE, prompts
from tests.server.http import alone, ask, deviation
from tests.server.launch import Adapted


def test_a_bundle_runs_without_an_adapter(adapted: Adapted) -> None:
    with (
        openai.OpenAI(base_url=f"{adapted.url}/v1", api_key="none", max_retries=0) as client,
        ThreadPoolExecutor(8) as pool,
    ):
        cases = [(name, prompt) for prompt in prompts(3, seed=43) for name in ("m", "style", "base")]
        responses = pool.map(lambda case: ask(client, *case, extra_body=alone("m") if case[0] == "m" else {}), cases)
        for (name, prompt), response in zip(cases, responses, strict=True):
            world = adapted.merged if name == "style" else adapted.plain
            bundle = adapted.plain.bundles["first"] if name == "m" else None
            assert deviation(world, response, prompt, bundle) <= TOLERANCE
        assert {m.id for m in client.models.list()} == {"base", "style", "m", "manual"}


def test_compiled_models_refuse_a_bundle(adapted: Adapted, tmp_path: Path) -> None:
    """vLLM's own LoRA on CPUs would mix adapters up with requests that have none."""
    config = SimpleNamespace(lora_config=SimpleNamespace(), model_config=SimpleNamespace(enforce_eager=False))
    client: Any = SimpleNamespace(vllm_config=config)
    models: Any = SimpleNamespace(lora_requests={}, base_model_paths=[SimpleNamespace(name="base")])
    state = ServerState(tmp_path / "state", keeps_bundles=False)
    bundle = adapted.plain.bundles["first"]
    registry = BundleRegistry(Engines(client), models, bundle.metadata.backbone, state)
    memory = ServedBundle.from_bundle(bundle, str(adapted.plain.paths["first"]))
    with pytest.raises(UnsupportedModel, match="runs with LoRA, but the keys and payloads"):
        registry._names.check_memory("m", memory)

"""A bundle made with a LoRA adapter: both passes run with it, and answers equal a model with the adapter merged in."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest

from inducekv_vllm.bundle import write_bundle
from inducekv_vllm.errors import UnsupportedModel
from inducekv_vllm.frontend.served_bundle import ServedBundle
from server.engines import Engines
from server.registry import BundleRegistry
from server.state import ServerState
from tests.engine.parity import TOLERANCE, gated_bundle, prompts
from tests.server.http import Bundles, alone, ask, deviation, trace_of
from tests.server.launch import Adapted


def test_answers_equal_the_merged_model_with_the_memory(adapted: Adapted) -> None:
    with openai.OpenAI(base_url=f"{adapted.url}/v1", api_key="none", max_retries=0) as client:
        for prompt in prompts(3, seed=41):
            for name, world, bundle in (
                ("base", adapted.plain, None),
                ("style", adapted.merged, None),
                ("m", adapted.merged, adapted.bundle),
            ):
                response = ask(client, name, prompt, extra_body=alone(name) if bundle else {})
                assert deviation(world, response, prompt, bundle) <= TOLERANCE
        assert trace_of(response)["digest"] == adapted.bundle.digest
        assert {m.id for m in client.models.list()} == {"base", "style", "m", "manual"}


def test_behind_a_closed_gate_is_the_model_with_the_adapter(adapted: Adapted, tmp_path: Path) -> None:
    """What the memory was made for: "closed" takes the memory away, not the adapter it belongs to."""
    questions = prompts(2, seed=42)
    bundle = gated_bundle(adapted.merged, questions, [None, "a"], adapter="style")
    write_bundle(bundle, tmp_path / "gated.safetensors")
    assert Bundles(adapted.url).load("gated", tmp_path / "gated.safetensors").status_code == 200
    with openai.OpenAI(base_url=f"{adapted.url}/v1", api_key="none", max_retries=0) as client:
        for prompt, is_open in zip(questions, (False, True), strict=True):
            response = ask(client, "gated", prompt, extra_body=alone("gated"))
            assert trace_of(response)["gate"]["open"] == is_open
            assert deviation(adapted.merged, response, prompt, bundle if is_open else None) <= TOLERANCE
            assert deviation(adapted.plain, response, prompt, None) > 100 * TOLERANCE


def test_a_bundle_that_names_no_adapter_runs_without_one(adapted: Adapted) -> None:
    with (
        Bundles(adapted.url).loaded("n", adapted.plain.paths["first"]),
        openai.OpenAI(base_url=f"{adapted.url}/v1", api_key="none", max_retries=0) as client,
        ThreadPoolExecutor(8) as pool,
    ):
        cases = [(name, prompt) for prompt in prompts(3, seed=43) for name in ("n", "style", "base")]
        responses = pool.map(lambda case: ask(client, *case, extra_body=alone("n") if case[0] == "n" else {}), cases)
        for (name, prompt), response in zip(cases, responses, strict=True):
            world = adapted.merged if name == "style" else adapted.plain
            bundle = adapted.plain.bundles["first"] if name == "n" else None
            assert deviation(world, response, prompt, bundle) <= TOLERANCE


def test_compiled_models_refuse_a_bundle_that_names_no_adapter(adapted: Adapted, tmp_path: Path) -> None:
    """vLLM's own LoRA on CPUs would mix adapters up with requests that have none."""
    config = SimpleNamespace(lora_config=SimpleNamespace(), model_config=SimpleNamespace(enforce_eager=False))
    client: Any = SimpleNamespace(vllm_config=config)
    models: Any = SimpleNamespace(lora_requests={}, base_model_paths=[SimpleNamespace(name="base")])
    state = ServerState(tmp_path / "state", keeps_bundles=False)
    registry = BundleRegistry(Engines(client), models, adapted.bundle.metadata.backbone, state)
    memory = ServedBundle.from_bundle(adapted.plain.bundles["first"], str(adapted.plain.paths["first"]))
    with pytest.raises(UnsupportedModel, match="names no adapter"):
        registry._names.check_memory("n", memory)

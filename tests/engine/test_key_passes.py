"""What a memory's key pass asks for, behind a stand-in for the engine that answers it."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.exceptions import GenerationError
from vllm.sampling_params import SamplingParams

from inducekv_vllm.bundle import Bundle
from inducekv_vllm.engine.memory_index import MemoryIndex
from inducekv_vllm.engine.two_pass import TwoPassEngine
from inducekv_vllm.engine.wire import KeyPassSpec, parse_spec
from inducekv_vllm.host.config import InduceKVConfig
from tests.bundles import d, decided_gate, random_bundle, random_gated_bundle
from tests.engine.served import Memories, handle, last

pytestmark = pytest.mark.anyio

UNIFORM: dict[str, Any] = {"form": "decoupled", "weighting": "uniform"}
GATED: dict[str, Any] = {"gate": decided_gate("b"), "activations": {"a": "prompt", "b": "prompt"}}
PROMPT = {"type": "token", "prompt_token_ids": [5, 6, 7]}


class Engine:
    """A two-pass engine, and the requests that reach vLLM."""

    def __init__(self, settings: InduceKVConfig | None = None, **bundles: Bundle) -> None:
        self.requests: list[SamplingParams] = []
        self.found: dict[str, bytes | None] = {
            "key": (np.ones(d, np.float32) / np.sqrt(d)).astype(np.float32).tobytes(),
            "evidence": np.array([0.25, 0], np.float32).tobytes(),
        }
        client: Any = SimpleNamespace(
            generate=self._generate,
            collective_rpc=self._rpc,
            renderer=SimpleNamespace(mm_processor_cache=None),
            model_config=SimpleNamespace(hf_config=SimpleNamespace()),
            vllm_config=SimpleNamespace(observability_config=SimpleNamespace(otlp_traces_endpoint=None)),
        )
        self.memories = {name: MemoryIndex.from_bundle(bundle, __file__) for name, bundle in bundles.items()}
        self.two_pass = TwoPassEngine(client, Memories(**self.memories), settings or InduceKVConfig())

    async def _generate(self, prompt: Any, params: Any, request_id: str, **_: Any) -> AsyncGenerator[Any, None]:
        self.requests.append(params)
        done = SimpleNamespace(finish_reason="stop")
        yield SimpleNamespace(finished=True, outputs=[done], metrics=None, kv_transfer_params=None)

    async def _rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[dict[str, Any]]:
        spec = parse_spec(self.requests[-1].extra_args)
        assert isinstance(spec, KeyPassSpec)
        asked = {"key": spec.retrieval, "evidence": spec.gate is not None}
        return [{name: self.found[name] if asked[name] else None for name in asked} | {"tokens": 3}]

    async def ask(self, name: str) -> dict[str, Any]:
        """The trace of one answer."""
        params = SamplingParams(max_tokens=1, extra_args={"inducekv_trace": 1})
        answer = await last(self.two_pass.generate(PROMPT, params, "r", lora_request=handle(name)))
        trace: dict[str, Any] = answer.kv_transfer_params["inducekv"]
        return trace


async def test_of_each_kind_of_memory() -> None:
    engine = Engine(
        sqrt=random_bundle(),
        prior=random_gated_bundle(gate=decided_gate("b")),
        uniform=random_gated_bundle(**UNIFORM, **GATED),
        always=random_bundle(**UNIFORM, activations={"t": "prompt"}),
    )
    for name, gated, retrieval in (("sqrt", False, True), ("prior", True, True), ("uniform", True, False)):
        engine.requests.clear()
        trace = await engine.ask(name)
        key_pass, _ = engine.requests
        spec = parse_spec(key_pass.extra_args)
        assert isinstance(spec, KeyPassSpec)
        assert (spec.gate, spec.retrieval) == (engine.memories[name].digest if gated else None, retrieval)
        # The evidence is read from the cache; a mean over hidden states needs all of them.
        assert key_pass.skip_reading_prefix_cache == retrieval
        assert trace["timings"]["key_source"] == "computed"
        assert (trace["gate"] is None) == (not gated)
        if gated:
            assert (trace["gate"]["task"], trace["gate"]["closed"]) == ("b", None)
            assert {entry["task"] for entry in trace["entries"]} == {"b"}
    assert [entry["weight"] for entry in trace["entries"]] == [1.0, 1.0]
    engine.requests.clear()
    trace = await engine.ask("always")
    assert len(engine.requests) == 1  # there is nothing to ask
    assert trace["timings"]["key_source"] == "none"
    assert [(entry["index"], entry["weight"]) for entry in trace["entries"]] == [(i, 1.0) for i in range(5)]


async def test_evidence_is_not_shared_between_gates() -> None:
    other = random_gated_bundle(**UNIFORM, **GATED | {"gate": decided_gate(None)})
    engine = Engine(first=random_gated_bundle(**UNIFORM, **GATED), other=other)
    sources = [(await engine.ask(name))["timings"]["key_source"] for name in ("first", "other", "first", "other")]
    assert sources == ["computed", "computed", "cached", "cached"]
    trace = await engine.ask("other")
    assert (trace["gate"]["open"], trace["gate"]["closed"], trace["entries"]) == (False, "outside", [])


async def test_numbers_that_are_not_finite_end_the_request() -> None:
    engine = Engine(uniform=random_gated_bundle(**UNIFORM, **GATED))
    engine.found["evidence"] = np.array([np.nan, 0], np.float32).tobytes()
    with pytest.raises(GenerationError, match="not finite"):
        await engine.ask("uniform")


async def test_every_decision_is_in_the_gate_log(tmp_path: Path) -> None:
    settings = InduceKVConfig(gate_log=str(tmp_path / "gate.jsonl"))
    engine = Engine(settings, uniform=random_gated_bundle(**UNIFORM, **GATED), sqrt=random_bundle())
    for name in ("uniform", "sqrt", "uniform"):
        await engine.ask(name)
    engine.two_pass._gate_log.close()
    lines = [json.loads(line) for line in (tmp_path / "gate.jsonl").read_text().splitlines()]
    digest = engine.memories["uniform"].token_digest
    assert lines == [{"gate": digest, "evidence": [0.25, 0.0], "task": "b"}] * 2

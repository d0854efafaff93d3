"""A whole engine on a GPU, in bfloat16: memory of every form may round no more than the model does alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from inducekv_vllm.activation import ACTIVATIONS
from inducekv_vllm.bundle import write_bundle
from server.demo import CHECKPOINT
from tests.inducekv_vllm.bundles import as_decoupled
from tests.inducekv_vllm.parity import MemoryEngine, deviation, engine, greedy, make_world, prompts

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("eager", [True, False])
def test_memory_rounds_no_more_than_the_model(eager: bool, tmp_path: Path) -> None:
    world = make_world(CHECKPOINT, tmp_path)
    for activation in ACTIVATIONS:
        world.bundles[activation] = as_decoupled(world.bundles["prior"], activation, "prior", map_rank=3)
        world.paths[activation] = tmp_path / f"{activation}.safetensors"
        write_bundle(world.bundles[activation], world.paths[activation])
    options = {"dtype": "bfloat16", "attention_backend": "FLASH_ATTN", "gpu_memory_utilization": 0.3}
    questions, kinds = prompts(12, seed=2), (None, "sqrt", "generation", "prior", "text", "prompt")
    with engine(world.model, enforce_eager=eager, max_num_batched_tokens=64, **options) as llm:
        served = MemoryEngine(world, llm)
        names = [kinds[i % 6] for i in range(12)]
        answers = served.chat(questions, names, greedy(max_tokens=40))
    worst: dict[bool, float] = {True: 0.0, False: 0.0}  # with and without memory
    for prompt, answer, name in zip(questions, answers, names, strict=True):
        bundle = name and served.bundles[name]
        difference = deviation(world, prompt, answer.output.outputs[0], bundle or None)
        worst[bundle is not None] = max(worst[bundle is not None], difference)
    assert 0 < worst[True] <= 2 * worst[False]

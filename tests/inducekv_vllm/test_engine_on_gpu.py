"""A whole engine on a GPU, in bfloat16: answers with memory of every form round about as much as those without."""

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
def test_memory_rounds_at_most_twice_as_much(eager: bool, tmp_path: Path) -> None:
    world = make_world(CHECKPOINT, tmp_path)
    for activation in ACTIVATIONS:
        world.bundles[activation] = as_decoupled(world.bundles["prior"], activation, "prior", map_rank=3)
        world.paths[activation] = tmp_path / f"{activation}.safetensors"
        write_bundle(world.bundles[activation], world.paths[activation])
    options = {"dtype": "bfloat16", "attention_backend": "FLASH_ATTN", "gpu_memory_utilization": 0.3}
    questions, kinds = prompts(12, seed=2), (None, "sqrt", "generation", "prior", "text", "prompt")
    with engine(world.model, enforce_eager=eager, max_num_batched_tokens=64, **options) as llm:
        served = MemoryEngine(world, llm)
        names = [name for name in kinds for _ in questions]
        answers = served.chat(questions * 6, names, greedy(max_tokens=40))
    worst = dict.fromkeys(kinds, 0.0)
    for prompt, answer, name in zip(questions * 6, answers, names, strict=True):
        bundle = served.bundles[name] if name else None
        worst[name] = max(worst[name], deviation(world, prompt, answer.output.outputs[0], bundle))
    assert 0 < max(worst.values()) <= 2 * worst[None], worst

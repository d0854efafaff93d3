"""A whole engine on a GPU, eager and in graphs, on each of vLLM's model runners, while other bundles come and go.

Answers with memory of every form round about as much as those without.
"""

import itertools
from pathlib import Path

import pytest

from inducekv_vllm.bundle.activation import ACTIVATIONS
from server.demo import CHECKPOINT
from tests.bundles import as_decoupled
from tests.engine.parity import FEWER_PROCESSES, MemoryEngine, deviation, engine, greedy, make_world, prompts

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("dtype", "runner", "eager"),
    [
        ("bfloat16", "1", True),
        ("bfloat16", "1", False),
        ("float16", "1", False),
        ("bfloat16", "0", False),
    ],
)
def test_memory_rounds_at_most_twice_as_much(
    dtype: str, runner: str, eager: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world(CHECKPOINT, tmp_path, with_merged=True)
    for activation in ACTIVATIONS:
        world.add(activation, as_decoupled(world.merged["prior"], activation, "prior", map_rank=3), tmp_path)
    world.add("no maps", as_decoupled(world.merged["prior"], "generation", "prior"), tmp_path)
    options = {"dtype": dtype, "attention_backend": "FLASH_ATTN"}
    environment = {**FEWER_PROCESSES, "VLLM_USE_V2_MODEL_RUNNER": runner}
    questions, kinds = prompts(12, seed=2), (None, "sqrt", "generation", "prior", "text", "prompt", "no maps")
    with engine(world.model, environment=environment, enforce_eager=eager, max_num_batched_tokens=64, **options) as llm:
        served = MemoryEngine(world, llm)
        other = world.bundles["other"].digest
        changes = itertools.cycle(
            [("inducekv_unload_bundle", (other,)), ("inducekv_load_bundle", (str(world.paths["other"]), other))]
        )
        step = llm.llm_engine.step

        def step_and_change() -> object:
            outputs, (method, arguments) = step(), next(changes)
            llm.collective_rpc(method, args=arguments)
            return outputs

        monkeypatch.setattr(llm.llm_engine, "step", step_and_change)
        worst = dict.fromkeys(kinds, 0.0)
        for together in (kinds, (None, "no maps"), (None,)):  # steps that need graphs of each kind
            names = [name for name in together for _ in questions]
            answers = served.chat(questions * len(together), names, greedy(max_tokens=40))
            for prompt, answer, name in zip(questions * len(together), answers, names, strict=True):
                bundle = served.bundles[name] if name else None
                worst[name] = max(worst[name], deviation(world, prompt, answer.output.outputs[0], bundle))
    assert 0 < max(worst.values()) <= 2 * worst[None], worst

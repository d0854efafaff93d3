"""Decoupled memory on a real engine against transformers, for every activation, and the prefix cache around it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from inducekv_vllm.activation import ACTIVATIONS, Activation
from inducekv_vllm.bundle import write_bundle
from inducekv_vllm.errors import CapacityError
from server.demo import CHECKPOINT
from tests.inducekv_vllm.bundles import DEMO_HEADS_PER_KV_HEAD, decoupled
from tests.inducekv_vllm.parity import (
    FEWER_PROCESSES,
    TOLERANCE,
    MemoryEngine,
    Prompt,
    World,
    engine,
    greedy,
    make_world,
    prompts,
    served_logprobs,
)

BLOCK = 32


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """The demo model with merged bundles, and decoupled ones named after their activation and weighting."""
    folder = tmp_path_factory.mktemp("decoupled")
    world = make_world(CHECKPOINT, folder)
    for activation in ACTIVATIONS:
        for weighting in ("uniform", "prior"):
            merged = world.bundles["prior"]
            world.bundles[f"{activation}-{weighting}"] = decoupled(merged, activation, weighting)
            world.bundles[f"{activation}-{weighting}-maps"] = decoupled(merged, activation, weighting, map_rank=3)
        world.bundles[f"{activation}-other"] = decoupled(world.bundles["other"], activation, scale=-6.0)
    for name, bundle in world.bundles.items():
        world.paths[name] = folder / f"{name}.safetensors"
        write_bundle(bundle, world.paths[name])
    return world


@pytest.fixture(scope="module")
def served(world: World) -> Iterator[MemoryEngine]:
    """Prompts in chunks, prefix caching on, too few blocks."""
    small = {"max_num_batched_tokens": 40, "num_gpu_blocks_override": 24, "block_size": BLOCK}
    with engine(world.model, environment=FEWER_PROCESSES, enforce_eager=True, disable_log_stats=False, **small) as llm:
        yield MemoryEngine(world, llm)


@pytest.mark.parametrize("weighting", ["uniform", "prior", "uniform-maps", "prior-maps"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_parity(served: MemoryEngine, activation: Activation, weighting: str) -> None:
    questions = prompts(6, seed=1)
    answers = served.check(questions, [f"{activation}-{weighting}"] * 6)
    plain = served.check(questions, [None] * 6)
    pairs = [[served_logprobs(a.output.outputs[0])[1] for a in both] for both in zip(answers, plain, strict=True)]
    assert all((memory - without).abs().max() > 100 * TOLERANCE for memory, without in pairs)


def test_all_kinds_in_one_batch_under_preemption(served: MemoryEngine) -> None:
    kinds = (
        None,
        "text-uniform",
        "prompt-uniform",
        "generation-uniform",
        "sqrt",
        "generation-other",
        "text-prior-maps",
    )
    questions = prompts(28, seed=2)
    served.check(questions, [kinds[i % 7] for i in range(28)], greedy(max_tokens=40))
    metrics = served.offline.llm.get_metrics()
    assert next(m for m in metrics if m.name == "vllm:num_preemptions").value > 0  # type: ignore[union-attr]


def test_maps_of_part_of_the_entries(served: MemoryEngine) -> None:
    served.check(prompts(4, seed=8), ["generation-prior-maps"] * 4, top_k=2)


def test_maps_of_another_width_are_refused(served: MemoryEngine, tmp_path: Path) -> None:
    bundle = decoupled(served.world.bundles["prior"], "prompt", map_rank=3, width=2 * DEMO_HEADS_PER_KV_HEAD)
    write_bundle(bundle, tmp_path / "wide.safetensors")
    with pytest.raises(CapacityError, match="its maps have width 256, the 2 query heads of a KV head here have 128"):
        served.offline.load_bundle(tmp_path / "wide.safetensors")


def test_samples_of_one_request(served: MemoryEngine) -> None:
    served.check(prompts(4, seed=3), ["generation-uniform"] * 4, greedy(n=3, temperature=2.0))


def cached(served: MemoryEngine, question: Prompt, name: str | None) -> int:
    (answer,) = served.check([question], [name])
    return answer.output.num_cached_tokens or 0


def test_blocks_before_the_first_active_position_are_shared_and_no_others(served: MemoryEngine) -> None:
    world = served.world
    for seed in range(4, 7):
        question = next(p for p in prompts(5, seed=seed) if len(p.question) > 80)
        inputs = world.backbone.encode(question.chat_messages, [question.image])
        length = inputs["input_ids"].shape[1]
        after_media = int((~world.backbone.text_mask(inputs)[0]).nonzero()[-1]) + 1
        whole, before_text = (length - 1) // BLOCK * BLOCK, after_media // BLOCK * BLOCK
        assert 0 < before_text < whole
        # The key pass of each request fills the untouched blocks, which its own answer then reads.
        assert cached(served, question, "generation-uniform") == whole
        assert cached(served, question, "generation-other") == whole
        assert cached(served, question, "text-uniform") == before_text
        assert cached(served, question, "text-other") == before_text  # not the blocks of the other memory
        assert cached(served, question, "text-uniform") == whole  # its own blocks
        assert cached(served, question, "prompt-uniform") == 0
        assert cached(served, question, "prompt-uniform") == whole
        assert cached(served, question, None) == whole


def prefix_hits(served: MemoryEngine) -> int:
    metrics = served.offline.llm.get_metrics()
    return next(m for m in metrics if m.name == "vllm:prefix_cache_hits").value  # type: ignore[union-attr]


def test_a_key_pass_reads_the_prefix_cache_and_its_key_is_that_of_the_whole_prompt(served: MemoryEngine) -> None:
    world = served.world
    questions = [p for p in prompts(15, seed=9) if len(p.question) > 80]
    for name, key_pass_hits in (("prompt-uniform", False), ("prompt-other", True), ("sqrt", False)):
        for question in questions:
            before = prefix_hits(served)
            (answer,) = served.chat([question], [name], greedy(max_tokens=1))
            expected = world.backbone.query_keys(world.backbone.encode(question.chat_messages, [question.image]))[0]
            torch.testing.assert_close(torch.tensor(answer.key), expected, rtol=0, atol=1e-5)
            # The answer pass of a memory that acts from the start on shares no block with another request.
            assert answer.output.num_cached_tokens == 0
            assert (prefix_hits(served) > before) == key_pass_hits


def test_keys_of_prompts_with_one_prefix_in_one_batch(served: MemoryEngine) -> None:
    """The first request's blocks are found in the cache in the step that computes them."""
    world = served.world
    image = prompts(1, seed=10)[0].image
    text = "The picture shows two green stars and a yellow ring. "
    questions = [Prompt(image, text * 3 + ending) for ending in ("How many stars?", "Which colour?", "A ring?")]
    answers = served.chat(questions, ["prompt-uniform"] * 3, greedy(max_tokens=1))
    for question, answer in zip(questions, answers, strict=True):
        expected = world.backbone.query_keys(world.backbone.encode(question.chat_messages, [question.image]))[0]
        torch.testing.assert_close(torch.tensor(answer.key), expected, rtol=0, atol=1e-5)

"""Decoupled memory on a real engine against transformers, for every activation, and the prefix cache around it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from inducekv_vllm.backbone.placeholders import placeholder_ids
from inducekv_vllm.bundle import write_bundle
from inducekv_vllm.bundle.activation import ACTIVATIONS, Activation
from inducekv_vllm.errors import BundleError
from inducekv_vllm.frontend.offline import MemoryAnswer
from server.demo import CHECKPOINT
from tests.bundles import as_decoupled, in_layers
from tests.engine.parity import (
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
    """The demo model with bundles of every form; those without a gate are named after activation and weighting."""
    folder = tmp_path_factory.mktemp("decoupled")
    world = make_world(CHECKPOINT, folder, with_merged=True)
    for activation in ACTIVATIONS:
        for weighting in ("uniform", "prior"):
            merged = world.merged["prior"]
            world.add(f"{activation}-{weighting}", as_decoupled(merged, activation, weighting), folder)
            with_maps = as_decoupled(merged, activation, weighting, map_rank=3)
            world.add(f"{activation}-{weighting}-maps", with_maps, folder)
            world.add(f"{activation}-{weighting}-layers", in_layers(with_maps, (1, 3)), folder)
        world.add(f"{activation}-other", as_decoupled(world.merged["other"], activation, scale=-6.0), folder)
    return world


@pytest.fixture(scope="module")
def served(world: World) -> Iterator[MemoryEngine]:
    """Prompts in chunks, prefix caching on, too few blocks."""
    small = {"max_num_batched_tokens": 40, "num_gpu_blocks_override": 24, "block_size": BLOCK}
    with engine(world.model, environment=FEWER_PROCESSES, enforce_eager=True, disable_log_stats=False, **small) as llm:
        yield MemoryEngine(world, llm)


@pytest.fixture(scope="module")
def plain(served: MemoryEngine) -> list[MemoryAnswer]:
    """The answers to the questions of `test_parity` without memory."""
    return served.check(prompts(6, seed=1), [None] * 6)


@pytest.mark.parametrize("weighting", ["prior", "uniform-maps", "prior-layers"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_parity(served: MemoryEngine, plain: list[MemoryAnswer], activation: Activation, weighting: str) -> None:
    answers = served.check(prompts(6, seed=1), [f"{activation}-{weighting}"] * 6)
    pairs = [[served_logprobs(a.output.outputs[0])[1] for a in both] for both in zip(answers, plain, strict=True)]
    assert all((memory - without).abs().max() > 100 * TOLERANCE for memory, without in pairs)


def test_maps_of_part_of_the_entries(served: MemoryEngine) -> None:
    """A call says how many entries count, or a prompt's parameters do, which win."""
    questions, own = prompts(4, seed=8), greedy()
    own.extra_args = {"inducekv_top_k": 2}
    answers = served.check(questions, ["generation-prior-maps"] * 4, top_k=2)
    same = served.chat(questions, ["generation-prior-maps"] * 4, own, top_k=1)
    for answer, other in zip(answers, same, strict=True):
        assert other.decision is not None
        assert answer.decision is not None
        assert other.decision.outcome == answer.decision.outcome


def test_maps_of_another_width_are_refused(served: MemoryEngine, tmp_path: Path) -> None:
    bundle = as_decoupled(served.world.merged["prior"], "prompt", map_rank=3, heads_per_kv_head=4)
    write_bundle(bundle, tmp_path / "wide.safetensors")
    with pytest.raises(BundleError, match="its maps have width 256, the 2 query heads of a KV head here have 128"):
        served.offline.load_bundle(tmp_path / "wide.safetensors")


def cached(served: MemoryEngine, question: Prompt, name: str | None) -> int:
    (answer,) = served.check([question], [name])
    return answer.output.num_cached_tokens or 0


def test_blocks_before_the_first_active_position_are_shared_and_no_others(served: MemoryEngine) -> None:
    world = served.world
    for seed in range(4, 7):
        question = next(p for p in prompts(5, seed=seed) if len(p.question) > 80)
        inputs = world.backbone.encode(question.chat_messages, question.images)
        length = inputs["input_ids"].shape[1]
        placeholders = placeholder_ids(world.backbone.model.config)
        after_media = max(at for at, token in enumerate(inputs["input_ids"][0].tolist()) if token in placeholders) + 1
        whole, before_text = (length - 1) // BLOCK * BLOCK, after_media // BLOCK * BLOCK
        assert 0 < before_text < whole
        assert cached(served, question, None) == 0
        assert cached(served, question, "generation-uniform") == whole
        assert cached(served, question, "generation-other") == whole
        assert cached(served, question, "text-uniform") == before_text
        assert cached(served, question, "text-other") == before_text  # not the blocks of the other memory
        assert cached(served, question, "text-uniform") == whole  # its own blocks
        assert cached(served, question, "prompt-uniform") == 0
        assert cached(served, question, "prompt-uniform") == whole
        assert cached(served, question, None) == whole


UNIFORM: dict[str, Any] = {
    "form": "decoupled",
    "weighting": "uniform",
    "activations": {"a": "prompt", "b": "prompt"},
}


def ask(served: MemoryEngine, question: Prompt, name: str) -> MemoryAnswer:
    """One question whose decision is compared with transformers."""
    (answer,) = served.chat([question], [name], greedy(max_tokens=1))
    assert answer.decision is not None
    served.check_decision(question, answer.decision, served.bundles[name])
    return answer


def test_a_gate_reads_the_prefix_cache_and_decides_as_on_the_whole_prompt(served: MemoryEngine) -> None:
    """A key for the retrieval is a mean over all tokens."""
    questions = [p for p in prompts(15, seed=9) if len(p.question) > 80]
    tasks: list[str | None] = ["a", "b", "a"]
    with served.gated(questions, tasks, **UNIFORM):
        for question, task in zip(questions, tasks, strict=True):
            for is_again in (False, True):
                before = served.counted("prefix_cache_hits")
                answer = ask(served, question, "gated")
                assert answer.decision is not None
                assert (answer.decision.task, answer.decision.similarity) == (task, None)
                # Memory that acts from the start on shares blocks with the same memory alone.
                whole = (len(answer.output.prompt_token_ids or ()) - 1) // BLOCK * BLOCK
                assert answer.output.num_cached_tokens == is_again * whole
                assert served.counted("prefix_cache_hits") - before == is_again * whole
    questions = [p for p in prompts(15, seed=19) if len(p.question) > 80]
    with served.gated(questions, ["a", None, "a"], **UNIFORM):
        for question in questions:
            cached(served, question, None)
            before = served.counted("prefix_cache_hits")
            ask(served, question, "gated")
            assert served.counted("prefix_cache_hits") > before
    with served.gated(questions, tasks, form="merged"):  # its weights depend on the request
        before = served.counted("prefix_cache_hits")
        answer = ask(served, questions[0], "gated")
        assert answer.decision is not None
        assert answer.decision.similarity is not None
        assert served.counted("prefix_cache_hits") == before


def test_evidence_of_prompts_with_one_prefix_in_one_batch(served: MemoryEngine) -> None:
    """The first request's blocks are found in the cache in the step that computes them."""
    image = prompts(1, seed=10)[0].image
    text = "The picture shows two green stars and a yellow ring. "
    questions = [Prompt(image, text * 3 + ending) for ending in ("How many stars?", "Which colour?", "A ring?")]
    with served.gated(questions, ["a", "b", None], **UNIFORM):
        served.check(questions, ["gated"] * 3)

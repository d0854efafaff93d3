"""What each of vLLM's two model runners must do with memory, with the memory attention of CPUs and with that of GPUs.

Here V1 runs with that of CPUs; `test_gpu_attention.py` runs this file with that of GPUs, on V1 and on V2. Every answer
is compared with transformers.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.inputs import TokensPrompt

from inducekv_vllm.bundle import write_bundle
from inducekv_vllm.bundle.activation import ACTIVATIONS
from inducekv_vllm.errors import CapacityError
from server.demo import CHECKPOINT
from tests.bundles import as_decoupled, remade
from tests.engine.parity import (
    FEWER_PROCESSES,
    TOLERANCE,
    WORKER_VARIABLE,
    MemoryEngine,
    Prompt,
    World,
    engine,
    greedy,
    make_world,
    prompts,
    served_logprobs,
    silent_below,
)
from tests.reference import reference_logprobs

CHUNK, BLOCK = 40, 64
KINDS = (None, "first", "sqrt", "generation", "second", "prior", "text", "other", "prompt")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """The demo model with bundles of every form; those named after their activation are decoupled, without a gate."""
    folder = tmp_path_factory.mktemp("runners")
    world = make_world(CHECKPOINT, folder, with_merged=True)
    for activation in ACTIVATIONS:
        world.add(activation, as_decoupled(world.merged["prior"], activation, "prior", map_rank=3), folder)
    for activation in ("generation", "prompt"):
        world.add(f"{activation}, uniform", as_decoupled(world.merged["prior"], activation, map_rank=3), folder)
    world.add("moving", world.merged["other"], folder)
    return world


@pytest.fixture(scope="module")
def served(world: World) -> Iterator[MemoryEngine]:
    """Prompts in chunks, prefix caching on, too few blocks, a small pool."""
    small: dict[str, Any] = {"max_num_batched_tokens": CHUNK, "num_gpu_blocks_override": 7, "block_size": BLOCK}
    small |= {"additional_config": {"inducekv": {"memory_pool_entries": 256}}}
    with engine(world.model, environment=FEWER_PROCESSES, enforce_eager=True, disable_log_stats=False, **small) as llm:
        yield MemoryEngine(world, llm)


def test_every_kind_in_one_batch_under_preemption(served: MemoryEngine) -> None:
    served.check(prompts(9, seed=2), list(KINDS), greedy(max_tokens=24))
    assert served.counted("num_preemptions") > 0


def test_part_of_the_entries_and_the_remainder(served: MemoryEngine) -> None:
    served.check(prompts(3, seed=5), ["sqrt", "prior", "generation"], top_k=2)


@pytest.mark.parametrize("name", [None, "first", "sqrt", "generation", "prompt"])
def test_a_prompts_last_chunk_is_one_token(served: MemoryEngine, name: str | None) -> None:
    """The runner computes it like a generated token."""
    prompt = torch.randint(20, 300, (2 * CHUNK + 1,), generator=torch.Generator().manual_seed(7)).tolist()
    backbone, bundle = served.world.backbone, served.bundles[name] if name else None
    memory = name and served.memories[name]
    (answer,) = served.offline.generate([TokensPrompt(prompt_token_ids=prompt)], greedy(), memory=memory or None)
    tokens, logprobs = served_logprobs(answer.output.outputs[0])
    inputs = {"input_ids": torch.tensor([prompt]), "attention_mask": torch.ones(1, len(prompt), dtype=torch.int64)}
    expected = reference_logprobs(backbone, bundle, inputs, tokens)
    if bundle is not None:
        assert answer.decision is not None
        assert answer.decision.source == (
            "none" if bundle.gate is None and bundle.metadata.weighting == "uniform" else "computed"
        )
    assert (logprobs - expected).abs().max() <= TOLERANCE


def test_blocks_are_shared_up_to_the_first_active_position(served: MemoryEngine) -> None:
    question = next(p for p in prompts(5, seed=4) if len(p.question) > 80)
    cached = []
    uniform = [f"{activation}, uniform" for activation in ("generation", "generation", "prompt", "prompt")]
    for name in (*uniform, "sqrt", None):
        (answer,) = served.check([question], [name])
        length = len(answer.output.prompt_token_ids or ())
        cached.append(answer.output.num_cached_tokens == (length - 1) // BLOCK * BLOCK)
        assert cached[-1] or answer.output.num_cached_tokens == 0
    assert cached == [False, True, False, True, False, True]


@contextmanager
def no_longer_encoded(served: MemoryEngine, when: Callable[[Any], bool], *, is_preempted: bool) -> Iterator[None]:
    """Once this holds for a running request, what its picture has become is gone, and with preemption its blocks."""
    engine, done = served.offline.llm.llm_engine, list[str]()
    step, scheduler = engine.step, engine.engine_core.engine_core.scheduler  # type: ignore[attr-defined]

    def step_and_forget() -> Any:
        outputs = step()
        if not done and any(map(when, scheduler.running)):
            done.append("forgotten")
            assert not is_preempted or engine.reset_prefix_cache(reset_running_requests=True)
            engine.reset_encoder_cache()
        return outputs

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "step", step_and_forget)
        yield
    assert done


@pytest.mark.parametrize("name", [None, "second", "first"])
def test_a_picture_that_the_prefix_cache_had_is_encoded_after_all(served: MemoryEngine, name: str | None) -> None:
    """The request is preempted, and its blocks are gone when it goes on: it came without its pixels."""
    question = next(p for p in prompts(5, seed=24) if len(p.question) > 80)
    served.check([question], [name])
    with no_longer_encoded(served, lambda request: request.num_output_tokens > 3, is_preempted=True):
        (answer,) = served.check([question], [name])
    assert answer.output.num_cached_tokens == BLOCK


def test_a_request_goes_back_in_place_to_before_its_picture(served: MemoryEngine) -> None:
    """In a later chunk than the picture's: the runner may have let its pixels go."""
    question = prompts(4, seed=25)[3]
    with no_longer_encoded(served, lambda request: request.num_computed_tokens == 0, is_preempted=False):
        (answer,) = served.check([question], ["prompt"])
    assert CHUNK < len(answer.output.prompt_token_ids or ()) <= BLOCK


def test_loads_and_unloads_under_way(served: MemoryEngine, world: World, tmp_path: Path) -> None:
    """Answers run while another bundle is loaded and unloaded, and while their own is unloaded."""
    llm, offline = served.offline.llm, served.offline
    own = world.bundles["moving"]
    new = remade(own, payload_values=-own.payload_values)
    write_bundle(new, tmp_path / "new.safetensors")
    questions = prompts(4, seed=8)
    loaded: list[str] = []

    def load_and_unload() -> None:
        """After each step of the answer pass."""
        stats = llm.collective_rpc("inducekv_stats")[0]
        if not loaded and stats["slots_used"] == 3:  # all have begun
            llm.collective_rpc("inducekv_load_bundle", args=(str(tmp_path / "new.safetensors"), new.digest))
            llm.collective_rpc("inducekv_unload_bundle", args=(own.digest,))
            loaded.append("begun")
        if loaded == ["begun"] and llm.collective_rpc("inducekv_load_outcome", args=(new.digest,))[0] is not None:
            llm.collective_rpc("inducekv_unload_bundle", args=(new.digest,))
            loaded.append("ended")

    free = llm.collective_rpc("inducekv_stats")[0]["pool_tokens_free"]
    step = llm.llm_engine.step
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm.llm_engine, "step", lambda: (step(), load_and_unload())[0])
        served.check(questions, ["moving", "generation", "moving", None], greedy(max_tokens=30))
    assert loaded == ["begun", "ended"]
    served.stats()
    for unloaded in (own, new):
        while not llm.collective_rpc("inducekv_is_erased", args=(unloaded.digest,))[0]:
            time.sleep(0.01)
    stats = llm.collective_rpc("inducekv_stats")[0]
    assert stats["resident"].keys() == {bundle.digest for bundle in world.bundles.values()} - {own.digest}
    assert stats["pool_tokens_free"] > free
    served.memories["moving"] = offline.load_bundle(world.paths["moving"])
    assert llm.collective_rpc("inducekv_stats")[0]["pool_tokens_free"] == free
    served.check(questions[:1], ["moving"])


def test_a_bundle_that_does_not_fit_is_refused_and_the_others_stay(served: MemoryEngine, tmp_path: Path) -> None:
    llm = served.offline.llm
    before = llm.collective_rpc("inducekv_stats")[0]
    merged = served.world.merged["prior"]
    large = as_decoupled(merged, "prompt", map_rank=48)
    write_bundle(large, tmp_path / "large.safetensors")
    size = r"its 12 entries take \d+ adjacent tokens; \d+ of 2048 are free, at most \d+ of them adjacent"
    with pytest.raises(CapacityError, match=rf"{size}.* larger --memory-pool-entries than 256"):
        served.offline.load_bundle(tmp_path / "large.safetensors")
    after = llm.collective_rpc("inducekv_stats")[0]
    assert after.pop("host_bytes") > before.pop("host_bytes")  # it may come again, once others have left
    assert after == before
    served.check(prompts(1, seed=9), ["first"])


@pytest.mark.parametrize(("weighting", "by_classifiers"), [("prior", False), ("uniform", True)])
def test_gates(served: MemoryEngine, weighting: str, by_classifiers: bool) -> None:
    """More prompts than blocks, twice: the second time they are decided at once."""
    questions, tasks = prompts(6, seed=18), [("a", None, "b")[i % 3] for i in range(6)]
    activations = {"a": "generation", "b": "prompt"}
    changes: dict[str, Any] = {"form": "decoupled", "weighting": weighting, "activations": activations}
    with served.gated(questions, tasks, by_classifiers=by_classifiers, **changes):
        for _ in range(2):
            answers = served.check(questions, ["gated"] * 6)
            assert [answer.decision and answer.decision.task for answer in answers] == tasks


@pytest.mark.parametrize("by_classifiers", [False, True])
def test_memory_of_the_generation_joins_the_pass_that_decides(served: MemoryEngine, by_classifiers: bool) -> None:
    """Even that of a prompt whose last token fills a block."""
    questions, tasks = prompts(6, seed=19), [("a", None, "b")[i % 3] for i in range(6)]
    questions[0] = _filling_a_block(served, questions[0])
    changes: dict[str, Any] = silent_below(served.world, 2, map_rank=3)
    with served.gated(questions, tasks, by_classifiers=by_classifiers, last_layer=2, **changes):
        answers = served.check(questions, ["gated"] * 6)
    for answer, task in zip(answers, tasks, strict=True):
        assert answer.decision is not None
        assert answer.decision.same_pass == (task == "a")
    assert len(answers[0].output.prompt_token_ids or ()) % BLOCK == 0


def _filling_a_block(served: MemoryEngine, prompt: Prompt) -> Prompt:
    while len(served.world.backbone.encode(prompt.chat_messages, prompt.images)["input_ids"][0]) % BLOCK:
        prompt = replace(prompt, question=f"{prompt.question} no")
    return prompt


@pytest.mark.skipif(WORKER_VARIABLE not in os.environ, reason="the memory attention of CPUs")
def test_kernels_graphs_and_log_sum_exps_took_part(served: MemoryEngine) -> None:
    calls = served.offline.llm.collective_rpc("inducekv_calls")[0]
    assert all(calls[kind] >= 36 for kind in ("twin", "graphs", "lse")), calls
    kernels = calls["kernels"]  # of each test above that has memory
    assert len(kernels) == 16, kernels
    assert all(number >= 1 for number in kernels.values()), kernels  # of each kind of step that a test has


def test_nothing_is_left_behind(served: MemoryEngine) -> None:
    stats = served.stats()
    assert (stats["slots_used"], stats["requests_known"]) == (0, 0)

"""vLLM with memory against transformers with memory, on real engines: every token's log-probability, to 1e-4."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from vllm.sampling_params import StructuredOutputsParams

from benchmarks.demo.model import CHECKPOINT
from inducekv_vllm.bundle import write_bundle
from inducekv_vllm.engine.memory_index import MemoryIndex
from inducekv_vllm.engine.offline import MemoryLLM
from selector.backbone.injection import reference_logprobs
from tests.inducekv_vllm.parity import (
    TOLERANCE,
    World,
    check_answers,
    deviation,
    engine,
    gated_bundle,
    greedy,
    load_all,
    make_world,
    prompts,
    served_logprobs,
)
from tests.tiny_models import save_tiny_llava, save_tiny_qwen3_vl

Served = tuple[World, MemoryLLM, dict[str, MemoryIndex]]
CONDITIONS = [("sqrt", None, False), ("sqrt", 3, False), ("sqrt", 3, True), ("prior", None, False), ("prior", 3, False)]


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> World:
    """The demo model; the HTTP tests use a random LLaVA."""
    return make_world(CHECKPOINT, tmp_path_factory.mktemp("llava"))


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("qwen")
    return make_world(save_tiny_qwen3_vl(folder / "model"), folder)


@pytest.fixture(scope="class")
def compiled(llava: World) -> Iterator[Served]:
    small = {"max_num_batched_tokens": 40, "num_gpu_blocks_override": 12, "block_size": 32}
    with engine(llava.model, disable_log_stats=False, **small) as llm:
        yield llava, *load_all(llava, llm)


@pytest.fixture(scope="class")
def eager_qwen(qwen: World) -> Iterator[Served]:
    with engine(qwen.model, enforce_eager=True) as llm:
        yield qwen, *load_all(qwen, llm)


class TestCompiled:
    """LLaVA under torch.compile (the default), prompts in chunks, prefix caching on, too few blocks."""

    @pytest.mark.parametrize(("name", "top_k", "remainder"), CONDITIONS)
    def test_parity(self, compiled: Served, name: str, top_k: int | None, remainder: bool) -> None:
        world, offline, memories = compiled
        asked = prompts(8, seed=1)
        assert max(len(world.backbone.encode(p.chat_messages, [p.image])["input_ids"][0]) for p in asked) > 40  # chunks
        answers = offline.chat(
            [p.messages for p in asked], greedy(), memory=memories[name], top_k=top_k, remainder=remainder
        )
        check_answers(world, asked, answers, [world.bundles[name]] * 8, top_k=top_k, remainder=remainder)

    def test_bundles_and_none_in_one_batch_under_preemption(self, compiled: Served) -> None:
        world, offline, memories = compiled
        names = [("sqrt", "prior", None, "other")[i % 4] for i in range(24)]
        asked = prompts(24, seed=2)
        answers = offline.chat(
            [p.messages for p in asked], greedy(max_tokens=40), memory=[n and memories[n] for n in names]
        )
        check_answers(world, asked, answers, [n and world.bundles[n] for n in names])
        preempted = next(m for m in offline.llm.get_metrics() if m.name == "vllm:num_preemptions")
        assert preempted.value > 0  # type: ignore[union-attr]

    def test_prefix_cache_is_reused_and_never_crossed(self, compiled: Served) -> None:
        world, offline, memories = compiled
        asked = [p for p in prompts(5, seed=3) if len(p.question) > 80]
        for name, cached in (("sqrt", False), ("sqrt", True), ("prior", False), (None, True), ("other", False)):
            # Without memory it is the key passes of the earlier rounds that filled the cache.
            memory = name and memories[name]
            answers = offline.chat([p.messages for p in asked], greedy(), memory=memory)
            check_answers(world, asked, answers, [name and world.bundles[name]] * len(asked))
            assert [bool(a.output.num_cached_tokens) for a in answers] == [cached] * len(asked)

    def test_samples_of_one_request(self, compiled: Served) -> None:
        world, offline, memories = compiled
        asked = prompts(5, seed=4)
        # No seed: vLLM on the CPU cannot resume a seeded request that was preempted.
        params = greedy(n=3, temperature=2.0)
        answers = offline.chat([p.messages for p in asked], params, memory=memories["sqrt"])
        # The demo model is sure of itself: not every sample differs.
        assert any(len({tuple(c.token_ids) for c in a.output.outputs}) > 1 for a in answers)
        check_answers(world, asked, answers, [world.bundles["sqrt"]] * 5)

    def test_structured_output(self, compiled: Served) -> None:
        """vLLM normalises over the tokens a grammar allows, so ratios between two of them are compared."""
        world, offline, memories = compiled
        asked = prompts(2, seed=6)
        constraint = StructuredOutputsParams(regex="[a-z ]{60,80}")
        params = greedy(structured_outputs=constraint, ignore_eos=False, logprobs=2)
        for prompt, answer in zip(
            asked, offline.chat([p.messages for p in asked], params, memory=memories["prior"]), strict=True
        ):
            (completion,) = answer.output.outputs
            assert set(completion.text) <= set("abcdefghijklmnopqrstuvwxyz ")
            inputs = world.backbone.encode(prompt.chat_messages, [prompt.image])
            compared = 0
            for position, step in enumerate(completion.logprobs):
                pair = [token for token, entry in step.items() if math.isfinite(entry.logprob)]
                if len(pair) == 2:
                    before = list(completion.token_ids[:position])
                    first, second = (
                        reference_logprobs(world.backbone, world.bundles["prior"], inputs, [*before, token])[-1]
                        for token in pair
                    )
                    served = step[pair[0]].logprob - step[pair[1]].logprob
                    assert abs(served - float(first - second)) <= 2 * TOLERANCE
                    compared += 1
            assert compared >= 5

    def test_gates_open_and_closed_in_one_batch(self, compiled: Served, tmp_path: Path) -> None:
        """Chunks, preemption, several samples of a request; other memories and none in between."""
        world, offline, memories = compiled
        asked = prompts(20, seed=11)
        tasks = [("a", None, "b", None, "a")[i % 5] for i in range(20)]
        bundle = gated_bundle(world, asked, tasks)
        write_bundle(bundle, tmp_path / "gated.safetensors")
        gated = offline.load_bundle(tmp_path / "gated.safetensors")
        names = ["gated" if i < 16 else ("sqrt", None)[i % 2] for i in range(20)]
        choice = {"gated": gated, **memories}
        conversations = [p.messages for p in asked]
        for top_k, params in ((None, greedy(max_tokens=40)), (2, greedy(n=2, temperature=2.0))):
            answers = offline.chat(conversations, params, memory=[n and choice[n] for n in names], top_k=top_k)
            bundles = {"gated": bundle, **world.bundles}
            check_answers(world, asked, answers, [n and bundles[n] for n in names], top_k=top_k, remainder=True)
            for answer, task in zip(answers[:16], tasks, strict=False):
                assert answer.gate_decision is not None
                assert answer.gate_decision.task == task
                assert (answer.retrieval is None) == (task is None)
                if answer.retrieval is not None:
                    used = {bundle.metadata.entries[i].task for i in answer.retrieval.entries}
                    assert used == {task}
                    assert len(answer.retrieval.entries) == (top_k or 6)
            assert all(answer.gate_decision is None for answer in answers[16:])
        offline.unload_bundle(gated)

    def test_a_closed_gate_reuses_the_prefix_of_its_key_pass(self, compiled: Served, tmp_path: Path) -> None:
        world, offline, _ = compiled
        asked = [p for p in prompts(10, seed=12) if len(p.question) > 80]
        write_bundle(gated_bundle(world, asked, [None, "a"]), tmp_path / "gated.safetensors")
        gated = offline.load_bundle(tmp_path / "gated.safetensors")
        for prompt, hits in zip(asked, (True, False), strict=True):  # an open gate's K and V are others
            (answer,) = offline.chat([prompt.messages], greedy(), memory=gated)
            length = len(answer.output.prompt_token_ids or ())
            assert length > 64
            assert answer.output.num_cached_tokens == ((length - 1) // 32 * 32 if hits else 0)
        offline.unload_bundle(gated)

    def test_nothing_is_left_behind(self, compiled: Served) -> None:
        world, offline, _ = compiled
        for _ in range(2):  # the scheduler reports finished requests one step late
            offline.chat([prompts(1, seed=7)[0].messages], greedy(max_tokens=2))
        stats = offline.llm.collective_rpc("inducekv_stats")[0]
        assert stats["slots_used"] == 0
        assert stats["keys_pending"] == 0
        assert stats["resident"].keys() == {b.digest for b in world.bundles.values()}


class TestEagerQwen:
    """Qwen3-VL without compilation: M-RoPE, deepstack, a merged patch grid."""

    @pytest.mark.parametrize(("name", "top_k", "remainder"), CONDITIONS)
    def test_parity(self, eager_qwen: Served, name: str, top_k: int | None, remainder: bool) -> None:
        world, offline, memories = eager_qwen
        asked = prompts(5, seed=1)
        answers = offline.chat(
            [p.messages for p in asked], greedy(), memory=memories[name], top_k=top_k, remainder=remainder
        )
        check_answers(world, asked, answers, [world.bundles[name]] * 5, top_k=top_k, remainder=remainder)

    def test_gates_open_and_closed(self, eager_qwen: Served, tmp_path: Path) -> None:
        world, offline, _ = eager_qwen
        asked, tasks = prompts(5, seed=14), [None, "a", "b", None, "b"]
        bundle = gated_bundle(world, asked, tasks)
        write_bundle(bundle, tmp_path / "gated.safetensors")
        gated = offline.load_bundle(tmp_path / "gated.safetensors")
        answers = offline.chat([p.messages for p in asked], greedy(), memory=gated)
        check_answers(world, asked, answers, [bundle] * 5)
        assert [answer.gate_decision and answer.gate_decision.task for answer in answers] == tasks
        for prompt, answer in zip(asked, answers, strict=True):
            keys = world.backbone.query_keys(world.backbone.encode(prompt.chat_messages, [prompt.image]))[0]
            torch.testing.assert_close(torch.tensor(answer.key), keys, rtol=0, atol=1e-5)
        offline.unload_bundle(gated)

    def test_no_memory_is_vllm_to_the_bit(self, eager_qwen: Served) -> None:
        world, offline, _ = eager_qwen
        conversations = [p.messages for p in prompts(6, seed=8)]
        mine = offline.llm.chat(conversations, greedy(), use_tqdm=False)
        with engine(world.model, memory=False, enforce_eager=True) as plain:
            theirs = plain.chat(conversations, greedy(), use_tqdm=False)
        for a, b in zip(mine, theirs, strict=True):
            assert served_logprobs(a.outputs[0])[0] == served_logprobs(b.outputs[0])[0]
            assert torch.equal(served_logprobs(a.outputs[0])[1], served_logprobs(b.outputs[0])[1])


@pytest.mark.parametrize("caching", [True, False], ids=["prefix caching", "no prefix caching"])
def test_a_closed_gate_is_vllm_to_the_bit(llava: World, tmp_path: Path, caching: bool) -> None:
    """What vLLM without the plugin answers when it has seen the prompt once before, as the key pass has."""
    options = {"enforce_eager": True, "block_size": 32, "enable_prefix_caching": caching}
    asked = prompts(5, seed=13)
    conversations = [p.messages for p in asked]
    write_bundle(gated_bundle(llava, asked, [None] * 4 + ["a"]), tmp_path / "gated.safetensors")
    with engine(llava.model, **options) as llm:
        offline = MemoryLLM(llm)
        gated = offline.load_bundle(tmp_path / "gated.safetensors")
        mine = [offline.chat([each], greedy(), memory=gated)[0] for each in conversations]
    assert [answer.retrieval is None for answer in mine] == [True] * 4 + [False]
    with engine(llava.model, memory=False, **options) as plain:
        theirs = [[plain.chat([each], greedy(), use_tqdm=False)[0] for _ in range(2)][1] for each in conversations]
    for a, b in zip(mine[:4], theirs, strict=False):
        assert served_logprobs(a.output.outputs[0])[0] == served_logprobs(b.outputs[0])[0]
        assert torch.equal(served_logprobs(a.output.outputs[0])[1], served_logprobs(b.outputs[0])[1])
        assert a.output.num_cached_tokens == b.num_cached_tokens
    assert any(b.num_cached_tokens for b in theirs) == caching
    difference = served_logprobs(mine[4].output.outputs[0])[1] - served_logprobs(theirs[4].outputs[0])[1]
    assert difference.abs().max() > 100 * TOLERANCE


def test_two_tensor_parallel_ranks(tmp_path: Path) -> None:
    """On a random LLaVA: the demo model's vision heads cannot be shared out over two ranks."""
    llava = make_world(save_tiny_llava(tmp_path / "model"), tmp_path)
    options = {"tensor_parallel_size": 2, "enforce_eager": True, "max_num_batched_tokens": 40}
    with engine(llava.model, environment={"VLLM_CPU_OMP_THREADS_BIND": "0|1"}, **options) as llm:
        offline, memories = load_all(llava, llm)
        names = ["sqrt", "prior", None, "other"]
        asked = prompts(4, seed=9)
        for top_k in (None, 3):
            answers = offline.chat(
                [p.messages for p in asked], greedy(), memory=[n and memories[n] for n in names], top_k=top_k
            )
            check_answers(llava, asked, answers, [n and llava.bundles[n] for n in names], top_k=top_k, remainder=True)


def test_bfloat16_is_as_close_as_it_is_without_memory(llava: World) -> None:
    """Against the float32 reference: no token more than twice as far off as the farthest token without memory."""
    asked = prompts(8, seed=10)
    with engine(llava.model, dtype="bfloat16", enforce_eager=True) as llm:
        offline, memories = load_all(llava, llm)

        def worst(name: str | None, top_k: int | None = None) -> float:
            answers = offline.chat([p.messages for p in asked], greedy(), memory=name and memories[name], top_k=top_k)
            bundle = name and llava.bundles[name]
            return max(
                deviation(llava, p, a.output.outputs[0], bundle, top_k=top_k, remainder=True)
                for p, a in zip(asked, answers, strict=True)
            )

        bound = 2 * worst(None)
        assert TOLERANCE < bound < 0.5  # the plain model does round in bfloat16, and is not nonsense
        for name, top_k, _ in CONDITIONS:
            assert worst(name, top_k) <= bound, (name, top_k)

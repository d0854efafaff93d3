"""vLLM with memory against transformers with memory, on real engines: every token's log-probability, to 1e-4."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from vllm import LLM
from vllm.outputs import RequestOutput
from vllm.sampling_params import StructuredOutputsParams

from inducekv_vllm.engine.memory_index import MemoryIndex
from inducekv_vllm.engine.offline import MemoryLLM
from server.demo import CHECKPOINT
from tests.inducekv_vllm.parity import (
    FEWER_PROCESSES,
    TOLERANCE,
    World,
    check_answers,
    deviation,
    engine,
    greedy,
    load_all,
    loaded_gated,
    make_world,
    prompts,
    served_logprobs,
)
from tests.reference import reference_logprobs
from tests.tiny_models import save_tiny_qwen3_vl

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


@pytest.fixture(scope="module")
def eager_qwen(qwen: World) -> Iterator[Served]:
    with engine(qwen.model, environment=FEWER_PROCESSES, enforce_eager=True, block_size=32) as llm:
        yield qwen, *load_all(qwen, llm)


@pytest.fixture(scope="module")
def plain_qwen(qwen: World) -> Iterator[LLM]:
    """vLLM without the plugin."""
    with engine(qwen.model, memory=False, environment=FEWER_PROCESSES, enforce_eager=True, block_size=32) as llm:
        yield llm


@pytest.fixture(scope="module")
def uncached(world: World) -> Iterator[Served]:
    """Without prefix caching."""
    with engine(world.model, environment=FEWER_PROCESSES, enforce_eager=True, enable_prefix_caching=False) as llm:
        yield world, *load_all(world, llm)


@pytest.fixture(scope="module")
def plain_uncached(world: World) -> Iterator[LLM]:
    options = {"enforce_eager": True, "enable_prefix_caching": False}
    with engine(world.model, memory=False, environment=FEWER_PROCESSES, **options) as llm:
        yield llm


def check_parity(served: Served, count: int, name: str, top_k: int | None, remainder: bool) -> None:
    world, offline, memories = served
    questions = prompts(count, seed=1)
    conversations = [p.messages for p in questions]
    answers = offline.chat(conversations, greedy(), memory=memories[name], top_k=top_k, remainder=remainder)
    check_answers(world, questions, answers, [world.bundles[name]] * count, top_k=top_k, remainder=remainder)


def check_equal(output: RequestOutput, plain: RequestOutput) -> None:
    """To the bit."""
    (tokens, logprobs), (plain_tokens, plain_logprobs) = (served_logprobs(o.outputs[0]) for o in (output, plain))
    assert tokens == plain_tokens
    assert torch.equal(logprobs, plain_logprobs)


class TestCompiled:
    """LLaVA under torch.compile (the default), prompts in chunks, prefix caching on, too few blocks."""

    @pytest.mark.parametrize(("name", "top_k", "remainder"), CONDITIONS)
    def test_parity(self, compiled: Served, name: str, top_k: int | None, remainder: bool) -> None:
        backbone = compiled[0].backbone
        lengths = [len(backbone.encode(p.chat_messages, [p.image])["input_ids"][0]) for p in prompts(8, seed=1)]
        assert max(lengths) > 40  # chunks
        check_parity(compiled, 8, name, top_k, remainder)

    def test_bundles_and_none_in_one_batch_under_preemption(self, compiled: Served) -> None:
        world, offline, memories = compiled
        names = [("sqrt", "prior", None, "other")[i % 4] for i in range(24)]
        questions = prompts(24, seed=2)
        answers = offline.chat(
            [p.messages for p in questions], greedy(max_tokens=40), memory=[n and memories[n] for n in names]
        )
        check_answers(world, questions, answers, [n and world.bundles[n] for n in names])
        preempted = next(m for m in offline.llm.get_metrics() if m.name == "vllm:num_preemptions")
        assert preempted.value > 0  # type: ignore[union-attr]

    def test_prefix_cache_is_reused_and_never_crossed(self, compiled: Served) -> None:
        world, offline, memories = compiled
        questions = [p for p in prompts(5, seed=3) if len(p.question) > 80]
        for name, cached in (("sqrt", False), ("sqrt", True), ("prior", False), (None, True), ("other", False)):
            # Without memory, the key passes of the earlier rounds have filled the cache.
            answers = offline.chat([p.messages for p in questions], greedy(), memory=name and memories[name])
            check_answers(world, questions, answers, [name and world.bundles[name]] * len(questions))
            assert [bool(a.output.num_cached_tokens) for a in answers] == [cached] * len(questions)

    def test_samples_of_one_request(self, compiled: Served) -> None:
        world, offline, memories = compiled
        questions = prompts(5, seed=4)
        # No seed: vLLM on the CPU cannot resume a seeded request that was preempted.
        params = greedy(n=3, temperature=2.0)
        answers = offline.chat([p.messages for p in questions], params, memory=memories["sqrt"])
        # The demo model is sure of itself: not every sample differs.
        assert any(len({tuple(c.token_ids) for c in a.output.outputs}) > 1 for a in answers)
        check_answers(world, questions, answers, [world.bundles["sqrt"]] * 5)

    def test_structured_output(self, compiled: Served) -> None:
        """vLLM normalises over the tokens a grammar allows, so ratios between two of them are compared."""
        world, offline, memories = compiled
        questions = prompts(2, seed=6)
        constraint = StructuredOutputsParams(regex="[a-z ]{60,80}")
        params = greedy(structured_outputs=constraint, ignore_eos=False, logprobs=2)
        answers = offline.chat([p.messages for p in questions], params, memory=memories["prior"])
        for prompt, answer in zip(questions, answers, strict=True):
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
                    difference = step[pair[0]].logprob - step[pair[1]].logprob
                    assert abs(difference - float(first - second)) <= 2 * TOLERANCE
                    compared += 1
            assert compared >= 5

    def test_gates_open_and_closed_in_one_batch(self, compiled: Served) -> None:
        """With chunks, preemption, several samples of a request, and other memories and none in between."""
        world, offline, memories = compiled
        questions = prompts(20, seed=11)
        tasks = [("a", None, "b", None, "a")[i % 5] for i in range(20)]
        names = ["gated" if i < 16 else ("sqrt", None)[i % 2] for i in range(20)]
        with loaded_gated(world, offline, questions, tasks) as (bundle, gated):
            loaded, bundles = {"gated": gated, **memories}, {"gated": bundle, **world.bundles}
            for top_k, params in ((None, greedy(max_tokens=40)), (2, greedy(n=2, temperature=2.0))):
                conversations = [p.messages for p in questions]
                answers = offline.chat(conversations, params, memory=[n and loaded[n] for n in names], top_k=top_k)
                expected = [n and bundles[n] for n in names]
                check_answers(world, questions, answers, expected, top_k=top_k, remainder=True)
                for answer, task in zip(answers[:16], tasks, strict=False):
                    assert answer.gate_decision is not None
                    assert answer.gate_decision.task == task
                    assert (answer.retrieval is None) == (task is None)
                    if answer.retrieval is not None:
                        assert {bundle.metadata.entries[i].task for i in answer.retrieval.entries} == {task}
                        assert len(answer.retrieval.entries) == (top_k or 6)
                assert all(answer.gate_decision is None for answer in answers[16:])

    def test_a_closed_gate_reuses_the_prefix_of_its_key_pass(self, compiled: Served) -> None:
        world, offline, _ = compiled
        questions = [p for p in prompts(10, seed=12) if len(p.question) > 80]
        with loaded_gated(world, offline, questions, [None, "a"]) as (_, gated):
            for prompt, hits in zip(questions, (True, False), strict=True):  # an open gate changes K and V
                (answer,) = offline.chat([prompt.messages], greedy(), memory=gated)
                length = len(answer.output.prompt_token_ids or ())
                assert length > 64
                assert answer.output.num_cached_tokens == ((length - 1) // 32 * 32 if hits else 0)

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
        check_parity(eager_qwen, 5, name, top_k, remainder)

    def test_gates_open_and_closed(self, eager_qwen: Served) -> None:
        world, offline, _ = eager_qwen
        questions, tasks = prompts(5, seed=14), [None, "a", "b", None, "b"]
        with loaded_gated(world, offline, questions, tasks) as (bundle, gated):
            answers = offline.chat([p.messages for p in questions], greedy(), memory=gated)
        check_answers(world, questions, answers, [bundle] * 5)
        assert [answer.gate_decision and answer.gate_decision.task for answer in answers] == tasks
        for prompt, answer in zip(questions, answers, strict=True):
            keys = world.backbone.query_keys(world.backbone.encode(prompt.chat_messages, [prompt.image]))[0]
            torch.testing.assert_close(torch.tensor(answer.key), keys, rtol=0, atol=1e-5)

    def test_no_memory_is_vllm_to_the_bit(self, eager_qwen: Served, plain_qwen: LLM) -> None:
        conversations = [p.messages for p in prompts(6, seed=8)]
        answers = (llm.chat(conversations, greedy(), use_tqdm=False) for llm in (eager_qwen[1].llm, plain_qwen))
        for output, plain in zip(*answers, strict=True):
            check_equal(output, plain)


@pytest.mark.parametrize(
    ("memory_engine", "plain_engine", "caching"),
    [("eager_qwen", "plain_qwen", True), ("uncached", "plain_uncached", False)],
)
def test_a_closed_gate_is_vllm_to_the_bit(
    request: pytest.FixtureRequest, memory_engine: str, plain_engine: str, caching: bool
) -> None:
    """The answer of vLLM without the plugin when it has seen the prompt once before, as the key pass has."""
    world, offline, _ = request.getfixturevalue(memory_engine)
    questions = prompts(5, seed=13)
    conversations = [p.messages for p in questions]
    with loaded_gated(world, offline, questions, [None] * 4 + ["a"]) as (_, gated):
        answers = [offline.chat([each], greedy(), memory=gated)[0] for each in conversations]
    assert [answer.retrieval is None for answer in answers] == [True] * 4 + [False]
    llm: LLM = request.getfixturevalue(plain_engine)
    outputs = [[llm.chat([each], greedy(), use_tqdm=False)[0] for _ in range(2)][1] for each in conversations]
    for answer, output in zip(answers[:4], outputs, strict=False):
        check_equal(answer.output, output)
        assert answer.output.num_cached_tokens == output.num_cached_tokens
    assert any(output.num_cached_tokens for output in outputs) == caching
    difference = served_logprobs(answers[4].output.outputs[0])[1] - served_logprobs(outputs[4].outputs[0])[1]
    assert difference.abs().max() > 100 * TOLERANCE


def test_bfloat16_is_as_close_as_it_is_without_memory(llava: World) -> None:
    """Against the float32 reference: no token more than twice as far off as the farthest token without memory."""
    questions = prompts(8, seed=10)
    with engine(llava.model, environment=FEWER_PROCESSES, dtype="bfloat16", enforce_eager=True) as llm:
        offline, memories = load_all(llava, llm)

        def worst(name: str | None, top_k: int | None = None) -> float:
            conversations = [p.messages for p in questions]
            answers = offline.chat(conversations, greedy(), memory=name and memories[name], top_k=top_k)
            bundle = name and llava.bundles[name]
            return max(
                deviation(llava, p, a.output.outputs[0], bundle, top_k=top_k, remainder=True)
                for p, a in zip(questions, answers, strict=True)
            )

        bound = 2 * worst(None)
        assert TOLERANCE < bound < 0.5  # the plain model does round in bfloat16, and is not nonsense
        for name, top_k, _ in CONDITIONS:
            assert worst(name, top_k) <= bound, (name, top_k)


def test_two_tensor_parallel_ranks(world: World) -> None:
    """On a random LLaVA: the demo model's vision heads cannot be split over two ranks."""
    options = {"tensor_parallel_size": 2, "enforce_eager": True, "max_num_batched_tokens": 40}
    with engine(world.model, environment={"VLLM_CPU_OMP_THREADS_BIND": "0|1"}, **options) as llm:
        offline, memories = load_all(world, llm)
        names = ["sqrt", "prior", None, "other"]
        questions = prompts(4, seed=9)
        for top_k in (None, 3):
            answers = offline.chat(
                [p.messages for p in questions], greedy(), memory=[n and memories[n] for n in names], top_k=top_k
            )
            expected = [n and world.bundles[n] for n in names]
            check_answers(world, questions, answers, expected, top_k=top_k, remainder=True)

"""vLLM with memory answers as transformers does, to 1e-4; without memory or behind a closed gate, as vLLM alone."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import LLM
from vllm.outputs import RequestOutput
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.selector import _cached_get_attn_backend

from inducekv_vllm.plugin import register
from server.demo import CHECKPOINT
from tests.engine.parity import (
    EAGER,
    FEWER_PROCESSES,
    TOLERANCE,
    MemoryEngine,
    World,
    deviation,
    engine,
    greedy,
    make_world,
    prompts,
    served_logprobs,
)
from tests.tiny_models import save_tiny_llava, save_tiny_qwen3_vl

DEFAULT = [("first", None), ("second", None), ("other", None)]
MERGED = [("sqrt", None), ("sqrt", 3), ("prior", None), ("prior", 3)]
CONDITIONS = [*DEFAULT, *MERGED]


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> World:
    """The demo model; the HTTP tests use a random LLaVA."""
    return make_world(CHECKPOINT, tmp_path_factory.mktemp("llava"), with_merged=True)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("qwen")
    return make_world(save_tiny_qwen3_vl(folder / "model"), folder, with_merged=True)


@pytest.fixture(scope="module")
def compiled(llava: World) -> Iterator[MemoryEngine]:
    """Under torch.compile (the default), prompts in chunks, prefix caching on, too few blocks."""
    small = {"max_num_batched_tokens": 40, "num_gpu_blocks_override": 12, "block_size": 32}
    with engine(llava.model, environment=FEWER_PROCESSES, disable_log_stats=False, **small) as llm:
        yield MemoryEngine(llava, llm)


@pytest.fixture(scope="module")
def eager_qwen(qwen: World) -> Iterator[MemoryEngine]:
    """Without compilation: M-RoPE, deepstack, a merged patch grid."""
    with engine(qwen.model, environment=FEWER_PROCESSES, enforce_eager=True, block_size=32) as llm:
        yield MemoryEngine(qwen, llm)


@pytest.fixture(scope="module")
def plain_qwen(eager_qwen: MemoryEngine) -> Iterator[LLM]:
    """vLLM without the plugin, which the engines with memory have loaded into this process."""
    AttentionBackendEnum.CPU_ATTN.clear_override()
    _cached_get_attn_backend.cache_clear()
    options = {"enforce_eager": True, "block_size": 32}
    with engine(eager_qwen.world.model, memory=False, environment=FEWER_PROCESSES, **options) as llm:
        register()
        _cached_get_attn_backend.cache_clear()
        layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
        assert {type(layer.impl) for layer in layers} == {CPUAttentionBackendImpl}
        yield llm


def check_equal(output: RequestOutput, plain: RequestOutput) -> None:
    """To the bit."""
    (tokens, logprobs), (plain_tokens, plain_logprobs) = (served_logprobs(o.outputs[0]) for o in (output, plain))
    assert tokens == plain_tokens
    assert torch.equal(logprobs, plain_logprobs)


@pytest.mark.parametrize(("name", "top_k"), CONDITIONS)
class TestParity:
    def test_compiled(self, compiled: MemoryEngine, name: str, top_k: int | None) -> None:
        questions = prompts(8, seed=1)
        answers = compiled.check(questions, [name] * 8, top_k=top_k)
        assert max(len(answer.output.prompt_token_ids or ()) for answer in answers) > 40  # chunks

    def test_qwen(self, eager_qwen: MemoryEngine, name: str, top_k: int | None) -> None:
        eager_qwen.check(prompts(5, seed=1), [name] * 5, top_k=top_k)


class TestCompiled:
    def test_bundles_and_none_in_one_batch_under_preemption(self, compiled: MemoryEngine) -> None:
        names = [("first", "sqrt", None, "other", "second", "prior")[i % 6] for i in range(24)]
        compiled.check(prompts(24, seed=2), names, greedy(max_tokens=40))
        assert compiled.counted("num_preemptions") > 0

    def test_prefix_cache_is_reused_and_never_crossed(self, compiled: MemoryEngine) -> None:
        questions = [p for p in prompts(5, seed=3) if len(p.question) > 80]
        for name, cached in (("sqrt", False), ("sqrt", False), ("prior", False), (None, True), ("first", True)):
            # What retrieves reads whole prompts, and fills the cache with the untouched ones: a gate reads them.
            answers = compiled.check(questions, [name] * len(questions))
            assert [bool(a.output.num_cached_tokens) for a in answers] == [cached] * len(questions)

    @pytest.mark.parametrize(
        ("changes", "top_k", "params"),
        [({}, None, {"max_tokens": 40}), ({"form": "merged"}, 2, {"n": 2, "temperature": 2.0})],
        ids=["default", "merged"],
    )
    def test_gates_open_and_closed_in_one_batch(
        self, compiled: MemoryEngine, changes: dict[str, Any], top_k: int | None, params: dict[str, Any]
    ) -> None:
        """With chunks, preemption, several samples of a request, and other memories and none in between."""
        questions = prompts(20, seed=11)
        tasks = [("a", None, "b", None, "a")[i % 5] for i in range(20)]
        names = ["gated" if i < 16 else ("sqrt", None)[i % 2] for i in range(20)]
        with compiled.gated(questions, tasks, **changes):
            entries = compiled.bundles["gated"].metadata.entries
            answers = compiled.check(questions, names, greedy(**params), top_k=top_k)
            for answer, task in zip(answers[:16], tasks, strict=False):
                assert answer.decision is not None
                assert answer.decision.task == task
                injection = answer.decision.injection
                assert (injection is None) == (task is None)
                if injection is not None:
                    assert {entries[i].task for i in injection.entries} == {task}
                    assert len(injection.entries) == (top_k or 6)
            assert all(answer.decision is None or answer.decision.margins is None for answer in answers[16:])

    def test_nothing_is_left_behind(self, compiled: MemoryEngine) -> None:
        stats = compiled.stats()
        assert (stats["slots_used"], stats["requests_known"]) == (0, 0)
        assert stats["resident"].keys() == {b.digest for b in compiled.world.bundles.values()}


def test_gates_of_qwen(eager_qwen: MemoryEngine) -> None:
    questions, tasks = prompts(5, seed=14), [None, "a", "b", None, "b"]
    with eager_qwen.gated(questions, tasks):
        answers = eager_qwen.check(questions, ["gated"] * 5)
    assert [answer.decision and answer.decision.task for answer in answers] == tasks


def test_no_memory_is_vllm_to_the_bit(eager_qwen: MemoryEngine, plain_qwen: LLM) -> None:
    conversations = [p.messages for p in prompts(6, seed=8)]
    answers = (llm.chat(conversations, greedy(), use_tqdm=False) for llm in (eager_qwen.offline.llm, plain_qwen))
    for output, plain in zip(*answers, strict=True):
        check_equal(output, plain)


def test_a_closed_gate_is_vllm_to_the_bit(eager_qwen: MemoryEngine, plain_qwen: LLM) -> None:
    questions = prompts(5, seed=13)
    with eager_qwen.gated(questions, [None] * 4 + ["a"]):
        answers = [eager_qwen.check([each], ["gated"])[0] for each in questions]
    assert [answer.decision and answer.decision.injection is None for answer in answers] == [True] * 4 + [False]
    outputs = []
    for each in questions:
        outputs += plain_qwen.chat([each.messages], greedy(), use_tqdm=False)
    for answer, output in zip(answers[:4], outputs, strict=False):
        check_equal(answer.output, output)
        assert answer.output.num_cached_tokens == output.num_cached_tokens
    difference = served_logprobs(answers[4].output.outputs[0])[1] - served_logprobs(outputs[4].outputs[0])[1]
    assert difference.abs().max() > 100 * TOLERANCE


def test_bfloat16_is_as_close_as_it_is_without_memory(llava: World) -> None:
    """Against the float32 reference: no token more than twice as far off as the farthest token without memory."""
    questions = prompts(8, seed=10)
    with engine(llava.model, environment=FEWER_PROCESSES, dtype="bfloat16", enforce_eager=True) as llm:
        rounding = MemoryEngine(llava, llm)

        def worst(name: str | None, top_k: int | None = None) -> float:
            bundle = name and llava.bundles[name]
            return max(
                deviation(llava, prompt, answer.output.outputs[0], bundle, top_k=top_k)
                for prompt, answer in zip(
                    questions, rounding.chat(questions, [name] * 8, greedy(), top_k=top_k), strict=True
                )
            )

        bound = 2 * worst(None)
        assert TOLERANCE < bound < 0.5  # the plain model does round in bfloat16, and is not nonsense
        # Not "second": random maps and values that are taken away round more than the model does by itself.
        for name, top_k in (DEFAULT[0], *MERGED):
            assert worst(name, top_k) <= bound, (name, top_k)


def test_two_tensor_parallel_ranks(tmp_path: Path) -> None:
    """On a random LLaVA: the demo model's vision heads cannot be split over two ranks. Without prefix caching."""
    world = make_world(save_tiny_llava(tmp_path / "model"), tmp_path, with_merged=True)
    options = {"tensor_parallel_size": 2, "enforce_eager": True, "max_num_batched_tokens": 40}
    options |= {"enable_prefix_caching": False}
    environment = {**FEWER_PROCESSES, **EAGER, "VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    with engine(world.model, environment=environment, **options) as llm:
        two_ranks = MemoryEngine(world, llm)
        for top_k in (None, 3):
            two_ranks.check(prompts(4, seed=9), ["sqrt", "first", None, "second"], top_k=top_k)
        questions, tasks = prompts(4, seed=17), ["a", None, "b", "a"]
        with two_ranks.gated(questions, tasks):
            answers = two_ranks.check(questions, ["gated"] * 4)
        assert [answer.decision and answer.decision.task for answer in answers] == tasks

"""Hybrids: memory in the layers with attention, beside layers that keep a state which cannot go back.

vLLM against transformers, to 1e-4, with memory of every decoupled form. A request that goes back begins again from its
last cached state. Gated DeltaNet is computed by `tests.engine.gdn_float32`, because vLLM's operator for CPUs takes
bfloat16 alone. Most families are marked `slow`: run them with `make test-families`.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.model_executor.layers import rotary_embedding

from inducekv_vllm.bundle.activation import ACTIVATIONS, Activation, first_active_position
from inducekv_vllm.errors import UnsupportedModel
from inducekv_vllm.frontend.offline import MemoryAnswer
from selector.backbone.generation import score
from tests.bundles import as_decoupled
from tests.engine import gdn_float32
from tests.engine.parity import (
    EAGER,
    FEWER_PROCESSES,
    NEW_TOKENS,
    TOLERANCE,
    MemoryEngine,
    Prompt,
    World,
    engine,
    greedy,
    make_world,
    prompts,
    served_logprobs,
    silent_below,
    text_prompts,
)
from tests.tiny_hybrids import (
    save_granite_hybrid,
    save_lfm2,
    save_nemotron_h,
    save_qwen3_5,
    save_qwen3_5_with_pictures,
    save_qwen3_next,
)

WORDS = ("red", "green", "blue", "circle", "square", "star", "ring", "triangle", "yes", "no", "one", "two", "left")


@dataclass(frozen=True)
class Family:
    save: Callable[[Path], Path]
    block: int  # tokens: the attention's page is as large as a state, or larger
    words: tuple[int, ...]  # of the prompts: of two, one or no block
    options: dict[str, Any] = field(default_factory=dict)


# The operator for CPUs takes queries of LFM2's shape for those of one head.
TORCH_ROPE = {"compilation_config": {"custom_ops": ["-rotary_embedding"]}}
FAMILIES = {
    "lfm2": Family(save_lfm2, 128, (140, 0, 70, 20), TORCH_ROPE),
    "granite-hybrid": Family(save_granite_hybrid, 128, (140, 0, 70, 20)),
    "nemotron-h": Family(save_nemotron_h, 128, (140, 0, 70, 20)),
    "qwen3.5": Family(save_qwen3_5, 384, (210, 0, 60, 20)),
    "qwen3-next": Family(save_qwen3_next, 384, (210, 0, 60, 20)),
}
IN_EVERY_RUN = ("lfm2",)
TASKS = ("a", None, "b", None)


def marked(family: str) -> Any:
    return pytest.param(family, marks=() if family in IN_EVERY_RUN else pytest.mark.slow)


def questions_of(family: Family, seed: int) -> list[Prompt]:
    """Whose first words differ, so that no prompt begins like another."""
    return [
        Prompt(
            None, " ".join(WORDS[(7 * i + 3 * seed + i * i) % len(WORDS)] for i in range(words)) + " " + row.question
        )
        for row, words in zip(text_prompts(4, seed), family.words, strict=True)
    ]


class Served(MemoryEngine):
    """With the number of rows that each request was scheduled for."""

    def __init__(self, world: World, llm: Any) -> None:
        super().__init__(world, llm)
        self.scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        self.rows = Counter[str]()
        schedule = self.scheduler.schedule

        def counted(*args: Any, **options: Any) -> Any:
            output = schedule(*args, **options)
            self.rows.update(output.num_scheduled_tokens)
            return output

        self.scheduler.schedule = counted

    def ask(self, questions: Sequence[Prompt], names: Sequence[str | None]) -> list[tuple[MemoryAnswer, int]]:
        """Answers as transformers gives them, each with the rows of its prompt that were computed."""
        self.rows.clear()
        answers = self.check(questions, names)
        rows = [
            count - (NEW_TOKENS - 1)
            for _, count in sorted(self.rows.items(), key=lambda item: int(item[0].split("-")[0]))
        ]
        return list(zip(answers, rows, strict=True))

    def length_of(self, prompt: Prompt) -> int:
        return int(self.world.backbone.encode(prompt.chat_messages, [])["input_ids"].shape[1])

    def forget(self) -> None:
        assert self.scheduler.reset_prefix_cache()


@contextmanager
def serving(family: Family, folder: Path, **options: Any) -> Iterator[Served]:
    gdn_float32.install()
    world = make_world(family.save(folder / "model"), folder, make_prompts=text_prompts)
    merged, per_head = world.merged["prior"], world.heads_per_kv_head
    for activation in ACTIVATIONS:
        world.add(activation, as_decoupled(merged, activation, map_rank=3, heads_per_kv_head=per_head), folder)
    retrieved = as_decoupled(merged, "generation", "prior", map_rank=3, heads_per_kv_head=per_head)
    world.add("retrieved", retrieved, folder)
    # A step ends with each block: vLLM keeps the state of a step's last block alone, and its Mamba 2 on CPUs ends the
    # engine if a block ends within a step.
    usual = {"enforce_eager": True, "max_num_batched_tokens": family.block, "max_model_len": 1024} | family.options
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rotary_embedding, "_ROPE_DICT", {})  # vLLM keeps what the engines of a process rotate by
        with engine(world.model, environment=FEWER_PROCESSES, **usual | options) as llm:
            yield Served(world, llm)


@pytest.fixture(scope="module", params=[marked(name) for name in FAMILIES])
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


@pytest.fixture(scope="module")
def served(family: Family, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(family, tmp_path_factory.mktemp("hybrid"), enable_prefix_caching=True) as served:
        yield served


@pytest.fixture
def from_the_middle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of the activation "text" acts from the middle of a prompt on, as behind a picture."""

    def position(activation: Activation, token_ids: Sequence[int], placeholders: Any) -> int:
        if activation == "text":
            return len(token_ids) // 2
        return first_active_position(activation, token_ids, placeholders)

    for module in ("inducekv_vllm.workers.decisions", "inducekv_vllm.frontend.request", "tests.reference"):
        monkeypatch.setattr(f"{module}.first_active_position", position)


def length(answer: MemoryAnswer) -> int:
    return len(answer.output.prompt_token_ids or ())


def whole_blocks(position: int, family: Family) -> int:
    """The tokens before a position of which there may be a cached state."""
    return position // family.block * family.block


def test_every_form_twice(served: Served, family: Family, from_the_middle: None) -> None:
    """The second time from the prefix cache, where a prompt has a block: from a cached state."""
    assert served.scheduler.block_size == family.block
    questions = questions_of(family, 1)
    for name in (None, *ACTIVATIONS, "retrieved"):
        for is_again in (False, True):
            for answer, rows in served.ask(questions, [name] * 4):
                cached = answer.output.num_cached_tokens or 0
                if name != "retrieved":  # it reads the whole prompt, and goes back
                    assert rows == length(answer) - cached
                    assert cached == whole_blocks(length(answer) - 1, family) or not is_again
    assert whole_blocks(length(answer) - 1, family) == 0  # of a prompt that has none
    names = [None, *ACTIVATIONS]
    plain, *with_memory = (each for each, _ in served.ask([questions[0]] * 4, names))
    for answer in with_memory:
        both = [served_logprobs(each.output.outputs[0])[1] for each in (answer, plain)]
        assert (both[0] - both[1]).abs().max() > 100 * TOLERANCE, "the memory does nothing"


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_behind_a_gate(served: Served, family: Family, from_the_middle: None, activation: Activation) -> None:
    """Open, a request begins again from the last state before memory's first position; closed, nothing happens."""
    served.forget()
    questions = questions_of(family, 2)
    with served.gated(questions, TASKS, activations=dict.fromkeys("ab", activation)):
        for (answer, rows), task in zip(served.ask(questions, ["gated"] * 4), TASKS, strict=True):
            assert answer.decision is not None
            assert (answer.decision.task, answer.decision.same_pass) == (task, False)
            T = length(answer)
            redone = 0
            if answer.decision.injection is not None:
                redone = T - whole_blocks(answer.decision.injection.first_active, family)
            assert rows == T + redone
        for (answer, _), task in zip(served.ask(questions, ["gated"] * 4), TASKS, strict=True):  # with cached states
            assert (answer.decision and answer.decision.task) == task


def test_memory_that_joins_the_pass_computes_nothing_twice(served: Served, family: Family) -> None:
    """Even that of a prompt whose last token fills a block."""
    served.forget()
    questions, tasks = questions_of(family, 3), ["a", None, "a", None]
    while served.length_of(questions[0]) % family.block:
        questions[0] = Prompt(None, f"{questions[0].question} no")
    with served.gated(questions, tasks, last_layer=1, **silent_below(served.world, 1, 3)):
        for is_again in (False, True):
            for (answer, rows), task in zip(served.ask(questions, ["gated"] * 4), tasks, strict=True):
                assert answer.decision is not None
                assert (answer.decision.task, answer.decision.same_pass) == (task, task == "a")
                cached = is_again * whole_blocks(length(answer) - 1, family)
                assert (answer.output.num_cached_tokens, rows) == (cached, length(answer) - cached)


def test_states_of_memory_are_never_those_of_other_requests(served: Served, family: Family) -> None:
    """A plain request that repeats a prompt with memory and its answer, over a block's end."""
    served.forget()
    question = questions_of(family, 4)[2]
    with served.gated(questions_of(family, 4), TASKS, activations=dict.fromkeys("ab", "generation")):
        prompt = served.world.backbone.encode(question.chat_messages, [])["input_ids"]
        tokens = family.block + 8 - prompt.shape[1]
        assert tokens > 0
        (answer,) = served.chat([question], ["gated"], greedy(max_tokens=max(tokens, NEW_TOKENS)))
        assert answer.decision is not None
        assert answer.decision.injection is not None
        ids = [*(answer.output.prompt_token_ids or ()), *answer.output.outputs[0].token_ids]
        for cached in (0, whole_blocks(len(ids) - 1, family)):  # none of memory's; then its own
            (plain,) = served.offline.llm.generate([{"prompt_token_ids": ids}], greedy(), use_tqdm=False)
            assert plain.num_cached_tokens == cached
            given, logprobs = served_logprobs(plain.outputs[0])
            inputs = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.int64)}
            (expected,) = score(served.world.backbone, [inputs], [given])
            assert (logprobs - expected).abs().max() <= TOLERANCE
        served.check([question], ["gated"])


def test_queries_that_vllm_rotates_wrongly_on_cpus_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`test_known_bugs.py` has what flags alone tell."""
    monkeypatch.setattr(rotary_embedding, "_ROPE_DICT", {})
    with (
        pytest.raises(UnsupportedModel, match="rotates its queries wrongly"),
        engine(save_lfm2(tmp_path), environment=FEWER_PROCESSES, enforce_eager=True),
    ):
        pass


def test_merged_memory_is_refused(served: Served, tmp_path: Path) -> None:
    served.world.add("merged", served.world.merged["prior"], tmp_path)
    with pytest.raises(UnsupportedModel, match="merged memory needs full attention in every layer"):
        served.offline.load_bundle(served.world.paths.pop("merged"))


def test_aborted_requests_leave_no_state_behind(served: Served, family: Family) -> None:
    """Undecided, or while it answers; requests beside it go on."""
    served.forget()
    questions = questions_of(family, 5)
    with served.gated(questions, TASKS):
        served.abort_two(questions, "gated")
        served.check(questions, ["gated"] * 4)
        served.check(questions, [None] * 4)
    stats = served.stats()
    assert (stats["slots_used"], stats["requests_known"]) == (0, 0)


@pytest.mark.parametrize("name", [marked(name) for name in FAMILIES])
def test_preempted_without_a_prefix_cache(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every restart is from the first token."""
    with serving(FAMILIES[name], tmp_path, enable_prefix_caching=False) as served:
        llm_engine, kinds = served.offline.llm.llm_engine, (None, *ACTIVATIONS, "retrieved", "gated")
        step, preempted = llm_engine.step, set[str]()

        def step_and_preempt() -> Any:
            outputs = step()
            answering = {each.request_id for each in served.scheduler.running if each.num_output_tokens > 3}
            if answering - preempted:
                preempted.update(answering)
                served.scheduler.reset_prefix_cache(reset_running_requests=True)
            return outputs

        monkeypatch.setattr(llm_engine, "step", step_and_preempt)
        questions = questions_of(FAMILIES[name], 6)
        with served.gated(questions, TASKS):
            for kind in kinds:
                answers = served.check(questions, [kind] * 4)
        assert [answer.decision and answer.decision.task for answer in answers] == list(TASKS)
        assert len(preempted) == 4 * len(kinds)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lfm2", "granite-hybrid"])
def test_two_tensor_parallel_ranks(name: str, tmp_path: Path) -> None:
    """The second rank hears of a decision behind the pass, so every open gate sends its request back."""
    family = FAMILIES[name]
    world = make_world(family.save(tmp_path / "model"), tmp_path, make_prompts=text_prompts)
    environment = {**FEWER_PROCESSES, **EAGER, "VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    options = {"enforce_eager": True, "max_num_batched_tokens": family.block, "enable_prefix_caching": True}
    options |= {"tensor_parallel_size": 2, "max_model_len": 1024} | family.options
    with engine(world.model, environment=environment, **options) as llm:
        two_ranks, questions = MemoryEngine(world, llm), questions_of(family, 7)
        for _ in range(2):
            two_ranks.check(questions, ["first", "second", None, "other"])
        with two_ranks.gated(questions, TASKS):
            answers = two_ranks.check(questions, ["gated"] * 4)
        assert [answer.decision and answer.decision.task for answer in answers] == list(TASKS)


@pytest.mark.slow
@pytest.mark.parametrize("with_experts", [False, True])
def test_qwen3_5_with_pictures(with_experts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of the text begins in the middle of a prompt, behind the picture."""
    gdn_float32.install()
    monkeypatch.setattr(rotary_embedding, "_ROPE_DICT", {})
    model = save_qwen3_5_with_pictures(tmp_path / "model", with_experts=with_experts)
    world = make_world(model, tmp_path, make_prompts=prompts)
    options = {"enforce_eager": True, "max_num_batched_tokens": 384, "max_model_len": 1024}
    with engine(world.model, environment=FEWER_PROCESSES, **options) as llm:
        served, questions = MemoryEngine(world, llm), prompts(4, 1)
        for _ in range(2):
            served.check(questions, [None, "first", "second", "other"])
        for activation in ACTIVATIONS:
            with served.gated(questions, TASKS, activations=dict.fromkeys("ab", activation)):
                answers = served.check(questions, ["gated"] * 4)
            assert [answer.decision and answer.decision.task for answer in answers] == list(TASKS)

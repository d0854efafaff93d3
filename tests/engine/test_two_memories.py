"""A request with its own memory and one that it shares with others: both act on its answer, and nobody else's does."""

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from vllm.exceptions import VLLMValidationError

from inducekv_vllm.backbone.saying import next_token
from inducekv_vllm.bundle import AdapterRecord, Bundle, FactRecord
from inducekv_vllm.errors import ConfigError
from inducekv_vllm.frontend.offline import MemoryAnswer
from inducekv_vllm.frontend.request import require_together
from inducekv_vllm.frontend.served_bundle import ServedBundle
from tests.bundles import as_decoupled
from tests.engine.facts import OPTIONS, Facts
from tests.engine.parity import (
    FEWER_PROCESSES,
    TOLERANCE,
    MemoryEngine,
    Prompt,
    World,
    engine,
    gated_bundle,
    greedy,
    make_world,
    served_logprobs,
    silent_below,
    text_prompts,
)
from tests.reference import reference_logprobs
from tests.tiny_families import FAMILIES

Pair = tuple[str, str]  # a request's own memory, and the shared one


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """The tenants "acme" and "bolt" with memory of the generation, "early" of the prompt; "manual" is shared."""
    folder = tmp_path_factory.mktemp("world")
    world = make_world(FAMILIES["llama"](folder / "model"), folder, make_prompts=text_prompts, with_merged=True)
    maps: dict[str, Any] = {"map_rank": 3, "heads_per_kv_head": world.heads_per_kv_head}
    for name, source, activation, scale in (
        ("acme", "prior", "generation", 6.0),
        ("bolt", "other", "generation", -6.0),
        ("early", "other", "text", 6.0),
        ("manual", "prior", "prompt", -4.0),
        ("late", "other", "generation", 4.0),
    ):
        world.add(name, as_decoupled(world.merged[source], activation, scale=scale, **maps), folder)  # type: ignore[arg-type]
    world.add("weighted", as_decoupled(world.merged["other"], "prompt", "prior", scale=5.0), folder)
    return world


@pytest.fixture(scope="module")
def served(world: World) -> Iterator[MemoryEngine]:
    """Prompts in chunks, prefix caching on, too few blocks."""
    small = {**OPTIONS, "num_gpu_blocks_override": 24, "disable_log_stats": False}
    two: dict[str, Any] = {"additional_config": {"inducekv": {"max_memories": 2}}}
    with engine(world.model, environment=FEWER_PROCESSES, **small, **two) as llm:
        yield MemoryEngine(world, llm)


def check(
    served: MemoryEngine, questions: Sequence[Prompt], pairs: Sequence[Pair | str | None], **params: Any
) -> list[MemoryAnswer]:
    """The answers, after every one was compared with transformers: own(shared(self-attention)) in every layer."""
    asked: list[Any] = [pair if isinstance(pair, tuple) or pair is None else (pair,) for pair in pairs]
    memories = [each and tuple(served.memories[name] for name in each) for each in asked]
    messages = [prompt.messages for prompt in questions]
    answers = served.offline.chat(messages, greedy(**params), memory=memories)
    for prompt, names, answer in zip(questions, asked, answers, strict=True):
        bundles = [served.bundles[name] for name in names or ()]
        assert deviation(served, prompt, answer, *bundles) <= TOLERANCE
        for bundle, decision in zip(bundles, answer.decisions, strict=True):
            served.check_decision(prompt, decision, bundle)
    return answers


def deviation(
    served: MemoryEngine, prompt: Prompt, answer: MemoryAnswer, own: Bundle | None = None, shared: Bundle | None = None
) -> float:
    backbone = served.world.backbone
    inputs = backbone.encode(prompt.chat_messages, prompt.images)
    tokens, logprobs = served_logprobs(answer.output.outputs[0])
    own, shared = (None if each is None or not each.num_entries else each for each in (own, shared))
    expected = reference_logprobs(backbone, own, inputs, tokens, beneath=shared)
    said = next((each.answer for each in answer.decisions if each.answer is not None), ())
    for place in range(len(tokens)):
        if next_token(said, tokens[:place]) is not None:
            expected[place] = 0.0  # it is certain
    return float((logprobs - expected).abs().max())


@pytest.mark.parametrize(
    ("own", "shared"),
    [("acme", "manual"), ("manual", "acme"), ("early", "manual"), ("acme", "late"), ("weighted", "late")],
)
def test_both_act_on_an_answer_the_shared_one_first(served: MemoryEngine, own: str, shared: str) -> None:
    """Each from its own position on, with weights of its own."""
    questions = text_prompts(3, seed=1)
    answers = check(served, questions, [(own, shared)] * 3)
    first, second = served.bundles[own], served.bundles[shared]
    for prompt, answer in zip(questions, answers, strict=True):
        for others in ((first,), (second,), (second, first), ()):  # the order counts: maps are of the output
            assert deviation(served, prompt, answer, *others) > 10 * TOLERANCE
    check(served, questions, [own, shared, None])  # nothing is left for those that have one, or none


@pytest.fixture
def gated(served: MemoryEngine, tmp_path: Path) -> Iterator[list[Prompt]]:
    """Questions, for which the gates of "own" and "shared" are open and closed in all four ways."""
    questions = text_prompts(16, seed=9)
    ways = list(itertools.product(("a", None), ("b", None))) * 4
    for name, tasks in zip(("own", "shared"), zip(*ways, strict=True), strict=True):
        served.world.add(name, gated_bundle(served.world, questions, tasks), tmp_path)
        served.bundles[name] = served.world.bundles[name]
        served.memories[name] = served.offline.load_bundle(served.world.paths[name])
    yield questions
    for name in ("own", "shared"):
        served.offline.unload_bundle(served.memories.pop(name))


def tasks_of(answers: Sequence[MemoryAnswer]) -> list[tuple[str | None, ...]]:
    return [tuple(decision.task for decision in answer.decisions) for answer in answers]


def test_each_gate_decides_by_itself(served: MemoryEngine, gated: list[Prompt]) -> None:
    """In one batch with others, preempted; and again, when blocks are known."""
    before, questions = served.counted("num_preemptions"), [*gated, *text_prompts(4, seed=10)]
    pairs: list[Pair | str | None] = [*[("own", "shared")] * 16, "acme", None, ("bolt", "manual"), ("acme", "manual")]
    for _ in range(2):
        answers = check(served, questions, pairs, max_tokens=40)
        assert tasks_of(answers[:16]) == list(itertools.product(("a", None), ("b", None))) * 4
        assert tasks_of(check(served, gated[:4], ["own", "shared"] * 2)) == [("a",), (None,), (None,), (None,)]
    assert served.counted("num_preemptions") > before


def test_both_join_the_pass_that_decides(served: MemoryEngine, tmp_path: Path) -> None:
    """If both can; the second gate looks at a later layer than the first one."""
    questions = text_prompts(8, seed=31)
    ways = list(itertools.product(("a", None, "b", None), ("a", None)))
    layers = served.world.backbone.num_layers
    for name, tasks, layer in zip(("own", "shared"), zip(*ways, strict=True), (layers - 2, layers - 1), strict=True):
        changes = silent_below(served.world, layers - 1, 0)
        bundle = gated_bundle(served.world, questions, tasks, last_layer=layer, **changes)
        served.world.add(name, bundle, tmp_path)
        served.bundles[name], served.memories[name] = bundle, served.offline.load_bundle(served.world.paths[name])
    answers = check(served, questions, [("own", "shared")] * 8)
    assert tasks_of(answers) == ways
    joined = [any(decision.same_pass for decision in answer.decisions) for answer in answers]
    assert joined == ["b" not in way and any(way) for way in ways]


def fact(city: str, answer: str) -> FactRecord:
    return FactRecord(
        id=f"codes/{city}", task="codes", source_digest="0", question=f"What is the code of {city}?", answer=answer
    )


def test_a_tenants_facts_come_first_and_nobody_elses_are_found(served: MemoryEngine, tmp_path: Path) -> None:
    facts = Facts(served, tmp_path)
    facts.teach("of acme", [fact("Lima", "amil 4"), fact("Oslo", "olso 9")])
    facts.teach("of bolt", [fact("Quito", "otiuq 5")])
    facts.teach("of all", [fact("Lima", "lll 1"), fact("Cairo", "oriac 5")], served.bundles["manual"])

    def found(city: str, *names: str) -> list[str | None]:
        (answer,) = check(served, [Prompt(None, f"Please tell me what the code of {city} is.")], [names])  # type: ignore[list-item]
        return [
            None if decision.fact is None else served.bundles[name].metadata.facts[decision.fact.number].answer
            for name, decision in zip(names, answer.decisions, strict=True)
        ]

    for _ in range(2):
        assert found("Lima", "of acme", "of all") == ["amil 4", None]
        assert found("Cairo", "of acme", "of all") == [None, "oriac 5"]
        assert found("Oslo", "of acme", "of all") == ["olso 9", None]
        assert found("Lima", "of bolt", "of all") == [None, "lll 1"]
        assert found("Oslo", "of bolt", "of all") == [None, None]
        assert found("Quito", "of acme", "of all") == [None, None]
        assert found("Lima", "of bolt", "of acme") == [None, "amil 4"]  # facts alone, without a pass


def test_adapters_go_together_with_facts_alone(world: World) -> None:
    plain = world.bundles["acme"].metadata
    routed = plain.model_copy(
        update={"task_adapters": (AdapterRecord(task="u", path="u", digest="0" * 64, rank=1),), "entries": ()}
    )
    facts = plain.model_copy(update={"entries": ()})
    memories = {
        name: ServedBundle(metadata, "/nowhere", 0)
        for name, metadata in {"plain": plain, "routed": routed, "facts": facts}.items()
    }
    for names in (("routed", "facts"), ("facts", "routed"), ("plain", "facts"), ("routed",)):
        require_together([memories[name] for name in names])
    for names, reason in (
        (("routed", "plain"), r"sends tasks to LoRA adapters cannot act .* in vllm_xargs, by inducekv_memories"),
        (("plain", "routed"), "sends tasks to LoRA adapters cannot act"),
    ):
        with pytest.raises(VLLMValidationError, match=reason):
            require_together([memories[name] for name in names])


def test_what_does_not_go_together_is_refused(served: MemoryEngine) -> None:
    messages, memories = [text_prompts(1, seed=0)[0].messages], served.memories
    for pair, error, reason in (
        (("sqrt", "manual"), VLLMValidationError, "a memory bundle that is merged into self-attention cannot act"),
        (("acme", "sqrt"), VLLMValidationError, "a memory bundle that is merged into self-attention cannot act"),
        (("acme", "acme"), ConfigError, "expected two different memories"),
        (("acme", "bolt", "manual"), ConfigError, r"a prompt may have 2 \(max_memories\), found 3"),
    ):
        with pytest.raises(error, match=reason):
            served.offline.chat(messages, greedy(), memory=[tuple(memories[name] for name in pair)])

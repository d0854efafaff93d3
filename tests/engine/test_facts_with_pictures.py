"""Facts about pictures in real engines: found by what the picture is like, which agrees with transformers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from PIL import Image, ImageEnhance

from inducekv_vllm.backbone.turns import turn_marks
from inducekv_vllm.bundle import FactRecord
from inducekv_vllm.errors import TaskDataError
from inducekv_vllm.facts import packed, unpacked
from inducekv_vllm.frontend.offline import MemoryAnswer
from inducekv_vllm.teaching import fact_of
from selector.backbone.token_values import picture_states
from tests.drawings import drawings
from tests.engine.facts import OPTIONS, Facts, asked_about
from tests.engine.parity import FEWER_PROCESSES, MemoryEngine, Prompt, World, engine, greedy, make_world, silent_below
from tests.engine.parity import gated_bundle as gated
from tests.tiny_families import FAMILIES

KNOWN, UNKNOWN = 10, 6
QUESTION = "Which part is this?"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("world")
    return make_world(FAMILIES["qwen2.5-vl"](folder / "model"), folder)


@pytest.fixture(scope="module")
def facts(world: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Facts]:
    with engine(world.model, environment=FEWER_PROCESSES, **OPTIONS) as llm:
        yield Facts(MemoryEngine(world, llm), tmp_path_factory.mktemp("taught"))


def stored(facts: Facts, pictures: Sequence[Image.Image], task: str = "parts") -> list[FactRecord]:
    states = [facts.served.offline.picture_state(each.messages) for each in asked_about(pictures, QUESTION)]
    return [fact_of(QUESTION, f"number {at}", task, f"{task}/{at}", None, each) for at, each in enumerate(states)]


def found(facts: Facts, name: str, questions: Sequence[Prompt]) -> list[list[str]]:
    answers = facts.check(name, questions)
    return [facts.found(name, answer) for answer in answers]


def text_of(answer: MemoryAnswer) -> str:
    return answer.output.outputs[0].text


def test_the_state_is_that_of_transformers(facts: Facts) -> None:
    backbone = facts.served.world.backbone
    questions = asked_about(drawings(3, 0))
    encoded = [backbone.encode(each.chat_messages, each.images) for each in questions]
    expected = picture_states(backbone, encoded, turn_marks(backbone.processor))
    for _ in range(2):  # the second time, blocks of the prompt are in the cache
        for prompt, state in zip(questions, expected, strict=True):
            assert state is not None
            served = unpacked(facts.served.offline.picture_state(prompt.messages))
            torch.testing.assert_close(torch.tensor(served), torch.tensor(unpacked(packed(state))), rtol=0, atol=1e-3)
    with pytest.raises(TaskDataError, match="expected a picture, found none"):
        facts.served.offline.picture_state(Prompt(None, "What is this?").messages)


def test_pictures_tell_facts_apart(facts: Facts) -> None:
    """In another wording, and a little brighter; not an unknown picture, nor the question alone."""
    known, unknown = drawings(KNOWN, 1), drawings(UNKNOWN, 2)
    facts.teach("pictures", stored(facts, known))
    names = [[f"parts/{at}"] for at in range(KNOWN)]
    for _ in range(2):  # again, when decisions are known
        assert found(facts, "pictures", asked_about(known)) == names
        assert found(facts, "pictures", asked_about(unknown)) == [[]] * UNKNOWN
    brighter = [ImageEnhance.Brightness(each).enhance(1.03) for each in known]
    assert found(facts, "pictures", asked_about(brighter)) == names
    assert found(facts, "pictures", [Prompt(None, QUESTION)]) == [[]]
    (answer,) = facts.check("pictures", asked_about(known[:1]), greedy(ignore_eos=False))
    assert text_of(answer) == "number 0"


def test_a_question_later_in_the_conversation(facts: Facts) -> None:
    known = drawings(KNOWN, 1)
    facts.teach("later", stored(facts, known))
    turns = [*asked_about(known[3:4], "Look at this.")[0].messages, {"role": "assistant", "content": "Yes."}]
    memory = facts.served.memories["later"]
    (answer,) = facts.served.offline.chat(
        [[*turns, {"role": "user", "content": QUESTION}]], greedy(ignore_eos=False), memory=memory
    )
    assert (text_of(answer), facts.found("later", answer)) == ("number 3", ["parts/3"])


def test_few_pictures(facts: Facts) -> None:
    """Then only the same picture is found. Facts in text of the same task go on being found by their words."""
    known = drawings(3, 4)
    words = fact_of("What is the code of Lima?", "LIM", "parts", "parts/Lima")
    facts.teach("few", [*stored(facts, known), words])
    assert found(facts, "few", asked_about(known, QUESTION)) == [[f"parts/{at}"] for at in range(3)]
    assert found(facts, "few", asked_about(drawings(UNKNOWN, 5), QUESTION)) == [[]] * UNKNOWN
    assert found(facts, "few", [Prompt(None, "What is the code of Lima?")]) == [["parts/Lima"]]


def test_behind_a_gate(facts: Facts) -> None:
    """After the prompt's pass, and in it."""
    world, known = facts.served.world, drawings(KNOWN, 1)
    questions, tasks = asked_about(known[:4], QUESTION), ["a", "a", "b", None]
    for last_layer, changes in ((None, silent_below(world, 0, 0)), (1, silent_below(world, 1, 0))):
        bundle = gated(world, questions, tasks, last_layer, (-0.4, -0.4), **changes)
        facts.teach("gated", stored(facts, known, "a"), bundle)
        assert found(facts, "gated", questions) == [["a/0"], ["a/1"], [], []]


@pytest.mark.slow
def test_two_ranks(world: World, tmp_path: Path) -> None:
    environment = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    with engine(world.model, environment=environment, tensor_parallel_size=2, **OPTIONS) as llm:
        facts = Facts(MemoryEngine(world, llm), tmp_path)
        test_the_state_is_that_of_transformers(facts)
        test_pictures_tell_facts_apart(facts)
        test_behind_a_gate(facts)

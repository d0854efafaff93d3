"""Facts about pictures in real engines: found by the pixels, as of the same picture in task data, and by the words."""

import io
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from PIL import Image

from inducekv_vllm.bundle import FactRecord, PictureRecord
from inducekv_vllm.errors import TaskDataError
from inducekv_vllm.frontend.offline import MemoryAnswer
from inducekv_vllm.teaching import fact_of
from tests.drawings import drawings
from tests.engine.facts import OPTIONS, Facts, asked_about
from tests.engine.parity import FEWER_PROCESSES, MemoryEngine, Prompt, World, engine, greedy, make_world, silent_below
from tests.engine.parity import gated_bundle as gated
from tests.tiny_families import FAMILIES

KNOWN, UNKNOWN = 10, 6
QUESTION = "Which part is this?"
ASKED = "Please tell me which part this is."


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("world")
    return make_world(FAMILIES["qwen2.5-vl"](folder / "model"), folder)


@pytest.fixture(scope="module")
def facts(world: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Facts]:
    with engine(world.model, environment=FEWER_PROCESSES, **OPTIONS) as llm:
        yield Facts(MemoryEngine(world, llm), tmp_path_factory.mktemp("taught"))


def stored(pictures: Sequence[Image.Image], task: str = "parts") -> list[FactRecord]:
    shown = [PictureRecord.of([each]) for each in pictures]
    return [fact_of(QUESTION, f"number {at}", task, f"{task}/{at}", None, each) for at, each in enumerate(shown)]


def found(facts: Facts, name: str, questions: Sequence[Prompt]) -> list[list[str]]:
    answers = facts.check(name, questions)
    return [facts.found(name, answer) for answer in answers]


def text_of(answer: MemoryAnswer) -> str:
    return answer.output.outputs[0].text


def as_jpeg(picture: Image.Image) -> Image.Image:
    picture.save(written := io.BytesIO(), "JPEG", quality=95)
    return Image.open(written).convert("RGB")


def changed(picture: Image.Image) -> Image.Image:
    """In one pixel, by one level of one colour."""
    other = picture.copy()
    pixel: Any = other.getpixel((7, 5))
    other.putpixel((7, 5), (*pixel[:2], pixel[2] ^ 1))
    return other


def test_the_engine_knows_a_picture_as_task_data_does(facts: Facts) -> None:
    for picture, prompt in zip(drawings(3, 0), asked_about(drawings(3, 0)), strict=True):
        assert facts.served.offline.picture(prompt.messages) == PictureRecord.of([picture])
    with pytest.raises(TaskDataError, match="expected a picture, found none"):
        facts.served.offline.picture(Prompt(None, "What is this?").messages)


def test_pictures_tell_facts_apart(facts: Facts) -> None:
    """Not another picture, however near, nor another question, nor the question alone."""
    known, unknown = drawings(KNOWN, 1), drawings(UNKNOWN, 2)
    facts.teach("pictures", stored(known))
    names = [[f"parts/{at}"] for at in range(KNOWN)]
    for _ in range(2):  # again, when vLLM has the pictures
        assert found(facts, "pictures", asked_about(known, ASKED)) == names
        assert found(facts, "pictures", asked_about(unknown, ASKED)) == [[]] * UNKNOWN
    for others in (map(changed, known), map(as_jpeg, known)):
        assert found(facts, "pictures", asked_about([*others], ASKED)) == [[]] * KNOWN
    assert found(facts, "pictures", asked_about(known[:2], "Who has painted the wall behind it?")) == [[], []]
    assert found(facts, "pictures", [Prompt(None, ASKED)]) == [[]]
    (answer,) = facts.check("pictures", asked_about(known[:1], ASKED), greedy(ignore_eos=False))
    assert text_of(answer) == "number 0"
    (answer,) = facts.check("pictures", asked_about(unknown[:1], ASKED))
    assert answer.decision is not None
    assert answer.decision.missed is not None
    assert answer.decision.missed.why == "it shows other pictures"


def test_several_pictures_of_one_question(facts: Facts) -> None:
    """All of them, in their order."""
    first, second = drawings(2, 6)
    fact = fact_of(QUESTION, "both", "parts", "parts/both", None, PictureRecord.of([first, second]))
    facts.teach("several", [fact])
    for pictures, expected in (
        ((first, second), ["parts/both"]),
        ((second, first), []),
        ((first,), []),
        ((first, second, second), []),
    ):
        prompt = [part for each in pictures for part in Prompt(each, "").messages[0]["content"][:1]]
        messages: Any = [{"role": "user", "content": [*prompt, {"type": "text", "text": ASKED}]}]
        (answer,) = facts.served.offline.chat([messages], greedy(), memory=facts.served.memories["several"])
        assert facts.found("several", answer) == expected


def test_a_question_later_in_the_conversation(facts: Facts) -> None:
    known = drawings(KNOWN, 1)
    facts.teach("later", stored(known))
    turns = [*asked_about(known[3:4], "Look at this.")[0].messages, {"role": "assistant", "content": "Yes."}]
    memory = facts.served.memories["later"]
    (answer,) = facts.served.offline.chat(
        [[*turns, {"role": "user", "content": ASKED}]], greedy(ignore_eos=False), memory=memory
    )
    assert (text_of(answer), facts.found("later", answer)) == ("number 3", ["parts/3"])


def test_beside_facts_in_text(facts: Facts) -> None:
    known = drawings(3, 4)
    words = fact_of("What is the code of Lima?", "LIM", "parts", "parts/Lima")
    facts.teach("few", [*stored(known), words])
    assert found(facts, "few", asked_about(known, ASKED)) == [[f"parts/{at}"] for at in range(3)]
    assert found(facts, "few", [Prompt(None, "What is the code of Lima?")]) == [["parts/Lima"]]
    assert found(facts, "few", asked_about(known[:1], "What is the code of Lima?")) == [[]]


def test_behind_a_gate(facts: Facts) -> None:
    """After the prompt's pass, and in it."""
    world, known = facts.served.world, drawings(KNOWN, 1)
    questions, tasks = asked_about(known[:4], ASKED), ["a", "a", "b", None]
    for last_layer, changes in ((None, silent_below(world, 0, 0)), (1, silent_below(world, 1, 0))):
        bundle = gated(world, questions, tasks, last_layer, (-0.4, -0.4), **changes)
        facts.teach("gated", stored(known, "a"), bundle)
        assert found(facts, "gated", questions) == [["a/0"], ["a/1"], [], []]

"""The questions that a gate is fitted to, and those that no gate can be fitted to."""

from collections import Counter
from pathlib import Path

import pytest

from inducekv_vllm.backbone.turns import message
from inducekv_vllm.bundle.source import source_digest_of
from inducekv_vllm.errors import ConfigError, TaskDataError
from selector.data.examples import Example, read_task
from selector.gate.background import everyday_requests, read_background
from selector.gate.data import GateData, check_questions
from selector.gate.fitting_set import FOLDS, GIVEN, REWORDED, GateQuestion, fitting_set
from selector.gate.variations import text_of
from selector.gate.wording import in_one_form, wordings
from tests.task_data import questions_about, write_task

COLOURS, SHAPES = ("red", "blue", "green", "grey", "white"), ("circle", "square", "ring", "star")


def asked(task: str, texts: list[str]) -> list[Example]:
    found = []
    for number, text in enumerate(texts):
        messages = (message("user", text),)
        found.append(Example(f"{task}/{number}", task, messages, (), "yes", source_digest_of(messages, [])))
    return found


def guild() -> list[Example]:
    """They share a frame, a key and a format, and are about few things."""
    return asked("guild", [f"Which guild owns the {c} {s}? Answer with one word." for c in COLOURS for s in SHAPES])


def base() -> list[Example]:
    return asked("base", [f"Is number {number} even? Answer with one word." for number in range(10)])


def key(question: GateQuestion) -> tuple[str, str | None, str, str]:
    return str(question.messages), question.task, question.kind, question.part


def test_every_process_draws_the_same() -> None:
    """Words are counted in sets, whose order is another in every process."""
    texts = {"guild": [text_of(example.messages) for example in guild()]}
    telling = list(wordings(texts, ["What is it?"] * 200)["guild"].telling)
    assert len(telling) > 2
    assert telling == sorted(telling)


def test_every_question_is_asked_in_several_ways_and_a_fifth_is_held_out() -> None:
    questions = fitting_set(GateData({"guild": guild()}, base(), asked("x", ["Hi!"])), pictures=True, seed=0)
    own = Counter(q.kind for q in questions if q.task == "guild")
    assert own["plain"] == own["wrapped"] == 10  # see `tests.gates`
    assert own["other"] == 20
    assert own["reworded"] == 10 * REWORDED
    none = Counter(q.kind for q in questions if q.task is None)
    assert none["plain"] == 10
    assert none["background"] == 1
    assert none["everyday"] == 40
    assert none["noise"] == 10
    assert none["near-miss"] > 0
    for kind in ("plain", "everyday", "noise"):
        parts = Counter(q.part for q in questions if q.kind == kind and q.task is None)
        assert parts["held_out"] * 4 == parts["fit"]


def test_a_task_of_few_examples_is_asked_as_often_as_others() -> None:
    few = fitting_set(GateData({"guild": guild()[:4]}, base()), pictures=True, seed=0)
    own = Counter(q.kind for q in few if q.task == "guild")
    assert (own["plain"], own["wrapped"], own["other"]) == (10, 10, 20)
    assert {text_of(q.messages) for q in few if (q.task, q.kind) == ("guild", "plain")} == {
        text_of(example.messages) for example in guild()[:4]
    }


@pytest.mark.parametrize("examples", [4, 20])
def test_classifiers_are_asked_everything_as_it_stands_and_with_phrases_around_it(examples: int) -> None:
    given, requests = asked("x", ["Which guild is the oldest?", "What is a guild?"]), asked("y", ["Hi!"])
    own = {"guild": guild()[:examples]}
    data = GateData(own, base(), requests, given)
    questions = fitting_set(data, pictures=False, for_classifiers=True, seed=0)
    plain = [q for q in questions if q.task and q.kind == "plain"]
    around = [q for q in questions if q.task and q.kind == "wrapped"]
    assert [text_of(q.messages) for q in plain] == [text_of(e.messages) for e in own["guild"]]
    assert [q.fold for q in plain] == [q.fold for q in around] == [number % FOLDS for number in range(examples)]
    for bare, wrapped in zip(plain, around, strict=True):
        assert text_of(bare.messages) in text_of(wrapped.messages)
        assert text_of(bare.messages) != text_of(wrapped.messages)
    counts = Counter(q.kind for q in questions if q.task is None)
    assert counts.pop("phrase") > 0
    assert counts == {
        "plain": 10,  # see `tests.gates`
        "wrapped": 10,
        "background": 1,
        "everyday": 40 + 7,  # one of six with a phrase
        "noise": 10,
        GIVEN: 2,
    }
    known = {request.text for request in everyday_requests()}
    assert sum(text_of(q.messages) in known for q in questions if q.kind == "everyday") == 40
    folds = [(q.part, q.fold) for q in questions if q.kind == "phrase"]  # those of a fit are not those held out
    assert all((fold == FOLDS - 1) == (part == "held_out") for part, fold in folds)


def test_questions_in_one_form_are_told_from_peoples_own_words() -> None:
    form = [text_of(example.messages) for example in guild()]
    own = [
        "my card was stolen",
        "I lost the card",
        "how do I block my visa?",
        "someone took my wallet, block it please",
    ]
    assert in_one_form(form)
    assert in_one_form(form[:2])
    assert not in_one_form(own)
    assert not in_one_form([*form[:2], *own])
    assert not in_one_form(form[:1])
    assert not in_one_form(["?!", "..."])


@pytest.mark.parametrize("seed", range(5))
def test_no_question_of_a_task_is_among_those_of_none(seed: int) -> None:
    """Nor one that the user asks and the package has too."""
    everyday = everyday_requests()[0].text
    texts = [text_of(e.messages).replace("guild", "crew") for e in guild()[:8]]
    own = {"guild": guild(), "crew": asked("crew", [*texts, everyday])}
    theirs = {text_of(e.messages).casefold() for examples in own.values() for e in examples}
    questions = fitting_set(GateData(own, base()), pictures=False, seed=seed)
    found = {text_of(q.messages).casefold() for q in questions if not q.task}
    assert not theirs & found


def test_a_model_of_text_is_asked_about_no_pictures(tmp_path: Path) -> None:
    own = {"colours": read_task(write_task(tmp_path, questions_about("colours", "What colour is the circle?")))}
    others = [q for q in fitting_set(GateData(own), pictures=True, seed=0) if q.task is None]
    assert {bool(q.images) for q in others} == {True, False}  # so that a picture alone tells nothing
    text = {"guild": guild()}
    assert not any(q.images for q in fitting_set(GateData(text, base()), pictures=False, seed=0))


def test_what_no_gate_can_tell_is_refused() -> None:
    everyday = [request.text for request in everyday_requests() if not request.picture]
    check_questions(GateData({"guild": guild(), "base": base()}, background=asked("x", ["Hi!"])))
    for own, background, problem in (
        ({"guild": guild(), "empty": []}, [], "needs questions of the task 'empty', and there are none"),
        ({"chat": asked("chat", everyday[:6])}, [], "6 of the 6 questions of the task 'chat' are everyday requests"),
        ({"guild": guild(), "crew": guild()[:12]}, [], "'guild' and 'crew' have 12 questions in common"),
        ({"guild": guild()}, guild()[:1], "background request 'guild/0' is also a question of the task 'guild'"),
    ):
        with pytest.raises(ConfigError, match=problem):
            check_questions(GateData(own, background=background))
    same = asked("same", ["What is it?"] * 8)
    with pytest.raises(ConfigError, match="the task 'same' has one question 8 times"):
        check_questions(GateData({"guild": guild(), "same": same}))
    shouted = asked("x", [text_of(guild()[0].messages).upper()])
    check_questions(GateData({"guild": guild()}, background=shouted, near_misses=base()))
    with pytest.raises(
        ConfigError, match=r"near-miss 'WHICH GUILD OWNS .* \(--not\) is a question of the task 'guild'"
    ):
        check_questions(GateData({"guild": guild()}, near_misses=shouted))


def test_background_requests(tmp_path: Path) -> None:
    path = tmp_path / "requests.txt"
    path.write_text("\ufeffOpen the door.\n\n  Größe?  \nOpen the door.\n", encoding="utf-8")
    found = read_background(path)
    assert [text_of(e.messages) for e in found] == ["Open the door.", "Größe?"]
    assert len({e.source_digest for e in found}) == 2
    data = write_task(tmp_path / "task", questions_about("mine", "Which one?"))
    assert [e.id for e in read_background(data)] == [f"mine{number}" for number in range(12)]
    table = tmp_path / "asked.csv"
    table.write_text("question,answer\nWhere?,there\n")
    assert [text_of(e.messages) for e in read_background(table)] == ["Where?"]


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("a.txt", b"\n \n", "the file holds no requests"),
        ("a.txt", b"caf\xe9", r"a.txt, line 1: not UTF-8 text \(b'\\xe9'\)"),
        ("a.txt", None, "cannot read the background requests"),
        ("a.csv", b"a,b\n1,2\n", "no column is the prompt"),
        ("a.jsonl", b"{\n", "malformed JSON"),
    ],
)
def test_background_that_cannot_be_read(tmp_path: Path, name: str, content: bytes | None, problem: str) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(TaskDataError, match=problem):
        read_background(path)


def test_pictures_without_a_word_are_asked_about_too(tmp_path: Path) -> None:
    """Captions, labels: what is said around a picture stands behind it."""
    lines = questions_about("captions", "")
    for line in lines:
        line["messages"][0]["content"].pop()
    pictures = read_task(write_task(tmp_path / "captions", lines))
    questions = fitting_set(GateData({"captions": pictures}, base()), pictures=True, seed=0)
    own = [q for q in questions if q.task == "captions"]
    assert all(sum(part["type"] == "image" for turn in q.messages for part in turn["content"]) == 1 for q in own)
    assert {text_of(q.messages) for q in own if q.kind == "plain"} == {""}
    assert all(text_of(q.messages) for q in own if q.kind == "wrapped")

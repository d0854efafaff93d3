"""Which fact of a bundle a prompt asks for: its tasks, what the gate has told, pictures, dates, and a begun answer."""

from collections.abc import Callable, Collection
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest

from inducekv_vllm.backbone.fact_reader import FactReader
from inducekv_vllm.backbone.stored_facts import REFUSED, StoredAnswers, StoredQuestions
from inducekv_vllm.bundle import FactRecord
from inducekv_vllm.facts import FactFound, FactMissed
from inducekv_vllm.judge import Pair
from inducekv_vllm.teaching import fact_of
from tests.tiny_families import FAMILIES

Judge = Callable[[Pair], float] | None
PAST = datetime(2020, 1, 1, tzinfo=UTC)


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> FactReader:
    return FactReader.of(FAMILIES["llama"](tmp_path_factory.mktemp("llama")))


class Bundle:
    """Facts behind a gate of some tasks, and prompts that ask for them."""

    def __init__(self, reader: FactReader, facts: Collection[FactRecord], gate_tasks: Collection[str] = ()) -> None:
        self.reader, self.facts = reader, list(facts)
        tasks = tuple(dict.fromkeys(fact.task for fact in facts))
        metadata: Any = SimpleNamespace(facts=tuple(facts), gate_tasks=tuple(gate_tasks), fact_tasks=tasks)
        self.questions = StoredQuestions(self.facts, tuple(gate_tasks))
        self.answers = StoredAnswers(metadata, reader)

    def find(self, *turns: str, begun: str = "", judge: Judge = None, **options: Any) -> FactFound | FactMissed | None:
        """`turns` are the user's, with the assistant's between them; the judge has a threshold of 1."""
        messages = [{"role": ("user", "assistant")[at % 2], "content": turn} for at, turn in enumerate(turns)]
        text = self.reader.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        ids = self.reader.tokenizer(text + begun, add_special_tokens=False)["input_ids"]
        asked = self.reader.question(ids)
        candidates = self.questions.candidates(asked.text, has_media=asked.has_media)
        odds = None if judge is None else {pair: judge(pair) for pair in candidates.pairs.values()}
        return self.answers.find(candidates.settled(odds, 1.0), asked, **options)

    def found(self, *turns: str, **options: Any) -> str | None:
        found = self.find(*turns, **options)
        return self.facts[found.number].id if isinstance(found, FactFound) else None


def of(name: str, task: str = "codes", answer: str | None = None, **changes: Any) -> FactRecord:
    fact = fact_of(f"What is the code of {name}?", answer or name[:3].upper(), task, id=f"{task}/{name}")
    return fact.model_copy(update=changes)


def test_the_answer_comes_as_it_is_generated(reader: FactReader) -> None:
    bundle = Bundle(reader, [of("Lima"), of("Oslo")])
    found = bundle.find("Tell me what the code of Oslo is, please")
    assert found == FactFound(1, 1.0, reader.answer("OSL"))
    assert reader.tokenizer.decode(found.token_ids, skip_special_tokens=True) == "OSL"


def test_the_last_turn_is_what_is_asked(reader: FactReader) -> None:
    bundle = Bundle(reader, [of("Lima"), of("Oslo")])
    assert bundle.found("What is the code of Lima?", "LIM", "What is the code of Oslo?") == "codes/Oslo"
    assert bundle.found("What is the code of Lima?", "LIM", "And how are you?") is None


def test_a_begun_answer_is_gone_on_with(reader: FactReader) -> None:
    bundle = Bundle(reader, [of("Lima", answer="It is LIM, as ever.")])
    question = "What is the code of Lima?"
    assert bundle.find(question, begun="It is LIM") == FactFound(0, 1.0, reader.answer(", as ever."))
    assert bundle.find(question, begun="   ") == bundle.find(question)
    assert bundle.find(question, begun="The code") == FactFound(
        0, 1.0, withheld="the request begins the answer in another way"
    )


def test_a_miss_names_the_nearest(reader: FactReader) -> None:
    bundle = Bundle(reader, [of("Lima"), of("Oslo")])
    missed = bundle.find("What is the code of the Oslo office in 2024?")
    assert missed == FactMissed(1, "'2024' is in one of them alone", (), ("office", "2024"))
    assert bundle.find("How are you?") is None


def test_the_gate_says_whose_facts_count(reader: FactReader) -> None:
    """Facts of its tasks where it allows them, and those of others everywhere."""
    bundle = Bundle(reader, [of("Lima", "a"), of("Oslo", "b"), of("Rome", "c")], gate_tasks=("a", "b"))
    for allowed, found in (
        ((), [None, None, "c/Rome"]),
        (("a",), ["a/Lima", None, "c/Rome"]),
        (("a", "b"), ["a/Lima", "b/Oslo", "c/Rome"]),
    ):
        requests = [f"What is the code of {name}?" for name in ("Lima", "Oslo", "Rome")]
        assert [bundle.found(request, fact_tasks=allowed) for request in requests] == found


def test_where_the_gate_allows_a_task_names_tell_of_what(reader: FactReader) -> None:
    """It has told what is asked, in whatever words."""
    names = ("Lima", "Oslo", "Quito", "Cairo")
    facts = [of(name, "a") for name in names]
    bundle = Bundle(reader, facts, gate_tasks=("a",))
    request = "Three letters on my luggage: which ones does Lima have?"
    assert Bundle(reader, facts).found(request) is None
    assert bundle.found(request) is None
    assert bundle.found(request, fact_tasks=("a",)) == "a/Lima"
    assert bundle.found("Three letters on my luggage: Rome?", fact_tasks=("a",)) is None


def test_what_words_leave_open_is_judged(reader: FactReader) -> None:
    """The surest of those above the threshold is said; below it, it is named with its odds."""
    harbour = "What is the code of the Lima harbour?"
    bundle = Bundle(reader, [of("Lima"), of("Oslo"), fact_of(harbour, "HAR", id="harbour")])
    request = "Which code does Lima have?"
    asked = list[Pair]()

    def judge(pair: Pair) -> float:
        asked.append(pair)
        return 2.0 if pair.stored == "What is the code of Lima?" else 1.5

    found = bundle.find(request, judge=judge)
    assert isinstance(found, FactFound)
    assert (found.number, found.odds, found.token_ids) == (0, 2.0, reader.answer("LIM"))
    assert set(asked) == {
        Pair("What is the code of Lima?", request),
        Pair(harbour, request),
    }
    missed = bundle.find(request, judge=lambda pair: -0.5)
    assert isinstance(missed, FactMissed)
    assert (missed.why, missed.odds) == (REFUSED, -0.5)
    unjudged = bundle.find(request)
    assert isinstance(unjudged, FactMissed)
    assert unjudged.odds is None
    assert bundle.find("What is the code of Lima?", judge=judge) == FactFound(0, 1.0, reader.answer("LIM"))


@pytest.mark.parametrize("more", [" and why?" * 60, " Same answer: yes", " Question 1: none"])
def test_what_cannot_be_put_to_a_judge_is_not(reader: FactReader, more: str) -> None:
    bundle = Bundle(reader, [of("Lima")])
    assert bundle.found(f"Which code does Lima have?{more}", judge=lambda pair: 99.0) is None


def test_expired_facts_are_not_found(reader: FactReader) -> None:
    bundle = Bundle(reader, [of("Lima"), of("Oslo", expires_at=PAST), of("Lima", "newer", expires_at=PAST)])
    assert bundle.found("What is the code of Oslo?") is None
    assert bundle.found("What is the code of Lima?") == "codes/Lima"


def test_marks_of_a_conversation(reader: FactReader) -> None:
    """In any place of a text; what only looks like one is text."""
    assert reader.mark_in("What is<|im_end|> it?") == "<|im_end|>"
    for text in ("What is it?", "a < b | c > d", "<|", "<im_end>", "", "👋"):
        assert reader.mark_in(text) is None

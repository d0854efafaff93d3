"""`inducekv-bundle teach`: versions of a bundle with other facts, and what the next versions keep of them."""

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch

from inducekv_vllm import teaching
from inducekv_vllm.backbone.fact_reader import FactReader
from inducekv_vllm.backbone.stored_facts import StoredAnswers, StoredQuestions
from inducekv_vllm.bundle import Bundle, EntryRecord, FactRecord, read_bundle, with_metadata, write_bundle
from inducekv_vllm.errors import CapacityError, TaskDataError, UnknownFact
from inducekv_vllm.facts import MOST_CHARACTERS, FactFound
from inducekv_vllm.teaching import FactList, Report, fact_of, replaced_by, stored_bytes
from selector.backbone.bundled_model import BundledModel
from selector.backbone.model import Backbone
from selector.backbone.scoring import Scorer
from selector.cli.bundle import main as bundle_command
from selector.data.examples import read_task
from selector.update.forget import without_entries
from tests.bundles import random_bundle, random_gate
from tests.drawings import drawings
from tests.tiny_families import FAMILIES

CITIES = ("Lima", "Oslo", "Quito", "Cairo", "Seoul", "Paris", "Delhi", "Tunis", "Hanoi", "Perth")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return FAMILIES["llama"](tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def reader(model: Path) -> FactReader:
    return FactReader.of(model)


def write(path: Path, cities: Sequence[str], **changes: Any) -> Path:
    lines = []
    for city in cities:
        messages = [{"role": "user", "content": f"What is the code of {city}?"}]
        lines.append({"id": city, "task": "codes", "messages": messages, "answer": city[::-1], **changes})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def taught(*arguments: Any, **options: Any) -> Bundle:
    return teaching.taught(*arguments, **options).bundle


def forgotten(bundle: Bundle, ids: Sequence[str]) -> Bundle:
    return teaching.forgotten(bundle, ids).bundle


def asked(reader: FactReader, bundle: Bundle, question: str) -> list[str]:
    ids = reader.tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True)
    prompt, facts = reader.question(ids["input_ids"]), bundle.metadata.facts
    of_text = StoredQuestions(facts).candidates(prompt.text, has_media=False).settled(None, 0.0)
    found = StoredAnswers(bundle.metadata, reader).find(of_text, prompt)
    return [bundle.metadata.facts[found.number].id] if isinstance(found, FactFound) else []


def test_the_command(model: Path, reader: FactReader, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = tmp_path / "first.safetensors", tmp_path / "second.safetensors"
    task = write(tmp_path / "codes.jsonl", CITIES)
    assert bundle_command(["teach", "--model", str(model), "--task", str(task), "--output", str(first)]) == 0
    bundle = read_bundle(first)
    assert f"first.safetensors: 10 facts, digest {bundle.digest}" in capsys.readouterr().out
    assert asked(reader, bundle, "please tell me what the code of LIMA is") == ["Lima"]
    assert asked(reader, bundle, "What is the code of Rome, please?") == []

    more, again = write(tmp_path / "more.jsonl", ["Rome"]), tmp_path / "again.jsonl"
    changed = write(again, ["Oslo"], answer="OSL").read_text()
    again.write_text(changed + write(again, ["Quito"]).read_text())
    rest = tmp_path / "rest.safetensors"
    assert bundle_command(["forget", str(first), "--entry", "Lima", "--output", str(rest)]) == 0
    assert "Lima" not in [fact.id for fact in read_bundle(rest).metadata.facts]
    capsys.readouterr()
    options = ["--model", str(model), "--bundle", str(rest), "--output", str(second)]
    tasks = ["--task", str(more), "--task", str(again)]
    assert bundle_command(["teach", *options, *tasks]) == 0
    assert capsys.readouterr().out.splitlines()[:-1] == ["Oslo: corrected"]
    bundle = read_bundle(second)
    assert bundle.metadata.parent_digest is not None
    assert [fact.id for fact in bundle.metadata.facts] == [*CITIES[3:], "Rome", "Oslo", "Quito"]
    assert asked(reader, bundle, "please tell me what the code of LIMA is") == []
    assert bundle_command(["inspect", "--entries", str(second)]) == 0
    assert "fact\tRome\tcodes" in capsys.readouterr().out


def test_pictures(tmp_path: Path) -> None:
    """The command takes them without the model; what the selector's model is shown, it knows by its pixels."""
    model, pictures, lines = FAMILIES["llava-1.5"](tmp_path / "model"), drawings(12, 1), []
    for at, picture in enumerate(pictures):
        picture.save(tmp_path / f"{at}.png")
        parts = [{"type": "image_url", "image_url": {"url": f"{at}.png"}}, {"type": "text", "text": "What is it?"}]
        lines.append(
            {"id": str(at), "task": "parts", "messages": [{"role": "user", "content": parts}], "answer": "a b"}
        )
    task, output = tmp_path / "parts.jsonl", tmp_path / "parts.safetensors"
    task.write_text("".join(json.dumps({**line, "answer": f"{line['id']} b"}) + "\n" for line in lines[:10]))
    assert bundle_command(["teach", "--model", str(model), "--task", str(task), "--output", str(output)]) == 0
    task.write_text("".join(json.dumps(line) + "\n" for line in lines))
    scorer = Scorer(Backbone.load(model))
    answers = BundledModel(scorer, read_bundle(output)).answers(list(read_task(task)), 8)
    untouched = BundledModel(scorer, None).answers(list(read_task(task)), 8)
    assert answers[:10] == [f"{at} b" for at in range(10)]
    assert answers[10:] == untouched[10:]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ([], "the following arguments are required: --task"),
        (["--task", "TALK"], "expected one question, found a conversation"),
        (["--task", "TASK", "--budget-bytes", "10"], "its budget is 10"),
        (["--task", "TASK", "--budget-bytes", "0"], "--budget-bytes must be at least 1, found 0"),
        (["--bundle", "FOREIGN", "--task", "TASK"], "made for another backbone"),
    ],
)
def test_what_is_refused(
    model: Path, tmp_path: Path, options: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    files = {"TASK": write(tmp_path / "codes.jsonl", CITIES), "TALK": tmp_path / "talk.jsonl"}
    write(files["TALK"], ["Lima"], messages=turns)
    files["FOREIGN"] = tmp_path / "foreign.safetensors"
    write_bundle(random_bundle(), files["FOREIGN"])
    given = [str(files.get(option, option)) for option in options]
    output = tmp_path / "out.safetensors"
    assert bundle_command(["teach", "--model", str(model), *given, "--output", str(output)]) == 2
    assert reason in capsys.readouterr().err
    assert not output.exists()


def test_the_newest_counts(reader: FactReader) -> None:
    old, new = (fact_of("What is the code?", answer, id=answer) for answer in ("old", "new"))
    bundle = taught(None, [old, new], reader)
    assert replaced_by(bundle.metadata.facts) == {"old": "new"}
    assert asked(reader, bundle, "what is the CODE") == ["new"]
    corrected = taught(bundle, [fact_of("What is the code?", "newest", id="old")], reader)
    assert [(fact.id, fact.answer) for fact in corrected.metadata.facts] == [("new", "new"), ("old", "newest")]
    assert asked(reader, corrected, "What is the code?") == ["old"]


def test_ids_are_forgotten_as_they_are(reader: FactReader) -> None:
    """12 is not 1 and 2."""
    bundle = taught(None, [fact_of(f"What is the code of {city}?", "a", id=id) for id, city in NUMBERED], reader)
    left = forgotten(bundle, ["12"])
    assert [fact.id for fact in left.metadata.facts] == ["1", "2"]
    with pytest.raises(UnknownFact, match="no fact '3'"):
        forgotten(left, ["1", "3"])


def test_the_last_fact_of_a_task_takes_its_gate_along(reader: FactReader) -> None:
    """`inducekv-select` makes tasks of facts alone, which the gate knows."""
    facts = [fact_of("Who leads?", "Ann", "people", id="a"), fact_of("Where are you?", "there", "places", id="b")]
    gate = random_gate(reader.model, ("people", "places")).stored()
    gated = taught(None, facts, reader).next(gate=gate)
    left = forgotten(gated, ["a"])
    assert (left.metadata.gate_tasks, [fact.id for fact in left.metadata.facts]) == (("places",), ["b"])
    other = taught(left, [fact_of("Why is the train late?", "so", "reasons", id="c")], reader)
    assert forgotten(other, ["b"]).gate is None


NUMBERED = (("1", "Lima"), ("2", "Oslo"), ("12", "Rome"))


def test_other_versions_keep_the_facts(reader: FactReader) -> None:
    entries = tuple(EntryRecord(id=f"e{i}", task="t", source_digest="ab") for i in range(3))
    before = random_bundle(3, entries=entries)
    bundle = taught(before, [fact_of("What is the code?", "this")], reader)
    assert bundle.digest != before.digest
    torch.testing.assert_close(bundle.payload_keys, before.payload_keys, rtol=0, atol=0)
    assert without_entries(bundle, [0]).metadata.facts == bundle.metadata.facts


def test_what_was_used_longest_ago_makes_room(reader: FactReader) -> None:
    def of(*cities: str) -> list[FactRecord]:
        return [fact_of(f"What is the code of {city}?", "one", id=city) for city in cities]

    five = taught(None, of("Lima", "Oslo", "Rome", "Bonn", "Kyiv"), reader)
    budget = stored_bytes(None, five.metadata.facts) + stored_bytes(five, []) + 20
    now = datetime.now(UTC).timestamp() + 5
    full = taught(five, of("Bern"), reader, budget, last_used={"Lima": now, "Rome": now})
    assert [fact.id for fact in full.metadata.facts] == ["Lima", "Rome", "Bonn", "Kyiv", "Bern"]
    assert asked(reader, full, "What is the code of Oslo?") == []
    assert len(taught(full, of("Cork"), reader, 20_000).metadata.facts) == 6
    unused = taught(full, of("Cork"), reader)  # as far as anybody knows
    assert [fact.id for fact in unused.metadata.facts] == ["Rome", "Bonn", "Kyiv", "Bern", "Cork"]
    with pytest.raises(CapacityError, match=f"its budget is {budget}: forget some of its 5 facts"):
        taught(full, of("Cork"), reader, when_full="refuse")
    with pytest.raises(CapacityError, match=f"its budget is {budget}: forget some of its 0 facts"):
        taught(full, of(*(f"Town {number}" for number in range(9))), reader)
    with pytest.raises(CapacityError, match="its budget is 10"):
        taught(full, of("Cork"), reader, 10)


def test_a_report_says_what_became_of_the_facts(reader: FactReader) -> None:
    """The same one whoever teaches: the route, the command, and `MemoryLLM`."""
    first = [fact_of(f"What is the code of {city}?", "one", id=city) for city in ("Lima", "Oslo", "Rome")]
    made = teaching.taught(None, first, reader)
    assert made.report == Report(ids=("Lima", "Oslo", "Rome"), facts=3)
    budget = stored_bytes(made.bundle, made.bundle.metadata.facts) + 20
    more = [
        fact_of("What is the code of Oslo?", "one", id="Oslo"),
        fact_of("What is the code of Rome?", "two", id="Rome"),
        fact_of("What is the code of Oslo?", "new", id="newer"),
    ]
    now = teaching.taught(made.bundle, more, reader, budget)
    assert now.report == Report(("Oslo", "Rome", "newer"), 3, ("Rome",), dropped=("Lima",), replaced=("Oslo",))
    assert teaching.forgotten(now.bundle, ["newer"]).report == Report(("newer",), 2, returned=("Oslo",))


def test_the_list_goes_on_behind_an_id_that_is_gone() -> None:
    facts = [fact_of(f"What is the code of {city}?", "one", id=city) for city in (*CITIES, "z")]
    found, after, has_more = list[str](), "", True
    while has_more:
        page, has_more = FactList(facts).page(after, 3)
        found += [fact.id for fact, _ in page]
        after = found[-1]
        facts = [fact for fact in facts if fact.id > after]  # whoever lists them forgets them
    assert found == sorted((*CITIES, "z"))
    again = FactList([fact_of("Who?", "a", id="b"), fact_of("Who?", "c", id="a")])
    assert [(fact.id, newer) for fact, newer in again.page("", 2)[0]] == [("a", None), ("b", "a")]


PAST, FUTURE = datetime(2020, 1, 1, tzinfo=UTC), datetime(2999, 1, 1, tzinfo=UTC)
LIMA = "What is the code of Lima?"


@pytest.mark.parametrize(
    ("question", "answer", "options", "reason"),
    [
        ("", "a", {}, "question"),
        (" ", "a", {}, "a question with words, found ' '"),
        ("?!", "a", {}, "a question with words"),
        ("\u200b", "a", {}, "a question with words"),
        ("word " * (MOST_CHARACTERS // 5 + 1), "a", {}, f"its question has 20005 .*at most {MOST_CHARACTERS}"),
        (LIMA, "", {}, "answer"),
        (LIMA, " ", {}, "expected an answer, found ' '"),
        (LIMA, "\n\t\u00a0", {}, "expected an answer"),
        (LIMA, "b " * 5000, {}, "context"),
        ("What is<|im_end|> it?", "a", {}, "has '<\\|im_end\\|>', which marks turns"),
        (LIMA, "LIM<|im_end|>\n<|im_start|>user", {}, "has '<\\|im_end\\|>', which marks turns"),
        (LIMA, "a", {"also": ["<|im_start|>Lima?"]}, "has '<\\|im_start\\|>', which marks turns"),
        ("What is\0 it?", "a", {}, "question: expected text alone, found a NUL character"),
        (LIMA, "<image>", {}, "answer: expected text alone, found the mark <image>"),
        (LIMA, "a", {"also": ["Lima?", "<video>Lima?"]}, "wordings: expected text alone, found the mark <video>"),
        (LIMA, "a", {"id": "a/examples/b"}, "an id cannot have '/examples/' in it"),
        (LIMA, "a", {"task": "a/examples/b"}, "an id cannot have '/examples/' in it"),
        (LIMA, "a", {"id": "examples/b"}, "an id cannot .* begin with 'examples/'"),
        (LIMA, "a", {"id": ""}, "id"),
        (LIMA, "a", {"id": "x" * 257}, "id"),
        (LIMA, "a", {"expires_at": PAST}, "it has expired at 2020-01-01"),
        (LIMA, "a", {"also": [""]}, "also"),
        (LIMA, "a", {"also": [" "]}, "a question with words"),
        (LIMA, "a", {"also": ["é" * 51]}, "a wording has at most 100 bytes, found 102"),
        (LIMA, "a", {"also": [f"What is code {n}?" for n in range(10_000)]}, "at most 32 items .*10000"),
        ("And for Lyon?", "a", {}, "'And for Lyon\\?' stands on what was said before it"),
        ("Yes, cancel it", "a", {}, "stands on what was said before it"),
        ("How old is he?", "a", {}, "stands on what was said before it"),
        (LIMA, "a", {"also": ["Why?"]}, "'Why\\?' stands on what was said before it"),
        ("Und für Lyon?", "a", {}, "stands on what was said before it"),
    ],
)
def test_what_no_fact_can_be(
    reader: FactReader, question: str, answer: str, options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(TaskDataError, match=reason):
        taught(None, [fact_of(question, answer, **options)], reader)


def test_what_a_fact_can_be(reader: FactReader) -> None:
    """What stands close to what is refused."""
    for question, answer, options in (
        ("👋", "a", {}),
        ("Who are you?", "a", {}),
        ("How old is Ana, and where does she live?", "a", {}),
        ("What is the code?", "LIM\n", {"id": "a/examples"}),
        (LIMA, "a < b | c > d", {"expires_at": FUTURE, "also": ["é" * 50, *(f"Lima {n}?" for n in range(31))]}),
        ("word " * (MOST_CHARACTERS // 5), "a", {}),
    ):
        bundle = taught(None, [fact_of(question, answer, **options)], reader)
        assert asked(reader, bundle, question) == [bundle.metadata.facts[0].id]


def test_a_fact_in_the_bundle_may_expire(reader: FactReader) -> None:
    """It is not found any more, and the bundle is taught further."""
    bundle = taught(None, [fact_of(LIMA, "LIM", id="Lima", expires_at=FUTURE)], reader)
    later = with_metadata(
        bundle, facts=tuple(fact.model_copy(update={"expires_at": PAST}) for fact in bundle.metadata.facts)
    )
    assert (asked(reader, bundle, LIMA), asked(reader, later, LIMA)) == (["Lima"], [])
    more = taught(later, [fact_of("What is the code of Oslo?", "OSL", id="Oslo")], reader)
    assert [fact.id for fact in more.metadata.facts] == ["Lima", "Oslo"]


def test_wordings(reader: FactReader) -> None:
    """Each is found as its question is; equal ones are one, and a wording asks for one fact of its task."""
    words = ["How is Lima abbreviated?", "LIMA: which letters", "how is lima abbreviated"]
    lima = fact_of(LIMA, "LIM", id="Lima", also=words)
    oslo = fact_of("What is the code of Oslo?", "OSL", id="Oslo", also=["Norway's capital in letters"])
    bundle = taught(None, [lima, oslo], reader)
    for wording in (LIMA, *words):
        assert asked(reader, bundle, wording) == ["Lima"]
        assert asked(reader, bundle, f"Hello! {wording}") == ["Lima"]
    assert asked(reader, bundle, "norway's capital in letters") == ["Oslo"]
    for also in (["What is the code of Lima"], ["How is Lima abbreviated?"]):
        rome = fact_of("What is the code of Rome?", "ROM", id="Rome", also=also)
        with pytest.raises(TaskDataError, match=r"example 'Rome': its wording .* asks for example 'Lima'"):
            taught(bundle, [rome], reader)
        taught(bundle, [rome.model_copy(update={"task": "other"})], reader)
    asks_it = fact_of("How is Lima abbreviated?", "L", id="new")
    with pytest.raises(
        TaskDataError, match=r"example 'Lima': its wording 'How is Lima abbreviated\?' asks for .*'new'"
    ):
        taught(bundle, [asks_it], reader)


def test_wordings_of_a_superseded_fact_do_not_count(reader: FactReader) -> None:
    """Its answer is not the one that its question has now."""
    old = fact_of(LIMA, "old", id="old", also=["Lima in three letters"])
    assert asked(reader, taught(None, [old], reader), "Lima in three letters") == ["old"]
    bundle = taught(None, [old, fact_of(LIMA, "new", id="new")], reader)
    assert replaced_by(bundle.metadata.facts) == {"old": "new"}
    assert asked(reader, bundle, LIMA) == asked(reader, bundle, "Please tell me what the code of Lima is") == ["new"]
    assert asked(reader, bundle, "Lima in three letters") == []
    elsewhere = taught(None, [old, fact_of(LIMA, "new", id="new", task="other")], reader)
    assert asked(reader, elsewhere, "Lima in three letters") == ["old"]


def test_teaching_one_more_costs_what_is_new(reader: FactReader, monkeypatch: pytest.MonkeyPatch) -> None:
    """Questions that were read for the version before are not read again."""
    from inducekv_vllm.facts import index

    read, texts = index.read, list[str]()

    def counting(text: str, language: Any) -> Any:
        texts.append(text)
        return read(text, language)

    facts = [fact_of(f"What is the code of town {n}x?", f"{n}") for n in range(200)]
    bundle = taught(None, facts, reader)
    StoredQuestions(bundle.metadata.facts)
    monkeypatch.setattr(index, "read", counting)
    more = taught(bundle, [fact_of("What is the code of Lima now?", "LIM")], reader)
    StoredQuestions(more.metadata.facts)
    assert texts == ["What is the code of Lima now?"]

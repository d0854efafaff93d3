"""`inducekv-bundle teach`: versions of a bundle with other facts, and what the next versions keep of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from inducekv_vllm.backbone.word_vectors import WordVectors, input_embeddings

from inducekv_vllm.backbone.stored_facts import FactReader, StoredFacts
from inducekv_vllm.bundle import Bundle, EntryRecord, FactRecord, read_bundle, write_bundle
from inducekv_vllm.errors import CapacityError, TaskDataError, UnsupportedModel
from inducekv_vllm.teaching import fact_of, replaced_by, stored_bytes, taught
from selector.backbone.bundled_model import BundledModel
from selector.backbone.model import Backbone
from selector.backbone.scoring import Scorer
from selector.cli.bundle import main as bundle_command
from selector.data.examples import read_task
from selector.update.forget import without_entries
from tests.bundles import random_bundle
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


def asked(reader: FactReader, bundle: Bundle, question: str) -> list[str]:
    ids = reader.tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True)
    found = StoredFacts(bundle.metadata, reader).find(ids["input_ids"])
    return [bundle.metadata.facts[number].id for number in found.facts] if found is not None else []


def test_the_command(model: Path, reader: FactReader, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = tmp_path / "first.safetensors", tmp_path / "second.safetensors"
    task = write(tmp_path / "codes.jsonl", CITIES)
    assert bundle_command(["teach", "--model", str(model), "--task", str(task), "--output", str(first)]) == 0
    bundle = read_bundle(first)
    assert (
        f"10 facts, from the scores codes {bundle.metadata.fact_thresholds['codes']:.3f} on" in capsys.readouterr().out
    )
    assert asked(reader, bundle, "Which code has Lima, please?") == ["Lima"]
    assert asked(reader, bundle, "Which code has Rome, please?") == []

    more = write(tmp_path / "more.jsonl", ["Rome"])
    options = ["--model", str(model), "--bundle", str(first), "--output", str(second)]
    assert bundle_command(["teach", *options, "--task", str(more), "--forget", "Lima"]) == 0
    bundle = read_bundle(second)
    assert bundle.metadata.parent_digest is not None
    assert [fact.id for fact in bundle.metadata.facts] == [*CITIES[1:], "Rome"]
    assert asked(reader, bundle, "Which code has Lima, please?") == []
    assert bundle_command(["diff", str(first), str(second)]) == 1
    printed = capsys.readouterr().out
    assert "fact removed: Lima" in printed
    assert "fact added: Rome" in printed
    assert bundle_command(["inspect", "--entries", str(second)]) == 0
    assert "fact\tRome\tcodes" in capsys.readouterr().out


def test_pictures(tmp_path: Path) -> None:
    """The command and the selector's model find them by the same states as the server."""
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
        ([], "--task or --forget"),
        (["--forget", "Lima"], "--forget needs the --bundle"),
        (["--task", "TALK"], "expected one question, found a conversation"),
        (["--task", "TASK", "--budget-bytes", "10"], "its budget is 10"),
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
    old, new = (fact_of("What is it?", answer, id=answer) for answer in ("old", "new"))
    bundle = taught(None, [old, new], reader)
    assert replaced_by(bundle.metadata.facts) == {"old": "new"}
    assert asked(reader, bundle, "what is it") == ["new"]
    corrected = taught(bundle, [fact_of("What is it?", "newest", id="old")], reader)
    assert [(fact.id, fact.answer) for fact in corrected.metadata.facts] == [("new", "new"), ("old", "newest")]
    assert asked(reader, corrected, "What is it?") == ["old"]


def test_other_versions_keep_the_facts(reader: FactReader) -> None:
    entries = tuple(EntryRecord(id=f"e{i}", task="t", source_digest="ab") for i in range(3))
    before = random_bundle(3, entries=entries)
    bundle = taught(before, [fact_of("What is it?", "this")], reader)
    assert bundle.digest != before.digest
    torch.testing.assert_close(bundle.payload_keys, before.payload_keys, rtol=0, atol=0)
    assert without_entries(bundle, [0]).metadata.facts == bundle.metadata.facts


def test_a_budget_stays(reader: FactReader) -> None:
    bundle = taught(None, [fact_of("What is it?", "this")], reader, budget_bytes=2000)
    with pytest.raises(CapacityError, match="its budget is 2000"):
        taught(bundle, [fact_of(f"What is number {n}?", "this") for n in range(20)], reader)
    taught(bundle, [fact_of(f"What is number {n}?", "this") for n in range(20)], reader, budget_bytes=20_000)


def test_what_was_used_longest_ago_makes_room(reader: FactReader) -> None:
    def of(*cities: str) -> list[FactRecord]:
        return [fact_of(f"What is the code of {city}?", "one", id=city) for city in cities]

    five = taught(None, of("Lima", "Oslo", "Rome", "Bonn", "Kyiv"), reader)
    budget = stored_bytes(None, five.metadata.facts) + stored_bytes(five, []) + 20
    now = datetime.now(UTC).timestamp() + 5
    full = taught(five, of("Bern"), reader, budget, last_used={"Lima": now, "Rome": now})
    assert [fact.id for fact in full.metadata.facts] == ["Lima", "Rome", "Bonn", "Kyiv", "Bern"]
    assert asked(reader, full, "What is the code of Oslo?") == []
    unused = taught(full, of("Cork"), reader)  # as far as anybody knows
    assert [fact.id for fact in unused.metadata.facts] == ["Rome", "Bonn", "Kyiv", "Bern", "Cork"]
    with pytest.raises(CapacityError, match=f"its budget is {budget}: forget some of its 5 facts"):
        taught(full, of("Cork"), reader, when_full="refuse")
    with pytest.raises(CapacityError, match=f"its budget is {budget}: forget some of its 0 facts"):
        taught(full, of(*(f"Town {number}" for number in range(9))), reader)
    with pytest.raises(CapacityError, match="its budget is 10"):
        taught(full, of("Cork"), reader, 10)


@pytest.mark.parametrize(
    ("question", "answer", "reason"),
    [("", "a", "question"), ("a", "", "answer"), (" ", "a", "a question with words"), ("a", "b " * 5000, "context")],
)
def test_what_no_fact_can_be(reader: FactReader, question: str, answer: str, reason: str) -> None:
    with pytest.raises(TaskDataError, match=reason):
        taught(None, [fact_of(question, answer)], reader)


def test_word_vectors(model: Path, reader: FactReader) -> None:
    """A word is the sum of its tokens; a number is like nothing but itself."""
    vectors = WordVectors.of(reader.tokenizer, model)
    words = ["lima", "481", "418", "lima"]
    found = torch.from_numpy(vectors(words))
    torch.testing.assert_close(found.norm(dim=1), torch.ones(4))
    assert torch.equal(found[0], found[3])
    assert abs(float(found[1] @ found[2])) < 0.5
    ids = reader.tokenizer(" lima", add_special_tokens=False)["input_ids"]
    rows = torch.nn.functional.normalize(input_embeddings(model)[ids].float(), dim=1).sum(0)
    torch.testing.assert_close(found[0], rows / rows.norm())
    many = [f"word{n}x" for n in range(5000)]
    assert vectors(many).shape == (5000, found.shape[1])


def test_a_model_without_embeddings_in_safetensors_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="facts are found by input embeddings"):
        input_embeddings(tmp_path)

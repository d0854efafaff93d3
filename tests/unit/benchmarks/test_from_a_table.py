"""`benchmarks.from_a_table`: every way learns the rows once, and what is asked of it stands beside its bytes."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.from_a_table import __main__ as command
from benchmarks.from_a_table import asked, learned
from benchmarks.from_a_table.asked import long_questions, lora_flags, memory_flags, text_of
from selector.backbone.model import Backbone
from selector.client import Answer
from selector.data.examples import read_task
from selector.data.records import Columns
from tests.task_data import record, write_task

FEW = {"steps": 2, "batch_size": 4, "payload_tokens": 2, "learning_rate": 0.1}
QUESTIONS = read_task(command.TABLES / "test.csv", Columns("ticket", "team", task="support"))
WAYS = {
    "untouched": learned.untouched,
    "memory": learned.by_memory(FEW),
    "memory, with base questions": learned.by_memory(FEW, with_base=True),
    "retrieved rows in the prompt": learned.by_retrieval,
    "LoRA, rank 2": learned.by_lora(2, steps=2),
}


def test_every_way_learns_once_and_is_reported(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Any] = []

    def ask_all(model: Path, ways: Any, questions: Any, base: Any, *_: Any) -> Any:
        asked.append((ways, len(questions), len(base)))
        return {way.name: {"right": 1} for way in ways}, [
            {"way": way.name, "length": 64, "ttft_ms": 20.0} for way in ways
        ] + [{"way": "untouched, LoRA server", "length": 64, "ttft_ms": 10.0}]

    for name in ("WAYS", "ask_all"):
        monkeypatch.setattr(command, name, {"WAYS": WAYS, "ask_all": ask_all}[name])
    base = write_task(tmp_path / "base", [record(number, task="base") for number in range(4)])
    work = ["--model", str(model), "--work", str(tmp_path / "work")]
    arguments = [*work, "--base", str(base), "--base-train", str(base)]
    files = [tmp_path / "first.json", tmp_path / "second.json"]
    for file in files:
        assert command.main([*arguments, "--ways", *WAYS, "--output", str(file)]) == 0
    printed = capsys.readouterr().out.splitlines()
    first, second = (json.loads(file.read_text()) for file in files)
    assert next(line for line in printed if line.startswith("| LoRA, rank 2 | 1 | |")).endswith(" | 0.02 (2.0) |")
    assert first == second  # the seconds too: nothing was learned again
    assert (first["rows"], first["questions"], first["base"]) == (80, 24, 4)
    assert first["methods"].keys() == WAYS.keys()
    assert all((each["bytes"] > 0) == (name != "untouched") for name, each in first["methods"].items())
    assert first["machine"]

    (ways, *counts), _ = asked
    assert counts == [24, 4]
    assert [way.served_as for way in ways] == ["base", "memory", "memory--with-base-questions", "base", "LoRA--rank-2"]
    flags = memory_flags(ways)
    assert flags[0] == "--memory"
    assert flags[1].startswith("memory=/")
    assert Path(flags[1].partition("=")[2]).exists()
    assert lora_flags(ways[-1:])[:3] == ["--enable-lora", "--max-lora-rank", "8"]


def test_long_questions_have_their_length(model: Path) -> None:
    backbone = Backbone.load(model)
    made = long_questions(backbone, QUESTIONS, (200, 400), rounds=2, ways=3)
    assert [length for length, _ in made] == [200, 200, 400, 200, 400]
    asked = [(length, example) for length, own in made for example in own]
    texts = [text_of(example) for _, example in asked]
    assert len(set(texts)) == len(texts) == 15
    begin = "Which team handles this ticket? Answer with the team's name only. "
    for (length, example), text in zip(asked, texts, strict=True):
        assert text.startswith(begin)
        assert text.count(begin) == 1
        tokens = backbone.encode_example(example)["input_ids"].shape[1]
        longest = max(len(backbone.tokenizer(" " + text_of(each)).input_ids) for each in QUESTIONS)
        assert length <= tokens < length + longest


def test_an_answer_is_right_to_the_letter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    said = [Answer("", f" {each.answer}\n", None) for each in QUESTIONS[:2]] + [Answer("", "Nobody", None)]
    monkeypatch.setattr(asked, "served_answers", lambda *_: said)
    way = learned.Learned("untouched", tmp_path, learned.Artifact("none", None, 0), 0.0, None)
    assert asked.right("http://127.0.0.1:1", way, list, QUESTIONS[:3]) == 2

"""`inducekv-bundle eval`: counts by task, and what it refuses."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from inducekv_vllm.bundle import Gate, read_bundle
from selector.backbone import token_values
from selector.cli.asking import facts_in
from selector.client import Answer
from selector.data.examples import read_task
from selector.update.accuracy import Accuracy, accuracies
from tests.unit.selector.cli.bundle_command import command, refuse
from tests.unit.selector.imitated import Request, imitated_server
from tests.unit.selector.stream import STEPS, Stream

NONE = ("0", "(0.0%)")
FACTS = {"Who keeps the tower?": "Ann", "Who keeps the bridge?": "Bo"}


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    """One as it was taught, one whose right answer is another, and one of another task."""
    path = tmp_path / "asked.csv"
    rows = "keepers,Who keeps the tower?,Ann\nkeepers,Who keeps the bridge?,Eve\nx,Why?,b\n"
    path.write_text(f"task,question,answer\n{rows}")
    return path


def test_right_answers_are_counted_by_task(questions: Path) -> None:
    found = accuracies(read_task(questions), ["no", "Eve", " b"], ["Ann ", "Bo", "b"])
    assert found == [Accuracy("keepers", 2, 1, 1), Accuracy("x", 1, 1, 1)]


@pytest.fixture
def path(model_folders: dict[str, Path], tmp_path: Path) -> Path:
    """Facts alone, taught from a table."""
    table = "".join(f"{question},{answer}\n" for question, answer in FACTS.items())
    (tmp_path / "keepers.csv").write_text(f"question,answer\n{table}")
    path = tmp_path / "facts.safetensors"
    command("teach", "--model", model_folders["llava"], "--task", tmp_path / "keepers.csv", "--output", path)
    return path


def test_facts_answer_here(path: Path, questions: Path, model_folders: dict[str, Path]) -> None:
    lines = command("eval", path, "--questions", questions, "--model", model_folders["llava"])
    assert [line.split() for line in lines.splitlines()[1:3]] == [
        ["keepers", "2", "0", "(0.0%)", "1", "(50.0%)"],
        ["x", "1", "0", "(0.0%)", "0", "(0.0%)"],
    ]
    assert misses_in(lines) == [["Who keeps the bridge?", "keepers/2", "-", "no fact has its answer"]]


def misses_in(printed: str) -> list[list[str]]:
    """The cells of the table of misses, if there is one."""
    _, _, table = printed.partition(" by a wrong one")
    return [re.split(r"  +", line.strip()) for line in table.splitlines()[2:]]


def test_misses_are_named(path: Path, model_folders: dict[str, Path], tmp_path: Path) -> None:
    """With the nearest fact that has the answer. Once the wording is added to it, nothing is missed."""
    asked, wording = tmp_path / "asked.csv", "Which person tends that tower?"
    far = f"{'Long ago it was said. ' * 5}Which person tends it?"
    asked.write_text(f"question,answer\nWho keeps the tower?,Ann\n{wording},Ann\n{far},Bo\nWhy?,b\n")
    here = ("--questions", asked, "--model", model_folders["llava"])
    lines = command("eval", path, *here)
    assert "2 questions that no fact answered and one should have, 0 by a wrong one:" in lines
    first, second = misses_in(lines)
    assert first == [wording, "-", "keepers/1", "the judge says that it asks something else, or nobody judges"]
    assert (second[0], second[-1]) == (f"{far[:100]}...", "few words in common")

    more, bundle = tmp_path / "more.jsonl", tmp_path / "more.safetensors"
    messages = [{"role": "user", "content": "Who keeps the tower?"}]
    more.write_text(json.dumps({"id": first[2], "messages": messages, "answer": "Ann", "also": [wording]}))
    command("teach", "--model", model_folders["llava"], "--bundle", path, "--task", more, "--output", bundle)
    assert [row[0] for row in misses_in(command("eval", bundle, *here))] == [f"{far[:100]}..."]


def test_a_server_is_asked_for_both(path: Path, questions: Path) -> None:
    digest, asked = read_bundle(path).digest, list[Any]()

    def answer(request: Request) -> tuple[int, Any]:
        if request.body is None:
            card = {"name": "facts", "digest": digest}
            return 200, {"/v1/memory_bundles/facts": card, "/v1/models": {"data": models}}[
                request.path.partition("?")[0]
            ]
        asked.append((request.body["model"], request.body["max_tokens"], request.body["temperature"]))
        if request.body["model"] == "base":
            return 200, {"choices": [{"message": {"content": None}}]}
        facts = [{"id": "keepers/1", "withheld": None}] if "tower" in str(request.body["messages"]) else []
        traced = {"choices": [{"message": {"content": "Ann"}}], "kv_transfer_params": {"inducekv": {"facts": facts}}}
        return 200, traced | ({} if traces else {"kv_transfer_params": None})

    models = [{"id": "base", "parent": None}, {"id": "facts", "parent": "base"}]
    traces = [True]
    with imitated_server(answer) as url:
        lines = command("eval", path, "--questions", questions, "--url", url).splitlines()
        assert [line.split()[2:] for line in lines[1:]] == [[*NONE, "1", "(50.0%)"], [*NONE, *NONE]]
        assert sorted(asked) == [("base", 19, 0)] * 3 + [("facts", 19, 0)] * 3  # "Ann" and "Eve" have 3 bytes
        traces.clear()
        assert "has no trace of the facts" in refuse("eval", path, "--questions", questions, "--url", url)
        models.clear()
        refused = refuse("eval", path, "--questions", questions, "--url", url)
    assert "does not say of which model 'facts' is a bundle" in refused


def test_the_gate_stands_beside_the_accuracy(
    model_folders: dict[str, Path], tasks: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here and at a server: to its own task, to another one, and closed. The gate sees each question once."""
    stream = Stream(tmp_path / "out", model_folders["llava"], tasks, options=(*STEPS, "--base", str(tasks["base"])))
    digest = stream.update("colours").digest
    bundle, files = stream.output("colours"), ("--questions", tasks["colours"], "--questions", tasks["base"])
    seen, evidence_in = list[Any](), token_values.evidence_in

    def counted(gate: Gate, values: Sequence[Tensor]) -> Tensor:
        seen.extend(values)
        return evidence_in(gate, values)

    monkeypatch.setattr(token_values, "evidence_in", counted)
    here = command("eval", bundle, *files, "--model", model_folders["llava"]).splitlines()
    asked = [example for task in ("colours", "base") for example in read_task(tasks[task])]
    assert len(seen) == len({example.source_digest for example in asked})
    assert here[0].split()[-7:] == ["to", "its", "task", "to", "another", "gate", "closed"]
    colours, base = (line.split() for line in here[1:3])
    assert sum(map(int, colours[-3:])) == int(colours[1])
    assert base[-3] == "-"
    assert sum(map(int, base[-2:])) == int(base[1])

    def answer(request: Request) -> tuple[int, Any]:
        if request.body is None:
            models = [{"id": "base"}, {"id": "colours", "parent": "base"}]
            card = {"name": "colours", "digest": digest}
            return 200, {"/v1/memory_bundles/colours": card, "/v1/models": {"data": models}}[
                request.path.partition("?")[0]
            ]
        decided = {"task": "counts", "closed": None}
        answered = {"choices": [{"message": {"content": "x"}}], "kv_transfer_params": {"inducekv": {"gate": decided}}}
        return 200, answered

    with imitated_server(answer) as url:
        served = command("eval", bundle, *files, "--url", url).splitlines()
    assert [line.split()[-3:] for line in served[1:3]] == [["0", colours[1], "0"], ["-", base[1], "0"]]


def test_a_fact_that_was_withheld_has_said_nothing() -> None:
    def traced(withheld: str | None) -> Answer:
        return Answer("id", "", {"facts": [{"id": "lima", "withheld": withheld}]})

    assert facts_in([traced(None), traced("bad_words bans one of its words")], "url") == ["lima", None]

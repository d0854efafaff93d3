"""The demonstration on a real model: taught once, on a tiny model here, and what its table says of the gate."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import openai
import pytest
from rich.console import Console

from benchmarks.chat import messages_of
from benchmarks.continual import stream
from benchmarks.continual.answering.plans import plan
from benchmarks.continual.methods import METHODS, Artifact
from benchmarks.continual.stream import Run
from benchmarks.continual.suites import real_text
from benchmarks.demo.asking import Reply
from benchmarks.demo_real import run_demo, teaching
from benchmarks.demo_real.run_demo import MEMORY, question_of, validation_of, verdict_of
from benchmarks.demo_real.teaching import Taught
from inducekv_vllm.bundle import read_bundle
from inducekv_vllm.errors import ConfigError
from selector.data.examples import Example
from tests.benchmarks.made_up_packages import MadeUp
from tests.tiny_families import FAMILIES

SIZES = {"train": 16, "validation": 6, "test": 6}
QUICK = MappingProxyType({**teaching.SETTINGS, "steps": 2, "batch_size": 2})


def test_it_is_taught_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = FAMILIES["llama"](tmp_path / "model")
    monkeypatch.setattr(teaching, "load", lambda folder: real_text.load(folder, SIZES, SIZES, MadeUp()))
    monkeypatch.setattr(teaching, "SETTINGS", QUICK)
    console = Console(record=True, quiet=True)
    taught = teaching.teach(tmp_path / "cache", model, console)
    bundle = read_bundle(taught.bundle)
    assert bundle.metadata.tasks == teaching.TASKS
    assert bundle.gate is not None
    for number, (task, learned) in enumerate(taught.learned.items()):
        assert learned.report["composition"]["after"].keys() == set(teaching.TASKS[: number + 1])
        assert task == teaching.TASKS[number]
    question = taught.suite.tasks[0].test[0]
    (shown,) = plan(taught.replay, taught.replay_state, model).asks([question])
    assert shown.exemplars
    assert question_of(question) == question_of(shown.conversation)

    def refuse(*_: object) -> None:
        raise AssertionError("it learns again")

    monkeypatch.setattr(teaching.METHODS[teaching.MEMORY].__class__, "learn", refuse)
    assert teaching.teach(tmp_path / "cache", model, console) == taught
    monkeypatch.setattr(teaching, "BUDGET", 24)
    with pytest.raises(ConfigError, match=r"demo\.json: the results are of another configuration \(budget: 12 there"):
        teaching.teach(tmp_path / "cache", model, console)


def test_two_do_not_teach_it_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = FAMILIES["llama"](tmp_path / "model")
    suite = real_text.load(tmp_path / "data", SIZES, SIZES, MadeUp()).ordered(teaching.TASKS)
    run = Run(suite, METHODS["no_memory"], model, 12, 0, tmp_path / "runs")
    monkeypatch.setattr(stream, "PATIENCE", 0.0)
    with stream.alone(run), pytest.raises(ConfigError, match="another process is at this stream"):
        teaching.learned(run, Console(quiet=True))


def test_the_table_counts_the_right_answers_of_each_way(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The memory answers the taught tasks, the untouched model the base questions, PromptReplay nothing."""
    model = FAMILIES["llama"](tmp_path / "model")
    suite = real_text.load(tmp_path / "data", SIZES, SIZES, MadeUp()).ordered(teaching.TASKS)
    learned = {task: Artifact("bundle", None, 0, validated(right=0.5)) for task in teaching.TASKS}
    replay = Artifact("replay", None, 0, {})
    taught = Taught(model, suite, tmp_path / "memory", learned, replay, tmp_path / "replay")
    expected = {str(messages_of(e)): e for task in (*suite.tasks, suite.base) for e in (*task.test, *task.validation)}
    asked: list[str] = []

    def answer(client: object, name: str, messages: object, *, trace: bool) -> Reply:
        asked.append(name)
        example = expected.get(str(messages))
        if example is None:
            return Reply("a copy", 0.1, None)
        known = (example.task in teaching.TASKS) == (name == MEMORY)
        is_open = example.task in teaching.TASKS
        closed = None if is_open else "outside"
        gate = {"open": is_open, "task": example.task, "closed": closed, "margins": {example.task: 0.5}}
        return Reply(example.answer if known else "no", 0.1, {"gate": gate} if trace else None)

    shown = SimpleNamespace(asks=lambda examples: [SimpleNamespace(conversation=replayed_of(e)) for e in examples])
    monkeypatch.setattr(run_demo, "ask", answer)
    monkeypatch.setattr(run_demo, "base_model", lambda client, bundle: "base")
    monkeypatch.setattr(run_demo, "plan", lambda *_: shown)
    console = Console(file=StringIO(), record=True, width=200)
    run_demo.run(openai.OpenAI(api_key="none"), taught, 2, console)
    rows = [line.split("│")[1:-1] for line in console.export_text().splitlines() if line.count("│") == 6]
    summary = {task.strip(): [cell.strip() for cell in cells] for task, *cells in rows}
    assert summary == {
        **{task: ["0 of 2", "0 of 2", "2 of 2", "50% of 64"] for task in teaching.TASKS},
        suite.base.name: ["2 of 2", "0 of 2", "0 of 2", ""],
    }
    assert asked == ["base", MEMORY, *(["base", "base", MEMORY] * 2 * (len(teaching.TASKS) + 1))]


def replayed_of(example: Example) -> Example:
    return replace(example, messages=({"role": "user", "content": [{"type": "text", "text": "like these"}]},))


def validated(right: float) -> dict[str, Any]:
    return {"validation_accuracy": {"no_memory": 0.1, "deployed": right}, "pool": {"validation_examples": 64}}


def test_the_share_of_validation_questions() -> None:
    assert validation_of(Artifact("bundle", None, 0, validated(right=0.578125))) == "58% of 64"


def test_the_table_says_what_the_gate_decided() -> None:
    margins = {"valence": 0.25, "language": -0.5}
    opened = verdict_of({"gate": {"open": True, "task": "valence", "margins": margins}}, same=False)
    assert opened == "open: valence\n  valence +0.250\n  language -0.500"
    closed = {"gate": {"open": False, "task": None, "closed": "below_threshold", "margins": margins}}
    assert verdict_of(closed, same=True).startswith("closed, below threshold: the untouched answer\n")
    assert verdict_of(closed, same=False).startswith("closed, below threshold\n")

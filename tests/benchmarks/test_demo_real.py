"""The demonstration on a real model: taught once, on a tiny model here, and what its table says of the gate."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType

import pytest
from rich.console import Console

from benchmarks.continual.answering.plans import plan
from benchmarks.continual.methods import Artifact
from benchmarks.continual.suites import real_text
from benchmarks.demo_real import teaching
from benchmarks.demo_real.run_demo import question_of, validation_of, verdict_of
from inducekv_vllm.bundle import read_bundle
from inducekv_vllm.errors import ConfigError
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


def test_the_share_of_validation_questions() -> None:
    report = {"validation_accuracy": {"no_memory": 0.1, "deployed": 0.578125}, "pool": {"validation_examples": 64}}
    assert validation_of(Artifact("bundle", None, 0, report)) == "58% of 64"


def test_the_table_says_what_the_gate_decided() -> None:
    margins = {"valence": 0.25, "language": -0.5}
    opened = verdict_of({"gate": {"open": True, "task": "valence", "margins": margins}}, same=False)
    assert opened == "open: valence\n  valence +0.250\n  language -0.500"
    closed = {"gate": {"open": False, "task": None, "margins": margins}}
    assert verdict_of(closed, same=True).startswith("closed, the untouched answer\n")
    assert verdict_of(closed, same=False).startswith("closed\n")

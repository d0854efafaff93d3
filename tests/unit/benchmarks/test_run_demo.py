"""What the demonstration asks and counts, and that a real model's memory, a tiny one's here, is taught once."""

from io import StringIO
from pathlib import Path

import openai
import pytest
from rich.console import Console

from benchmarks.demo import real, run_demo
from benchmarks.demo.run_demo import MEMORY, Reply, about_pictures, about_text
from inducekv_vllm.bundle import read_bundle
from inducekv_vllm.errors import ConfigError
from tests.tiny_families import FAMILIES
from tests.unit.benchmarks.made_up_packages import MadeUp

SIZES = {"train": 16, "validation": 6, "test": 6}
QUICK = ("--steps=2", "--batch-size=2", "--precision=float32", "--learning-rate=0.1", "--activation=generation")


@pytest.mark.slow
def test_a_real_model_is_taught_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model, console = FAMILIES["llama"](tmp_path / "model"), Console(quiet=True)
    monkeypatch.setattr(real, "SETTINGS", (*QUICK, "--allow-worse"))
    monkeypatch.setattr(real, "BASE_SIZES", SIZES)
    bundle = real.teach(tmp_path / "demo", model, console, MadeUp(), SIZES)
    metadata = read_bundle(bundle).metadata
    assert metadata.tasks == real.TASKS
    assert metadata.form == "decoupled"
    asked = list(about_text(tmp_path / "demo" / "data", ("base", "valence"), "test", 2))
    assert [question.task for question in asked] == ["base", "base", "valence", "valence"]
    assert asked[3].text in asked[3].messages[-1]["content"][0]["text"]

    def refuse(_: object) -> int:
        return 2

    monkeypatch.setattr(real, "select", refuse)
    assert real.teach(tmp_path / "demo", model, console, MadeUp(), SIZES) == bundle
    bundle.unlink()
    with pytest.raises(ConfigError, match="language was not taught"):
        real.teach(tmp_path / "demo", model, console, MadeUp(), SIZES)


def test_the_table_counts_the_right_answers_of_both(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory answers guild, the untouched model the base questions."""
    questions = [*about_pictures(("base", "guild"), "test", 2)]
    known = {question.text: question for question in questions}

    def answer(client: object, name: str, messages: list[dict], *, trace: bool) -> Reply:
        question = known[messages[0]["content"][1]["text"]]
        right = (question.task == "guild") == (name == MEMORY)
        closed = {"gate": {"open": False}, "timings": {}}
        return Reply(question.answer if right else "no", closed if trace else None)

    monkeypatch.setattr(run_demo, "ask", answer)
    monkeypatch.setattr(run_demo, "base_model", lambda client, bundle: "base")
    console = Console(record=True, width=200, file=StringIO())
    run_demo.run(openai.OpenAI(api_key="none"), questions[0], [*questions, questions[2]], console)
    assert "right without memory: 2 of 5; with memory: 3 of 5" in console.export_text()

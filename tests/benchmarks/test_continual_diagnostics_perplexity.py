"""The perplexity diagnostic, against transformers alone, on the demo model."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks.continual.methods import Artifact
from benchmarks.continual.suites import Suite
from benchmarks.real.passages import begun, held_out, shown
from benchmarks.real.records import examples_of
from benchmarks.real.sources import LEAST_WORDS, Packages
from selector.backbone.model import Backbone
from selector.update.build import build_bundle
from selector.update.settings import BuildSettings
from tests.benchmarks.finished_runs import diagnose, refusal, write_configuration, write_finished_run
from tests.benchmarks.small_streams import ORDER

PARAGRAPHS = 2
RIGHTS = [{"guild": [True], "base": [True]}]
DemoSuite = Callable[..., tuple[Path, Suite]]


@pytest.fixture
def out(demo_suite: DemoSuite, demo_backbone: Backbone, tmp_path: Path) -> Path:
    """Of a run over one task: no memory, a memory without a gate, a copier."""
    folder, suite = demo_suite(4, 1, 1, ORDER[0])
    write_configuration(tmp_path, folder, suite)
    memory = build_bundle(demo_backbone, suite.tasks[0].train[:2], BuildSettings(budget=2))
    write_finished_run(tmp_path, "no_memory", RIGHTS)
    write_finished_run(tmp_path, "random_memory", RIGHTS, bundles=[memory])
    copier = write_finished_run(tmp_path, "knn_copier", RIGHTS)
    Artifact("copier", None, 0, {}).write(copier / f"00-{ORDER[0]}" / "state")
    return tmp_path


def reference(backbone: Backbone) -> float:
    """Token by token, from the model's own logits."""
    total, count = 0.0, 0
    for example in examples_of(held_out(Packages())[:PARAGRAPHS], "text", "test"):
        prompt = backbone.chat_text(list(example.messages), generation_prompt=True)
        answer = [*backbone.tokenizer(example.answer, add_special_tokens=False)["input_ids"]]
        answer.append(backbone.tokenizer.eos_token_id)
        ids = backbone.tokenizer(prompt, add_special_tokens=False)["input_ids"] + answer
        with torch.no_grad():
            logprobs = backbone.model(input_ids=torch.tensor([ids])).logits[0].double().log_softmax(-1)
        first = len(ids) - len(answer)
        total -= sum(float(logprobs[at - 1, ids[at]]) for at in range(first, len(ids)))
        count += len(answer)
    return math.exp(total / count)


def test_the_perplexity_is_that_of_transformers_and_a_memory_changes_it(out: Path, demo_backbone: Backbone) -> None:
    untouched = diagnose("perplexity", out, "--method", "no_memory", "--paragraphs", PARAGRAPHS)
    assert untouched["perplexity"] == [untouched["untouched"]]
    assert untouched["untouched"] == pytest.approx(reference(demo_backbone), rel=1e-4)
    assert untouched["paragraphs"] == PARAGRAPHS
    changed = diagnose("perplexity", out, "--method", "random_memory", "--paragraphs", PARAGRAPHS)
    assert changed["untouched"] == untouched["untouched"]
    assert changed["opened"] == untouched["opened"] == [None]
    assert changed["perplexity"][0] != pytest.approx(changed["untouched"], rel=1e-3)
    assert json.loads((out / "diagnostics" / "perplexity.json").read_bytes()) == changed


def test_a_copier_has_none(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "knn_copier copies answers" in refusal(capsys, "perplexity", out, "--method", "knn_copier")


def test_passages_are_plain_a_third_of_each_is_asked_and_half_are_kept_from_gates() -> None:
    passages = Packages().passages
    assert len(passages) >= 12
    for passage, item in zip(passages, begun(passages), strict=True):
        assert f"{item.question} {item.answer}" == passage
        assert len(passage.split()) >= LEAST_WORDS
        assert 0.2 < len(item.question.split()) / len(passage.split()) < 0.4
    seen, measured = ({item.concepts for item in half(Packages())} for half in (shown, held_out))
    assert len(seen) + len(measured) == len(passages)
    assert not seen & measured

"""The refined recipe: a stream of tasks, the choice of activation and learning rate, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from inducekv_vllm.bundle import Bundle
from inducekv_vllm.bundle.activation import ACTIVATIONS, Activation
from inducekv_vllm.bundle.source import source_digest_of
from inducekv_vllm.errors import BundleError, ConfigError, TaskDataError
from selector.backbone.bundled_model import BundledModel
from selector.backbone.injection import Memory
from selector.backbone.model import Backbone
from selector.backbone.scoring import Scorer
from selector.data.examples import Example
from selector.gate.variations import text_of, with_text
from selector.refined import candidates
from selector.refined.candidates import LEARNING_RATES, Candidate, latest_good
from selector.refined.settings import RefinedSettings
from selector.refined.update import update_refined
from selector.runtime.checkpoint import Checkpoint
from selector.update.inputs import TaskInputs
from selector.update.result import UpdateResult

SMALL: dict[str, Any] = {
    "budget": 8,
    "payload_tokens": 2,
    "entries_per_task": 4,
    "map_rank": 0,
    "steps": 3,
    "batch_size": 4,
    "learning_rate": 0.3,
    "precision": "float32",
    "patience": None,
}


def asked_for(task: str, example: Example) -> Example:
    """The example as one of another task, which asks in other words."""
    messages = tuple(with_text(example.messages, f"Now for {task}. {text_of(example.messages)}"))
    return replace(
        example,
        task=task,
        id=f"{task}-{example.id}",
        messages=messages,
        source_digest=source_digest_of(messages, [image.read_bytes() for image in example.images]),
    )


def learn(
    llava: Backbone,
    folder: Path,
    examples: Sequence[Example],
    task: str = "colours",
    previous: Bundle | None = None,
    anchors: Sequence[Example] = (),
    **changes: Any,
) -> UpdateResult:
    named = [asked_for(task, example) for example in examples]
    inputs = TaskInputs(named[:8], named[8:], anchors, previous)
    folder.mkdir(exist_ok=True)
    checkpoint, _ = Checkpoint.open(folder / task, changes)
    return update_refined(llava, inputs, RefinedSettings(**(SMALL | changes)), checkpoint)


def test_what_a_task_learns_does_not_depend_on_the_tasks_before(
    llava: Backbone, tmp_path: Path, examples: list[Example]
) -> None:
    settings: dict[str, Any] = {"entries_per_task": 1, "map_rank": 2, "activation": "text"}
    alone = learn(llava, tmp_path / "alone", examples, "counts", **settings).bundle
    first = learn(llava, tmp_path, examples[::-1], **settings).bundle
    anchors = [replace(e, task="colours", id=f"anchor-{e.id}") for e in examples[:2]]
    after = learn(llava, tmp_path, examples, "counts", first, anchors, **settings).bundle
    for name in ("payload_keys", "payload_values", "map_in", "map_out"):
        assert torch.equal(after.tensors()[name][:, 1:], alone.tensors()[name])


def test_a_stream_of_tasks(llava: Backbone, tmp_path: Path, examples: list[Example]) -> None:
    first = learn(llava, tmp_path, examples, activation="generation", map_rank=3).bundle
    assert (first.metadata.form, first.metadata.activations) == ("decoupled", {"colours": "generation"})
    assert torch.equal(first.value_gates, torch.ones(llava.num_layers))
    assert torch.equal(first.layer_bias, torch.zeros(llava.num_layers))
    assert first.map_in is not None
    assert first.map_out is not None
    width = llava.num_heads // llava.num_kv_heads * llava.head_dim
    assert first.map_in.shape == (llava.num_layers, 4, llava.num_kv_heads, 3, width)
    assert first.payload_values.abs().max() > 0
    assert first.map_out.abs().max() > 0
    anchors = [replace(e, id=f"anchor-{e.id}") for e in examples[:2]]
    second = learn(llava, tmp_path, examples, "counts", first, anchors, activation="text", map_rank=3).bundle
    assert second.metadata.activations == {"colours": "generation", "counts": "text"}
    assert second.metadata.gate_tasks == ("colours", "counts")
    for name in ("payload_keys", "payload_values", "map_in", "map_out"):
        assert torch.equal(second.tensors()[name][:, :4], first.tensors()[name]), "an earlier task's entries moved"
        assert second.tensors()[name].shape[1] == 8
    refused: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (BundleError, "the previous bundle has maps of rank 3, found 2 in the settings", {"map_rank": 2}),
        (BundleError, "refined for the form 'decoupled', found 'merged'", {"form": "merged"}),
        (BundleError, "refined for the weighting 'uniform', found 'prior'", {"weighting": "prior", "map_rank": 3}),
        (ConfigError, "budget of 7 entries does not hold 4 of a new task beside 4", {"budget": 7, "map_rank": 3}),
        (ConfigError, f"a map of width {width} has at most that rank, found map_rank 999", {"map_rank": 999}),
    ]
    for error, message, changes in refused:
        before = {} if changes.get("map_rank") == 999 else {"previous": first, "anchors": anchors}
        with pytest.raises(error, match=message):
            learn(llava, tmp_path, examples, "shapes", **before, **changes)


@pytest.mark.parametrize("map_rank", [0, 2])
def test_untrained_memory_is_no_memory(llava: Backbone, tmp_path: Path, examples: list[Example], map_rank: int) -> None:
    bundle = learn(llava, tmp_path, examples, steps=0, activation="prompt", map_rank=map_rank).bundle
    scorer = Scorer(llava)
    keys = torch.cat([llava.retrieval_keys(llava.encode_example(e)) for e in examples])
    losses = [BundledModel(scorer, each).mean_loss(examples, keys) for each in (bundle, None)]
    assert losses[0] == losses[1]


def candidate(activation: Activation, accuracy: float | None, loss: float | None = 1.0, layer: int = 0) -> Candidate:
    memory: Any = None
    return Candidate(activation, layer, 0.1, memory, (), accuracy, loss)


@pytest.mark.parametrize(
    ("accuracies", "chosen"),
    [
        ((0.5, 0.5, 0.5), 2),
        ((0.9, 0.875, 0.8), 1),  # one standard error of 0.9 on 100 questions: 0.03
        ((0.9, 0.5, 0.871), 2),
        ((0.9, 0.5, 0.869), 0),
        ((0.5, 0.9, 0.1), 1),
        ((1.0, 0.99, 1.0), 2),
        ((1.0, 0.99, 0.99), 0),  # no error at 1
    ],
)
def test_the_latest_within_a_standard_error_of_the_best(accuracies: tuple[float, ...], chosen: int) -> None:
    candidates = [candidate(*each) for each in zip(ACTIVATIONS, accuracies, strict=True)]
    assert latest_good(candidates, 100) is candidates[chosen]


def test_the_least_loss_of_an_activation_stands_for_it() -> None:
    made = [
        candidate("prompt", 0.9, 2.0),
        candidate("prompt", 0.7, 3.0),
        candidate("text", 0.4, 3.0),
        candidate("text", 0.88, 2.0),
        candidate("text", 0.9, 2.0),
    ]
    assert latest_good(made, 100) is made[3]
    assert latest_good(made[:2], 100) is made[0]
    alone = candidate("prompt", None, None)
    assert latest_good([alone], 0) is alone


@pytest.mark.parametrize(("accuracy", "chosen"), [(0.88, 2), (0.8, 1)])
def test_late_layers_count_as_later(accuracy: float, chosen: int) -> None:
    made = [candidate("text", 0.9), candidate("generation", 0.89), candidate("generation", accuracy, layer=2)]
    assert latest_good(made, 100) is made[chosen]


def test_memory_from_a_layer_on_has_no_effect_before_it(
    llava: Backbone, tmp_path: Path, examples: list[Example], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is chosen, because no accuracy is better than another."""
    monkeypatch.setattr(Scorer, "accuracy", lambda *args: 0.5)
    result = learn(llava, tmp_path, examples, activation="search", map_rank=2)
    bundle, layer = result.bundle, result.report["activation"]["first_layer"]
    assert bundle.gate is not None
    assert bundle.map_out is not None
    assert layer == bundle.gate.layers[-1] > 0
    assert result.report["activation"]["chosen"] == "generation"
    for trained in (bundle.payload_values, bundle.map_out):
        acts = trained.flatten(1).any(dim=1).tolist()  # [L]
        assert acts == [number >= layer for number in range(len(acts))]


def test_activation_and_learning_rate_are_searched_together(
    llava: Backbone, tmp_path: Path, examples: list[Example]
) -> None:
    result = learn(llava, tmp_path, examples, activation="search", learning_rate=None)
    trials = result.report["activation"]["search"]
    latest = {trial["learning_rate"]: trial["nll"] for trial in trials if trial["first_layer"]}
    assert set(latest) == set(LEARNING_RATES)
    rate = min(latest, key=lambda each: latest[each])
    earlier = [(t["activation"], t["learning_rate"]) for t in trials if not t["first_layer"]]
    assert {("prompt", rate), ("text", rate), ("generation", rate)} <= set(earlier)
    assert result.bundle.metadata.settings["learning_rate"] == rate


@pytest.mark.parametrize(
    ("losses", "tried"),
    [
        ([2.0, 1.0, 16.6, 0.9, 0.8], [("prompt", 0.1), ("text", 0.1), ("text", 0.3)]),
        ([2.0, 1.0, 0.9, 0.8], [("prompt", 0.3), ("text", 0.3)]),
        ([1.0, 2.0, 1.1, 1.2], [("prompt", 0.1), ("text", 0.1)]),
        ([2.0, 1.0, 16.6, 1.8, 17.0, 2.0], [("prompt", 0.1), ("prompt", 0.3), ("text", 0.1), ("text", 0.3)]),
    ],
)
def test_an_earlier_activation_worse_than_a_later_one_gets_the_lower_rate_too(
    llava: Backbone,
    tmp_path: Path,
    examples: list[Example],
    monkeypatch: pytest.MonkeyPatch,
    losses: list[float],
    tried: list[tuple[str, float]],
) -> None:
    """`losses` are made up: of the generation with 0.1 and 0.3, then of what is trained after it.

    The generation in all layers is a little better than in the later ones.
    """
    losses = [*losses[:2], min(losses[:2]) - 0.01, *losses[2:]]
    measured, made_up = Scorer.mean_loss, iter(losses)
    monkeypatch.setattr(Scorer, "mean_loss", lambda *args: next(made_up, None) or measured(*args))
    result = learn(llava, tmp_path, examples, activation="search", learning_rate=None)
    trials = [t for t in result.report["activation"]["search"] if t["activation"] != "generation"]
    assert sorted((t["activation"], t["learning_rate"]) for t in trials) == tried
    assert {t["nll"] for t in trials} == set(losses[3:])


def test_nothing_earlier_is_tried_once_all_answers_are_right(
    llava: Backbone, tmp_path: Path, examples: list[Example], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Scorer, "accuracy", lambda *args: 1.0)
    result = learn(llava, tmp_path, examples, activation="search")
    layer = result.bundle.gate and result.bundle.gate.layers[-1]
    assert result.report["activation"] == {"chosen": "generation", "first_layer": layer, "search": []}


@pytest.mark.parametrize(("patience", "rates"), [(3, [0.1]), (None, [0.1, 0.3])])
def test_with_a_patience_a_rate_that_cannot_be_beaten_is_the_last(
    llava: Backbone,
    tmp_path: Path,
    examples: list[Example],
    monkeypatch: pytest.MonkeyPatch,
    patience: int | None,
    rates: list[float],
) -> None:
    trained: list[float] = []
    measured = candidates.train

    def train(training: Any, *arguments: Any) -> Memory:
        trained.append(training.learning_rate)
        return measured(training, *arguments)

    monkeypatch.setattr(candidates, "train", train)
    monkeypatch.setattr(Scorer, "accuracy", lambda *args: 1.0)
    learn(llava, tmp_path, examples, activation="search", learning_rate=None, patience=patience)
    assert trained == rates


def test_trainings_that_diverge_are_left_out(
    llava: Backbone, tmp_path: Path, examples: list[Example], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(candidates, "LEARNING_RATES", (1e30, 0.3))
    result = learn(llava, tmp_path, examples, activation="search", learning_rate=None)
    assert {trial["learning_rate"] for trial in result.report["activation"]["search"]} == {0.3}
    monkeypatch.setattr(candidates, "LEARNING_RATES", (1e30,))
    with pytest.raises((TaskDataError, BundleError)):
        learn(llava, tmp_path / "none", examples, activation="search", learning_rate=None)

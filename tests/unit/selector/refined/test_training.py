"""A refined step is Muon on the mean loss; a training resumes, and ends early with its best state."""

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from inducekv_vllm.bundle import EntryRecord
from inducekv_vllm.errors import ConfigError
from selector.backbone.extraction import extract, extract_keys
from selector.backbone.injection import TensorMemory
from selector.backbone.model import Backbone
from selector.backbone.scoring import Questions, Scorer
from selector.data.examples import Example
from selector.refined.muon import Muon
from selector.refined.settings import RefinedSettings
from selector.refined.training import (
    CALIBRATION_RATE,
    LEAST_GAIN,
    Training,
    TrainingProblem,
    is_done,
    log_prior,
    reachable,
    train,
)
from selector.runtime.checkpoint import Checkpoint

LEARNING_RATE = 0.3
EXACT = RefinedSettings(form="merged", steps=4, batch_size=3, precision="float32")


@pytest.fixture(scope="module")
def problem(llava: Backbone, examples: list[Example]) -> TrainingProblem:
    """Two entries and eight questions, which may retrieve both."""
    entries = extract(llava, examples[2:4], 2)
    questions = Questions(examples[:8], extract_keys(llava, examples[:8]))
    memory = TensorMemory(
        entries.keys,
        entries.payload_keys,
        entries.payload_values,
        torch.tensor(0.07),
        torch.full((llava.num_layers,), 0.5),
        torch.zeros(llava.num_layers),
        "prior",
    )
    return TrainingProblem(Scorer(llava), memory, questions, torch.zeros(8, 2), questions, False)


def checkpoint(folder: Path) -> Checkpoint:
    return Checkpoint.open(folder, {})[0]


def changed(settings: RefinedSettings, **values: Any) -> RefinedSettings:
    return settings.model_copy(update=values)


def trained(problem: TrainingProblem, settings: RefinedSettings, folder: Path) -> Training:
    training = Training(problem, settings, LEARNING_RATE)
    train(training, checkpoint(folder), "one")
    return training


def stepped(problem: TrainingProblem, settings: RefinedSettings = EXACT) -> Training:
    """After one step."""
    training = Training(problem, settings, LEARNING_RATE)
    training.take_step()
    return training


def test_the_loss_falls_and_only_what_may_change_does(problem: TrainingProblem, tmp_path: Path) -> None:
    training = trained(problem, changed(EXACT, steps=20, batch_size=8), tmp_path / "progress")
    assert training.history[-1].current < training.history[0].current - 1
    refined = training.memory()
    for name in ("payload_keys", "payload_values"):
        assert not torch.equal(getattr(refined, name), getattr(problem.memory, name))
    assert torch.equal(refined.retrieval_keys, problem.memory.retrieval_keys)
    assert torch.equal(refined.layer_bias, problem.memory.layer_bias)
    assert refined.temperature.item() == pytest.approx(0.07, rel=1e-6)


def test_the_calibration_is_trained_where_it_is_asked_for(problem: TrainingProblem) -> None:
    refined = stepped(replace(problem, calibrate=True)).memory()
    assert refined.layer_bias.all()
    assert refined.temperature.item() != pytest.approx(0.07, rel=1e-6)
    assert (refined.value_gates != 0.5).all()


def test_a_step_is_muons_on_the_mean_loss(problem: TrainingProblem) -> None:
    """Written out again: plain concatenated attention, clipped gradients, and `Muon`, which has its own tests."""
    training = Training(problem, changed(EXACT, batch_size=8), LEARNING_RATE)
    keys = problem.memory.payload_keys.clone().requires_grad_()
    values = problem.memory.payload_values.clone().requires_grad_()
    muon = Muon([keys, values], lr=LEARNING_RATE)
    for number in range(3):
        memory = replace(problem.memory, payload_keys=keys, payload_values=values)
        questions = problem.training
        loss = problem.scorer.losses(questions.examples, memory, memory.terms(questions.keys)).mean()
        muon.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_([keys, values], 1.0)
        muon.param_groups[0]["lr"] = LEARNING_RATE * 0.5 * (1 + math.cos(math.pi * number / 4))
        muon.step()
        training.take_step()
        assert training.history[-1].current == pytest.approx(loss.item(), rel=1e-5)
    assert torch.allclose(training.parameters["payload_keys"], keys, atol=2e-4)
    assert torch.allclose(training.parameters["payload_values"], values, atol=2e-4)


def test_the_calibration_takes_torchs_adamw(problem: TrainingProblem) -> None:
    bias = torch.zeros(problem.scorer.backbone.num_layers, requires_grad=True)
    adamw = torch.optim.AdamW([bias], lr=CALIBRATION_RATE, weight_decay=0.0)
    questions = problem.training
    memory = replace(problem.memory, layer_bias=bias)
    problem.scorer.losses(questions.examples, memory, memory.terms(questions.keys)).mean().backward()
    adamw.step()
    training = stepped(replace(problem, calibrate=True), changed(EXACT, batch_size=8))
    assert torch.allclose(training.parameters["layer_bias"], bias, atol=1e-5)


@pytest.mark.parametrize("calibrate", [False, True])
def test_a_resumed_run_ends_as_one_that_was_not_stopped(
    problem: TrainingProblem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calibrate: bool
) -> None:
    """Checked after each step; stopped after the second of four."""
    monkeypatch.setattr("selector.refined.training.STEPS_BETWEEN_CHECKS", 1)
    problem = replace(problem, calibrate=calibrate)
    whole = trained(problem, EXACT, tmp_path / "whole")

    def stop(training: Training) -> None:
        if training.step == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(Training(problem, EXACT, LEARNING_RATE), checkpoint(tmp_path / "part"), "one", stop)
    resumed = trained(problem, EXACT, tmp_path / "part")
    assert (resumed.history, resumed.checks) == (whole.history, whole.checks)
    for name, parameter in whole.parameters.items():
        assert torch.equal(resumed.parameters[name], parameter)
        assert torch.equal(resumed.best[name], whole.best[name])


def test_a_training_without_a_step_resumes_too(problem: TrainingProblem, tmp_path: Path) -> None:
    """Of `--steps 0` the losses are compared, and kept."""
    settings, folder = changed(EXACT, steps=0), checkpoint(tmp_path / "progress")
    first, again = (Training(problem, settings, LEARNING_RATE) for _ in range(2))
    losses = first.compare(0, folder, "one")
    train(again, folder, "one")
    assert torch.equal(again.compare(0, folder, "one"), losses)


@pytest.mark.parametrize(
    ("losses", "patience", "done"),
    [
        ([], 2, False),
        ([2.0, 1.0, 0.5], 2, False),
        ([2.0, 1.0, 1.1], 2, False),
        ([2.0, 1.0, 1.1, 1.0 - LEAST_GAIN / 2], 2, True),
        ([2.0, 1.0, 1.1, 0.9], 2, False),
        ([2.0, 1.0, 0.994, 0.988], 2, False),  # small gains add up
        ([2.0, 1.0, 1.1, 1.2], None, False),
        ([2.0, LEAST_GAIN], 2, True),  # nothing is left to gain
        ([math.nan, 2.0, 1.0], 3, False),
    ],
)
def test_when_a_training_is_done(losses: list[float], patience: int | None, done: bool) -> None:
    assert is_done(losses, patience) is done


def test_a_training_that_gains_nothing_ends_with_its_best_state(
    problem: TrainingProblem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The validation losses are made up: the second check is the best of five, one after each step."""
    monkeypatch.setattr("selector.refined.training.STEPS_BETWEEN_CHECKS", 1)
    losses = iter([2.0, 1.0, 1.5, 1.4, 1.3, 0.0])
    monkeypatch.setattr(Scorer, "mean_loss", lambda *_: next(losses))
    states: list[Tensor] = []
    training = Training(problem, changed(EXACT, steps=9, patience=3), LEARNING_RATE)

    def keep(training: Training) -> None:
        states.append(training.parameters["payload_values"].detach().clone())

    memory = train(training, checkpoint(tmp_path / "progress"), "one", keep)
    assert (training.step, training.checks) == (5, [2.0, 1.0, 1.5, 1.4, 1.3])
    assert torch.equal(memory.payload_values, states[1])


@pytest.mark.parametrize(
    ("kept", "added", "progress", "message"),
    [
        ("nothing", {}, {}, "payload_keys"),
        ("nothing", {"parameters.payload_keys": torch.zeros(7)}, {}, "payload_keys must be"),
        ("nothing", {"parameters.stray": torch.zeros(1)}, {}, "payload_keys"),
        ("parameters", {}, None, "muon's state"),
        ("", {}, {}, "'history'"),
        ("", {}, {"history": [{"colour": 1}], "step": 1}, "colour"),
        ("", {}, {"history": [], "step": "many"}, "many"),
    ],
)
def test_damaged_progress_is_named(
    problem: TrainingProblem,
    tmp_path: Path,
    kept: str,
    added: dict[str, Tensor],
    progress: dict[str, Any] | None,
    message: str,
) -> None:
    """A good file with only the tensors whose names begin with `kept`, some `added`, and other progress if not None."""
    folder = checkpoint(tmp_path / "progress")
    stepped(problem).save(folder, "one")
    tensors, good_progress = folder.read("one")
    saved = {name: tensor for name, tensor in tensors.items() if name.startswith(kept)}
    folder.write("one", saved | added, good_progress if progress is None else progress)
    with pytest.raises(ConfigError, match=rf"one\.safetensors: the progress is damaged.*{message}"):
        train(Training(problem, EXACT, LEARNING_RATE), folder, "one")


def test_a_question_is_never_answered_with_the_entry_that_was_made_of_it(problem: TrainingProblem) -> None:
    entries = tuple(EntryRecord(id=digest, task="a", source_digest=digest) for digest in ("x", "y"))
    asked: list[Any] = [SimpleNamespace(source_digest=digest) for digest in ("x", "z")]
    prior = log_prior(asked, entries)
    assert prior.tolist() == [[-math.inf, 0], [0, 0]]
    assert log_prior(asked[:1], entries[:1]).tolist() == [[0]]  # alone, it stays
    used, left = reachable(problem.memory, prior[:1])
    assert torch.equal(used.payload_keys, problem.memory.payload_keys[:, 1:])
    assert left.tolist() == [[0]]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"form": "merged", "weighting": "uniform"}, "merged memory acts on the whole prompt .* weighting 'uniform'"),
        ({"form": "merged", "activation": "text"}, "and the activation 'text'"),
        ({"form": "merged", "map_rank": 2}, "merged memory has no maps of the attention output, found map_rank 2"),
    ],
)
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RefinedSettings(**wrong)

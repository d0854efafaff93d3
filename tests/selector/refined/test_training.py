"""Training of the refined recipe: what changes, what does not, and resuming."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from inducekv_vllm.errors import ConfigError, TaskDataError
from selector.backbone.extraction import extract, extract_keys
from selector.backbone.injection import Memory
from selector.backbone.model import Backbone
from selector.backbone.scoring import Questions, Scorer
from selector.data.examples import Example
from selector.refined.early_stopping import LEAST_GAIN, is_done
from selector.refined.losses import restrict, subset_of_step
from selector.refined.muon import Muon
from selector.refined.settings import RefinedSettings
from selector.refined.training import CALIBRATION_RATE, Training, train
from selector.refined.training_problem import RoutedQuestions, Teacher, TrainingProblem
from selector.runtime.checkpoint import Checkpoint

LEARNING_RATE = 0.3
EXACT = RefinedSettings(form="merged", steps=4, batch_size=3, precision="float32")


@pytest.fixture(scope="module")
def problem(llava: Backbone, examples: list[Example]) -> TrainingProblem:
    """Four entries, eight questions: the last two entries are the new task's, and may be trained."""
    entries = extract(llava, examples[:4], 2)
    questions = Questions(examples[:8], extract_keys(llava, examples[:8]))
    memory = Memory(
        entries.keys,
        entries.payload_keys,
        entries.payload_values,
        torch.tensor(0.07),
        torch.full((llava.num_layers,), 0.5),
        torch.zeros(llava.num_layers),
        "prior",
    )
    prior = torch.full((8, 4), -math.inf)
    prior[:, 2:] = 0.0
    trainable, nested = torch.tensor([False, False, True, True]), torch.ones(1, 4, dtype=torch.bool)
    return TrainingProblem(
        Scorer(llava), memory, trainable, RoutedQuestions(questions, prior), None, None, False, nested
    )


@pytest.fixture
def anchored(problem: TrainingProblem) -> TrainingProblem:
    """The first two entries are an earlier task's; a memory of theirs alone is the teacher, and they may change too."""
    prior = torch.full((8, 4), -math.inf)
    prior[:, :2] = 0.0
    return replace(
        problem,
        trainable=torch.ones(4, dtype=torch.bool),
        anchors=RoutedQuestions(problem.current.questions, prior),
        teacher=Teacher(problem.memory, prior),
    )


def of_new_task(memory: Memory, **changed: Tensor) -> Memory:
    """The last two entries alone, with what is changed."""
    own = {"payload_keys": memory.payload_keys[:, 2:], "payload_values": memory.payload_values[:, 2:]}
    return replace(memory, retrieval_keys=memory.retrieval_keys[2:], **(own | changed))


def checkpoint(folder: Path) -> Checkpoint:
    return Checkpoint.open(folder, {})[0]


def changed(settings: RefinedSettings, **values: Any) -> RefinedSettings:
    return settings.model_copy(update=values)


def trained(problem: TrainingProblem, settings: RefinedSettings, folder: Path, rate: float = LEARNING_RATE) -> Training:
    training = Training(problem, settings, rate)
    train(training, checkpoint(folder), "one")
    return training


def stepped(problem: TrainingProblem, settings: RefinedSettings = EXACT, first: int = 0) -> Training:
    """After one step, number `first`."""
    training = Training(problem, settings, LEARNING_RATE)
    training.step = first
    training.take_step()
    return training


def test_the_loss_falls_and_only_what_may_change_does(problem: TrainingProblem, tmp_path: Path) -> None:
    training = trained(problem, changed(EXACT, steps=20, batch_size=8), tmp_path / "progress")
    assert training.history[-1].current < training.history[0].current - 1
    refined = training.memory()
    for name in ("payload_keys", "payload_values"):
        before, after = getattr(problem.memory, name), getattr(refined, name)
        assert torch.equal(after[:, :2], before[:, :2])
        assert not torch.equal(after[:, 2:], before[:, 2:])
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
    keys = problem.memory.payload_keys[:, 2:].clone().requires_grad_()
    values = problem.memory.payload_values[:, 2:].clone().requires_grad_()
    muon = Muon([keys, values], lr=LEARNING_RATE)
    for number in range(3):
        memory = of_new_task(problem.memory, payload_keys=keys, payload_values=values)
        questions = problem.current.questions
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
    questions = problem.current.questions
    memory = of_new_task(problem.memory, layer_bias=bias)
    problem.scorer.losses(questions.examples, memory, memory.terms(questions.keys)).mean().backward()
    adamw.step()
    training = stepped(replace(problem, calibrate=True), changed(EXACT, batch_size=8))
    assert torch.allclose(training.parameters["layer_bias"], bias, atol=1e-5)


def test_a_teacher_that_is_the_memory_itself_teaches_nothing_yet(anchored: TrainingProblem) -> None:
    record = stepped(anchored).history[0]
    assert record.distillation == pytest.approx(0, abs=1e-5)
    assert record.anchors > 0


def test_distillation_pulls_the_answers_towards_the_teachers(anchored: TrainingProblem, tmp_path: Path) -> None:
    """Entries that were disturbed come back to what they answered."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(anchored.memory.payload_values.shape, generator=generator)
    disturbed = replace(anchored.memory, payload_values=anchored.memory.payload_values + noise)
    settings = changed(EXACT, steps=8, batch_size=8, distillation=100.0)
    history = trained(replace(anchored, memory=disturbed), settings, tmp_path / "progress").history
    assert history[-1].distillation < history[0].distillation / 2


@pytest.mark.parametrize("calibrate", [False, True])
def test_a_resumed_run_ends_as_one_that_was_not_stopped(
    anchored: TrainingProblem, tmp_path: Path, calibrate: bool
) -> None:
    """Stopped by `until`; resumed from the file, and by the same object under another name."""
    problem = replace(anchored, calibrate=calibrate)
    whole = trained(problem, EXACT, tmp_path / "a")
    part = Training(problem, EXACT, LEARNING_RATE)
    train(part, checkpoint(tmp_path / "b"), "one", until=2)
    assert (part.step, whole.step) == (2, 4)
    resumed = trained(problem, EXACT, tmp_path / "b")
    train(part, checkpoint(tmp_path / "c"), "other")
    for other in (resumed, part):
        assert other.history == whole.history
        for name, parameter in whole.parameters.items():
            assert torch.equal(other.parameters[name], parameter)


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


def test_a_training_that_gains_nothing_ends_with_its_best_state_resumed_or_not(
    problem: TrainingProblem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The validation losses are made up: the second check is the best of five, one after each step."""
    monkeypatch.setattr("selector.refined.training.STEPS_BETWEEN_SAVES", 1)
    settings = changed(EXACT, steps=9, patience=3)
    losses = [2.0, 1.0, 1.5, 1.4, 1.3, 0.0]
    best = Training(problem, settings, LEARNING_RATE)
    train(best, checkpoint(tmp_path / "best"), "one", until=2)

    def ended(folder: Path, stops: tuple[int | None, ...]) -> Training:
        checks = iter(losses)
        for until in stops:
            training = Training(problem, settings, LEARNING_RATE)
            train(training, checkpoint(folder), "one", until=until, validation_loss=lambda memory: next(checks))
        return training

    for number, stops in enumerate([(None,), (1, 4, None)]):
        training = ended(tmp_path / str(number), stops)
        assert (training.step, training.checks) == (5, losses[:5])
        for name in ("payload_keys", "payload_values"):
            assert torch.equal(getattr(training.memory(), name), getattr(best.memory(), name))


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
    train(Training(problem, EXACT, LEARNING_RATE), folder, "one", until=1)
    tensors, good_progress = folder.read("one")
    saved = {name: tensor for name, tensor in tensors.items() if name.startswith(kept)}
    folder.write("one", saved | added, good_progress if progress is None else progress)
    with pytest.raises(ConfigError, match=rf"one\.safetensors: the progress is damaged.*{message}"):
        train(Training(problem, EXACT, LEARNING_RATE), folder, "one")


def test_bfloat16_products_change_the_loss_a_little(problem: TrainingProblem) -> None:
    exact = stepped(problem).history[0].current
    rounded = stepped(problem, changed(EXACT, precision="bfloat16")).history[0].current
    assert rounded != exact
    assert rounded == pytest.approx(exact, rel=0.02)


def test_a_loss_that_is_not_a_number_ends_the_run(problem: TrainingProblem) -> None:
    broken = replace(problem.memory, payload_values=problem.memory.payload_values * float("nan"))
    with pytest.raises(TaskDataError, match="not a finite number"):
        stepped(replace(problem, memory=broken))


@pytest.mark.parametrize(
    "wrong", [{"steps": -1}, {"batch_size": 0}, {"learning_rate": 0.0}, {"beta": math.inf}, {"distillation": -1.0}]
)
def test_settings_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong)).replace("_", "[_ ]")):
        RefinedSettings(**wrong)


def test_every_second_step_uses_all_entries_and_the_others_ever_fewer() -> None:
    assert [subset_of_step(number, 3) for number in range(16)] == [0, 1, 0, 2, 0, 1, 0, 2, 0, 1, 0, 2, 0, 1, 0, 2]
    assert [subset_of_step(number, 1) for number in range(4)] == [0] * 4


def test_a_step_on_half_of_a_quota_leaves_the_other_half_alone(problem: TrainingProblem) -> None:
    halved = replace(problem, nested=torch.tensor([[True] * 4, [True, True, True, False]]))
    for number, entries in ((0, [2, 3]), (1, [2])):
        refined = stepped(halved, first=number).memory()
        moved = (refined.payload_values != halved.memory.payload_values).flatten(2).any(dim=2).any(dim=0)
        assert moved.nonzero()[:, 0].tolist() == entries


def test_a_question_that_would_be_left_without_entries_keeps_its_own(problem: TrainingProblem) -> None:
    prior = torch.tensor([[-math.inf, 0, 0], [-math.inf, -math.inf, 0]])
    limited = restrict(replace(problem.current, log_prior=prior), torch.tensor([True, True, False]))
    assert limited.log_prior.tolist() == [[-math.inf, 0, -math.inf], [-math.inf, -math.inf, 0]]

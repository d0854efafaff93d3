"""Refinement: what it trains, what it leaves alone, and that it can be stopped anywhere."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from inducekv_vllm.errors import ConfigError, TaskDataError
from selector.backbone.extraction import extract
from selector.backbone.injection import Memory
from selector.backbone.model import Backbone
from selector.backbone.scoring import Questions, Scorer
from selector.data.examples import read_task
from selector.refined.muon import muon_step
from selector.refined.training import (
    CALIBRATION_RATE,
    Lesson,
    RefinementSettings,
    RefinementState,
    Routed,
    Teacher,
    depth,
    refine,
    step,
    within,
)
from selector.runtime.checkpoint import Checkpoint

EXACT = RefinementSettings(steps=4, batch_size=3, learning_rate=0.3, precision="float32")


@pytest.fixture(scope="module")
def lesson(llava: Backbone, task_file: Path) -> Lesson:
    """Four entries of eight examples: the last two are the arriving task's, and may be trained."""
    examples = read_task(task_file)[:8]
    entries = extract(llava, examples[:4], 2)
    keys = extract(llava, examples, 2).keys
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
    trainable = torch.tensor([False, False, True, True])
    current = Routed(Questions(examples, keys), prior)
    return Lesson(Scorer(llava), memory, trainable, current, None, None, False, torch.ones(1, 4, dtype=torch.bool))


@pytest.fixture
def anchored(lesson: Lesson) -> Lesson:
    """The first two entries are an earlier task's; a memory of theirs alone is the teacher, and they may change too."""
    prior = torch.full((8, 4), -math.inf)
    prior[:, :2] = 0.0
    return replace(
        lesson,
        trainable=torch.ones(4, dtype=torch.bool),
        anchors=Routed(lesson.current.questions, prior),
        teacher=Teacher(lesson.memory, prior),
    )


def of_arriving_task(memory: Memory, **changed: torch.Tensor) -> Memory:
    """The last two entries alone, with what is changed."""
    own = {"payload_keys": memory.payload_keys[:, 2:], "payload_values": memory.payload_values[:, 2:]}
    return replace(memory, retrieval_keys=memory.retrieval_keys[2:], **(own | changed))


def checkpoint(folder: Path) -> Checkpoint:
    return Checkpoint.open(folder, {})[0]


def test_the_loss_falls_and_only_what_may_change_does(lesson: Lesson, tmp_path: Path) -> None:
    settings = replace(EXACT, steps=20, batch_size=8)
    state = refine(lesson, settings, checkpoint(tmp_path / "progress"), "one")
    assert state.history[-1].current < state.history[0].current - 1
    refined = state.memory(lesson)
    for name in ("payload_keys", "payload_values"):
        before, after = getattr(lesson.memory, name), getattr(refined, name)
        assert torch.equal(after[:, :2], before[:, :2])
        assert not torch.equal(after[:, 2:], before[:, 2:])
    assert torch.equal(refined.layer_bias, lesson.memory.layer_bias)
    assert refined.temperature.item() == pytest.approx(0.07, rel=1e-6)


def test_the_calibration_is_trained_where_it_is_asked_for(lesson: Lesson) -> None:
    calibrated = replace(lesson, calibrate=True)
    refined = step(calibrated, EXACT, RefinementState.initial(calibrated)).memory(calibrated)
    assert refined.layer_bias.all()
    assert refined.temperature.item() != pytest.approx(0.07, rel=1e-6)
    assert (refined.value_gates != 0.5).all()


def test_a_step_is_muons_on_the_mean_loss(lesson: Lesson) -> None:
    """Written out again: plain concatenated attention, clipped gradients, and `muon_step`, which has its own tests."""
    settings = replace(EXACT, batch_size=8)
    keys = lesson.memory.payload_keys[:, 2:].clone().requires_grad_()
    values = lesson.memory.payload_values[:, 2:].clone().requires_grad_()
    momenta = [torch.zeros_like(keys), torch.zeros_like(values)]
    state = RefinementState.initial(lesson)
    for number in range(3):
        memory = of_arriving_task(lesson.memory, payload_keys=keys, payload_values=values)
        questions = lesson.current.questions
        loss = lesson.scorer.losses(questions.examples, memory, memory.terms(questions.keys)).mean()
        keys.grad = values.grad = None
        loss.backward()
        torch.nn.utils.clip_grad_norm_([keys, values], 1.0)
        rate = settings.learning_rate * 0.5 * (1 + math.cos(math.pi * number / 4))
        for place, leaf in enumerate((keys, values)):
            assert leaf.grad is not None
            leaf.data, momenta[place] = muon_step(leaf.data, leaf.grad, momenta[place], rate)
        state = step(lesson, settings, state)
        assert state.history[-1].current == pytest.approx(loss.item(), rel=1e-5)
    assert torch.allclose(state.values["payload_keys"], keys, atol=2e-4)
    assert torch.allclose(state.values["payload_values"], values, atol=2e-4)


def test_the_calibration_takes_torchs_adamw(lesson: Lesson) -> None:
    calibrated = replace(lesson, calibrate=True)
    bias = torch.zeros(lesson.scorer.backbone.num_layers, requires_grad=True)
    adamw = torch.optim.AdamW([bias], lr=CALIBRATION_RATE, weight_decay=0.0)
    settings = replace(EXACT, batch_size=8)
    questions = lesson.current.questions
    memory = of_arriving_task(lesson.memory, layer_bias=bias)
    lesson.scorer.losses(questions.examples, memory, memory.terms(questions.keys)).mean().backward()
    adamw.step()
    state = step(calibrated, settings, RefinementState.initial(calibrated))
    assert torch.allclose(state.values["layer_bias"], bias, atol=1e-5)


def test_a_teacher_that_is_the_memory_itself_teaches_nothing_yet(anchored: Lesson) -> None:
    measured = step(anchored, EXACT, RefinementState.initial(anchored)).history[0]
    assert measured.distillation == pytest.approx(0, abs=1e-5)
    assert measured.anchors is not None
    assert measured.anchors > 0


def test_distillation_pulls_the_answers_towards_the_teachers(anchored: Lesson, tmp_path: Path) -> None:
    """Entries that were disturbed come back to what they answered."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(anchored.memory.payload_values.shape, generator=generator)
    disturbed = replace(anchored.memory, payload_values=anchored.memory.payload_values + noise)
    settings = replace(EXACT, steps=30, batch_size=8, distillation=100.0, learning_rate=0.15)
    state = refine(replace(anchored, memory=disturbed), settings, checkpoint(tmp_path / "progress"), "one")
    first, last = state.history[0].distillation, state.history[-1].distillation
    assert first is not None
    assert last is not None
    assert last < first / 2


def test_stopped_and_gone_on_is_the_same_as_in_one_go(anchored: Lesson, tmp_path: Path) -> None:
    """Stopped by `until`, and by a kill between two saves; gone on from the file, and from a state handed over."""
    whole = refine(anchored, EXACT, checkpoint(tmp_path / "a"), "one")
    part = refine(anchored, EXACT, checkpoint(tmp_path / "b"), "one", until=2)
    assert (part.step, whole.step) == (2, 4)
    from_file = refine(anchored, EXACT, checkpoint(tmp_path / "b"), "one")
    from_state = refine(anchored, EXACT, checkpoint(tmp_path / "c"), "other", start=part)
    for other in (from_file, from_state):
        assert other.history == whole.history
        for name, value in whole.values.items():
            assert torch.equal(other.values[name], value)


@pytest.mark.parametrize(
    ("tensors", "progress", "said"),
    [
        ({}, {}, "expected the tensors"),
        ({"values.phi": torch.zeros(7)}, {}, "expected the tensors"),
        ({"stray": torch.zeros(1)}, {}, "expected the tensors"),
        (None, {}, "'history'"),
        (None, {"history": [{"colour": 1}], "step": 1}, "colour"),
        (None, {"history": [], "step": "many"}, "many"),
    ],
)
def test_damaged_progress_is_named(
    lesson: Lesson, tmp_path: Path, tensors: dict[str, torch.Tensor] | None, progress: dict[str, Any], said: str
) -> None:
    """Of `tensors` what a run saves where nothing else is said."""
    kept = checkpoint(tmp_path / "progress")
    refine(lesson, EXACT, kept, "one", until=1)
    good = kept.read("one")
    assert good is not None
    kept.write("one", good[0] if tensors is None else tensors, progress)
    with pytest.raises(ConfigError, match=rf"one\.safetensors: the progress is damaged.*{said}"):
        refine(lesson, EXACT, kept, "one")


def test_bfloat16_products_change_the_loss_a_little(lesson: Lesson) -> None:
    state = RefinementState.initial(lesson)
    exact = step(lesson, EXACT, state).history[0].current
    rounded = step(lesson, replace(EXACT, precision="bfloat16"), state).history[0].current
    assert rounded != exact
    assert rounded == pytest.approx(exact, rel=0.02)


def test_a_loss_that_is_not_a_number_ends_the_run(lesson: Lesson) -> None:
    broken = replace(lesson.memory, payload_values=lesson.memory.payload_values * float("nan"))
    with pytest.raises(TaskDataError, match="not a finite number"):
        step(replace(lesson, memory=broken), EXACT, RefinementState.initial(replace(lesson, memory=broken)))


@pytest.mark.parametrize(
    "wrong", [{"steps": -1}, {"batch_size": 0}, {"learning_rate": 0.0}, {"beta": math.inf}, {"distillation": -1.0}]
)
def test_settings_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong)).replace("_", "[_ ]")):
        RefinementSettings(**wrong)


def test_every_second_step_uses_all_entries_and_the_others_ever_fewer() -> None:
    assert [depth(number, 3) for number in range(16)] == [0, 1, 0, 2, 0, 1, 0, 2, 0, 1, 0, 2, 0, 1, 0, 2]
    assert [depth(number, 1) for number in range(4)] == [0] * 4


def test_a_step_on_half_of_a_quota_leaves_the_other_half_alone(lesson: Lesson) -> None:
    halved = replace(lesson, nested=torch.tensor([[True] * 4, [True, True, True, False]]))
    start = RefinementState.initial(halved)
    for number, trained in ((0, [2, 3]), (1, [2])):
        refined = step(halved, EXACT, replace(start, step=number)).memory(halved)
        changed = (refined.payload_values != halved.memory.payload_values).flatten(2).any(dim=2).any(dim=0)
        assert changed.nonzero()[:, 0].tolist() == trained


def test_a_question_that_would_be_left_without_entries_keeps_its_own(lesson: Lesson) -> None:
    prior = torch.tensor([[-math.inf, 0, 0], [-math.inf, -math.inf, 0]])
    limited = within(replace(lesson.current, log_prior=prior), torch.tensor([True, True, False]))
    assert limited.log_prior.tolist() == [[-math.inf, 0, -math.inf], [-math.inf, -math.inf, 0]]

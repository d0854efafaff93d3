"""Preconditioned payloads: what a step moves reaches the residual stream alike in all directions."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from selector.backbone.loading import output_projection
from selector.backbone.model import Backbone
from selector.backbone.scoring import Questions, Scorer
from selector.data.examples import Example
from selector.refined import candidates
from selector.refined.entries import initial_entries
from selector.refined.muon import Muon
from selector.refined.preconditioner import RIDGE, Preconditioner, whitening
from selector.refined.settings import RefinedSettings
from selector.refined.training import MAP_RATE, WARM_UP, Training, TrainingProblem, clipped, step_loss, train
from selector.runtime.checkpoint import Checkpoint
from selector.update.inputs import TaskInputs

SETTINGS = RefinedSettings(payload_tokens=3, map_rank=2, steps=40, batch_size=4, precision="float32")


@pytest.fixture(scope="module")
def problem(llava: Backbone, examples: list[Example]) -> TrainingProblem:
    """An entry and eight questions."""
    entries, _ = initial_entries(llava, TaskInputs(examples[:8], [], [], None), SETTINGS)
    keys = torch.zeros(8, llava.hidden_size)
    return TrainingProblem(
        Scorer(llava),
        entries,
        Questions(examples[:8], keys),
        torch.zeros(8, 1),
        Questions([], keys[:0]),
        calibrate=False,
        preconditioner=Preconditioner.of(llava),
    )


def projections(backbone: Backbone) -> list[Tensor]:
    """Of each layer, [d, H V] float64."""
    return [output_projection(attention).weight.detach().double() for attention in backbone.attention_layers()]


def test_whitening_is_the_inverse_root_of_the_scaled_matrix_and_its_ridge() -> None:
    parts = torch.randn(3, 20, 6, generator=torch.Generator().manual_seed(0)).double()
    gram = parts.mT @ parts
    found = whitening(gram)
    mean = gram.diagonal(dim1=-2, dim2=-1).mean(dim=-1)[:, None, None]
    inverse = torch.linalg.inv(gram / mean + RIDGE * torch.eye(6))
    torch.testing.assert_close(found @ found, inverse)
    torch.testing.assert_close(found, found.mT)


def test_what_is_written_is_whiter(llava: Backbone) -> None:
    """By the spread of its singular values, for each group of heads as the model lays them out."""
    found = Preconditioner.of(llava)
    assert found is not None
    J, V = llava.num_kv_heads, llava.value_dim
    width = llava.num_heads // J * V
    assert found.values.shape == (llava.num_layers, J, V, V)
    assert found.maps.shape == (llava.num_layers, J, width, width)
    for layer, weight in enumerate(projections(llava)):
        for group in range(J):
            part = weight[:, group * width : (group + 1) * width]
            before, after = (torch.linalg.svdvals(each) for each in (part, part @ found.maps[layer, group].double()))
            assert after.std() / after.mean() < 0.5 * before.std() / before.mean()
            heads = part.unflatten(1, (-1, V))  # type: ignore[no-untyped-call]
            gram = sum(heads[:, head].mT @ heads[:, head] for head in range(width // V))
            expected = whitening(gram)
            torch.testing.assert_close(found.values[layer, group].double(), expected, rtol=1e-3, atol=1e-4)


def test_a_step_is_one_of_muon_in_the_coordinates(problem: TrainingProblem) -> None:
    """By the gradient g of plain payloads: that of the coordinates is T g, and T brings the step back."""
    found = problem.preconditioner
    assert found is not None
    training = Training(problem, SETTINGS, 0.1)
    training.take_step()
    moved = training.memory()

    plain = {name: getattr(problem.memory, name).clone().requires_grad_() for name in ("payload_values", "map_out")}
    loss = step_loss(problem, SETTINGS, replace(problem.memory, **plain), 0)
    of_values, of_maps = torch.autograd.grad(loss, list(plain.values()))
    of_coordinates = clipped(
        {"payload_values": of_values @ found.values[:, None], "map_out": found.maps[:, None] @ of_maps}
    )
    share = 1 / (WARM_UP * SETTINGS.steps)
    for name, rate, back in (("payload_values", 0.1, found.values_of), ("map_out", MAP_RATE, found.map_out_of)):
        expected = torch.zeros_like(plain[name])
        expected.grad = of_coordinates[name]
        Muon([expected], lr=rate * share).step()
        torch.testing.assert_close(getattr(moved, name), back(expected), rtol=1e-3, atol=1e-7)


def test_the_memory_is_the_coordinates_times_t(problem: TrainingProblem) -> None:
    training = Training(problem, SETTINGS, 0.1)
    for _ in range(2):
        training.take_step()
    memory, found = training.memory(), problem.preconditioner
    assert found is not None
    assert memory.map_out is not None
    coordinates = training.parameters["map_out"].detach()
    assert coordinates.any()
    for layer in range(coordinates.shape[0]):
        for group in range(coordinates.shape[2]):
            expected = found.maps[layer, group].double() @ coordinates[layer, 0, group].double()
            torch.testing.assert_close(memory.map_out[layer, 0, group].double(), expected, rtol=1e-4, atol=1e-6)


def test_rates_rise_and_those_of_maps_are_their_own(problem: TrainingProblem) -> None:
    training = Training(problem, SETTINGS, 0.1)
    assert training.optimizers["muon_maps"].defaults["lr"] == MAP_RATE
    rates = []
    for _ in range(6):
        training.take_step()
        rates.append(training.optimizers["muon"].param_groups[0]["lr"])
    rise = round(WARM_UP * SETTINGS.steps)
    assert rates[:rise] == sorted(rates[:rise])
    assert rates[0] == pytest.approx(0.1 / rise)
    assert rates[rise] < rates[rise - 1]


@pytest.mark.parametrize("is_wide", [False, True])
def test_decoupled_memory_of_wide_models_has_one(
    problem: TrainingProblem, monkeypatch: pytest.MonkeyPatch, is_wide: bool
) -> None:
    plain = replace(problem, preconditioner=None)
    monkeypatch.setattr(candidates, "WIDE", problem.scorer.backbone.hidden_size + (not is_wide))
    begun = candidates.every_candidate(plain, SETTINGS, 1)
    assert {each.training.problem.preconditioner is not None for each in begun} == {is_wide}
    assert {each.name.endswith("preconditioned") for each in begun} == {is_wide}
    (merged,) = candidates.every_candidate(
        plain, RefinedSettings(form="merged", learning_rate=0.1, precision="float32"), 1
    )
    assert merged.training.problem.preconditioner is None


def test_a_training_that_is_resumed_ends_as_a_whole_one(problem: TrainingProblem, tmp_path: Path) -> None:
    whole = train(Training(problem, SETTINGS, 0.1), None, "one", until=4)
    for until in (2, 4):
        resumed = train(Training(problem, SETTINGS, 0.1), Checkpoint.open(tmp_path, {})[0], "one", until=until)
    for name in ("payload_keys", "payload_values", "map_in", "map_out"):
        assert torch.equal(getattr(resumed, name), getattr(whole, name))


def test_a_projection_of_zeros_leaves_finite_coordinates() -> None:
    torch.testing.assert_close(whitening(torch.zeros(2, 3, 3)), RIDGE**-0.5 * torch.eye(3).expand(2, 3, 3))


def test_a_projection_of_another_name_or_width_has_none(llava: Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    module = "selector.refined.preconditioner.output_projection"
    for other in (None, nn.Linear(llava.num_heads * llava.value_dim + 1, 4)):
        with monkeypatch.context() as context:
            context.setattr(module, lambda attention, other=other: other)
            assert Preconditioner.of(llava) is None

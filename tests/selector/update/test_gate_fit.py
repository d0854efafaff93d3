"""The fitted gate: against scikit-learn's discriminant, and on groups of keys whose answer is known."""

from __future__ import annotations

import pytest
import torch
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from torch import Tensor

from inducekv_vllm.errors import ConfigError
from selector.backbone.routing import gated_prior
from selector.update.gate_fit import SHRINKAGE, discriminants, fit_gate
from tests.selector.conftest import unit_vectors

d = 24


def group(centre: int, count: int, seed: int, *, part: int = 1) -> Tensor:
    """Unit keys [count, 2, d] around an axis in one part, and around one common direction in the other."""
    generator = torch.Generator().manual_seed(seed)
    keys = 0.15 * torch.randn(count, 2, d, generator=generator)
    keys[:, 1 - part, 0] += 1
    keys[:, part, 1 + centre] += 1
    return torch.nn.functional.normalize(keys, dim=2)


def opened(gate_inputs: dict[str, Tensor], base: Tensor, asked: Tensor) -> tuple[Tensor, Tensor]:
    """Whether each question is let in, and the number of its task."""
    is_open, prior = gated_prior(fit_gate(gate_inputs, base), list(gate_inputs), asked)
    return is_open, prior.argmax(dim=1)


class Given:
    """scikit-learn takes any estimator of a covariance."""

    def __init__(self, covariance: Tensor) -> None:
        self.covariance_ = covariance.numpy()

    def fit(self, X: object) -> Given:
        return self


@pytest.mark.parametrize("with_base", [True, False])
@pytest.mark.parametrize("count", [15, 200])  # fewer samples than the 2 d dimensions of a key, and more
def test_the_log_odds_are_those_of_the_shrunken_discriminant_analysis(count: int, with_base: bool) -> None:
    groups = [group(number, count + number, number) for number in range(3)]
    samples = [one.flatten(1).double() for one in groups]
    centred = torch.cat([one - one.mean(dim=0) for one in samples])
    covariance = centred.T @ centred / len(centred)
    shrunken = covariance + SHRINKAGE * covariance.diagonal().mean() * torch.eye(2 * d, dtype=torch.float64)
    labels = [number for number, one in enumerate(samples) for _ in one]
    analysis = LinearDiscriminantAnalysis(solver="lsqr", covariance_estimator=Given(shrunken), priors=[1 / 3] * 3)
    asked = torch.cat([group(number, 20, 10 + number) for number in range(4)]).double()
    scores = torch.from_numpy(analysis.fit(torch.cat(samples).numpy(), labels).decision_function(asked.flatten(1)))

    keys, offsets = discriminants(groups, 2 if with_base else 3)
    found = torch.einsum("npd,cpd->nc", asked, keys) - offsets
    if with_base:
        expected = scores[:, :2] - scores[:, 2:]
        assert torch.allclose(found, expected, atol=1e-7)
    else:  # the tasks' log-odds against each other
        assert torch.allclose(found - found[:, :1], scores - scores[:, :1], atol=1e-7)


def test_tasks_are_told_apart_and_base_questions_stay_outside() -> None:
    tasks = {name: group(number, 64, number) for number, name in enumerate("abc")}
    base = torch.cat([group(number, 40, 10 + number) for number in (5, 6, 7)])
    for number in range(3):
        is_open, task = opened(tasks, base, group(number, 200, 20 + number))
        assert is_open.double().mean() >= 0.95
        assert (task[is_open] == number).double().mean() >= 0.99
    is_open, _ = opened(tasks, base, torch.cat([group(number, 200, 30 + number) for number in (5, 6, 7)]))
    assert is_open.double().mean() <= 0.02


def test_tasks_that_ask_the_same_are_told_apart_by_their_pictures() -> None:
    """A shared template: the text parts are alike, the prefix parts are not."""
    tasks = {name: group(number, 64, number, part=0) for number, name in enumerate("ab")}
    for number in range(2):
        is_open, task = opened(tasks, torch.empty(0, 2, d), group(number, 200, 20 + number, part=0))
        assert is_open.double().mean() >= 0.95
        assert (task == number).double().mean() >= 0.99


def test_one_task_alone_lets_its_own_questions_in() -> None:
    asked = torch.cat([group(0, 500, 1), group(3, 500, 1)])
    is_open, _ = opened({"a": group(0, 64, 0)}, torch.empty(0, 2, d), asked)
    assert is_open[:500].double().mean() >= 0.9
    assert not is_open[500:].any()


def test_a_threshold_is_not_fooled_by_the_examples_of_the_fit() -> None:
    """Few examples in many dimensions: in-sample thresholds would leave half of the task's questions outside."""
    is_open, _ = opened({"a": group(0, 20, 0)}, group(1, 20, 1), group(0, 1000, 2))
    assert is_open.double().mean() >= 0.9


@pytest.mark.parametrize("counts", [(1, 1), (1, 5), (5, 1), (2, 2)])
def test_a_handful_of_examples_gives_a_finite_gate(counts: tuple[int, int]) -> None:
    gate = fit_gate({"a": group(0, counts[0], 0)}, group(1, counts[1], 1))
    assert gate.keys.isfinite().all()
    assert gate.thresholds.isfinite().all()
    assert (gate.keys.dtype, gate.thresholds.dtype) == (torch.float16, torch.float32)


@pytest.mark.parametrize("others", ["another task", "nothing"])
def test_a_gate_of_the_prefix_part_alone(others: str) -> None:
    """It is what the whole gate would be if every question had the same text, and it looks at no text."""
    tasks = {"a": group(0, 64, 0, part=0)} | ({"b": group(1, 64, 1, part=0)} if others == "another task" else {})
    gate = fit_gate(tasks, torch.empty(0, 2, d), prefix_only=True)
    assert gate.keys.shape == (len(tasks), 2, d)
    assert not gate.keys[:, 1].any()
    asked = group(0, 200, 20, part=0)
    asked[:, 1] = unit_vectors(200, d, seed=5)
    is_open, prior = gated_prior(gate, list(tasks), asked)
    assert is_open.double().mean() >= 0.8
    assert (prior.argmax(dim=1) == 0).all()
    assert not gated_prior(gate, list(tasks), group(4, 200, 30, part=0))[0].double().mean() > 0.1


def test_a_task_without_questions_is_refused() -> None:
    with pytest.raises(ConfigError, match="task 'b'"):
        fit_gate({"a": group(0, 4, 0), "b": torch.empty(0, 2, d)}, torch.empty(0, 2, d))

"""Training on made-up token values: two tasks and everything else."""

from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor

from inducekv_vllm.bundle import Gate
from inducekv_vllm.gate import TurnMarks, last_averaged
from selector.backbone.token_values import evidence_in
from selector.gate.training import MISSES, TrainedGate, train_gate

S, F, EACH = 2, 48, 120  # more features than prototypes
TASKS = ("a", "b")


def prompts(task: int | None, count: int, seed: int) -> list[Tensor]:
    """Token values [t, S, F] of so many prompts of text: noise, and one token near the task's own direction."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        tokens = int(torch.randint(3, 9, (), generator=generator))
        values = torch.randn(tokens, S, F, generator=generator)
        if task is not None:
            own = torch.randn(2, S, F, generator=torch.Generator().manual_seed(99))[task]
            values[int(torch.randint(tokens, (), generator=generator))] = 3 * own
        found.append(last_averaged(values, tokens))
    return found


@cache
def trained(misses: float = 0.0, seed: int = 0) -> TrainedGate:
    values = [*prompts(0, EACH, 1), *prompts(1, EACH, 2), *prompts(None, 3 * EACH, 3)]
    labels = [0] * EACH + [1] * EACH + [2] * 3 * EACH
    held_out = [row % 5 == 4 for row in range(len(values))]
    kinds = ["own"] * 2 * EACH + ["noise"] * 2 * EACH + ["everyday"] * EACH
    return train_gate(values, labels, held_out, kinds, 2, misses=misses, seed=seed)


def gate_of(found: TrainedGate) -> Gate:
    """As a bundle stores it."""
    return Gate(
        layers=(0, 1),
        marks=TurnMarks((), None),
        center=found.center,
        scale=found.scale,
        prototypes=found.prototypes.half(),
        floors=found.floors,
        weights=found.weights,
        thresholds=found.thresholds,
        near=found.near,
        tasks=TASKS,
    )


def routed(gate: Gate, values: list[Tensor]) -> list[str | None]:
    return [gate.rule.decide(found).task for found in evidence_in(gate, values)]


@pytest.fixture(autouse=True)
def enough_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("selector.gate.training.EPOCHS", 12)


def test_two_tasks_are_told_from_each_other_and_from_noise() -> None:
    gate = gate_of(trained())
    for task, name in enumerate(TASKS):
        own = routed(gate, prompts(task, 50, 10 + task))
        assert own.count(name) >= 45
        assert own.count(TASKS[1 - task]) == 0
    assert routed(gate, prompts(None, 100, 20)).count(None) >= 95


def test_tokens_far_away_open_nothing() -> None:
    gate = gate_of(trained())
    assert (gate.thresholds > 0).all()
    assert ((gate.floors > 0) & (gate.floors < 1)).all()
    nothing = torch.zeros(gate.weights.shape[1])
    assert (gate.rule.decide(nothing).task, gate.rule.decide(nothing).closed) == (None, "outside")
    # However long it is, a token that is like no prototype is no evidence.
    unlike = torch.stack([torch.linalg.svd(of_layer.float())[2][-1] for of_layer in gate.prototypes])  # [S, F]
    far = (gate.center + 1e4 * unlike / gate.scale)[None]  # [1, S, F]
    assert torch.equal(evidence_in(gate, [far]), nothing[None])


def test_the_same_seed_gives_the_same_gate() -> None:
    first = trained()
    torch.manual_seed(1234)
    state = torch.random.get_rng_state()
    trained.cache_clear()
    again = trained()
    assert torch.equal(torch.random.get_rng_state(), state)  # nobody else's random numbers change
    for name in ("center", "scale", "prototypes", "floors", "weights", "thresholds"):
        assert torch.equal(getattr(first, name), getattr(again, name))
    assert first.near == again.near
    assert not torch.equal(trained(seed=1).weights, again.weights)


def test_nearly_all_held_out_questions_of_no_task_are_farther_than_near() -> None:
    """Margins are those of the rule as it is stored, by the definition of a quantile."""
    gate = gate_of(trained())
    others = [p for row, p in enumerate(prompts(None, 3 * EACH, 3), start=2 * EACH) if row % 5 == 4]
    margins = np.array([gate.rule.decide(found).margins for found in evidence_in(gate, others)])
    np.testing.assert_allclose(gate.near, np.minimum(np.quantile(margins, 0.97, axis=0), 0), rtol=0, atol=2e-3)
    assert max(gate.near) <= 0
    assert min(gate.near) < -0.1


def test_missing_more_costs_no_more_openings() -> None:
    found = trained(misses=0.03)
    assert [price.misses for price in found.prices] == sorted({*MISSES, 0.03})
    assert all(set(price.opened) == {"noise", "everyday"} for price in found.prices)
    for kind in ("noise", "everyday"):
        shares = [price.opened[kind] for price in found.prices]
        assert shares == sorted(shares, reverse=True)
    low, high = trained(misses=0.01).thresholds, trained(misses=0.1).thresholds
    assert (high >= low).all()

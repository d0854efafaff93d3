"""The paper's regret theorems, checked on convex surrogates with the projected step that the selector takes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from selector.paper.simplex import project
from selector.update.coverage import Coverage

N, BUDGET, ROUNDS = 12, 4, 60
DIAMETER = BUDGET * math.sqrt(2)

# One round's surrogate: its value and its gradient at w.
Surrogate = tuple[Callable[[Tensor], float], Callable[[Tensor], Tensor]]


def linear_rounds(seed: int) -> list[Surrogate]:
    generator = torch.Generator().manual_seed(seed)
    slopes = torch.randn(ROUNDS, N, dtype=torch.float64, generator=generator)
    return [(lambda w, c=c: float(c @ w), lambda w, c=c: c) for c in slopes]


def quadratic_rounds(seed: int) -> list[Surrogate]:
    """Their minimum wanders over the simplex."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(ROUNDS, N, dtype=torch.float64, generator=generator).cumsum(0) * 0.2 + 1
    return [(lambda w, c=c: float((w - c) @ (w - c)) / 2, lambda w, c=c: w - c) for c in centres]


def coverage_rounds(seed: int) -> list[Surrogate]:
    """Coverage of other keys in every round, with a linear fit term: the shape of the selector's own objective."""
    generator = torch.Generator().manual_seed(seed)
    rounds: list[Surrogate] = []
    for _ in range(ROUNDS):
        keys = torch.nn.functional.normalize(torch.randn(N, 6, dtype=torch.float64, generator=generator), dim=1)
        slope, coverage = torch.rand(N, dtype=torch.float64, generator=generator), Coverage.of_keys(keys, BUDGET)
        rounds.append(
            (
                lambda w, s=slope, c=coverage: float(s @ w + 0.3 * c.value(w)),
                lambda w, s=slope, c=coverage: s + 0.3 * c.gradient(w),
            )
        )
    return rounds


@dataclass(frozen=True)
class Game:
    """Projected online gradient descent: the points played, and the largest gradient met."""

    rounds: list[Surrogate]
    step: float
    seed: int
    played: list[Tensor]
    loss: float  # of the points played, over all rounds
    largest: float

    @classmethod
    def play(cls, rounds: list[Surrogate], step: float, seed: int = 0) -> Game:
        w = torch.full((N,), BUDGET / N, dtype=torch.float64)
        played, loss, largest = [], 0.0, 0.0
        for value, gradient in rounds:
            played.append(w)
            loss += value(w)
            g = gradient(w)
            largest = max(largest, float(g.norm()))
            w = project(w - step * g, BUDGET)
        return cls(rounds, step, seed, played, loss, largest)

    def regret(self, path: Sequence[Tensor]) -> float:
        """Against a comparator that moves along `path`."""
        return self.loss - sum(value(u) for (value, _), u in zip(self.rounds, path, strict=True))

    def static_bound(self) -> float:
        return DIAMETER**2 / (2 * self.step) + self.step * self.largest**2 * ROUNDS / 2


SURROGATES = {"linear": linear_rounds, "quadratic": quadratic_rounds, "coverage": coverage_rounds}


def comparators(seed: int, count: int) -> list[Tensor]:
    """Vertices of the simplex, where linear functions have their minimum, and points inside."""
    generator = torch.Generator().manual_seed(seed + 100)
    inside = [project(torch.randn(N, dtype=torch.float64, generator=generator), BUDGET) for _ in range(count)]
    return [*(BUDGET * torch.eye(N, dtype=torch.float64)), *inside]


@pytest.fixture(params=itertools.product(SURROGATES, [0.001, 0.02, 0.1, 0.5], range(3)), ids=str)
def game(request: pytest.FixtureRequest) -> Game:
    kind, step, seed = request.param
    return Game.play(SURROGATES[kind](seed), step, seed)


def test_static_regret_keeps_its_bound(game: Game) -> None:
    for u in comparators(game.seed, 20):
        assert game.regret([u] * ROUNDS) <= game.static_bound()


@pytest.mark.parametrize("seed", range(3))
def test_static_regret_with_the_best_step_grows_with_the_root_of_the_rounds(seed: int) -> None:
    rounds = linear_rounds(seed)
    largest = max(float(gradient(torch.zeros(N).double()).norm()) for _, gradient in rounds)
    game = Game.play(rounds, DIAMETER / (largest * math.sqrt(ROUNDS)))
    regret = max(game.regret([u] * ROUNDS) for u in comparators(seed, 20))
    assert 0 < regret <= DIAMETER * largest * math.sqrt(ROUNDS)


def test_dynamic_regret_keeps_the_bound_of_its_proof(game: Game) -> None:
    """Eq. dyn_bound_intermediate, the proof's bound with its constants, for comparators that move."""
    generator = torch.Generator().manual_seed(game.seed)
    drift = torch.randn(ROUNDS, N, dtype=torch.float64, generator=generator).cumsum(0) * 0.05
    moving = [project(point, BUDGET) for point in drift]
    vertices = BUDGET * torch.eye(N, dtype=torch.float64)
    slopes = [gradient(w) for (_, gradient), w in zip(game.rounds, game.played, strict=True)]
    greedy = [vertices[int(slope.argmin())] for slope in slopes]
    for path in (moving, greedy):
        length = sum(float((after - before).norm()) for before, after in itertools.pairwise(path))
        bound = game.static_bound() + 3 * DIAMETER * length / (2 * game.step) + game.largest * length
        assert game.regret(path) <= bound


def test_the_static_bound_can_fail_for_a_comparator_outside_the_simplex() -> None:
    """The check is no tautology: against a point with more budget the same inequality does not hold."""
    rounds = [(lambda w: -float(w.sum()), lambda w: -torch.ones(N).double()) for _ in range(ROUNDS)]
    game = Game.play(rounds, 0.1)
    assert game.regret([torch.full((N,), 10.0, dtype=torch.float64)] * ROUNDS) > game.static_bound()


@pytest.mark.parametrize("seed", range(10))
def test_the_projection_inequality_holds_at_every_step(seed: int) -> None:
    """The lemma both theorems rest on."""
    generator = torch.Generator().manual_seed(seed)
    w = project(torch.randn(N, dtype=torch.float64, generator=generator), BUDGET)
    g, step = 3 * torch.randn(N, dtype=torch.float64, generator=generator), 0.1
    after = project(w - step * g, BUDGET)
    for u in comparators(seed, 20):
        bound = ((u - w).norm() ** 2 - (u - after).norm() ** 2) / (2 * step) + step / 2 * g.norm() ** 2
        assert float(g @ (w - u)) <= float(bound) + 1e-9

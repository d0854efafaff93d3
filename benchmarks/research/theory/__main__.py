"""The paper's theory with numbers: what holds, how tight it is, and which assumptions do not.

    python -m benchmarks.research.theory [--results FILE]

Sections "Theory" and the appendix of the paper. The selector's own projection, rounding and coverage are what is
checked, in float64. Shapes: N candidates, B budget, T tasks, d dimensions of the keys.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from scipy.optimize import minimize
from torch import Tensor

from benchmarks.machine import describe_machine
from selector.paper.simplex import project, top_b
from selector.update.coverage import STABILIZER, Coverage

RESULTS = Path(__file__).parents[2] / "results" / "theory.json"
N, B, DIM = 60, 8, 12
DIAMETER = B * math.sqrt(2)
Found = dict[str, Any]


def keys(generator: torch.Generator, number: int = N, near_copies: int = 0) -> Tensor:
    """[number, DIM], unit norm; the last `near_copies` nearly equal the first."""
    found = torch.randn(number, DIM, generator=generator, dtype=torch.float64)
    if near_copies:
        noise = 0.02 * torch.randn(near_copies, DIM, generator=generator, dtype=torch.float64)
        found[-near_copies:] = found[0] + noise
    return torch.nn.functional.normalize(found, dim=1)


def point(generator: torch.Generator, number: int = N, spread: float = 1.0) -> Tensor:
    """On the simplex; concentrated for a small `spread`."""
    drawn = torch.distributions.Gamma(spread, 1.0).sample((number,)).double()
    return project(B * drawn / drawn.sum(), B)


def projection(generator: torch.Generator) -> Found:
    """Lemma "projection inequality", and the projection against a general solver."""
    worst, furthest = -math.inf, 0.0
    for _ in range(200):
        w, u, g = point(generator), point(generator), torch.randn(N, generator=generator, dtype=torch.float64)
        eta = float(torch.rand((), generator=generator)) + 0.01
        after = project(w - eta * g, B)
        right = ((u - w).square().sum() - (u - after).square().sum()) / (2 * eta) + eta / 2 * g.square().sum()
        worst = max(worst, float(g @ (w - u) - right))
    for _ in range(5):
        x = 3 * torch.randn(N, generator=generator, dtype=torch.float64)
        nearest = solved(lambda y, x=x: float((y - x).square().sum()), lambda y, x=x: 2 * (y - x), point(generator))
        furthest = max(furthest, float((nearest - project(x, B)).abs().max()))
    return {"holds": worst <= 1e-9, "largest_left_minus_right": worst, "furthest_from_a_general_solver": furthest}


def log_det(generator: torch.Generator) -> Found:
    """Lemmas "convexity of Omega" and "gradient formula and norm bound", and that Omega is not negative."""
    coverage = Coverage.of_keys(keys(generator), B)
    convexity, difference, least = -math.inf, 0.0, math.inf
    norms = []
    for _ in range(200):
        a, b = point(generator, spread=0.3), point(generator, spread=0.3)
        share = float(torch.rand((), generator=generator))
        mixed = share * coverage.value(a) + (1 - share) * coverage.value(b)
        convexity = max(convexity, float(coverage.value(share * a + (1 - share) * b) - mixed))
        gradient = coverage.gradient(a)
        norms.append(float(gradient.norm()))
        traced = a.clone().requires_grad_()
        (automatic,) = torch.autograd.grad(coverage.value(traced), traced)
        difference = max(difference, float((automatic - gradient).abs().max()))
        least = min(least, float(coverage.value(a)))
    bound = math.sqrt(N) / (B * STABILIZER)
    return {
        "holds": convexity <= 1e-9 and max(norms) <= bound and least >= 0,
        "largest_violation_of_convexity": convexity,
        "formula_against_automatic_gradient": difference,
        "bound_of_the_gradient": bound,
        "largest_gradient_over_bound": max(norms) / bound,
        "least_value": least,
    }


def tasks(generator: torch.Generator, count: int, gamma: float, drift: int) -> list[tuple[Tensor, float]]:
    """Of each task its linear loss [N] and the weight of coverage; the loss changes every `drift` tasks."""
    found, loss = [], torch.zeros(N, dtype=torch.float64)
    for number in range(count):
        if number % drift == 0:
            loss = torch.rand(N, generator=generator, dtype=torch.float64)
        found.append((loss, gamma))
    return found


def descend(stream: list[tuple[Tensor, float]], coverage: Coverage, eta: float) -> tuple[list[Tensor], float]:
    """The weights before each task by projected gradient steps, and the largest gradient."""
    w, visited, largest = torch.full((N,), B / N, dtype=torch.float64), [], 0.0
    for loss, gamma in stream:
        visited.append(w)
        gradient = loss + gamma * coverage.gradient(w)
        largest = max(largest, float(gradient.norm()))
        w = project(w - eta * gradient, B)
    return visited, largest


def value(task: tuple[Tensor, float], w: Tensor, coverage: Coverage) -> float:
    return float(task[0] @ w + task[1] * coverage.value(w))


def best_fixed(stream: list[tuple[Tensor, float]], coverage: Coverage) -> Tensor:
    """The comparator with the least sum: a vertex without coverage, by a general solver with it."""
    loss, gamma = sum(each for each, _ in stream) / len(stream), sum(of for _, of in stream) / len(stream)
    vertex = torch.zeros(N, dtype=torch.float64)
    vertex[loss.argmin()] = B
    if gamma == 0:
        return vertex
    return solved(
        lambda w: float(loss @ w + gamma * coverage.value(w)),
        lambda w: loss + gamma * coverage.gradient(w),
        (vertex + B / N) / 2,
    )


def solved(of: Callable[[Tensor], float], gradient: Callable[[Tensor], Tensor], start: Tensor) -> Tensor:
    """The least point on the simplex, by sequential quadratic programming."""
    found = minimize(
        lambda w: of(torch.from_numpy(w)),
        start.numpy(),
        jac=lambda w: gradient(torch.from_numpy(w)).numpy(),
        method="SLSQP",
        bounds=[(0, None)] * N,
        constraints={"type": "eq", "fun": lambda w: w.sum() - B},
        options={"ftol": 1e-14, "maxiter": 2000},
    )
    return project(torch.from_numpy(found.x), B)


def regret(generator: torch.Generator, count: int, gamma: float) -> Found:
    """Theorem "static regret": convex losses with coverage, the step size that the theorem names."""
    coverage = Coverage.of_keys(keys(generator, near_copies=20), B)
    stream = tasks(generator, count, gamma, drift=1)
    bound_of_gradients = math.sqrt(N) + gamma * math.sqrt(N) / (B * STABILIZER)  # a priori, as the lemma has it
    found: Found = {}
    for name, g in (("a_priori", bound_of_gradients), ("measured", None)):
        g = g or found["a_priori"]["largest_gradient"]
        eta = DIAMETER / (g * math.sqrt(count))
        visited, largest = descend(stream, coverage, eta)
        u = best_fixed(stream, coverage)
        total = sum(
            value(task, w, coverage) - value(task, u, coverage) for task, w in zip(stream, visited, strict=True)
        )
        right = DIAMETER * max(g, largest) * math.sqrt(count)
        still = sum(value(task, visited[0], coverage) - value(task, u, coverage) for task in stream)
        found[name] = {
            "holds": total <= right + 1e-9,
            "regret_over_bound": total / right,
            "regret_of_never_moving": still,
            "regret": total,
            "bound": right,
            "largest_gradient": largest,
        }
    return {"tasks": count, "gamma": gamma, **found, "holds": all(each["holds"] for each in found.values())}


def dynamic_regret(generator: torch.Generator, count: int, drift: int) -> Found:
    """Theorem "dynamic regret", with the constants of its proof, against the best point of each task.

    The proof needs eta <= D / G; its optimal eta is that only where V <= D (T - 1) / 5.
    """
    coverage = Coverage.of_keys(keys(generator), B)
    stream = tasks(generator, count, 0.0, drift)
    comparators = [best_fixed([task], coverage) for task in stream]
    path = sum(float((after - before).norm()) for before, after in pairwise(comparators))
    g = max(float(loss.norm()) for loss, _ in stream)
    optimal = math.sqrt((DIAMETER**2 + 5 * DIAMETER * path) / (g**2 * count))
    eta = min(optimal, DIAMETER / g)
    visited, _ = descend(stream, coverage, eta)
    total = sum(float(task[0] @ (w - u)) for task, w, u in zip(stream, visited, comparators, strict=True))
    right = (DIAMETER**2 + 5 * DIAMETER * path) / (2 * eta) + eta * g**2 * count / 2
    trivial = DIAMETER * g * count  # that of any sequence of points
    return {
        "changes_every": drift,
        "holds": total <= right + 1e-9,
        "regret_over_bound": total / right,
        "bound_over_trivial_bound": right / trivial,
        "optimal_step_is_allowed": optimal <= DIAMETER / g,
    }


def attention_loss(w: Tensor, similarity: Tensor, values: Tensor, target: int, tau: float) -> Tensor:
    """The NLL of a small model: retrieval weights with the prior w / B, and a readout of the mean value."""
    alpha = (w.clamp(min=1e-12).log() + similarity / tau).softmax(0)
    return -(alpha @ values).log_softmax(0)[target]


def convexity_of_the_likelihood(generator: torch.Generator) -> Found:
    """The theorems' assumption: is the loss through soft retrieval convex in w?"""
    violated, largest = 0, 0.0
    trials = 2000
    for _ in range(trials):
        similarity = keys(generator) @ keys(generator, 1)[0]
        values = 4 * torch.randn(N, 5, generator=generator, dtype=torch.float64)
        a, b = point(generator, spread=0.05), point(generator, spread=0.05)
        loss: Callable[[Tensor], Tensor] = lambda w, s=similarity, v=values: attention_loss(w, s, v, 0, 0.1)  # noqa: E731
        gap = float(loss((a + b) / 2) - (loss(a) + loss(b)) / 2)
        violated, largest = violated + (gap > 1e-9), max(largest, gap)
    return {"holds": violated == 0, "violated_share": violated / trials, "largest_violation": largest}


def retention(generator: torch.Generator) -> Found:
    """Theorem "anchor-controlled historical risk": the averaged bound, and how much of it is not the anchors' loss."""
    coverage = Coverage.of_keys(keys(generator), B)
    beta, gamma, count = 1.0, 0.1, 50
    current = [torch.rand(N, generator=generator, dtype=torch.float64) for _ in range(count)]
    anchors = [torch.rand(N, generator=generator, dtype=torch.float64) for _ in range(count)]
    errors = [0.05 * torch.rand(N, generator=generator, dtype=torch.float64) for _ in range(count)]
    stream = [(loss + beta * anchor, gamma) for loss, anchor in zip(current, anchors, strict=True)]
    visited, g = descend(stream, coverage, 0.02)
    u = best_fixed(stream, coverage)
    risk = sum(float((a + e) @ w) for a, e, w in zip(anchors, errors, visited, strict=True)) / count
    representative = sum(B * float(e.max()) for e in errors) / count  # the supremum over the simplex
    fixed = sum(value(task, u, coverage) for task in stream) / count
    total = sum(value(task, w, coverage) - value(task, u, coverage) for task, w in zip(stream, visited, strict=True))
    right = fixed / beta + total / (beta * count) + representative
    return {"holds": risk <= right + 1e-9, "risk_over_bound": risk / right, "largest_gradient": g}


def rounding(generator: torch.Generator) -> Found:
    """TopB: the gap is at most the Lipschitz constant times the distance; what coverage does to it."""
    found: Found = {"holds": True}
    for name, gamma in (("without_coverage", 0.0), ("with_coverage", 0.3)):
        gaps, ratios, distances = [], [], []
        for _ in range(20):
            coverage = Coverage.of_keys(keys(generator, near_copies=20), B)
            loss = torch.rand(N, generator=generator, dtype=torch.float64)
            w = best_fixed([(loss, gamma)], coverage)
            rounded = torch.zeros(N, dtype=torch.float64)
            rounded[top_b(w, B)] = 1.0
            distance = float((rounded - w).norm())
            lipschitz = float(loss.norm()) + gamma * math.sqrt(N) / (B * STABILIZER)
            gaps.append(float(loss @ (rounded - w)))
            difference = value((loss, gamma), rounded, coverage) - value((loss, gamma), w, coverage)
            ratios.append(difference / (lipschitz * distance))
            distances.append(distance / DIAMETER)
        found["holds"] = found["holds"] and max(ratios) <= 1
        found[name] = {
            "mean_gap_of_the_loss": sum(gaps) / len(gaps),
            "mean_distance_over_diameter": sum(distances) / len(distances),
            "largest_gap_over_bound": max(ratios),
        }
    return found


def run() -> Found:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    return {
        "projection_inequality": projection(generator),
        "log_det": log_det(generator),
        "static_regret": [regret(generator, count, gamma) for count in (16, 256) for gamma in (0.0, 0.1)],
        "dynamic_regret": [dynamic_regret(generator, 256, drift) for drift in (1, 16, 256)],
        "convexity_of_the_likelihood": convexity_of_the_likelihood(generator),
        "retention": retention(generator),
        "rounding": rounding(generator),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    found = run()
    for name, each in found.items():
        for part in each if isinstance(each, list) else [each]:
            print(f"{name}: {'holds' if part['holds'] else 'DOES NOT HOLD'}: {json.dumps(part)}", file=sys.stderr)
    result = {"benchmark": "theory", "candidates": N, "budget": B, "dimensions": DIM, **found}
    options.results.write_text(json.dumps({**result, "machine": describe_machine()}, indent=1) + "\n")
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())

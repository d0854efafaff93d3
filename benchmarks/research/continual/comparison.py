"""Methods against each other: means over seeds, and differences paired over the seeds that both have.

A run is the result of `stream.collect`: one method with one budget and one seed. Only complete streams with the same
settings and the same order of tasks are compared, and every mean names its seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import fsum
from statistics import fmean
from typing import Any, Literal, Self

from scipy import stats

from benchmarks.research.continual.metrics import base_retention, standard_error
from inducekv_vllm.errors import ConfigError

CONFIDENCE = 0.95
UNTOUCHED = "no_memory"
ROUNDING = 1e-9  # rounding errors of sums of accuracies stay below it
Collected = Mapping[str, Any]
Score = Callable[[Collected], float]
Verdict = Literal["more", "less", "open", "unknown"]


@dataclass(frozen=True)
class Mean:
    """Mean of one score over seeds."""

    value: float
    standard_error: float | None  # None: a single seed
    seeds: tuple[int, ...]

    @classmethod
    def over(cls, by_seed: Mapping[int, float]) -> Self:
        """Of at least one score."""
        seeds = tuple(sorted(by_seed))
        values = [by_seed[seed] for seed in seeds]
        return cls(fmean(values), standard_error(values) if len(values) > 1 else None, seeds)


@dataclass(frozen=True)
class Difference(Mean):
    """Mean difference of a method's score and a rival's, seed by seed."""

    @property
    def margin(self) -> float | None:
        """Half the width of the 95% interval of the mean (Student's t); None for a single seed."""
        if self.standard_error is None:
            return None
        return in_errors(len(self.seeds)) * self.standard_error

    @property
    def verdict(self) -> Verdict:
        """ "more" or "less" if 0 is outside the interval, otherwise "open"; "unknown" for a single seed."""
        if self.margin is None:
            return "unknown"
        if abs(self.value) <= max(self.margin, ROUNDING):
            return "open"
        return "more" if self.value > 0 else "less"


def in_errors(seeds: int) -> float:
    """Half the width of a mean's 95% interval in standard errors: 4.3 for 3 seeds, towards 1.96 for many."""
    return float(stats.t.ppf((1 + CONFIDENCE) / 2, seeds - 1))


def paired(values: Mapping[int, float], rival: Mapping[int, float]) -> Difference | None:
    """The mean difference over the seeds of both; None if they share none."""
    differences = {seed: values[seed] - rival[seed] for seed in {*values} & {*rival}}
    return Difference.over(differences) if differences else None


def metric(name: str) -> Score:
    """A score of `metrics.summary`, by name."""
    return lambda run: float(run["metrics"][name])


def has_base(run: Collected) -> bool:
    """Whether base questions were asked."""
    return "base_final" in run["metrics"]


def final_accuracy(task: str) -> Score:
    """a[T, t] of the task of that name."""
    return lambda run: float(run["accuracy"][-1][run["order"].index(task)])


def learn_seconds(run: Collected) -> float:
    """Of all tasks together."""
    return fsum(task["learn"] for task in run["seconds"])


@dataclass(frozen=True)
class Streams:
    """All runs of one suite, model and order. Raises ConfigError: settings or orders differ, or a run occurs twice."""

    runs: Sequence[Collected]
    _complete: dict[tuple[str, int], dict[int, Collected]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        groups: dict[tuple[str, int], dict[int, Collected]] = {}
        first: dict[tuple[str, int], Collected] = {}
        for run in self.runs:
            method, budget, seed = run["method"], run["budget"], run["seed"]
            if run["order"] != self.runs[0]["order"]:
                raise ConfigError(f"{method}, budget {budget}, seed {seed} has another order of tasks than other runs")
            other = first.setdefault((method, budget), run)
            if run["settings"] != other["settings"]:
                raise ConfigError(
                    f"{method}, budget {budget} was run with different settings: {other['settings']} with seed "
                    f"{other['seed']}, {run['settings']} with seed {seed}"
                )
            if not run["complete"]:
                continue
            group = groups.setdefault((method, budget), {})
            if seed in group:
                raise ConfigError(f"{method}, budget {budget}, seed {seed} occurs twice")
            group[seed] = run
        object.__setattr__(self, "_complete", groups)

    @property
    def tasks(self) -> tuple[str, ...]:
        """In the order of learning."""
        return tuple(self.runs[0]["order"]) if self.runs else ()

    @property
    def budgets(self) -> tuple[int, ...]:
        return tuple(sorted({run["budget"] for run in self.runs}))

    def methods(self, budget: int) -> tuple[str, ...]:
        """The methods with complete streams of this budget, in the order in which they first occur."""
        names = dict.fromkeys(run["method"] for run in self.runs)
        return tuple(name for name in names if self.of(name, budget))

    def of(self, method: str, budget: int) -> dict[int, Collected]:
        """The complete runs by seed. A method that stores nothing is the same with every budget."""
        if runs := self._complete.get((method, budget)):
            return runs
        others = [group for (name, _), group in sorted(self._complete.items()) if name == method]
        return next((g for g in others if not any(any(run["stored_bytes"]) for run in g.values())), {})

    def seeds(self, budget: int) -> tuple[int, ...]:
        """All seeds with which any method was begun, with this budget."""
        return tuple(sorted({run["seed"] for run in self.runs if run["budget"] == budget}))

    def has_all_seeds(self, method: str, budget: int) -> bool:
        return set(self.seeds(budget)) <= set(self.of(method, budget))

    def scores(self, method: str, budget: int, score: Score) -> dict[int, float]:
        """By seed."""
        return {seed: score(run) for seed, run in self.of(method, budget).items()}

    def mean(self, method: str, budget: int, score: Score) -> Mean:
        """Mean of a score; the method must have complete streams."""
        return Mean.over(self.scores(method, budget, score))

    def difference(self, method: str, rival: str, budget: int, score: Score) -> Difference | None:
        """`method` minus `rival`; None if no seed is complete in both."""
        return paired(self.scores(method, budget, score), self.scores(rival, budget, score))

    def retention(self, budget: int) -> Score | None:
        """Base retention against the untouched model; None if it was not run, or answers no base question."""
        run = next(iter(self.of(UNTOUCHED, budget).values()), None)
        untouched = run["base"][-1] if run and has_base(run) else 0.0
        return (lambda run: base_retention(run["base"], untouched)) if untouched > 0 else None


def gaps(streams: Streams) -> list[str]:
    """Sentences on missing streams: begun and not finished, or of a seed or budget that others have."""
    begun = {(run["method"], run["budget"], run["seed"]): len(run["accuracy"]) for run in streams.runs}
    sentences = []
    for method in dict.fromkeys(run["method"] for run in streams.runs):
        for budget in streams.budgets:
            for seed in streams.seeds(budget):
                if seed in streams.of(method, budget):
                    continue
                done = begun.get((method, budget, seed))
                how = "not run" if done is None else f"{done} of {len(streams.tasks)} tasks done; not counted"
                sentences.append(f"{method}, budget {budget}, seed {seed}: {how}.")
    return sentences


def compare(streams: Streams) -> list[dict[str, Any]]:
    """One row for each method and budget, JSON values: mean and standard error over the seeds of its complete runs.

    Base retention is included if the untouched model was run too, and answers some base question.
    """
    table = []
    for budget in streams.budgets:
        retention = streams.retention(budget)
        for method in streams.methods(budget):
            group = streams.of(method, budget)
            scores = {name: metric(name) for name in next(iter(group.values()))["metrics"]}
            if retention:
                scores["base_retention"] = retention
            of_tasks = {task: final_accuracy(task) for task in streams.tasks}
            row = {
                "method": method,
                "budget": budget,
                "seeds": sorted(group),
                "all_seeds": streams.has_all_seeds(method, budget),
                "stored_bytes": max(run["stored_bytes"][-1] for run in group.values()),
                "learn_seconds": rounded(streams.mean(method, budget, learn_seconds), 1),
                "metrics": {name: rounded(streams.mean(method, budget, score)) for name, score in scores.items()},
                "tasks": {task: rounded(streams.mean(method, budget, score)) for task, score in of_tasks.items()},
            }
            table.append(row)
    return table


def rounded(value: Mean, digits: int = 4) -> dict[str, Any]:
    """As JSON values."""
    error = value.standard_error
    return {"mean": round(value.value, digits), "standard_error": None if error is None else round(error, digits)}

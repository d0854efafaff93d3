"""Who is compared with whom, who is ahead, and the report's paragraph about it.

A difference counts if 0 lies outside its 95% interval over the seeds. A single seed has no error: its sign counts, and
the paragraph says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from benchmarks.continual.comparison import UNTOUCHED, Difference, Mean, Streams, final_accuracy, in_errors, metric
from benchmarks.continual.report.names import RECIPES, RIVALS, is_ours, listed, title

AP, BASE = metric("AP"), metric("base_final")
TASKS_NAMED = 3
Verdict = Literal["better", "worse", "open"]


def ranking(streams: Streams, budget: int) -> list[str]:
    """Methods that have all seeds, the highest AP first; equal ones in the order of running."""
    complete = [method for method in streams.methods(budget) if streams.has_all_seeds(method, budget)]
    return sorted(complete, key=lambda method: -streams.mean(method, budget, AP).value)


def rivals(streams: Streams, budget: int) -> tuple[str, ...]:
    """Whom a recipe is compared with: those of `RIVALS`, and the best method that is not InduceKV's."""
    best = next((name for name in ranking(streams, budget) if not is_ours(name) and name != UNTOUCHED), None)
    return RIVALS if best in (None, *RIVALS) else (*RIVALS, best)


def verdict(streams: Streams) -> Verdict:
    """Of the better recipe against the best method that is not InduceKV's, over all budgets."""
    verdicts = set()
    for budget in streams.budgets:
        ranked = ranking(streams, budget)
        ours = next((name for name in ranked if name in RECIPES), None)
        rival = next((name for name in ranked if not is_ours(name)), None)
        if ours and rival:
            difference = streams.difference(ours, rival, budget, AP)
            verdicts |= {difference.verdict} if difference else set()
    if "less" in verdicts:
        return "worse"
    return "better" if verdicts == {"more"} else "open"


def summary(streams: Streams) -> str:
    """The paragraph: where InduceKV gains nothing or loses, then who has the highest AP, then what ± means.

    Of more than two budgets the least and the largest are named, so that it stays within six lines.
    """
    budgets = [budget for budget in streams.budgets if ranking(streams, budget)]
    if not budgets:
        return "No stream is complete, so there is no result yet."
    budgets = list(dict.fromkeys((budgets[0], budgets[-1])))
    recipes = [recipe for recipe in RECIPES if any(run["method"] == recipe for run in streams.runs)]
    sentences = [f"{title(recipe)} {shortfalls(streams, budgets, recipe)}." for recipe in recipes]
    return " ".join([*(sentences or ["No recipe of InduceKV was run."]), leaders(streams, budgets), _errors(streams)])


def shortfalls(streams: Streams, budgets: Sequence[int], recipe: str) -> str:
    """Where a recipe gains nothing or loses; the predicate of a sentence."""
    facts: dict[str, dict[int, str]] = {}
    for budget in budgets:
        for fact, value in _shortfalls(streams, budget, recipe):
            facts.setdefault(fact, {})[budget] = value
    return ", ".join(f"{fact} ({_by_budget(values)})" for fact, values in facts.items()) or "falls behind nobody"


def _shortfalls(streams: Streams, budget: int, recipe: str) -> Iterator[tuple[str, str]]:
    """With one budget: each fact, and the difference that shows it."""
    if not streams.of(recipe, budget):
        yield "has no complete stream", ""
        return
    overall = streams.difference(recipe, UNTOUCHED, budget, AP)
    if overall is None:
        yield "cannot be compared with no memory", ""
    elif not _gained(overall):
        yield "loses to no memory" if _lost(overall) else "gains nothing over no memory", points(overall)
        return  # tasks and rivals add nothing to that; the table has them
    else:
        by_task = {task: streams.difference(recipe, UNTOUCHED, budget, final_accuracy(task)) for task in streams.tasks}
        if useless := [task for task, difference in by_task.items() if difference and not _gained(difference)]:
            more = [f"{len(useless) - TASKS_NAMED} more"] if len(useless) > TASKS_NAMED else []
            yield f"gains nothing on {listed([*useless[:TASKS_NAMED], *more])}", ""
    base = streams.difference(recipe, UNTOUCHED, budget, BASE)
    if base is not None and _lost(base):
        yield "loses base accuracy", points(base)
    for rival in rivals(streams, budget):
        difference = streams.difference(recipe, rival, budget, AP)
        if difference is None:
            yield f"cannot be compared with {title(rival)}", ""
        elif _lost(difference):
            yield f"loses to {title(rival)}", points(difference)
        elif not _gained(difference):
            yield f"ties with {title(rival)}", points(difference)


def leaders(streams: Streams, budgets: Sequence[int]) -> str:
    """Who has the highest AP, and how far the next method is behind."""
    best: dict[str, dict[int, str]] = {}
    following: dict[str, dict[int, str]] = {}
    for budget in budgets:
        first, *rest = ranking(streams, budget)
        best.setdefault(title(first), {})[budget] = f"{percent(streams.mean(first, budget, AP))}%"
        for method in rest[:1]:
            difference = streams.difference(method, first, budget, AP)
            assert difference is not None  # both have all seeds
            within = " within the error" if difference.verdict == "open" else ""
            following.setdefault(title(method), {})[budget] = points(difference) + within
    sentences = {"Highest AP": best, "Next": following}
    return " ".join(
        f"{lead}: {', '.join(f'{name} ({_by_budget(values)})' for name, values in methods.items())}."
        for lead, methods in sentences.items()
        if methods
    )


def _by_budget(values: Mapping[int, str]) -> str:
    """ "32 entries: −1.6 ± 0.0; 64: −3.1 ± 0.0"; the budgets alone if there are no values."""
    if not any(values.values()):
        return f"{listed(map(str, values))} entries"
    (first, value), *rest = values.items()
    return "; ".join([f"{first} entries: {value}", *(f"{budget}: {more}" for budget, more in rest)])


def points(difference: Mean) -> str:
    """Percentage points, with a sign: "−3.1 ± 0.4"."""
    sign = "+" if round(100 * difference.value, 1) > 0 else ""
    return sign + percent(difference)


def percent(value: Mean) -> str:
    """ "78.8 ± 0.5", without an error for a single seed."""
    error = "" if value.standard_error is None else f" ± {100 * value.standard_error:.1f}"
    return f"{100 * value.value:.1f}".replace("-", "−").replace("−0.0", "0.0") + error


def _errors(streams: Streams) -> str:
    seeds = max(len(streams.seeds(budget)) for budget in streams.budgets)
    if seeds == 1:
        return "Points are of AP; there is one seed only, so the error is unknown."
    beyond = f"a difference counts beyond {in_errors(seeds):.1f} errors"
    return f"Points are of AP ± standard error over {seeds} seeds, paired; {beyond}."


def _gained(difference: Difference) -> bool:
    return difference.verdict == "more" or (difference.verdict == "unknown" and difference.value > 0)


def _lost(difference: Difference) -> bool:
    return difference.verdict == "less" or (difference.verdict == "unknown" and difference.value < 0)

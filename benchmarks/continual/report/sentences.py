"""What was found, in plain sentences: where InduceKV gains nothing or loses, then who won.

Shares are percentages, differences percentage points with the standard error of the paired differences. A difference
counts where 0 lies outside its 95% interval over the seeds; a single seed has no error, and its differences are told
as such.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from benchmarks.continual.comparison import UNTOUCHED, Difference, Mean, Streams, final_accuracy, metric

from .names import RECIPES, RIVALS, is_ours, listed, title

AP, BASE = metric("AP"), metric("base_final")
TASKS_NAMED = 3  # in a sentence; a table has them all
Kind = Literal["better", "worse", "open"]


@dataclass(frozen=True)
class Verdict:
    """The first paragraph, and whether InduceKV is ahead of all rivals, behind one, or neither can be said."""

    kind: Kind
    text: str


def verdict(streams: Streams) -> Verdict:
    """The page's first paragraph, in up to three lines."""
    won = [sentence for budget in streams.budgets if (sentence := winner(streams, budget))]
    if not won:
        return Verdict("open", "No stream is complete, so nothing can be said yet.")
    lost = [sentence for budget in streams.budgets for sentence in shortfalls(streams, budget)]
    first = " ".join(["Where InduceKV falls short, first.", *lost]) if lost else "No recipe of InduceKV was run."
    return Verdict(_kind(streams), "\n".join([first, " ".join(["Who won.", *won]), _reading(streams)]))


# ------------------------------------------------------------------------------------------------- falling short


def shortfalls(streams: Streams, budget: int) -> list[str]:
    """For each recipe, what it gains nothing over or loses to with this budget, on which tasks and by how much.

    A recipe that was never run has no sentence; one that is not complete with this budget is named.
    """
    told: list[str] = []
    for recipe in RECIPES:
        if not any(run["method"] == recipe for run in streams.runs):
            continue
        if not streams.of(recipe, budget):
            told.append(f"With {budget} entries: no stream of {title(recipe)} is complete.")
            continue
        found = against_untouched(streams, budget, recipe)
        for rival in RIVALS:
            found += against_rival(streams, budget, recipe, rival)
        if not found:
            found = [f"{title(recipe)} falls behind {listed(map(title, (UNTOUCHED, *RIVALS)))} on no task."]
        told += [f"With {budget} entries: {found[0]}", *found[1:]]
    return told


def against_untouched(streams: Streams, budget: int, recipe: str) -> list[str]:
    """Where a recipe gains nothing over the untouched model, and what it costs on base questions."""
    overall = streams.difference(recipe, UNTOUCHED, budget, AP)
    if overall is None:
        return [f"{title(recipe)} cannot be held against no memory, which was not run."]
    told = []
    useless = {
        task: found for task, found in _by_task(streams, budget, recipe, UNTOUCHED).items() if not _gained(found)
    }
    if not _gained(overall):
        lead = "answers fewer questions than no memory" if _lost(overall) else "gains nothing over no memory"
        told.append(f"{title(recipe)} {lead}: {_both(streams, budget, recipe, UNTOUCHED)}, {difference(overall)}.")
    elif useless:
        told.append(f"{title(recipe)} gains nothing over no memory on {_tasks(useless, streams)}{_if_single(overall)}.")
    base = streams.difference(recipe, UNTOUCHED, budget, BASE)
    if base is not None and _lost(base):
        told.append(f"{title(recipe)} costs base accuracy: {points(base)} points against no memory{_if_single(base)}.")
    return told


def against_rival(streams: Streams, budget: int, recipe: str, rival: str) -> list[str]:
    """Where a recipe is not ahead of a rival, overall or on tasks; empty where it falls behind on no task."""
    overall = streams.difference(recipe, rival, budget, AP)
    if overall is None:
        return [f"{title(recipe)} cannot be held against {title(rival)}: no seed is complete in both."]
    behind = {task: found for task, found in _by_task(streams, budget, recipe, rival).items() if _lost(found)}
    on = f" on {_tasks(behind, streams)}" if behind else ""
    both = f"{_both(streams, budget, recipe, rival)}, {difference(overall)}"
    if _lost(overall):
        return [f"{title(recipe)} loses to {title(rival)}{on}: {both}."]
    if not _gained(overall):
        return [f"{title(recipe)} is not ahead of {title(rival)}: {both}{f', and it is behind{on}' if on else ''}."]
    if behind:
        return [f"{title(recipe)} is behind {title(rival)}{on}, though ahead over all tasks{_if_single(overall)}."]
    return []


# ------------------------------------------------------------------------------------------------- who won


def winner(streams: Streams, budget: int) -> str:
    """Who has the highest AP with this budget, by how much, and who cannot be told from it; empty without streams.

    Only methods with all seeds that any has are ranked.
    """
    ranked = ranking(streams, budget)
    if not ranked:
        return ""
    best, *rest = ranked
    said = f"With {budget} entries, the best of {len(ranked)} methods is {title(best)}: "
    said += f"{share(streams.mean(best, budget, AP))} of all tasks' questions answered right after the last task (AP)"
    said += f", and {share(streams.mean(best, budget, BASE))} of the base questions"
    if not rest:
        return said + "."
    second = streams.difference(best, rest[0], budget, AP)
    assert second is not None  # both have all seeds
    said += f". The next, {title(rest[0])}, has {share(streams.mean(rest[0], budget, AP))}: {difference(second)}."
    others = [name for name in rest[1:] if _verdict(streams, budget, best, name) == "open"]
    if others:
        said += f" Nor can the error tell {listed(map(title, others))} from the best."
    ours = next((name for name in ranked if name in RECIPES), None)
    if ours not in (None, best, rest[0]):
        found = streams.difference(best, ours, budget, AP)
        assert found is not None
        said += f" InduceKV's better recipe, {title(ours)}, has {share(streams.mean(ours, budget, AP))}: "
        said += f"{difference(found)}."
    return said


def ranking(streams: Streams, budget: int) -> list[str]:
    """Methods that have all seeds, the highest AP first; equal ones in the order of running."""
    complete = [method for method in streams.methods(budget) if streams.has_all_seeds(method, budget)]
    return sorted(complete, key=lambda method: -streams.mean(method, budget, AP).value)


def _kind(streams: Streams) -> Kind:
    """Of the better recipe against the best method that is not ours, over all budgets."""
    verdicts = []
    for budget in streams.budgets:
        ranked = ranking(streams, budget)
        ours = next((name for name in ranked if name in RECIPES), None)
        rival = next((name for name in ranked if not is_ours(name)), None)
        if ours and rival:
            verdicts.append(_verdict(streams, budget, ours, rival))
    if "less" in verdicts:
        return "worse"
    return "better" if verdicts and set(verdicts) == {"more"} else "open"


def _reading(streams: Streams) -> str:
    """What the signs in the paragraph mean."""
    most = max(len(streams.seeds(budget)) for budget in streams.budgets)
    if most == 1:
        return "There is one seed only, so no error is known, and small differences mean nothing."
    return (
        f"Numbers after ± are standard errors over {most} seeds, of differences paired seed by seed; a difference is "
        "beyond the error where 0 lies outside its 95% interval (Student's t)."
    )


# ------------------------------------------------------------------------------------------------- parts of sentences


def difference(found: Difference) -> str:
    """A difference of shares, and whether it is beyond the error."""
    if found.verdict == "unknown":
        return f"a difference of {points(found)} points in a single seed, whose error is unknown"
    said = f"a difference of {points(found)} points over {len(found.seeds)} seeds"
    return said + (", no difference beyond the error" if found.verdict == "open" else ", beyond the error")


def points(found: Mean) -> str:
    """Percentage points, with a sign: "−3.1 ± 0.4"."""
    value = round(100 * found.value, 1)
    said = f"{value:+.1f}".replace("-", "−") if value else "0.0"
    return said if found.standard_error is None else f"{said} ± {100 * found.standard_error:.1f}"


def share(found: Mean) -> str:
    """A percentage: "78.8 ± 0.5%"."""
    error = "" if found.standard_error is None else f" ± {100 * found.standard_error:.1f}"
    return f"{100 * found.value:.1f}{error}%"


def _both(streams: Streams, budget: int, method: str, rival: str) -> str:
    return f"AP {share(streams.mean(method, budget, AP))} against {share(streams.mean(rival, budget, AP))}"


def _tasks(found: Mapping[str, Difference], streams: Streams) -> str:
    """The tasks with their differences in points, the lowest first; the others beyond a few by their number."""
    lowest = sorted(found, key=lambda task: found[task].value)
    named = [f"{task} ({points(found[task])})" for task in lowest[:TASKS_NAMED]]
    if more := len(lowest) - len(named):
        named.append("1 other task" if more == 1 else f"{more} other tasks")
    every = f"all {len(streams.tasks)} tasks, most on " if len(lowest) == len(streams.tasks) > TASKS_NAMED else ""
    return every + listed(named[:TASKS_NAMED] if every else named)


def _by_task(streams: Streams, budget: int, method: str, rival: str) -> dict[str, Difference]:
    found = {task: streams.difference(method, rival, budget, final_accuracy(task)) for task in streams.tasks}
    return {task: one for task, one in found.items() if one is not None}


def _verdict(streams: Streams, budget: int, method: str, rival: str) -> str:
    found = streams.difference(method, rival, budget, AP)
    return "unknown" if found is None else found.verdict


def _gained(found: Difference) -> bool:
    """With a single seed the sign alone decides, and the sentence says so."""
    return found.verdict == "more" or (found.verdict == "unknown" and found.value > 0)


def _lost(found: Difference) -> bool:
    return found.verdict == "less" or (found.verdict == "unknown" and found.value < 0)


def _if_single(found: Difference) -> str:
    return " (a single seed, error unknown)" if found.verdict == "unknown" else ""

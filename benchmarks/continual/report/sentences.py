"""What was found, in plain sentences: where InduceKV gains nothing or loses, then who won.

Shares are percentages, differences percentage points with the standard error of the paired differences. A difference
counts where 0 lies outside its 95% interval over the seeds; a single seed has no error, its sign counts, and the
sentence says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from benchmarks.continual.comparison import UNTOUCHED, Difference, Mean, Streams, final_accuracy, in_errors, metric
from benchmarks.continual.report.names import RECIPES, RIVALS, is_ours, listed, title

AP, BASE = metric("AP"), metric("base_final")
AP_MEANS = "AP is the accuracy over all tasks after the last one; base questions are what the model could do before."
TASKS_NAMED = 3  # in a sentence; a table has them all
Kind = Literal["better", "worse", "open"]


@dataclass(frozen=True)
class Verdict:
    """The first paragraph, and whether InduceKV is ahead of all rivals, behind one, or neither can be said."""

    kind: Kind
    text: str


def verdict(streams: Streams) -> Verdict:
    """The page's first paragraph, in three lines: where InduceKV falls short, who won, how to read the numbers."""
    won = [sentence for budget in streams.budgets if (sentence := winner(streams, budget))]
    if not won:
        return Verdict("open", "No stream is complete, so nothing can be said yet.")
    lost = [sentence for budget in streams.budgets for sentence in shortfalls(streams, budget)]
    first = " ".join(["Where InduceKV falls short, first.", *lost]) if lost else "No recipe of InduceKV was run."
    return Verdict(_kind(streams), "\n".join([first, " ".join(["Who won.", *won]), _reading(streams)]))


# ------------------------------------------------------------------------------------------------- falling short


def shortfalls(streams: Streams, budget: int) -> list[str]:
    """A sentence for each recipe: what it gains nothing over or loses to with this budget, where and by how much.

    A recipe that was never run has no sentence; one that is not complete with this budget is named.
    """
    told: list[str] = []
    for recipe in RECIPES:
        if not any(run["method"] == recipe for run in streams.runs):
            continue
        if not streams.of(recipe, budget):
            told.append(f"With {budget} entries, no stream of {title(recipe)} is complete.")
            continue
        found = against_untouched(streams, budget, recipe)
        overall = streams.difference(recipe, UNTOUCHED, budget, AP)
        with_tasks = overall is None or _gained(overall)  # where nothing is gained, tasks say nothing more
        for rival in rivals(streams, budget):
            found += against_rival(streams, budget, recipe, rival, with_tasks)
        if not found:
            found = [f"falls behind {listed(map(title, (UNTOUCHED, *rivals(streams, budget))))} on no task"]
        told.append(f"With {budget} entries, {title(recipe)} {'; '.join(found)}.")
    return told


def rivals(streams: Streams, budget: int) -> tuple[str, ...]:
    """Whom a recipe is held against: those of `RIVALS`, and whoever is the best of all that is not InduceKV's."""
    best = next((name for name in ranking(streams, budget) if not is_ours(name) and name != UNTOUCHED), None)
    return RIVALS if best in (None, *RIVALS) else (*RIVALS, best)


def against_untouched(streams: Streams, budget: int, recipe: str) -> list[str]:
    """Where a recipe gains nothing over the untouched model, and what it costs on base questions; sentence parts."""
    overall = streams.difference(recipe, UNTOUCHED, budget, AP)
    if overall is None:
        return ["cannot be held against no memory, which was not run"]
    told = []
    if _lost(overall):
        told.append(f"answers fewer questions than no memory ({_ap(overall)})")
    elif not _gained(overall):
        told.append(f"gains nothing over no memory ({_ap(overall)})")
    elif useless := {t: one for t, one in _by_task(streams, budget, recipe, UNTOUCHED).items() if not _gained(one)}:
        surely = "" if overall.verdict == "unknown" else " beyond the error"
        told.append(
            f"gains nothing{surely} over no memory{_on(useless, streams)}, though ahead in all ({_ap(overall)})"
        )
    base = streams.difference(recipe, UNTOUCHED, budget, BASE)
    if base is not None and _lost(base):
        told.append(f"costs base accuracy ({points(base)}{_if_single(base, ', ')})")
    return told


def against_rival(streams: Streams, budget: int, recipe: str, rival: str, with_tasks: bool) -> list[str]:
    """Where a recipe is not ahead of a rival, overall or on tasks; sentence parts, none where it is everywhere.

    Args:
        with_tasks: whether tasks on which it is behind are told, too.
    """
    overall = streams.difference(recipe, rival, budget, AP)
    if overall is None:
        return [f"cannot be held against {title(rival)}, as no seed is complete in both"]
    by_task = _by_task(streams, budget, recipe, rival) if with_tasks else {}
    behind = {task: found for task, found in by_task.items() if _lost(found)}
    if _lost(overall):
        return [f"loses to {title(rival)} ({_ap(overall)}){_on(behind, streams)}"]
    if not _gained(overall):
        and_behind = f", behind{_on(behind, streams)}" if behind else ""
        return [f"is not ahead of {title(rival)} ({_ap(overall)}){and_behind}"]
    return [f"is behind {title(rival)}{_on(behind, streams)}, though ahead in all ({_ap(overall)})"] if behind else []


# ------------------------------------------------------------------------------------------------------- who won


def winner(streams: Streams, budget: int) -> str:
    """Who has the highest AP with this budget, by how much, and who cannot be told from it; empty without streams.

    Only methods with all seeds that any has are ranked.
    """
    ranked = ranking(streams, budget)
    if not ranked:
        return ""
    best, *rest = ranked
    said = f"With {budget} entries, {title(best)} answers most of all tasks' questions after the last task: "
    said += f"AP {share(streams.mean(best, budget, AP))}, base questions {share(streams.mean(best, budget, BASE))}"
    if not rest:
        return f"{said}; no other method is complete."
    said += f", the best of {len(ranked)} methods. {_behind(streams, budget, best, rest[0], 'The next, ')}"
    if others := [name for name in rest[1:] if _ap_difference(streams, budget, best, name).verdict == "open"]:
        said += f" The error does not tell {listed(map(title, others))} from the best either."
    ours = next((name for name in ranked if name in RECIPES), None)
    if ours not in (None, best, rest[0]):
        said += f" {_behind(streams, budget, best, ours, 'The better recipe of InduceKV, ')}"
    return said


def ranking(streams: Streams, budget: int) -> list[str]:
    """Methods that have all seeds, the highest AP first; equal ones in the order of running."""
    complete = [method for method in streams.methods(budget) if streams.has_all_seeds(method, budget)]
    return sorted(complete, key=lambda method: -streams.mean(method, budget, AP).value)


def _behind(streams: Streams, budget: int, best: str, other: str, lead: str) -> str:
    found = _ap_difference(streams, budget, best, other)
    said = f"{lead}{title(other)}, has AP {share(streams.mean(other, budget, AP))}"
    said += f" (base {share(streams.mean(other, budget, BASE))}): "
    if found.verdict == "open":
        return f"{said}no difference beyond the error ({points(found)})."
    return f"{said}{points(found).removeprefix('+')} points less{_if_single(found) or ', beyond the error'}."


def _ap_difference(streams: Streams, budget: int, best: str, other: str) -> Difference:
    """Of two methods that have all seeds."""
    found = streams.difference(best, other, budget, AP)
    assert found is not None
    return found


def _kind(streams: Streams) -> Kind:
    """Of the better recipe against the best method that is not ours, over all budgets."""
    verdicts = set()
    for budget in streams.budgets:
        ranked = ranking(streams, budget)
        ours = next((name for name in ranked if name in RECIPES), None)
        rival = next((name for name in ranked if not is_ours(name)), None)
        if ours and rival:
            verdicts.add(_ap_difference(streams, budget, ours, rival).verdict)
    if "less" in verdicts:
        return "worse"
    return "better" if verdicts == {"more"} else "open"


def _reading(streams: Streams) -> str:
    """What the signs in the paragraph mean."""
    most = max(len(streams.seeds(budget)) for budget in streams.budgets)
    if most == 1:
        return f"{AP_MEANS} There is one seed only, so no error is known, and small differences mean nothing."
    return (
        f"{AP_MEANS} Differences are percentage points; ± is the standard error over {most} seeds, paired seed by "
        f"seed. Beyond the error: more than {in_errors(most):.1f} of them, so that 0 lies outside the 95% interval "
        "(Student's t)."
    )


# ------------------------------------------------------------------------------------------------- parts of sentences


def points(found: Mean) -> str:
    """Percentage points, with a sign: "−3.1 ± 0.4"."""
    value = round(100 * found.value, 1)
    said = f"{value:+.1f}".replace("-", "−") if value else "0.0"
    return said if found.standard_error is None else f"{said} ± {100 * found.standard_error:.1f}"


def share(found: Mean) -> str:
    """A percentage: "78.8 ± 0.5%"."""
    error = "" if found.standard_error is None else f" ± {100 * found.standard_error:.1f}"
    return f"{100 * found.value:.1f}{error}%"


def _ap(found: Difference) -> str:
    """A difference over all tasks, and whether it is within the error."""
    within = ", no difference beyond the error" if found.verdict == "open" else ""
    return f"AP {points(found)}{within}{_if_single(found, ', ')}"


def _on(found: Mapping[str, Difference], streams: Streams) -> str:
    """ " on" the tasks with their differences, the lowest first, those beyond a few by their number; empty for none."""
    if not found:
        return ""
    if len(found) == len(streams.tasks) > TASKS_NAMED:
        return f" on all {len(found)} tasks"
    lowest = sorted(found, key=lambda task: found[task].value)
    named = [f"{task} ({points(found[task])})" for task in lowest[:TASKS_NAMED]]
    if more := len(lowest) - len(named):
        named.append("1 other task" if more == 1 else f"{more} other tasks")
    return f" on {listed(named)}"


def _by_task(streams: Streams, budget: int, method: str, rival: str) -> dict[str, Difference]:
    found = {task: streams.difference(method, rival, budget, final_accuracy(task)) for task in streams.tasks}
    return {task: one for task, one in found.items() if one is not None}


def _gained(found: Difference) -> bool:
    return found.verdict == "more" or (found.verdict == "unknown" and found.value > 0)


def _lost(found: Difference) -> bool:
    return found.verdict == "less" or (found.verdict == "unknown" and found.value < 0)


def _if_single(found: Difference, lead: str = " ") -> str:
    return f"{lead}of a single seed, error unknown" if found.verdict == "unknown" else ""

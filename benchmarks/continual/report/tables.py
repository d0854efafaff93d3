"""The page's tables. Shares are percentages, differences percentage points; ± is a standard error over seeds."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.continual.comparison import UNTOUCHED, Collected, Score, Streams, final_accuracy, learn_seconds, metric
from benchmarks.continual.report.findings import Findings
from benchmarks.continual.report.names import RECIPES, ablations, title
from benchmarks.continual.report.sentences import AP, BASE, points, ranking, rivals
from selector.report.parts import byte_size, number, table, text

POINTS_EQUAL = 5e-5  # shares that a table shows as the same


@dataclass(frozen=True)
class Column:
    """A score of the main table, as a percentage."""

    label: str
    score: Score
    sign: int  # 1 where more is better, -1 where less is


FIRST_COLUMNS = (
    Column("AP (%)", AP, 1),
    Column("AF (points)", metric("AF"), -1),
    Column("base, at the end (%)", BASE, 1),
)
MORE_COLUMNS = (
    Column("BWT (points)", metric("BWT"), 1),
    Column("Last (%)", metric("Last"), 1),
    Column("MAA over time (%)", metric("MAA_over_time"), 1),
)


def main_table(streams: Streams, budget: int) -> str:
    """A row for each method, the highest AP first, the best of each column marked.

    Only methods that learn something and have all seeds can be best: the untouched model forgets nothing.
    """
    retention = streams.retention(budget)
    retained = [Column("base retention (%)", retention, 1)] if retention else []
    columns = [*FIRST_COLUMNS, *retained, *MORE_COLUMNS]
    methods = by_accuracy(streams, budget)
    rows = [
        [
            title(method),
            _seeds(streams, method, budget),
            *(_percent(streams, method, budget, column.score) for column in columns),
            byte_size(stored_bytes(streams, method, budget)),
            _seconds(streams, method, budget, learn_seconds),
        ]
        for method in methods
    ]
    marked = set()
    for place, column in enumerate(columns):
        for row in _best(streams, methods, budget, column.score, column.sign):
            marked.add((row, place + 2))
    head = ["method", "seeds", *(column.label for column in columns), "stored", "learning (s)"]
    return wide(table(head, rows, marked=marked))


def ablation_table(streams: Streams, budget: int, recipe: str) -> str | None:
    """Each ablation's scores and their differences to what it changes one part of; None where none was run."""
    variants = ablations(streams.methods(budget), recipe)
    if not variants or not streams.of(recipe, budget):
        return None
    scores = {"AP (%)": AP, "AF (points)": metric("AF"), "base, at the end (%)": BASE}
    head = ["variant", "seeds"]
    for label in scores:
        head += [label, "difference (points)"]
    rows = [[f"{title(recipe)}, full", _seeds(streams, recipe, budget)]]
    for score in scores.values():
        rows[0] += [_percent(streams, recipe, budget, score), ""]
    for variant, ablation in variants.items():
        other = "" if ablation.against == recipe else f" (against: {title(ablation.against)})"
        row = [ablation.change + other, _seeds(streams, variant, budget)]
        for score in scores.values():
            found = _difference(streams, variant, ablation.against, budget, score)
            row += [_percent(streams, variant, budget, score), found]
        rows.append(row)
    return wide(table(head, rows, chosen=[True, *([False] * len(variants))]))


def task_table(streams: Streams, budget: int) -> str:
    """Final accuracy of every method on every task, the best of each marked."""
    methods = by_accuracy(streams, budget)
    rows = [
        [title(method), *(_percent(streams, method, budget, final_accuracy(task)) for task in streams.tasks)]
        for method in methods
    ]
    marked = {
        (row, place + 1)
        for place, task in enumerate(streams.tasks)
        for row in _best(streams, methods, budget, final_accuracy(task), 1)
    }
    return wide(table(["method", *streams.tasks], rows, marked=marked))


def rival_table(streams: Streams, budget: int) -> str | None:
    """Each recipe minus no memory and minus its rivals, over all tasks and on each; None where nothing can be compared.

    Differences that are beyond the error to the recipe's disadvantage are marked.
    """
    scores = {"all tasks (AP)": AP, **{task: final_accuracy(task) for task in streams.tasks}, "base": BASE}
    rows, marked = [], set()
    for recipe in RECIPES:
        for rival in (UNTOUCHED, *rivals(streams, budget)):
            found = [streams.difference(recipe, rival, budget, score) for score in scores.values()]
            if found[0] is None:
                continue
            marked |= {(len(rows), place + 1) for place, one in enumerate(found) if one and one.verdict == "less"}
            rows.append([f"{title(recipe)} − {title(rival)}", *("" if one is None else points(one) for one in found)])
    return wide(table(["difference (points)", *scores], rows, marked=marked)) if rows else None


def cost_table(streams: Streams, budget: int) -> str:
    """What every method stores and takes. Seconds are means over seeds, of the whole stream."""
    rows = []
    for method in by_accuracy(streams, budget):
        run = next(iter(streams.of(method, budget).values()))
        rows.append(
            [
                title(method),
                stored_bytes(streams, method, budget),
                byte_size(stored_bytes(streams, method, budget)),
                byte_size(anchor_bytes(run)),
                _seconds(streams, method, budget, learn_seconds),
                _seconds(streams, method, budget, evaluate_seconds),
                run["settings"].get("steps"),
                run["settings"].get("batch_size"),
            ]
        )
    head = ["method", "stored bytes", "", "anchors", "learning (s)", "answering (s)", "steps a task", "batch"]
    return wide(table(head, rows))


def settings_table(streams: Streams) -> str:
    """The settings of every method, which may differ between budgets."""
    budgets: dict[tuple[str, str], list[int]] = {}
    for run in streams.runs:
        settings = ", ".join(f"{key} = {_setting(value)}" for key, value in run["settings"].items() if key != "name")
        budgets.setdefault((run["method"], settings), []).append(run["budget"])
    rows = [
        [title(method), method, ", ".join(map(str, sorted({*used}))), settings]
        for (method, settings), used in budgets.items()
    ]
    return prose(table(["method", "name in commands", "entries", "settings"], rows))


def footprint_table(findings: Findings) -> str:
    rows = [
        [
            row.budget,
            row.kv_tokens,
            byte_size(row.bytes),
            row.peft_parameters,
            row.text_exemplars,
            row.picture_exemplars,
        ]
        for row in findings.footprint
    ]
    head = [
        "entries B",
        "KV tokens a layer",
        "memory",
        "float16 parameters",
        "text exemplars",
        "picture + text exemplars",
    ]
    return table(head, rows)


def tuned_table(findings: Findings) -> str | None:
    """Every method's trials with what they scored; the chosen are marked. None where no search is known."""
    if findings.tuned is None:
        return None
    used = {run["method"]: run["settings"] for run in findings.streams.runs}
    rows, chosen = [], []
    for method, record in findings.tuned["methods"].items():
        if method not in used:
            continue
        here = all(_setting(used[method].get(key)) == _setting(value) for key, value in record["settings"].items())
        for trial in record["trials"]:
            won = trial["settings"] == record["settings"]
            rows.append(
                [
                    title(method),
                    ", ".join(f"{key} = {_setting(value)}" for key, value in trial["settings"].items()),
                    f"{100 * trial['AP']:.1f}",
                    f"{100 * trial['base_final']:.1f}",
                    number(trial["seconds"], 3),
                    ("used here" if here else "this run used others") if won else "",
                ]
            )
            chosen.append(won)
    if not rows:
        return None
    head = ["method", "settings tried", "AP on validation (%)", "base (%)", "learning (s)", ""]
    return wide(table(head, rows, chosen))


# ----------------------------------------------------------------------------------------------------- parts


def by_accuracy(streams: Streams, budget: int) -> list[str]:
    """All methods with complete streams: the ranked ones, then those that lack seeds."""
    ranked = ranking(streams, budget)
    return [*ranked, *(method for method in streams.methods(budget) if method not in ranked)]


def stored_bytes(streams: Streams, method: str, budget: int) -> int:
    """After the last task; the most of any seed."""
    return max(run["stored_bytes"][-1] for run in streams.of(method, budget).values())


def anchor_bytes(run: Collected) -> int:
    """Of examples that a method keeps for its own learning, not for answering."""
    return int(run["anchor_bytes"][-1])


def evaluate_seconds(run: Collected) -> float:
    """Of all tasks together."""
    return math.fsum(task["evaluate"] for task in run["seconds"])


def wide(content: str) -> str:
    """A table that may be broader than the page."""
    return f'<div class="wide">{content}</div>'


def prose(content: str) -> str:
    """A table of words."""
    return f'<div class="prose">{content}</div>'


def paragraph(said: str) -> str:
    return f"<p>{text(said)}</p>"


def for_each_budget(streams: Streams, part: Callable[[int], str | None]) -> list[str]:
    """Parts of the page with the budget they are of above them."""
    parts: list[str] = []
    for budget in streams.budgets:
        if streams.methods(budget) and (content := part(budget)) is not None:
            parts += [f"<h3>{text(f'{budget} entries')}</h3>", content]
    return parts


def _best(streams: Streams, methods: Sequence[str], budget: int, score: Score, sign: int) -> list[int]:
    """The rows of the best."""
    means = {
        row: sign * streams.mean(method, budget, score).value
        for row, method in enumerate(methods)
        if streams.has_all_seeds(method, budget) and stored_bytes(streams, method, budget)
    }
    return [row for row, value in means.items() if value > max(means.values()) - POINTS_EQUAL]


def _percent(streams: Streams, method: str, budget: int, score: Score) -> str:
    found = streams.mean(method, budget, score)
    error = "" if found.standard_error is None else f" ± {100 * found.standard_error:.1f}"
    return f"{100 * found.value:.1f}".replace("-", "−").replace("−0.0", "0.0") + error


def _difference(streams: Streams, method: str, rival: str, budget: int, score: Score) -> str:
    found = streams.difference(method, rival, budget, score)
    if found is None:
        return "no seed in common"
    return points(found) + {"more": " ▲", "less": " ▼"}.get(found.verdict, "")


def _seconds(streams: Streams, method: str, budget: int, score: Score) -> str:
    return f"{streams.mean(method, budget, score).value:,.0f}"


def _seeds(streams: Streams, method: str, budget: int) -> str:
    """All of them by number; those that are missing by name."""
    found = sorted(streams.of(method, budget))
    lacking = [seed for seed in streams.seeds(budget) if seed not in found]
    count = str(len(found))
    return f"{count}, without {', '.join(map(str, lacking))}" if lacking else count


def _setting(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_setting, value))}]"
    return f"{value:g}" if isinstance(value, float) else str(value)

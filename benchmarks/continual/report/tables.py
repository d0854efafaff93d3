"""The page's tables. Shares are percentages, differences percentage points; ± is a standard error over seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.continual.comparison import UNTOUCHED, Collected, Score, Streams, final_accuracy, learn_seconds, metric
from benchmarks.continual.report.content import Content
from benchmarks.continual.report.names import RECIPES, ablations, described, listed, title
from benchmarks.continual.report.ranking import AP, BASE, points, ranking, rivals
from selector.report.parts import Table, byte_size, counted, number

POINTS_EQUAL = 5e-5  # shares that a table shows as the same


@dataclass(frozen=True)
class Column:
    """A score of the main table, as a percentage."""

    label: str
    score: Score
    sign: int  # 1 if more is better, -1 if less is


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


def rival_table(streams: Streams) -> Table:
    """Each recipe minus no memory and minus its rivals, over all tasks and on each, with every budget.

    Differences beyond the error to the recipe's disadvantage are marked.
    """
    scores = {"all tasks (AP)": AP, **{task: final_accuracy(task) for task in streams.tasks}, "base": BASE}
    rows, marked = [], set()
    for budget in streams.budgets:
        for recipe in RECIPES:
            for rival in (UNTOUCHED, *rivals(streams, budget)):
                differences = [streams.difference(recipe, rival, budget, score) for score in scores.values()]
                if differences[0] is None:
                    continue
                behind = [column for column, score in enumerate(differences) if score and score.verdict == "less"]
                marked |= {(len(rows), column + 2) for column in behind}
                cells = ["" if difference is None else points(difference) for difference in differences]
                rows.append([f"{title(recipe)} − {title(rival)}", budget, *cells])
    return Table(["difference (points)", "entries", *scores], rows, marked=marked, kind="wide")


def main_table(streams: Streams, budget: int) -> Table:
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
    marked = {
        (row, place + 2)
        for place, column in enumerate(columns)
        for row in _best(streams, methods, budget, column.score, column.sign)
    }
    head = ["method", "seeds", *(column.label for column in columns), "stored", "learning (s)"]
    return Table(head, rows, marked=marked, kind="wide")


def ablation_table(streams: Streams, budget: int, recipe: str) -> Table | None:
    """Each ablation's scores and their differences to what it changes one part of; None if none was run."""
    variants = ablations(streams.methods(budget), recipe)
    if not variants or not streams.of(recipe, budget):
        return None
    scores = {"AP (%)": AP, "AF (points)": metric("AF"), "base, at the end (%)": BASE}
    rows = [[f"{title(recipe)}, full", _seeds(streams, recipe, budget)]]
    for score in scores.values():
        rows[0] += [_percent(streams, recipe, budget, score), ""]
    for variant, ablation in variants.items():
        other = "" if ablation.against == recipe else f" (against: {title(ablation.against)})"
        row = [ablation.change + other, _seeds(streams, variant, budget)]
        for score in scores.values():
            difference = _difference(streams, variant, ablation.against, budget, score)
            row += [_percent(streams, variant, budget, score), difference]
        rows.append(row)
    head = ["variant", "seeds", *(name for label in scores for name in (label, "difference (points)"))]
    return Table(head, rows, chosen=[0], kind="wide")


def task_table(streams: Streams, budget: int) -> Table:
    """Final accuracy of every method on every task and the base, shaded, the best of each marked."""
    methods = by_accuracy(streams, budget)
    scores = [*(final_accuracy(task) for task in streams.tasks), BASE]
    rows = [[title(method), *(_percent(streams, method, budget, score) for score in scores)] for method in methods]
    marked = {
        (row, column + 1) for column, score in enumerate(scores) for row in _best(streams, methods, budget, score, 1)
    }
    shares = {
        (row, column + 1): round(streams.mean(method, budget, score).value, 2)
        for row, method in enumerate(methods)
        for column, score in enumerate(scores)
    }
    return Table(["method", *streams.tasks, "base"], rows, marked=marked, shares=shares, kind="wide")


def base_table(streams: Streams, budget: int) -> Table:
    """Accuracy on the base questions after each task, shaded; means over the complete seeds."""
    methods = by_accuracy(streams, budget)
    scores: list[Score] = [lambda run, step=step: float(run["base"][step]) for step in range(len(streams.tasks))]
    rows = [[title(method), *(_percent(streams, method, budget, score) for score in scores)] for method in methods]
    shares = {
        (row, column + 1): round(streams.mean(method, budget, score).value, 2)
        for row, method in enumerate(methods)
        for column, score in enumerate(scores)
    }
    return Table(["method", *(f"after {task}" for task in streams.tasks)], rows, shares=shares, kind="wide")


def cost_table(streams: Streams, budget: int) -> Table:
    """Bytes and seconds of every method. Seconds are means over seeds, of the whole stream."""
    rows = []
    for method in by_accuracy(streams, budget):
        run = next(iter(streams.of(method, budget).values()))
        stored = stored_bytes(streams, method, budget)
        rows.append(
            [
                title(method),
                stored,
                byte_size(stored),
                byte_size(run["anchor_bytes"]),
                _seconds(streams, method, budget, learn_seconds),
                _seconds(streams, method, budget, evaluate_seconds),
                run["settings"].get("steps"),
                run["settings"].get("batch_size"),
            ]
        )
    head = ["method", "stored bytes", "", "anchors", "learning (s)", "answering (s)", "steps a task", "batch"]
    return Table(head, rows, kind="wide")


def run_table(content: Content, streams: Streams) -> Table:
    """What was run, and on which machines."""
    methods, seeds = ({run[key]: 0 for run in streams.runs} for key in ("method", "seed"))
    tasks = f"{counted(len(streams.tasks), 'task', 'tasks')}, in this order: {', '.join(streams.tasks)}"
    machines = dict.fromkeys(map(_machine, content["commands"]))
    rows = [
        ["suite", f"{content['suite']}: {tasks}"],
        ["model", content["model"]["name"]],
        ["budgets", f"{listed(map(str, streams.budgets))} entries of memory, or their bytes"],
        ["seeds", listed(map(str, sorted(seeds)))],
        ["questions", _questions(content)],
        ["answers", _answered(content.get("answer", {}))],
        ["methods", len(methods)],
        *(["hardware and versions", machine] for machine in machines),
    ]
    return Table(["what", ""], rows, kind="prose")


def methods_table(streams: Streams) -> Table:
    methods = dict.fromkeys(run["method"] for run in streams.runs)
    return Table(["method", "what it is"], [[title(name), described(name) or "–"] for name in methods], kind="prose")


def settings_table(streams: Streams) -> Table:
    """The settings of every method, which may differ between budgets."""
    budgets: dict[tuple[str, str], set[int]] = {}
    for run in streams.runs:
        settings = ", ".join(f"{key} = {_setting(value)}" for key, value in run["settings"].items() if key != "name")
        budgets.setdefault((run["method"], settings), set()).add(run["budget"])
    rows = [
        [title(method), method, ", ".join(map(str, sorted(used))), settings]
        for (method, settings), used in budgets.items()
    ]
    return Table(["method", "name in commands", "entries", "settings"], rows, kind="prose")


def tuned_table(tuned: Mapping[str, Any] | None, streams: Streams) -> Table | None:
    """The trials of every method of the run with their scores; the chosen are bold. None if no search is known."""
    if tuned is None:
        return None
    used = {run["method"]: run["settings"] for run in streams.runs}
    rows, chosen = [], []
    for method in [name for name in tuned["methods"] if name in used]:
        record = tuned["methods"][method]
        here = all(_setting(used[method].get(key)) == _setting(value) for key, value in record["settings"].items())
        for trial in record["trials"]:
            won = trial["settings"] == record["settings"]
            chosen += [len(rows)] if won else []
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
    head = ["method", "settings tried", "AP on validation (%)", "base (%)", "learning (s)", ""]
    return Table(head, rows, chosen, kind="wide")


def footprint_table(content: Content) -> Table:
    head = [
        "entries B",
        "KV tokens a layer",
        "memory",
        "float16 parameters",
        "text exemplars",
        "picture + text exemplars",
    ]
    keys = ("budget", "kv_tokens", "bytes", "peft_parameters", "text_exemplars", "picture_exemplars")
    rows = [[byte_size(row[key]) if key == "bytes" else row[key] for key in keys] for row in content["footprint"]]
    return Table(head, rows)


# ----------------------------------------------------------------------------------------------------- parts


def by_accuracy(streams: Streams, budget: int) -> list[str]:
    """All methods with complete streams: the ranked ones, then those that lack seeds."""
    ranked = ranking(streams, budget)
    return [*ranked, *(method for method in streams.methods(budget) if method not in ranked)]


def stored_bytes(streams: Streams, method: str, budget: int) -> int:
    """After the last task; the most of any seed."""
    return max(run["stored_bytes"][-1] for run in streams.of(method, budget).values())


def evaluate_seconds(run: Collected) -> float:
    """Of all tasks together."""
    return math.fsum(task["evaluate"] for task in run["seconds"])


def _best(streams: Streams, methods: Sequence[str], budget: int, score: Score, sign: int) -> list[int]:
    """The rows of the best."""
    means = {
        row: sign * streams.mean(method, budget, score).value
        for row, method in enumerate(methods)
        if streams.has_all_seeds(method, budget) and stored_bytes(streams, method, budget)
    }
    return [row for row, value in means.items() if value > max(means.values()) - POINTS_EQUAL]


def _percent(streams: Streams, method: str, budget: int, score: Score) -> str:
    mean = streams.mean(method, budget, score)
    error = "" if mean.standard_error is None else f" ± {100 * mean.standard_error:.1f}"
    return f"{100 * mean.value:.1f}".replace("-", "−").replace("−0.0", "0.0") + error


def _difference(streams: Streams, method: str, rival: str, budget: int, score: Score) -> str:
    difference = streams.difference(method, rival, budget, score)
    if difference is None:
        return "no seed in common"
    return points(difference) + {"more": " ▲", "less": " ▼"}.get(difference.verdict, "")


def _seconds(streams: Streams, method: str, budget: int, score: Score) -> str:
    return f"{streams.mean(method, budget, score).value:,.0f}"


def _seeds(streams: Streams, method: str, budget: int) -> str:
    """The number of complete seeds, and the names of missing ones."""
    complete = streams.of(method, budget)
    missing = [seed for seed in streams.seeds(budget) if seed not in complete]
    return f"{len(complete)}, without {', '.join(map(str, missing))}" if missing else str(len(complete))


def _setting(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_setting, value))}]"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _questions(content: Content) -> str:
    split = f"of the {content['split']} split" if "split" in content else "–"
    if not content["examples"]:
        return split
    *tasks, base = content["examples"]
    counts = sorted({task["questions"] for task in tasks})
    per_task = " to ".join(map(str, dict.fromkeys((counts[0], counts[-1]))))
    return f"{per_task} a task, {base['questions']} base questions, {split}"


def _answered(answer: Mapping[str, Any]) -> str:
    if answer.get("by") == "http":
        server = "a server given to the run" if answer.get("server") == "given" else "inducekv-serve"
        return f"by {server} over HTTP, greedy"
    return "in transformers, greedy"


def _machine(record: Mapping[str, Any]) -> str:
    """Hardware and versions of a command on record."""
    machine = record["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    processor = f"{counted(machine['cores'], 'core', 'cores')} of {machine['cpu']}, {machine['memory_gib']} GiB"
    gpu = f", {machine['gpu']}" if machine["gpu"] else ", no GPU"
    return f"{processor}{gpu}; Python {machine['python']}, {versions}"

"""The page's tables. Shares are percentages, differences percentage points; ± is a standard error over seeds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.continual.comparison import UNTOUCHED, Collected, Score, Streams, final_accuracy, learn_seconds, metric
from benchmarks.continual.report.content import Content
from benchmarks.continual.report.names import RECIPES, ablations, described, listed, title
from benchmarks.continual.report.ranking import AP, BASE, percent, points, ranking, rivals
from selector.report.parts import Table, byte_size, counted, number

POINTS_EQUAL = 5e-5  # shares that a table shows as the same


# Scores of the main table, as percentages: label, and 1 if more is better, -1 if less is
SCORES: Mapping[str, tuple[Score, int]] = {
    "AP (%)": (AP, 1),
    "AF (points)": (metric("AF"), -1),
    "base, at the end (%)": (BASE, 1),
    "BWT (points)": (metric("BWT"), 1),
    "Last (%)": (metric("Last"), 1),
    "MAA over time (%)": (metric("MAA_over_time"), 1),
}


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
    """The scores of each method."""
    retention = streams.retention(budget)
    retained = {"base retention (%)": (retention, 1)} if retention else {}
    return _method_table(
        streams,
        budget,
        {**SCORES, **retained},
        {
            "stored": lambda method: byte_size(stored_bytes(streams, method, budget)),
            "learning (s)": lambda method: _seconds(streams, method, budget, learn_seconds),
            "seeds": lambda method: _seeds(streams, method, budget),
        },
    )


def ablation_table(streams: Streams, budget: int, recipe: str) -> Table | None:
    """Each ablation's scores and their differences to what it changes one part of; None if none was run."""
    variants = ablations(streams.methods(budget), recipe)
    if not variants or not streams.of(recipe, budget):
        return None
    scores = {"AP (%)": AP, "AF (points)": metric("AF"), "base, at the end (%)": BASE}
    rows = [[f"{title(recipe)}, full", _seeds(streams, recipe, budget)]]
    for score in scores.values():
        rows[0] += [percent(streams.mean(recipe, budget, score)), ""]
    for variant, ablation in variants.items():
        other = "" if ablation.against == recipe else f" (against: {title(ablation.against)})"
        row = [ablation.change + other, _seeds(streams, variant, budget)]
        for score in scores.values():
            difference = _difference(streams, variant, ablation.against, budget, score)
            row += [percent(streams.mean(variant, budget, score)), difference]
        rows.append(row)
    head = ["variant", "seeds", *(name for label in scores for name in (label, "difference (points)"))]
    return Table(head, rows, chosen=[0], kind="wide")


def task_table(streams: Streams, budget: int) -> Table:
    """Final accuracy of every method on every task and the base, shaded."""
    scores = {**{task: (final_accuracy(task), 1) for task in streams.tasks}, "base": (BASE, 1)}
    return _method_table(streams, budget, scores, shaded=True)


def base_table(streams: Streams, budget: int) -> Table:
    """Accuracy on the base questions after each task, shaded."""

    def after(step: int) -> Score:
        return lambda run: float(run["base"][step])

    scores = {f"after {task}": (after(step), 0) for step, task in enumerate(streams.tasks)}
    return _method_table(streams, budget, scores, shaded=True)


def cost_table(streams: Streams, budget: int) -> Table:
    """Bytes and seconds of every method. Seconds are means over seeds, of the whole stream."""

    def run(method: str) -> Collected:
        return next(iter(streams.of(method, budget).values()))

    return _method_table(
        streams,
        budget,
        {},
        {
            "stored bytes": lambda method: stored_bytes(streams, method, budget),
            "stored": lambda method: byte_size(stored_bytes(streams, method, budget)),
            "anchors": lambda method: byte_size(run(method)["anchor_bytes"]),
            "learning (s)": lambda method: _seconds(streams, method, budget, learn_seconds),
            "answering (s)": lambda method: _seconds(streams, method, budget, evaluate_seconds),
            "steps a task": lambda method: run(method)["settings"].get("steps"),
            "batch": lambda method: run(method)["settings"].get("batch_size"),
        },
    )


def _method_table(
    streams: Streams,
    budget: int,
    scores: Mapping[str, tuple[Score, int]],
    more: Mapping[str, Callable[[str], Any]] = {},
    shaded: bool = False,
) -> Table:
    """A row for each method, the highest AP first: scores as percentages, then `more` columns.

    The best of each score with a sign is marked. Only methods that learn something and have all seeds can be best: the
    untouched model forgets nothing.
    """
    methods = by_accuracy(streams, budget)
    rows = [
        [
            title(method),
            *(percent(streams.mean(method, budget, score)) for score, _ in scores.values()),
            *(cell(method) for cell in more.values()),
        ]
        for method in methods
    ]
    marked, shares = set(), {}
    for column, (score, sign) in enumerate(scores.values(), start=1):
        values = {row: streams.mean(method, budget, score).value for row, method in enumerate(methods)}
        ranked = {
            row: sign * value
            for row, value in values.items()
            if streams.has_all_seeds(methods[row], budget) and stored_bytes(streams, methods[row], budget)
        }
        best = max(ranked.values(), default=0.0)
        marked |= {(row, column) for row, value in ranked.items() if sign and value > best - POINTS_EQUAL}
        shares |= {(row, column): round(value, 2) for row, value in values.items() if shaded}
    return Table(["method", *scores, *more], rows, marked=marked, shares=shares, kind="wide")


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
        budgets.setdefault((run["method"], _settings(run["settings"])), set()).add(run["budget"])
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
            scores = [f"{100 * trial[name]:.1f}" for name in ("AP", "base_final")]
            remark = ("used here" if here else "this run used others") if won else ""
            rows.append([title(method), _settings(trial["settings"]), *scores, number(trial["seconds"], 3), remark])
    head = ["method", "settings tried", "AP on validation (%)", "base (%)", "learning (s)", ""]
    return Table(head, rows, chosen, kind="wide")


def footprint_table(content: Content) -> Table:
    columns = {
        "budget": "entries B",
        "kv_tokens": "KV tokens a layer",
        "bytes": "memory",
        "peft_parameters": "float16 parameters",
        "text_exemplars": "text exemplars",
        "picture_exemplars": "picture + text exemplars",
    }
    rows = [[byte_size(row[key]) if key == "bytes" else row[key] for key in columns] for row in content["footprint"]]
    return Table([*columns.values()], rows)


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


def _settings(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} = {_setting(value)}" for key, value in settings.items() if key != "name")


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

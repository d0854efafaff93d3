"""The page, and the JSON file with the same content."""

from __future__ import annotations

from typing import Any

from benchmarks.continual.comparison import (
    UNTOUCHED,
    Collected,
    Difference,
    Streams,
    compare,
    final_accuracy,
    gaps,
    rounded,
)
from benchmarks.continual.report import figures, overview, tables
from benchmarks.continual.report.findings import Diagnosed, Findings
from benchmarks.continual.report.names import RECIPES, ablations, title
from benchmarks.continual.report.sentences import AP, BASE, rivals, verdict
from benchmarks.continual.report.tables import for_each_budget, paragraph
from selector.report.parts import page, picture, text

__all__ = ["as_json", "render_html"]

KEPT = ("method", "budget", "seed", "settings", "complete", "accuracy", "base", "stored_bytes", "seconds", "metrics")
DIGITS = 4


def render_html(findings: Findings) -> str:
    """The page, complete in itself: nothing on it is loaded from anywhere."""
    found = verdict(findings.streams)
    sections = {
        "Against no memory and rivals": _rivals(findings),
        "What was run": overview.what_was_run(findings),
        "The tasks": overview.tasks_told(findings),
        "The methods": overview.methods_told(findings),
        "Results": _results(findings),
        "Ablations": _ablations(findings),
        "Task by task": _tasks(findings),
        "Learning and forgetting": _forgetting(findings),
        "Cost": _cost(findings),
        "What the bytes buy otherwise": [overview.footprint_told(findings), tables.footprint_table(findings)],
        "Settings": _settings(findings),
        "Diagnostics": [part for one in findings.diagnostics for part in _diagnostic(one)],
        "Terms": overview.glossary(),
        "Commands": overview.commands_told(findings),
    }
    name = f"Continual learning: {findings.configuration['suite']} suite"
    return page(
        name, found.kind, found.text.splitlines(), {heading: parts for heading, parts in sections.items() if parts}
    )


def as_json(findings: Findings) -> dict[str, Any]:
    """What the page says, as JSON values; shares, not percentages."""
    streams = findings.streams
    found = verdict(streams)
    return {
        "benchmark": "continual",
        **findings.configuration,
        "verdict": found.kind,
        "says": found.text,
        "missing": gaps(streams),
        "results": compare(streams),
        "differences": _differences(streams),
        "diagnostics": [{**one.found} for one in findings.diagnostics],
        "commands": list(findings.commands),
        "runs": [_brief(run) for run in streams.runs],
    }


# ----------------------------------------------------------------------------------------------------- sections


def _rivals(findings: Findings) -> list[str]:
    parts = for_each_budget(findings.streams, lambda budget: tables.rival_table(findings.streams, budget))
    if not parts:
        return []
    said = (
        "InduceKV minus the other, in points with standard errors, over all tasks and on each. Where InduceKV is "
        "behind beyond the error the cell is marked."
    )
    return [paragraph(said), *parts]


def _results(findings: Findings) -> list[str]:
    streams = findings.streams
    parts = for_each_budget(
        streams,
        lambda budget: tables.main_table(streams, budget) + figures.bars_of_accuracy(streams, budget),
    )
    if not parts:
        return []
    said = (
        "The best of each column is marked, among methods that learn something and have all seeds. The terms are "
        "explained at the end of the page."
    )
    return [paragraph(said), *parts, *filter(None, [overview.chance_of_questions(findings)])]


def _ablations(findings: Findings) -> list[str]:
    streams = findings.streams
    parts = []
    for recipe in RECIPES:
        found = for_each_budget(streams, lambda budget, recipe=recipe: tables.ablation_table(streams, budget, recipe))
        if found:
            parts += [paragraph(f"{title(recipe)}, with one part changed at a time."), *found]
    if not parts:
        return []
    said = (
        "Differences are to the full recipe where nothing else is named, in points; ▲ and ▼ are beyond the error. "
        "Where AF rises, more is lost."
    )
    return [paragraph(said), *parts]


def _tasks(findings: Findings) -> list[str]:
    streams = findings.streams
    return for_each_budget(
        streams, lambda budget: figures.heatmap_of_tasks(streams, budget) + tables.task_table(streams, budget)
    )


def _forgetting(findings: Findings) -> list[str]:
    streams = findings.streams
    return for_each_budget(
        streams, lambda budget: figures.matrices(streams, budget) + figures.heatmap_of_base(streams, budget)
    )


def _cost(findings: Findings) -> list[str]:
    parts = for_each_budget(findings.streams, lambda budget: tables.cost_table(findings.streams, budget))
    said = (
        "Stored is what answering needs beside the model, after the last task; anchors are examples that are kept for "
        "learning only. Seconds are of the whole stream, on the hardware above; answering is all questions after all "
        "tasks together, where another method has not got the same answers before."
    )
    return [paragraph(said), *parts] if parts else []


def _settings(findings: Findings) -> list[str]:
    parts = [tables.settings_table(findings.streams)]
    if (tuned := tables.tuned_table(findings)) is not None:
        searched = (findings.tuned or {}).get("search", {})
        where = f" over the tasks {', '.join(searched['tasks'])}" if "tasks" in searched else ""
        said = (
            f"Settings were searched with equally many trials for every method that has any to search{where}, judged "
            "by AP on validation questions; the chosen ones are bold."
        )
        parts += [paragraph(said), tuned]
    return parts


def _diagnostic(one: Diagnosed) -> list[str]:
    source, method, budget = (one.found.get(key) for key in ("source", "method", "budget"))
    name = str(one.found["diagnostic"]).replace("_", " ").capitalize()
    name += f", {title(method)}" if method else ""
    name += f", {budget} entries" if budget else ""
    said = one.says + (f" (Source: {source}.)" if source else "")
    if one.plot is None:
        return [f"<p><strong>{text(name)}.</strong> {text(said)}</p>"]
    return [picture(one.plot, name, said)]


# ----------------------------------------------------------------------------------------------------- JSON


def _differences(streams: Streams) -> list[dict[str, Any]]:
    """Recipes minus the untouched model and rivals, ablations minus what they change: paired, by budget."""
    pairs = [
        (budget, method, rival)
        for budget in streams.budgets
        for recipe in RECIPES
        for method, rival in (
            *((recipe, rival) for rival in (UNTOUCHED, *rivals(streams, budget))),
            *((name, one.against) for name, one in ablations(streams.methods(budget), recipe).items()),
        )
    ]
    table = []
    for budget, method, rival in pairs:
        overall = streams.difference(method, rival, budget, AP)
        if overall is None:
            continue
        by_task = {task: streams.difference(method, rival, budget, final_accuracy(task)) for task in streams.tasks}
        table.append(
            {
                "method": method,
                "against": rival,
                "budget": budget,
                "seeds": list(overall.seeds),
                "AP": _told(overall),
                "base_final": _told(streams.difference(method, rival, budget, BASE)),
                "tasks": {task: _told(one) for task, one in by_task.items()},
            }
        )
    return table


def _told(found: Difference | None) -> dict[str, Any] | None:
    if found is None:
        return None
    margin = None if found.margin is None else round(found.margin, DIGITS)
    return {**rounded(found, DIGITS), "margin": margin, "verdict": found.verdict}


def _brief(run: Collected) -> dict[str, Any]:
    """A run without what training logged, with few digits."""
    return {**{name: _short(run[name]) for name in KEPT}, "anchor_bytes": tables.anchor_bytes(run)}


def _short(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, DIGITS)
    if isinstance(value, list):
        return [_short(one) for one in value]
    return {key: _short(one) for key, one in value.items()} if isinstance(value, dict) else value

"""The page of a report's content: this module has the numbers, `templates/stream.html.j2` the words."""

from __future__ import annotations

import math
from typing import Any

from benchmarks.continual.comparison import CONFIDENCE, UNTOUCHED, Streams
from benchmarks.continual.report import figures, tables
from benchmarks.continual.report.content import Content, streams_of
from benchmarks.continual.report.names import RECIPES, place, title
from benchmarks.continual.report.ranking import rivals
from selector.report.parts import byte_size, render


def render_html(content: Content) -> str:
    """The page of what the JSON file holds, complete in itself: nothing on it is loaded from anywhere."""
    streams = streams_of(content)
    budgets = [budget for budget in streams.budgets if streams.methods(budget)]
    return render(
        "benchmarks.continual.report",
        "stream.html.j2",
        suite=content["suite"],
        verdict=content["verdict"],
        summary=content["finding"],
        contenders=figures.accuracy_bars(streams, _contenders(streams)) if budgets else None,
        rivals=tables.rival_table(streams),
        run=tables.run_table(content, streams),
        missing=content["missing"],
        examples=[_example(example) for example in content["examples"]],
        examples_missing=content["examples_missing"],
        methods=tables.methods_table(streams),
        accuracy=figures.accuracy_bars(streams, tables.by_accuracy(streams, budgets[0])) if budgets else None,
        chance=_chance_of_questions(content),
        ablations=_ablations(streams),
        budgets=[
            {
                "entries": budget,
                "results": tables.main_table(streams, budget),
                "tasks": tables.task_table(streams, budget),
                "matrices": figures.matrices(streams, budget),
                "base": tables.base_table(streams, budget),
                "cost": tables.cost_table(streams, budget),
            }
            for budget in budgets
        ],
        footprint=tables.footprint_table(content),
        picture_bytes=byte_size(round(content["picture_bytes"])) if content["picture_bytes"] else None,
        settings=tables.settings_table(streams),
        tuned=tables.tuned_table(content["tuned"], streams),
        tuned_on=((content["tuned"] or {}).get("search") or {}).get("tasks", []),
        diagnostics=[_diagnostic(diagnostic) for diagnostic in content["diagnostics"]],
        confidence=f"{CONFIDENCE:.0%}",
        commands=list(dict.fromkeys(record["command"] for record in content["commands"])),
    )


def _contenders(streams: Streams) -> list[str]:
    """No memory, the recipes and their rivals, as far as any of their streams is complete."""
    names = {UNTOUCHED, *RECIPES, *(name for budget in streams.budgets for name in rivals(streams, budget))}
    complete = {name for budget in streams.budgets for name in streams.methods(budget)}
    return sorted(names & complete, key=place) or sorted(complete, key=place)


def _example(example: dict[str, Any]) -> dict[str, Any]:
    picture = example["picture"] and f"data:image/png;base64,{example['picture']}"
    answers = {title(method): answer for method, answer in example["answers"].items()}
    return {**example, "picture": picture, "answers": answers}


def _chance_of_questions(content: Content) -> dict[str, float] | None:
    """Points by which other questions would move an accuracy near 50%; the error over seeds does not contain it."""
    counts = [example["questions"] for example in content["examples"][:-1]]
    if not counts:
        return None
    return {"task": 100 * math.sqrt(0.25 / min(counts)), "all": 100 * math.sqrt(0.25 / sum(counts))}


def _ablations(streams: Streams) -> list[dict[str, Any]]:
    return [
        {"recipe": title(recipe), "entries": budget, "table": table}
        for recipe in RECIPES
        for budget in streams.budgets
        if (table := tables.ablation_table(streams, budget, recipe)) is not None
    ]


def _diagnostic(content: dict[str, Any]) -> dict[str, Any]:
    method, budget = content.get("method"), content.get("budget")
    name = content["diagnostic"].replace("_", " ").capitalize()
    name += f", {title(method)}" if method else ""
    name += f", {budget} entries" if budget else ""
    return {
        "name": name,
        "plot": figures.diagnostic_plot(content),
        "finding": content["finding"],
        "source": content.get("source"),
    }

"""The page of a report's content: tables and figures; `templates/stream.html.j2` has the words."""

from __future__ import annotations

import base64
import json
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from matplotlib.figure import Figure

from benchmarks.research.continual.diagnostics.__main__ import DIAGNOSTICS
from benchmarks.research.continual.report.content import Content
from benchmarks.research.continual.report.names import title
from benchmarks.research.drawing import blank, png
from benchmarks.research.published.paper import TABLES, PaperTable
from inducekv_vllm.errors import ConfigError

COLUMNS = 5  # matrices side by side
# Scores of the table of results: label, and 1 if more is better, -1 if less is.
SCORES = {
    "AP": ("AP (%)", 1),
    "AF": ("AF (points)", -1),
    "base_final": ("base (%)", 1),
    "BWT": ("BWT (points)", 1),
    "Last": ("Last (%)", 1),
    "MAA_over_time": ("MAA over time (%)", 1),
}


@dataclass(frozen=True)
class Table:
    """Rows under their head; `marked` are the places (row, column) of cells in bold."""

    head: Sequence[str]
    rows: Sequence[Sequence[Any]]
    marked: set[tuple[int, int]] = field(default_factory=set)


def render_html(content: Content) -> str:
    """The page of what the JSON file holds, complete in itself: nothing on it is loaded from anywhere."""
    loader = PackageLoader("benchmarks.research.continual.report")
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    budgets = sorted({row["budget"] for row in content["results"]})
    return environment.get_template("stream.html.j2").render(
        content=content,
        budgets=[(budget, result_table(content, budget), matrices(content, budget)) for budget in budgets],
        differences=difference_table(content),
        settings=settings_table(content),
        paper=[(paper_table(each), paper_caption(each)) for each in TABLES.get(content["suite"], ())],
        diagnostics=[_diagnostic(diagnostic) for diagnostic in content["diagnostics"]],
        commands=list(dict.fromkeys(record["command"] for record in content["commands"])),
        machines=list(dict.fromkeys(_machine(record["machine"]) for record in content["commands"])),
    )


def difference_table(content: Content) -> Table:
    """Recipes minus no memory and their rivals, ablations minus their recipe; losses beyond the error are marked."""
    rows, marked = [], set()
    for row in content["differences"]:
        cells = [row["AP"], *row["tasks"].values(), row["base_final"]]
        marked |= {(len(rows), at + 2) for at, cell in enumerate(cells) if cell and cell["verdict"] == "less"}
        names = f"{title(row['method'])} − {title(row['against'])}"
        rows.append([names, row["budget"], *("" if cell is None else _points(cell) for cell in cells)])
    return Table(["difference (points)", "entries", "AP", *content["order"], "base"], rows, marked)


def result_table(content: Content, budget: int) -> Table:
    """The scores of each method, the highest AP first, what it stores and how long it learned.

    The best of each score is marked. Only methods that learn something and have all seeds can be best: the untouched
    model forgets nothing.
    """
    results = [row for row in content["results"] if row["budget"] == budget]
    results.sort(key=lambda row: (not row["all_seeds"], -row["metrics"]["AP"]["mean"]))
    tasks = content["order"]
    known = results[0]["metrics"] if results else {}
    own = {name: (name, -1 if "forget" in name.lower() else 1) for name in known if ": " in name}  # the suite's
    scores = {name: label for name, label in SCORES.items() if name in known} | own
    rows = [
        [
            title(row["method"]),
            *(_percent(row["metrics"][score]) for score in scores),
            *(_percent(row["tasks"][task]) for task in tasks),
            _bytes(row["stored_bytes"]),
            f"{row['learn_seconds']['mean']:,.0f}",
            ", ".join(map(str, row["seeds"])),
        ]
        for row in results
    ]
    ranked = {at: row for at, row in enumerate(results) if row["all_seeds"] and row["stored_bytes"]}
    marked = set()
    for column, (score, (_, sign)) in enumerate(scores.items(), start=1):
        best = max((sign * row["metrics"][score]["mean"] for row in ranked.values()), default=0.0)
        marked |= {(at, column) for at, row in ranked.items() if sign * row["metrics"][score]["mean"] == best}
    labels = [label for label, _ in scores.values()]
    return Table(["method", *labels, *tasks, "stored", "learning (s)", "seeds"], rows, marked)


def paper_table(table: PaperTable) -> Table:
    """What the paper prints of this suite."""
    rows = [[*row[:2], *("" if figure is None else f"{figure:.2f}" for figure in row[2:])] for row in table.rows]
    return Table(["method", "backbone", *table.columns], rows)


def paper_caption(table: PaperTable) -> str:
    return "; ".join([table.title, *table.notes]) + "."


def settings_table(content: Content) -> Table:
    """The settings of every method, which may differ between budgets."""
    budgets: dict[tuple[str, str], set[int]] = {}
    for run in content["runs"]:
        settings = ", ".join(f"{key} = {json.dumps(value)}" for key, value in run["settings"].items() if key != "name")
        budgets.setdefault((run["method"], settings), set()).add(run["budget"])
    rows = [[title(m), m, ", ".join(map(str, sorted(used))), settings] for (m, settings), used in budgets.items()]
    return Table(["method", "name in commands", "entries", "settings"], rows)


def matrices(content: Content, budget: int) -> str:
    """a[i, t] of every method, means over its seeds, as an image."""
    runs = [run for run in content["runs"] if run["budget"] == budget and run["complete"]]
    return _address(png(_draw_matrices, runs, content["order"]))


def _draw_matrices(runs: Sequence[Mapping[str, Any]], tasks: Sequence[str]) -> Figure:
    methods = list(dict.fromkeys(run["method"] for run in runs))
    size, rows = len(tasks), math.ceil(len(methods) / COLUMNS)
    canvas = blank(0.9 + 1.7 * rows)
    for at, method in enumerate(methods):
        axes = canvas.add_subplot(rows, COLUMNS, at + 1)
        mean = mean_matrix([run["accuracy"] for run in runs if run["method"] == method])
        image = axes.imshow(100 * mean, vmin=0, vmax=100, cmap="viridis", aspect="auto")
        axes.set_title(textwrap.fill(title(method), 26), fontsize=6.5)
        named, last = at % COLUMNS == 0, at >= len(methods) - COLUMNS
        axes.set_yticks(range(size) if named else [], tasks if named else [], fontsize=6.5)
        axes.set_xticks(range(size) if last else [], tasks if last else [], rotation=90, fontsize=6.5)
        axes.grid(False)
    canvas.colorbar(image, ax=canvas.axes, label="accuracy (%)", shrink=0.5)
    return canvas


def mean_matrix(accuracies: Sequence[Sequence[Sequence[float]]]) -> np.ndarray:
    """a[i, t] over seeds, from rows a[i, 0..i] of each: [T, T] float64, NaN for tasks not yet seen."""
    size = len(accuracies[0])
    matrix = np.full((size, size), math.nan)
    for i in range(size):
        matrix[i, : i + 1] = np.mean([rows[i][: i + 1] for rows in accuracies], axis=0)
    return matrix


def _diagnostic(content: dict[str, Any]) -> dict[str, Any]:
    """Its name, finding and figure. Raises ConfigError: it cannot be drawn."""
    name = content["diagnostic"].replace("_", " ").capitalize()
    name += f", {title(content['method'])}" if content.get("method") else ""
    plot = None
    if content["diagnostic"] in DIAGNOSTICS:
        try:
            plot = _address(png(DIAGNOSTICS[content["diagnostic"]].plot, content))
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(f"diagnostic {content['diagnostic']!r} cannot be drawn: {error!r}") from error
    return {"name": name, "plot": plot, "finding": content["finding"], "source": content.get("source")}


def _address(image: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(image).decode()}"


def _percent(value: Mapping[str, Any]) -> str:
    """ "78.8 ± 0.5", without an error for a single seed."""
    error = "" if value["standard_error"] is None else f" ± {100 * value['standard_error']:.1f}"
    return f"{100 * value['mean']:.1f}".replace("-", "−").replace("−0.0", "0.0") + error


def _points(value: Mapping[str, Any]) -> str:
    """Percentage points, with a sign: "−3.1 ± 0.4"."""
    return ("+" if round(100 * value["mean"], 1) > 0 else "") + _percent(value)


def _bytes(amount: float) -> str:
    """In the largest binary unit that gives at least 1."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if amount >= size:
            return f"{amount / size:.2f} {unit}"
    return f"{amount} bytes"


def _machine(machine: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    gpu = machine["gpu"] or "no GPU"
    where = f"{machine['cores']} cores of {machine['cpu']}, {machine['memory_gib']} GiB, {gpu}"
    return f"{where}; Python {machine['python']}, {versions}"

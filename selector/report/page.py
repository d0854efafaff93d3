"""The report of an update as one HTML page: whether the memory helps, how its training went, and what it holds.

`report.json` has all numbers; the page has those that a person asks for first, and loads nothing from outside.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeGuard

from jinja2 import Environment, PackageLoader, StrictUndefined

from .plots import bars, curve, plain

Report = Mapping[str, Any]

MEMORIES: Final = {
    "no_memory": "without memory",
    "relaxed": "relaxed memory",
    "deployed": "bundled memory",
    "most_frequent_answer": "always the most frequent answer",
}
TRAINING: Final = ("memory acts on", "learning rate", "steps", "validation NLL when compared last")
LONGEST_ANSWER: Final = 300  # characters that are shown


class Table(NamedTuple):
    """Rows of text, the first column's on the left."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


def render_html(report: Report) -> str:
    """The page of a report, complete in itself; the same report gives the same page.

    Args:
        report: content of `report.json`. Sections may be absent, numbers None or not finite.
    """
    verdict, summary = _summary(report)
    environment = Environment(
        loader=PackageLoader("selector.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template("page.html.j2").render(
        title=plain(f"Memory report: {report.get('recipe') or 'unknown'} recipe"),
        verdict=verdict,
        summary=plain(summary),
        tables=_tables(report),
        plots=_plots(report),
    )


def _summary(report: Report) -> tuple[str, str]:
    """Whether the memory is "better" than none, "worse" or "open", and the paragraph about it."""
    verdict, sentences = "open", ["This report has no validation figures, so it does not compare the memory with none."]
    losses, shares = _section(report, "validation_nll"), _section(report, "validation_accuracy")
    without, bundled = losses.get("no_memory"), losses.get("deployed")
    if _is_number(without) and _is_number(bundled):
        verdict = "better" if bundled < without else "worse"
        questions = _section(report, "pool").get("validation_examples", "the")
        sentences = [
            f"On {questions} validation questions the memory is {'better' if bundled < without else 'no better'} than "
            f"no memory: the mean negative log-likelihood (NLL) of the right answers is {bundled:.4g} nats with it and "
            f"{without:.4g} without (lower is better)."
        ]
        if _is_number(shares.get("no_memory")) and _is_number(shares.get("deployed")):
            sentences.append(
                f"Answered right are {shares['deployed']:.1%} with it and {shares['no_memory']:.1%} without."
            )
    if base := _section(report, "base_accuracy"):
        sentences.append(
            f"Of {base.get('questions')} base questions, to which the gate was fitted, "
            f"{_number(base.get('deployed'), 100)}% are answered right with it and "
            f"{_number(base.get('no_memory'), 100)}% without."
        )
    if model := report.get("model"):
        sentences.append(f"Model: {model}.")
    if entries := _section(_section(report, "composition"), "after"):
        sentences.append(f"Entries by task: {', '.join(f'{task} ({count})' for task, count in entries.items())}.")
    if _is_number(size := report.get("memory_bytes")):
        sentences.append(f"The memory takes {size:,} bytes.")
    return verdict, " ".join([*sentences, f"Digest: {report.get('digest') or 'none'}."])


def _tables(report: Report) -> list[Table]:
    """Accuracy, the trainings that were begun, and some answers; those that have rows."""
    losses, shares = _section(report, "validation_nll"), _section(report, "validation_accuracy")
    compared = [
        (label, _number(losses.get(name)), _number(shares.get(name), factor=100))
        for name, label in MEMORIES.items()
        if name in losses or name in shares
    ]
    answers = _section(report, "answers")
    asked = ("question", "expected", "with memory", "without")
    keys = ("question", "expected", "with_memory", "without")
    tables = [
        Table("", ("validation questions", "mean NLL (nats)", "answered right (%)"), compared),
        Table("Trainings that were begun; the first one was finished and kept", TRAINING, _trainings(report)),
        *(
            Table(
                f"Answers that are {kind}", asked, [tuple(plain(a[key], LONGEST_ANSWER) for key in keys) for a in said]
            )
            for kind in ("right", "wrong")
            if (said := answers.get(kind))
        ),
    ]
    return [each for each in tables if each.rows]


def _trainings(report: Report) -> list[tuple[str, ...]]:
    """Of a search among several."""
    begun = _section(report, "activation").get("search") or ()
    return [
        (
            f"{each['activation']}" + (f" from layer {each['first_layer']}" if each["first_layer"] else ""),
            _number(each["learning_rate"]),
            str(each["steps"]),
            _number(each["nll"]),
        )
        for each in begun
    ]


def _plots(report: Report) -> dict[str, str]:
    """By what they show: the loss in training, then how often the gate opens or, without a gate, the entries."""
    plots = {}
    history = report.get("history") or _section(report, "refinement").get("history") or ()
    losses = [row.get("objective", row.get("current")) for row in history]
    if sum(map(_is_number, losses)) > 1:
        plots["Loss of each step, on its own batch"] = curve([_finite(loss) for loss in losses], "loss (nats)", "step")
    composition = _section(report, "composition")
    openings = _section(report, "gate").get("openings") or ()
    if len(openings) > 1:
        names = [f"{opening.get('task')} ({opening.get('split')})" for opening in openings]
        opened = [100 * _finite(opening.get("opened")) for opening in openings]
        title = "Questions that open the relevance gate: all of a task's own should, no base questions"
        plots[title] = bars(names, {"opened": opened}, "share of the questions (%)")
    elif composition and not openings:
        before, after = _section(composition, "before"), _section(composition, "after")
        tasks = list(dict.fromkeys([*before, *after]))
        counts = {
            "before": [_finite(before.get(task, 0)) for task in tasks],
            "after": [_finite(after.get(task, 0)) for task in tasks],
        }
        if len(tasks) > 1:
            plots["Entries by task, before and after this update"] = bars(tasks, counts, "entries")
    return plots


def _section(report: Report, name: str) -> Report:
    """A part of the report; empty if it is absent or null."""
    section: Report = report.get(name) or {}
    return section


def _number(value: Any, factor: int = 1) -> str:
    """For people; a dash for a missing number."""
    return f"{factor * value:.4g}" if _is_number(value) else "–"


def _finite(value: Any) -> float:
    return float(value) if _is_number(value) else math.nan


def _is_number(value: Any) -> TypeGuard[float]:
    """Whether it is a number, and a finite one."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)

"""The report for people: one HTML page with what `report.json` says, its plots inside, nothing fetched from anywhere.

Every part of the page comes from one section of the report and is left out where the report has none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .parts import byte_size, counted, figure, is_number, number, page, percent, table
from .plots import Panel, bars, curves, finite, histogram

Report = Mapping[str, Any]

RECIPES = {
    "paper": "it selects training prefixes, without changing what is stored of them",
    "refined": "it selects training prefixes, then trains what is stored of them",
}
OPEN_FOR_STREAM = 0.95  # the gate is to open for at least this share of a stream task's questions
OPEN_FOR_BASE = 0.02  # and for at most this share of the questions of tasks the model knows without memory


def render_html(report: Report) -> str:
    """The page of a report, complete in itself; the same report gives the same page.

    Args:
        report: what `report.json` holds. Sections may be absent, numbers None or not finite.
    """
    verdict, summary = _summary(report)
    sections = {heading: parts for heading, render in _SECTIONS if (parts := render(report))}
    return page(f"Memory report: {_recipe(report)} recipe", verdict, summary, sections)


# ---------------------------------------------------------------------------------------------------- summary


def _summary(report: Report) -> tuple[str, str]:
    """Whether the memory is "better" than none, "worse" or "open", and the first paragraph."""
    recipe = _recipe(report)
    held = _section(_section(report, "composition"), "after")
    entries = sum(held.values())
    tasks = ", ".join(f"{task}: {count}" for task, count in held.items())
    said = f"This memory was made by the {recipe} recipe"
    said += f": {RECIPES[recipe]}. " if recipe in RECIPES else ". "
    if held:
        said += f"It holds {counted(entries, 'entry', 'entries')} of {counted(len(held), 'task', 'tasks')} ({tasks})"
        size = report.get("memory_bytes")
        said += f" in {byte_size(size)}. " if is_number(size) else ". "

    loss = _section(report, "validation_nll")
    without, deployed = finite([loss.get("no_memory"), loss.get("deployed")])
    if math.isnan(without) or math.isnan(deployed):
        return "open", said + "Without validation figures, this report cannot say whether it is better than no memory."
    questions = _section(report, "pool").get("validation_examples")
    said += (
        f"On {counted(questions, 'validation question', 'validation questions')} "
        if questions
        else "On validation questions "
    )
    better = deployed < without
    said += "the memory is better than no memory: " if better else "the memory is no better than no memory: "
    change = abs(without - deployed)
    share = f" ({change / abs(without):.1%})" if without else ""
    said += (
        f"the right answers' mean negative log-likelihood (NLL, in nats; lower is better) is {deployed:#.4g} with "
        f"it and {without:#.4g} without, "
    )
    said += f"{change:#.4g}{share} {'lower' if better else 'higher'}." if change else "the same."
    accuracy = _section(report, "validation_accuracy")
    right_without, right = finite([accuracy.get("no_memory"), accuracy.get("deployed")])
    if not (math.isnan(right_without) or math.isnan(right)):
        points = 100 * (right - right_without)
        direction = "more" if points > 0 else "fewer"
        said += f" It answers {right:.1%} of the questions right with the memory, {right_without:.1%} without"
        said += f": {abs(points):.1f} percentage points {direction}." if points else ": no difference."
    return ("better" if better else "worse"), said


def _recipe(report: Report) -> str:
    return str(report.get("recipe") or "unknown")


# --------------------------------------------------------------------------------------------------- sections


def _validation(report: Report) -> list[str]:
    names = {"no_memory": "no memory", "relaxed": "relaxed memory", "deployed": "deployed memory"}
    loss, accuracy = _section(report, "validation_nll"), _section(report, "validation_accuracy")
    parts = []
    if shown := [name for name in names if is_number(loss.get(name))]:
        nll = Panel("mean NLL of an answer (nats)", {"NLL": [loss[name] for name in shown]})
        parts.append(
            figure(
                bars([names[name] for name in shown], [nll]),
                "Mean NLL of the right answers on the validation questions",
                "How unlikely the model finds the right answers (summed over an answer's tokens, mean over the "
                "questions): shorter is better, and a useful memory's bar is shorter than that of no memory. "
                "Deployed is what the bundle holds; relaxed, where there is one, what it was rounded from: all "
                "candidates with their weights.",
            )
        )
    if shown := [name for name in names if is_number(accuracy.get(name))]:
        right = Panel("questions answered right (%)", {"accuracy": [100 * accuracy[name] for name in shown]})
        parts.append(
            figure(
                bars([names[name] for name in shown], [right], ".1f"),
                "Accuracy on the validation questions",
                "The share of validation questions the model answers exactly right: longer is better.",
            )
        )
    return parts


def _composition(report: Report) -> list[str]:
    held = _section(report, "composition")
    columns = {f"entries {when}": _section(held, when) for when in ("before", "after")}
    tasks = list(dict.fromkeys(task for counts in columns.values() for task in counts))
    if not tasks:
        return []
    drawn = {name: [counts.get(task, 0) for task in tasks] for name, counts in columns.items()}
    return [
        figure(
            bars(tasks, [Panel("entries", drawn)], ".0f"),
            "Entries of the memory by task, before and after this update",
            "How many entries each task has before and after this update: the memory's size is fixed, so a new task's "
            "entries come out of free room or out of the other tasks' share.",
        ),
        table(["task", *columns], [[task, *(counts.get(task, 0) for counts in columns.values())] for task in tasks]),
    ]


def _gate(report: Report) -> list[str]:
    gate = _section(report, "gate")
    openings: Sequence[Report] = gate.get("openings") or []
    parts = []
    if openings:
        names = [f"{one.get('task')} ({one.get('split')})" for one in openings]
        shares = [percent(one.get("opened")) for one in openings]
        series: dict[str, Sequence[float | None]] = {"gate opens": shares}
        routed = [percent(one.get("routed_to_own_task")) for one in openings]
        if any(share is not None for share in routed):
            series["opens, and chooses the question's own task"] = routed
        levels = {
            f"target for stream tasks: at least {OPEN_FOR_STREAM:.0%}": 100 * OPEN_FOR_STREAM,
            f"target for base tasks: at most {OPEN_FOR_BASE:.0%}": 100 * OPEN_FOR_BASE,
        }
        parts.append(
            figure(
                bars(names, [Panel("share of the questions (%)", series, levels, (0, 125))], ".1f"),
                "Share of questions that open the relevance gate, by task",
                "The gate decides whether a question uses the memory at all: it should open for questions of the "
                "memory's tasks and stay closed for what the model already knows (base), which then runs untouched. "
                "The gate was fitted to all of these questions; others may open it a little more or less often.",
            )
        )
        parts.append(
            table(
                ["task", "questions are of", "questions", "gate opens (%)", "routed to their own task (%)"],
                [
                    [one.get("task"), one.get("split"), one.get("questions"), share, own]
                    for one, share, own in zip(openings, shares, routed, strict=True)
                ],
            )
        )
    if thresholds := list(zip(gate.get("tasks") or [], gate.get("thresholds") or [], strict=False)):
        parts.append("<p>A task's gate opens where the question's score reaches its threshold.</p>")
        parts.append(table(["task", "threshold"], [[task, threshold] for task, threshold in thresholds]))
    return parts


def _losses(report: Report) -> list[str]:
    history = _rows(report, "history")
    settings = _section(report, "settings")
    labels = {
        "objective": "objective J",
        "current": "current task, NLL (nats)",
        "anchors": "anchors, NLL (nats)",
        "coverage": "coverage Ω (−log det)",
    }
    weights = ", ".join(f"{name} = {number(settings[name])}" for name in ("beta", "gamma") if name in settings)
    return _curves(
        history,
        "outer iteration",
        labels,
        "Losses in each iteration of the selection",
        "What the selection minimises, J = current + beta · anchors + gamma · coverage"
        + (f" ({weights})" if weights else "")
        + ", measured on each iteration's own batch before its step: J should fall, with some noise.",
    )


def _calibration(report: Report) -> list[str]:
    parts = _curves(
        _rows(report, "history"),
        "outer iteration",
        {"temperature": "retrieval temperature tau", "value_gate": "value gate (mean of layers)"},
        "Temperature and value gate in each iteration",
        "A lower temperature makes retrieval concentrate on fewer entries; the value gate (0 to 1) says how strongly "
        "the memory's values enter.",
    )
    found = _section(report, "calibration")
    layers = {
        "value_gates": Panel("value gate (0 to 1)", {"gate": found.get("value_gates") or []}),
        "layer_bias": Panel("layer bias (added to logits)", {"bias": found.get("layer_bias") or []}),
    }
    panels = [panel for name, panel in layers.items() if found.get(name)]
    if panels:
        count = max(len(found[name]) for name in layers if found.get(name))
        parts.append(
            figure(
                curves(range(count), "layer", panels),
                "Value gate and bias of each layer",
                "What the finished memory has in each layer: a gate near 0 mutes the memory's values there, a "
                "negative bias lowers the attention it gets.",
            )
        )
    if "temperature" in found:
        parts.append(f"<p>The finished memory's temperature is {number(found['temperature'])}.</p>")
    return parts


def _rounding(report: Report) -> list[str]:
    found, loss = _section(report, "rounding"), _section(report, "validation_nll")
    parts = []
    if is_number(found.get("mass_captured")):
        captured = 100 * found["mass_captured"]
        split = {"kept by the selected entries": [captured], "lost with the others": [100 - captured]}
        parts.append(
            figure(
                bars(["selection weight"], [Panel("share of the weight (%)", split, limits=(0, 115))], ".1f"),
                "Share of the selection weight that the selected entries hold",
                "The optimisation spreads weight over all candidates, the memory keeps the top ones: the more of the "
                "weight they hold, the closer the memory is to what was optimised.",
            )
        )
    history, selected = _rows(report, "history"), found.get("selected")
    used = {"support": "with any weight", "effective": "effective, (Σw)² / Σw²"}
    series = {label: [one.get(name) for one in history] for name, label in used.items()}
    if any(_has_numbers(values) for values in series.values()):
        levels = {"selected in the end": float(selected)} if is_number(selected) else {}
        parts.append(
            figure(
                curves(range(len(history)), "outer iteration", [Panel("candidates", series, levels)]),
                "Candidates in use in each iteration",
                "How many candidates share the weight: fewer than are selected in the end means that the selection "
                "collapsed, and the rest of the memory stands there by its order alone.",
            )
        )
    names = {
        "selected": "entries selected",
        "support": "candidates with any weight",
        "effective_entries": "effective candidates",
        "selected_without_weight": "selected without any weight",
        "retrieval_divergence_nats": "Jensen-Shannon divergence of relaxed and deployed retrieval (nats, 0 to 0.693)",
    }
    rows: list[list[Any]] = [[label, found[name]] for name, label in names.items() if name in found]
    if "mass_captured" in found:
        rows.insert(1, ["weight held by the selected entries (%)", percent(found["mass_captured"])])
    if "rounding_gap" in loss:
        rows.append(["NLL of the deployed memory minus that of the relaxed one (nats)", loss["rounding_gap"]])
    if rows:
        parts.append(table(["from relaxed weights to a memory", ""], rows))
    if found.get("collapsed"):
        parts.append("<p><strong>Collapsed: fewer candidates hold weight than were selected.</strong></p>")
    return parts


def _refinement(report: Report) -> list[str]:
    labels = {
        "current": "current task, NLL (nats)",
        "anchors": "anchors, NLL (nats)",
        "distillation": "distillation loss (nats)",
        "temperature": "retrieval temperature tau",
        "value_gate": "value gate (mean of layers)",
        "layer_bias": "layer bias (mean of layers)",
    }
    return _curves(
        _rows(_section(report, "refinement"), "history"),
        "step",
        labels,
        "Losses and calibration in each step of the refinement",
        "After the selection the stored keys and values themselves are trained: the losses are those of each step's "
        "own batch and should fall, with some noise.",
    )


def _diversity(report: Report) -> list[str]:
    names = {
        "selected": "this memory",
        "random": "as many at random",
        "selected_with_gamma_0": "selected with gamma = 0",
    }
    sets = {
        label: _section(_section(report, "diversity"), name)
        for name, label in names.items()
        if _section(_section(report, "diversity"), name)
    }
    if not sets:
        return []
    parts: list[str] = []
    shares: dict[str, list[float | None]] = {}
    edges: list[float] = []
    for label, found in sets.items():
        bins = _section(found, "cosine_histogram")
        if pairs := sum(bins.get("counts") or []):
            shares[label] = [100 * count / pairs for count in bins["counts"]]
            edges = bins["edges"]
    if shares:
        parts.append(
            figure(
                histogram(edges, Panel("share of the pairs (%)", shares), "cosine of two retrieval keys"),
                "Cosines of all pairs of entries within a set",
                "How alike the entries of a set are: mass near 1 means near-duplicates, mass further left a memory "
                "that covers more of the questions.",
            )
        )
    quantiles = list(dict.fromkeys(q for found in sets.values() for q in _section(found, "cosine_quantiles")))
    parts.append(
        table(
            ["set", "log det (higher: more diverse)", "mean cosine", *(f"{float(q):.0%} quantile" for q in quantiles)],
            [
                [
                    label,
                    number(found.get("logdet"), 7),
                    found.get("cosine_mean"),
                    *(_section(found, "cosine_quantiles").get(q) for q in quantiles),
                ]
                for label, found in sets.items()
            ],
        )
    )
    return parts


def _search(report: Report) -> list[str]:
    settings = _section(report, "settings")
    parts = []
    if grid := _rows(report, "grid"):
        parts.append("<p>Weights of anchors (beta) and coverage (gamma) that were tried; the chosen pair is bold.</p>")
        chosen = [all(one.get(name) == settings.get(name, math.nan) for name in ("beta", "gamma")) for one in grid]
        rows = [[one.get("beta"), one.get("gamma"), one.get("validation_nll")] for one in grid]
        parts.append(table(["beta", "gamma", "validation NLL (nats)"], rows, chosen))
    if search := _rows(_section(report, "refinement"), "search"):
        losses = [loss for loss in finite([one.get("validation_nll") for one in search]) if not math.isnan(loss)]
        parts.append("<p>Learning rates of the refinement that were tried; the lowest NLL is bold.</p>")
        lowest = [bool(losses) and one.get("validation_nll") == min(losses) for one in search]
        rows = [[one.get("learning_rate"), one.get("validation_nll")] for one in search]
        parts.append(table(["learning rate", "validation NLL (nats), part of the way"], rows, lowest))
    return parts


def _storage(report: Report) -> list[str]:
    storage = _section(report, "storage")
    if not is_number(storage.get("memory_bytes")):
        return []
    stored = {"memory": storage["memory_bytes"], "anchors": storage.get("anchor_bytes") or 0}
    after = _section(_section(report, "composition"), "after").values()
    entries = sum(count for count in after if is_number(count))
    return [
        figure(
            bars(list(stored), [Panel("MiB", {"stored": [count / 2**20 for count in stored.values()]})]),
            "Bytes of the memory and of the anchors",
            "The memory is what a server loads; anchors are examples of earlier tasks that only this program keeps, "
            "so that the next update does not forget them.",
        ),
        table(
            ["what", "bytes", "", "items"],
            [
                ["memory", stored["memory"], byte_size(stored["memory"]), entries],
                ["anchors", stored["anchors"], byte_size(stored["anchors"]), storage.get("anchors")],
            ],
        ),
    ]


def _phases(report: Report) -> list[str]:
    phases = _rows(report, "phases")
    if not phases:
        return []
    seconds = [one.get("seconds") for one in phases]
    peaks = [one["peak_bytes"] / 2**20 if is_number(one.get("peak_bytes")) else None for one in phases]
    names = [str(one.get("name")) for one in phases]
    own = all(one.get("peak_of") == "phase" for one in phases)
    title = "peak memory (MiB)" if own else "peak memory so far (MiB)"
    panels = [Panel("time (s)", {"time": seconds}), Panel(title, {"peak": peaks})]
    return [
        figure(
            bars(names, panels),
            "Time and peak memory of each phase",
            "Where the run spent its time, and the most main memory the process had used "
            + ("during each phase " if own else "by the end of each phase, by work before it included ")
            + f"({number(math.fsum(x for x in finite(seconds) if not math.isnan(x)))} s in all).",
        )
    ]


def _provenance(report: Report) -> list[str]:
    parts = []
    identity = {"digest": "digest", "parent_digest": "digest of the memory before"}
    rows = [[label, report[name]] for name, label in identity.items() if report.get(name)]
    for name, heading in (("pool", "made from"), ("settings", "setting")):
        if values := _section(report, name):
            parts.append(table([heading, ""], [[str(key).replace("_", " "), value] for key, value in values.items()]))
    return [table(["memory", ""], rows), *parts] if rows else parts


_SECTIONS: tuple[tuple[str, Callable[[Report], list[str]]], ...] = (
    ("Does it help", _validation),
    ("Entries by task", _composition),
    ("Relevance gate", _gate),
    ("Selection losses", _losses),
    ("Calibration", _calibration),
    ("Rounding", _rounding),
    ("Refinement", _refinement),
    ("Diversity", _diversity),
    ("Search", _search),
    ("Storage", _storage),
    ("Time and memory", _phases),
    ("Provenance", _provenance),
)


# ------------------------------------------------------------------------------------------- reading a report


def _curves(history: Sequence[Report], position: str, labels: Mapping[str, str], title: str, said: str) -> list[str]:
    """A figure of the measured columns of `history` that have any numbers."""
    columns = {label: [one.get(name) for one in history] for name, label in labels.items()}
    panels = [Panel(label, {label: values}) for label, values in columns.items() if _has_numbers(values)]
    if not panels:
        return []
    steps = [one.get("step", row) for row, one in enumerate(history)]
    return [figure(curves(steps, position, panels), title, said)]


def _has_numbers(values: Sequence[Any]) -> bool:
    return any(is_number(value) for value in values)


def _section(report: Report, name: str) -> Report:
    """A part of the report; empty where it is absent or null."""
    found: Report = report.get(name) or {}
    return found


def _rows(report: Report, name: str) -> Sequence[Report]:
    found: Sequence[Report] = report.get(name) or ()
    return found

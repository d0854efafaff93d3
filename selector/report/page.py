"""The report of an update as one HTML page: the content of `report.json` with plots, nothing loaded from outside.

This module has the numbers, `templates/selection.html.j2` the words. A part of the page is None if the report lacks the
numbers for it, and a section without parts is left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from .parts import Table, byte_size, counted, is_number, number, percent, render
from .plots import Panel, bars, curves, finite, histogram

Report = Mapping[str, Any]
Parts = dict[str, Any]

MEMORIES = {"no_memory": "no memory", "relaxed": "relaxed memory", "deployed": "bundled memory"}
OPEN_FOR_STREAM = 0.95  # least share of a stream task's questions that the gate should open for
OPEN_FOR_BASE = 0.02  # most of the questions of tasks the model knows without memory


def render_html(report: Report) -> str:
    """The page of a report, complete in itself; the same report gives the same page.

    Args:
        report: content of `report.json`. Sections may be absent, numbers None or not finite.
    """
    verdict, summary = _summary(report)
    return render(
        "selector.report",
        "selection.html.j2",
        recipe=str(report.get("recipe") or "unknown"),
        verdict=verdict,
        summary=summary,
        validation=_validation(report),
        composition=_composition(report),
        gate=_gate(report),
        losses=_losses(report),
        calibration=_calibration(report),
        rounding=_rounding(report),
        refinement=_refinement(report),
        diversity=_diversity(report),
        search=_search(report),
        storage=_storage(report),
        phases=_phases(report),
        provenance=_provenance(report),
    )


def _summary(report: Report) -> tuple[str, str]:
    """Whether the memory is "better" than none, "worse" or "open", and the paragraph about it."""
    verdict, sentences = "open", ["This report has no validation figures, so it does not compare the memory with none."]
    without, bundled = finite([_section(report, "validation_nll").get(name) for name in ("no_memory", "deployed")])
    if not (math.isnan(without) or math.isnan(bundled)):
        verdict = "better" if bundled < without else "worse"
        questions = _section(report, "pool").get("validation_examples")
        of = counted(questions, "validation question", "validation questions") if questions else "validation questions"
        change = abs(without - bundled)
        share = f" ({change / abs(without):.1%})" if without else ""
        direction = "lower" if bundled < without else "higher"
        sentences = [
            f"On {of} the memory is {'better' if verdict == 'better' else 'no better'} than no memory.",
            f"Mean negative log-likelihood (NLL) of the right answers: {bundled:#.4g} nats with it, {without:#.4g} "
            f"without, {f'{change:#.4g}{share} {direction}' if change else 'the same'} (lower is better).",
        ]
        right_without, right = finite(
            [_section(report, "validation_accuracy").get(name) for name in ("no_memory", "deployed")]
        )
        if not (math.isnan(right_without) or math.isnan(right)):
            points = 100 * (right - right_without)
            difference = f"{abs(points):.1f} percentage points {'more' if points > 0 else 'fewer'}"
            sentences.append(
                f"Questions answered right: {right:.1%} with it, {right_without:.1%} without, "
                f"{difference if points else 'no difference'}."
            )
    if entries := _section(_section(report, "composition"), "after"):
        size = report.get("memory_bytes")
        sentences.append(
            f"It holds {counted(sum(entries.values()), 'entry', 'entries')} of "
            f"{counted(len(entries), 'task', 'tasks')}{f' in {byte_size(size)}' if is_number(size) else ''}."
        )
    return verdict, " ".join(sentences)


# --------------------------------------------------------------------------------------------------- sections


def _validation(report: Report) -> Parts:
    loss, accuracy = _section(report, "validation_nll"), _section(report, "validation_accuracy")
    names = [name for name in MEMORIES if is_number(loss.get(name)) or is_number(accuracy.get(name))]
    losses = [loss.get(name) for name in names]
    right = [percent(accuracy.get(name)) for name in names]
    panels = [Panel("mean NLL of an answer (nats)", {"NLL": losses})] if _has_numbers(losses) else []
    if _has_numbers(right):
        panels.append(Panel("questions answered right (%)", {"accuracy": right}, digits=".1f"))
    labels = [MEMORIES[name] for name in names]
    rows = list(zip(labels, losses, right, strict=True))
    return {
        "chart": bars(labels, panels) if panels else None,
        "table": Table(["validation questions", "mean NLL (nats)", "answered right (%)"], rows),
    }


def _composition(report: Report) -> Parts:
    composition = _section(report, "composition")
    columns = {f"entries {when}": _section(composition, when) for when in ("before", "after")}
    tasks = list(dict.fromkeys(task for counts in columns.values() for task in counts))
    series = {name: [counts.get(task, 0) for task in tasks] for name, counts in columns.items()}
    rows = list(zip(tasks, *series.values(), strict=True))
    return {
        "chart": bars(tasks, [Panel("entries", series, digits=".0f")]) if tasks else None,
        "table": Table(["task", *columns], rows),
    }


def _gate(report: Report) -> Parts:
    gate = _section(report, "gate")
    openings = _rows(gate, "openings")
    opened = [percent(task.get("opened")) for task in openings]
    routed = [percent(task.get("routed_to_own_task")) for task in openings]
    series = {"gate opens": opened}
    if _has_numbers(routed):
        series["opens, and chooses the question's own task"] = routed
    levels = {
        f"target for stream tasks: at least {OPEN_FOR_STREAM:.0%}": 100 * OPEN_FOR_STREAM,
        f"target for base tasks: at most {OPEN_FOR_BASE:.0%}": 100 * OPEN_FOR_BASE,
    }
    panel = Panel("share of the questions (%)", series, levels, (0, 125), digits=".1f")
    names = [f"{task.get('task')} ({task.get('split')})" for task in openings]
    head = ["task", "questions are of", "questions", "gate opens (%)", "routed to their own task (%)"]
    rows = [
        [task.get("task"), task.get("split"), task.get("questions"), share, own]
        for task, share, own in zip(openings, opened, routed, strict=True)
    ]
    thresholds = list(zip(gate.get("tasks") or [], gate.get("thresholds") or [], strict=False))
    return {
        "chart": bars(names, [panel]) if openings else None,
        "table": Table(head, rows),
        "thresholds": Table(["task", "threshold"], thresholds),
        "prices": _prices(gate),
    }


def _prices(gate: Report) -> Table:
    """What other shares of missed questions would cost."""
    prices = _rows(gate, "prices")
    kinds = list(dict.fromkeys(kind for price in prices for kind in _section(price, "opened")))
    rows = [
        [percent(price.get("misses")), *(percent(_section(price, "opened").get(kind)) for kind in kinds)]
        for price in prices
    ]
    return Table(["own questions missed (%)", *(f"{kind} (%)" for kind in kinds)], rows, kind="wide")


def _losses(report: Report) -> Parts:
    settings = _section(report, "settings")
    labels = {
        "objective": "objective J",
        "current": "current task, NLL (nats)",
        "anchors": "anchors, NLL (nats)",
        "coverage": "coverage Ω (−log det)",
    }
    return {
        "chart": _curves(_rows(report, "history"), "outer iteration", labels),
        "weights": ", ".join(f"{name} = {number(settings[name])}" for name in ("beta", "gamma") if name in settings),
    }


def _calibration(report: Report) -> Parts:
    calibration = _section(report, "calibration")
    labels = {"temperature": "retrieval temperature tau", "value_gate": "value gate (mean of layers)"}
    layers = {
        "value_gates": Panel("value gate (0 to 1)", {"gate": calibration.get("value_gates") or []}),
        "layer_bias": Panel("layer bias (added to logits)", {"bias": calibration.get("layer_bias") or []}),
    }
    panels = [panel for name, panel in layers.items() if calibration.get(name)]
    count = max((len(calibration[name]) for name in layers if calibration.get(name)), default=0)
    return {
        "chart": _curves(_rows(report, "history"), "outer iteration", labels),
        "layers": curves(range(count), "layer", panels) if panels else None,
        "temperature": number(calibration["temperature"]) if "temperature" in calibration else None,
    }


def _rounding(report: Report) -> Parts:
    rounding, loss = _section(report, "rounding"), _section(report, "validation_nll")
    history, captured = _rows(report, "history"), percent(rounding.get("mass_captured"))
    share = None
    if captured is not None:
        split = {"kept by the selected entries": [captured], "lost with the others": [100 - captured]}
        panel = Panel("share of the weight (%)", split, limits=(0, 115), digits=".1f")
        share = bars(["selection weight"], [panel])
    used = {"support": "with any weight", "effective": "effective, (Σw)² / Σw²"}
    series = {label: [row.get(name) for row in history] for name, label in used.items()}
    levels = {"selected in the end": rounding["selected"]} if is_number(rounding.get("selected")) else {}
    candidates = [Panel("candidates", series, levels)]
    names = {
        "selected": "entries selected",
        "mass_captured": "weight held by the selected entries (%)",
        "support": "candidates with any weight",
        "effective_entries": "effective candidates",
        "selected_without_weight": "selected without any weight",
        "retrieval_divergence_nats": "Jensen-Shannon divergence of relaxed and bundled retrieval (nats, 0 to 0.693)",
    }
    values = {**rounding, "mass_captured": captured}
    rows = [[label, values[name]] for name, label in names.items() if name in rounding]
    if "rounding_gap" in loss:
        rows.append(["NLL of the bundled memory minus that of the relaxed one (nats)", loss["rounding_gap"]])
    return {
        "share": share,
        "candidates": curves(range(len(history)), "outer iteration", candidates)
        if any(map(_has_numbers, series.values()))
        else None,
        "table": Table(["from relaxed weights to a memory", ""], rows),
        "collapsed": bool(rounding.get("collapsed")),
    }


def _refinement(report: Report) -> Parts:
    labels = {
        "current": "current task, NLL (nats)",
        "anchors": "anchors, NLL (nats)",
        "distillation": "distillation loss (nats)",
        "temperature": "retrieval temperature tau",
        "value_gate": "value gate (mean of layers)",
        "layer_bias": "layer bias (mean of layers)",
    }
    return {"chart": _curves(_rows(_section(report, "refinement"), "history"), "step", labels)}


def _diversity(report: Report) -> Parts:
    names = {
        "selected": "this memory",
        "random": "as many at random",
        "selected_with_gamma_0": "selected with gamma = 0",
    }
    diversity = _section(report, "diversity")
    sets = {label: diversity[name] for name, label in names.items() if diversity.get(name)}
    shares: dict[str, list[float | None]] = {}
    edges: list[float] = []
    for label, values in sets.items():
        bins = _section(values, "cosine_histogram")
        if pairs := sum(bins.get("counts") or []):
            shares[label] = [100 * count / pairs for count in bins["counts"]]
            edges = bins["edges"]
    panel = Panel("share of the pairs (%)", shares)
    quantiles = list(dict.fromkeys(q for values in sets.values() for q in _section(values, "cosine_quantiles")))
    head = ["set", "log det (higher: more diverse)", "mean cosine", *(f"{float(q):.0%} quantile" for q in quantiles)]
    rows = [
        [
            label,
            number(values.get("logdet"), 7),
            values.get("cosine_mean"),
            *(_section(values, "cosine_quantiles").get(q) for q in quantiles),
        ]
        for label, values in sets.items()
    ]
    return {
        "chart": histogram(edges, panel, "cosine of two retrieval keys") if shares else None,
        "table": Table(head, rows),
    }


def _search(report: Report) -> Parts:
    settings, grid = _section(report, "settings"), _rows(report, "grid")
    rates = _rows(_section(report, "refinement"), "search")
    weights = ("beta", "gamma")
    chosen = [r for r, row in enumerate(grid) if all(row.get(w) == settings.get(w, math.nan) for w in weights)]
    losses = [loss for loss in finite([row.get("validation_nll") for row in rates]) if not math.isnan(loss)]
    lowest = [r for r, row in enumerate(rates) if losses and row.get("validation_nll") == min(losses)]
    return {
        "grid": Table(
            ["beta", "gamma", "validation NLL (nats)"],
            [[row.get("beta"), row.get("gamma"), row.get("validation_nll")] for row in grid],
            chosen,
        ),
        "rates": Table(
            ["learning rate", "validation NLL (nats), part of the way"],
            [[row.get("learning_rate"), row.get("validation_nll")] for row in rates],
            lowest,
        ),
    }


def _storage(report: Report) -> Parts:
    storage = _section(report, "storage")
    if not is_number(storage.get("memory_bytes")):
        return {"chart": None, "table": None}
    stored = {"memory": storage["memory_bytes"], "anchors": storage.get("anchor_bytes") or 0}
    after = _section(_section(report, "composition"), "after").values()
    items = {"memory": sum(count for count in after if is_number(count)), "anchors": storage.get("anchors")}
    rows = [[name, size, byte_size(size), items[name]] for name, size in stored.items()]
    return {
        "chart": bars(list(stored), [Panel("MiB", {"stored": [size / 2**20 for size in stored.values()]})]),
        "table": Table(["what", "bytes", "", "items"], rows),
    }


def _phases(report: Report) -> Parts:
    phases = _rows(report, "phases")
    seconds = [phase.get("seconds") for phase in phases]
    peaks = [phase["peak_bytes"] / 2**20 if is_number(phase.get("peak_bytes")) else None for phase in phases]
    own = all(phase.get("peak_of") == "phase" for phase in phases)
    panels = [
        Panel("time (s)", {"time": seconds}),
        Panel("peak memory (MiB)" if own else "peak memory so far (MiB)", {"peak": peaks}),
    ]
    return {
        "chart": bars([str(phase.get("name")) for phase in phases], panels) if phases else None,
        "own": own,
        "seconds": math.fsum(value for value in finite(seconds) if not math.isnan(value)),
    }


def _provenance(report: Report) -> Parts:
    identity = {"digest": "digest", "parent_digest": "digest of the memory before"}
    rows = [[label, report[name]] for name, label in identity.items() if report.get(name)]
    return {
        "memory": Table(["memory", ""], rows),
        **{
            name: Table([head, ""], [[key.replace("_", " "), value] for key, value in _section(report, name).items()])
            for name, head in (("pool", "made from"), ("settings", "setting"))
        },
    }


# ------------------------------------------------------------------------------------------- reading a report


def _curves(history: Sequence[Report], position: str, labels: Mapping[str, str]) -> str | None:
    """A chart of the measured columns of `history` that have any numbers."""
    columns = {label: [row.get(name) for row in history] for name, label in labels.items()}
    panels = [Panel(label, {label: values}) for label, values in columns.items() if _has_numbers(values)]
    steps = [row.get("step", place) for place, row in enumerate(history)]
    return curves(steps, position, panels) if panels else None


def _has_numbers(values: Sequence[Any]) -> bool:
    return any(map(is_number, values))


def _section(report: Report, name: str) -> Report:
    """A part of the report; empty if it is absent or null."""
    section: Report = report.get(name) or {}
    return section


def _rows(report: Report, name: str) -> Sequence[Report]:
    rows: Sequence[Report] = report.get(name) or ()
    return rows

"""What was run, for a reader who has never heard of it: tasks with their questions, model, methods, terms, commands."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from benchmarks.continual.comparison import CONFIDENCE, Streams, gaps
from benchmarks.continual.report.findings import Findings, TaskShown
from benchmarks.continual.report.names import RECIPES, RIVALS, described, listed, title
from benchmarks.continual.report.tables import paragraph, prose
from selector.report.parts import byte_size, counted, picture, table, text

GLOSSARY: Mapping[str, str] = MappingProxyType(
    {
        "stream": "tasks that are learned one after the other; what came before is not trained on again, but for the "
        "anchors that some methods keep",
        "InduceKV": "leaves the model as it is and gives its attention a memory of keys and values, made from training "
        "prompts; a memory has a fixed number of entries",
        "entries (B)": "the size of the memory. Other methods get as many bytes as a memory of that size takes",
        "anchors": "examples of earlier tasks that a method keeps for learning later ones; not part of what it answers "
        "with",
        "AP": "accuracy over all tasks after the last one: the mean of the final accuracies. The paper's Avg, MAA and "
        "AvgAcc are the same number",
        "AF": "forgetting: how far a task's accuracy has fallen from its best, on average over all tasks but the last; "
        "0 is nothing forgotten",
        "BWT": "backward transfer: what later tasks have done to earlier ones since they were learned; negative means "
        "forgotten",
        "Last": "final accuracy on the task that was learned last",
        "MAA over time": "CoIN's own MAA: the mean accuracy on the tasks seen so far, averaged over all steps",
        "base": "questions of what the model could do before the stream; nothing in the stream asks them",
        "base retention": "base accuracy at the end, divided by the untouched model's",
        "points": "percentage points: the difference of two percentages",
        "±": "the standard error over seeds, which says how far chance in learning moves a mean. Differences are taken "
        "seed by seed first, then averaged",
        "beyond the error": f"0 lies outside the {CONFIDENCE:.0%} interval of the mean difference (Student's t, as "
        "there are few seeds); marked ▲ where it is more, ▼ where it is less",
    }
)


def what_was_run(findings: Findings) -> list[str]:
    streams, known = findings.streams, findings.configuration
    methods = list(dict.fromkeys(run["method"] for run in streams.runs))
    seeds = sorted({run["seed"] for run in streams.runs})
    rows = [
        ["suite", f"{known['suite']}: {counted(len(streams.tasks), 'task', 'tasks')}, in this order: "
         + ", ".join(streams.tasks)],
        ["model", known["model"]["name"]],
        ["budgets", f"{listed(map(str, streams.budgets))} entries of memory, or their bytes"],
        ["seeds", listed(map(str, seeds))],
        ["questions", _questions(findings)],
        ["answers", _answered(known)],
        ["methods", str(len(methods))],
    ]  # fmt: skip
    for record in _machines(findings.commands):
        rows.append(["hardware and versions", record])
    parts = [
        paragraph(
            f"The tasks of the suite “{known['suite']}” were learned one after the other. After each, the questions of "
            "all tasks seen so far were asked, and base questions of what the model could do before; an answer counts "
            "where it is the expected one but for case, surrounding space and final punctuation. No method may "
            "store more to answer with than a memory of the budget takes, and each was learned anew for every budget "
            "and seed."
        ),
        prose(table(["what", ""], rows)),
    ]
    return [*parts, *_missing(streams)]


def methods_told(findings: Findings) -> list[str]:
    methods = dict.fromkeys(run["method"] for run in findings.streams.runs)
    return [prose(table(["method", "what it is"], [[title(m), described(m) or "–"] for m in methods]))]


def tasks_told(findings: Findings) -> list[str]:
    if not findings.tasks:
        return [paragraph(f"The tasks' questions cannot be shown: {findings.no_tasks_because}")]
    parts = [paragraph("One question of each task, and what some methods answered after the last task (first seed).")]
    return [*parts, '<div class="gallery">', *(_task(shown) for shown in findings.tasks), "</div>"]


def _task(shown: TaskShown) -> str:
    names = [name for name in ("no_memory", *RECIPES, *RIVALS) if name in shown.answers]
    answers = "".join(f" {title(name)}: “{shown.answers[name]}”." for name in names)
    said = (
        f"“{shown.text}” Expected: “{shown.expected}”.{answers} ({counted(shown.questions, 'question', 'questions')})"
    )
    if shown.picture is None:
        return f"<p><strong>{text(shown.task)}.</strong> {text(said)}</p>"
    return picture(shown.picture, shown.task, said)


def glossary() -> list[str]:
    return [prose(table(["term", "what it means"], [[term, said] for term, said in GLOSSARY.items()]))]


def footprint_told(findings: Findings) -> str:
    size = findings.picture_bytes
    pictures = "" if size is None else f", and an exemplar's pictures {byte_size(round(size))} as JPEG on average"
    return paragraph(
        "What the bytes of a memory would buy otherwise, as in the paper's budget conversion: parameters of an adapter "
        f"in float16, or exemplars for replay, whose text is taken to be 512 token ids of 4 bytes{pictures}."
    )


def commands_told(findings: Findings) -> list[str]:
    if not findings.commands:
        return [paragraph("No command is on record in the folder.")]
    commands = dict.fromkeys(str(record["command"]) for record in findings.commands)
    return [f"<pre>{chr(10).join(map(text, commands))}</pre>"]


def chance_of_questions(findings: Findings) -> str | None:
    """What the choice of questions adds to the error over seeds, which does not contain it."""
    if not findings.tasks:
        return None
    *tasks, _ = findings.tasks
    fewest = min(shown.questions for shown in tasks)
    of_task, of_all = (100 * math.sqrt(0.25 / count) for count in (fewest, sum(shown.questions for shown in tasks)))
    return paragraph(
        "The error over seeds does not contain the choice of the questions, which is the same for all methods. Other "
        f"questions would move a single accuracy near 50% by about {of_task:.1f} points on one task and "
        f"{of_all:.1f} on all tasks together (binomial standard error)."
    )


def _questions(findings: Findings) -> str:
    known = findings.configuration
    split = f"of the {known['split']} split" if "split" in known else ""
    if not findings.tasks:
        return split or "–"
    *tasks, base = findings.tasks
    counts = sorted({shown.questions for shown in tasks})
    return f"{' to '.join(map(str, {counts[0]: 0, counts[-1]: 0}))} a task, {base.questions} base questions, {split}"


def _answered(known: Mapping[str, Any]) -> str:
    """Who answered the questions, from run.json."""
    answer = known.get("answer", {})
    if answer.get("by") == "http":
        server = "a server given to the run" if answer.get("server") == "given" else "inducekv-serve"
        return f"by {server} over HTTP, greedy"
    return "in transformers, greedy"


def _machines(commands: Sequence[Mapping[str, Any]]) -> list[str]:
    """Hardware and versions, each once."""
    told = []
    for record in commands:
        machine = record["machine"]
        versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
        processor = f"{counted(machine['cores'], 'core', 'cores')} of {machine['cpu']}, {machine['memory_gib']} GiB"
        gpu = f", {machine['gpu']}" if machine["gpu"] else ", no GPU"
        told.append(f"{processor}{gpu}; Python {machine['python']}, {versions}")
    return list(dict.fromkeys(told))


def _missing(streams: Streams) -> list[str]:
    found = gaps(streams)
    if not found:
        return [paragraph("All methods are complete with all budgets and seeds.")]
    items = "".join(f"<li>{text(sentence)}</li>" for sentence in found)
    return [
        paragraph(
            "Incomplete. Means are over the seeds that each method has, comparisons over those that both have, and "
            "only methods with all seeds can be best. Missing:"
        ),
        f"<ul>{items}</ul>",
    ]

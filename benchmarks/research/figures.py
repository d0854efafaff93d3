"""The plots of docs/results.md, from the files of results."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.research.continual.metrics import accuracy_matrix, average_forgetting
from benchmarks.research.continual.report.names import title

ROOT = Path(__file__).parents[2]

COLOURS = {  # of Okabe and Ito, which colour-blind readers can tell apart
    "InduceKV": "#0072B2",
    "one gated LoRA a task": "#D55E00",
    "LoRA + replay": "#009E73",
    "gated LoRA + replay": "#CC79A7",
    "no memory": "#777777",
}
MARKS = dict(zip(COLOURS, "os^Dx", strict=True))
NAMES = {"InduceKV (decoupled)": "InduceKV", "InduceKV (decoupled, facts)": "InduceKV"}
STYLE: Any = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "inducekv",  # ids of a drawing are random otherwise
    "savefig.facecolor": "white",
}
DEMO = "continual_decoupled.json"
TODAY = ("real_text_facts_search_seed0.json", "real_text_facts_search_seed1.json", "real_text_facts_search.json")
EIGHT, LORA_TODAY = "real_text_eight.json", "real_text_lora_seed2.json"
TABLE, TABLE_OF_QWEN = "from_a_table.json", "from_a_table_qwen2.5-0.5b.json"
STREAM = "stream_qwen2.5-0.5b.json"
Results = Callable[[str], dict[str, Any]]


def name_of(method: str) -> str:
    return NAMES.get(title(method), title(method))


def accuracy_against_bytes(axes: Axes, results: Results) -> None:
    """The demo stream: AP of each method at its bytes."""
    points: dict[str, list[tuple[float, float, float]]] = {}
    for row in results(DEMO)["results"]:
        ap = row["metrics"]["AP"]
        points.setdefault(name_of(row["method"]), []).append(
            (row["stored_bytes"] / 1e3, ap["mean"], ap["standard_error"])
        )
    for name, found in points.items():
        x, y, error = zip(*sorted(found), strict=True)
        axes.errorbar(x, y, error, label=name, color=COLOURS[name], marker=MARKS[name], capsize=3)
    axes.set(xlabel="kB for eight tasks", ylabel="accuracy over all tasks at the end", ylim=(0, 1))
    axes.legend(frameon=False, fontsize=9)


def forgetting_over_tasks(axes: Axes, results: Results) -> None:
    """The demo stream, 32 entries: how much of their best accuracy earlier tasks have lost after each task."""
    runs: dict[str, list[list[list[float]]]] = {}
    for run in results(DEMO)["runs"]:
        if run["budget"] == 32 and run["method"] != "no_memory":
            runs.setdefault(name_of(run["method"]), []).append(run["accuracy"])
    for name, matrices in runs.items():
        lost = [statistics.mean(forgotten(matrix, after) for matrix in matrices) for after in range(1, 8)]
        axes.plot(range(2, 9), lost, label=name, color=COLOURS[name], marker=MARKS[name])
    axes.set(xlabel="tasks learned", ylabel="accuracy lost by earlier tasks", ylim=(-0.01, None))
    axes.legend(frameon=False, fontsize=9)


def forgotten(matrix: Sequence[Sequence[float]], after: int) -> float:
    """AF of the tasks up to number `after`, from 0; row i has the accuracies after task i."""
    return average_forgetting(accuracy_matrix([row[: after + 1] for row in matrix[: after + 1]]))


def first_token(axes: Axes, results: Results, table: str = TABLE) -> None:
    """The memory of 80 rows, of SmolLM2 unless another table is named: time to first token by the question's length."""
    ways = {
        "untouched": ("no memory", "no memory"),
        "memory": ("InduceKV", "InduceKV, default"),
        "memory, --preset quick": ("gated LoRA + replay", "InduceKV, --preset quick"),
        "retrieved rows in the prompt": ("LoRA + replay", "four retrieved rows in the prompt"),
        "LoRA, rank 8": ("one gated LoRA a task", "LoRA of rank 8 (vLLM)"),
    }
    times = results(table)["first_token"]
    for way, (style, label) in ways.items():
        rows = [row for row in times if row["way"] == way]
        seconds = [row["ttft_ms"] / 1000 for row in rows]
        axes.plot([row["length"] for row in rows], seconds, label=label, color=COLOURS[style], marker=MARKS[style])
    axes.set(xlabel="tokens of the question's prompt", ylabel="time to first token, s", xscale="log", yscale="log")
    axes.set_xticks(lengths := sorted({row["length"] for row in times}), lengths)
    axes.minorticks_off()
    axes.legend(frameon=False, fontsize=9)


def accuracy_by_task(axes: Axes, results: Results) -> None:
    """SmolLM2's eight tasks, after the last one."""
    series: dict[str, list[Mapping[str, Any]]] = {"InduceKV": [row["results"][0] for row in map(results, TODAY)]}
    content = results(EIGHT)
    eight = {row["method"]: row for row in content["results"]}
    series["one gated LoRA a task"] = [eight["gated_task_lora"]] * 2 + [results(LORA_TODAY)["results"][0]]
    series["LoRA + replay"] = [eight["lora_replay"]]
    tasks = content["order"]
    means = {
        name: [statistics.mean(row["tasks"][task]["mean"] for row in rows) for task in tasks]
        for name, rows in series.items()
    }
    bars(axes, means, tasks)


def accuracy_by_task_of_qwen(axes: Axes, results: Results) -> None:
    """Qwen2.5-Coder-0.5B's five tasks, after the last one: the searched memory, of two runs, and LoRA."""
    runs = results(STREAM)["runs"]
    lora = next(run for run in runs if run["complete"] and run["method"] == "gated_task_lora")
    memory = [run for run in runs if run["settings"].get("activation") == "search"]  # a task's latest run counts
    heights: dict[str, dict[str, float]] = {}
    for run in (*memory, lora):
        heights.setdefault(name_of(run["method"]), {}).update(zip(run["order"], run["accuracy"][-1], strict=False))
    bars(axes, {name: [of[task] for task in lora["order"]] for name, of in heights.items()}, lora["order"])


def bars(axes: Axes, means: Mapping[str, Sequence[float]], tasks: Sequence[str]) -> None:
    """Of each method, its accuracy on each task."""
    for place, (name, heights) in enumerate(means.items()):
        middle = 0.27 * (place - (len(means) - 1) / 2)
        axes.bar([x + middle for x in range(len(tasks))], heights, 0.25, color=COLOURS[name], label=name)
    axes.set_xticks(range(len(tasks)), tasks, rotation=20)
    axes.set(ylabel="accuracy after the last task", ylim=(0, 1))
    axes.legend(frameon=False, fontsize=9, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1))


FIGURES: Mapping[str, Callable[[Axes, Results], None]] = {
    "accuracy-against-bytes": accuracy_against_bytes,
    "forgetting-over-tasks": forgetting_over_tasks,
    "first-token": first_token,
    "first-token-qwen": partial(first_token, table=TABLE_OF_QWEN),
    "accuracy-by-task": accuracy_by_task,
    "accuracy-by-task-qwen": accuracy_by_task_of_qwen,
}


def draw(source: Path, folder: Path) -> None:
    """Each as NAME.svg."""
    folder.mkdir(parents=True, exist_ok=True)

    def results(file: str) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((source / file).read_bytes())
        return content

    for name, plot in FIGURES.items():
        with mpl.rc_context(STYLE):
            figure = Figure(figsize=(7.0, 4.2), layout="constrained")
            plot(figure.add_subplot(), results)
            figure.savefig(folder / f"{name}.svg", format="svg", metadata={"Date": None, "Creator": None})


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.research.figures", description=__doc__)
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results", help="folder of JSON files")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images", help="folder for the plots")
    options = parser.parse_args(arguments)
    draw(options.results, options.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""From timings to the table, the targets and the one JSON object at the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from benchmarks.serving.methods import BASE_METHOD, LONGER_PROMPT, SECOND_TURN, decoupled_name

Block = Mapping[str, Any]  # what the locust file writes: the requests of one method sent together
Measured = dict[int, dict[str, list[Block]]]  # concurrency -> method -> its blocks, one a round

# At concurrency 1: name, and a metric of a method at most `limit` times that of another.
TURN2 = decoupled_name("generation") + SECOND_TURN
TARGETS = (
    ("TTFT, 64 entries", "ttft_ms", "memory_B64_all", BASE_METHOD, 2.5),
    ("TPOT, 64 entries", "tpot_ms", "memory_B64_all", BASE_METHOD, 1.25),
    ("TTFT, decoupled, acting on the generation", "ttft_ms", decoupled_name("generation"), BASE_METHOD, 1.25),
    ("TTFT, decoupled, acting on the text", "ttft_ms", decoupled_name("text"), BASE_METHOD, 1.4),
    ("TPOT, decoupled", "tpot_ms", decoupled_name("generation"), BASE_METHOD, 1.15),
    ("TTFT of a second turn, acting on the generation", "ttft_ms", TURN2, BASE_METHOD + SECOND_TURN, 1.0),
    ("TTFT, 256 entries against the longer prompt", "ttft_ms", "memory_B256_all", LONGER_PROMPT, 0.5),
)


def summarize(blocks: Sequence[Block]) -> dict[str, float]:
    """Medians over all requests (times) and over blocks (throughput); the spread is the quartiles' distance."""
    timings = [timing for block in blocks for timing in block["requests"]]
    ttft = [1000 * timing["ttft"] for timing in timings]
    tpot = [1000 * timing["tpot"] for timing in timings if timing["tpot"] is not None]
    rates = [sum(timing["output_tokens"] for timing in block["requests"]) / block["seconds"] for block in blocks]
    return {
        "requests": len(timings),
        "prompt_tokens": median(timing["prompt_tokens"] for timing in timings),
        "ttft_ms": median(ttft),
        "ttft_iqr_ms": _iqr(ttft),
        "tpot_ms": median(tpot) if tpot else float("nan"),
        "tpot_iqr_ms": _iqr(tpot) if tpot else float("nan"),
        "tokens_per_s": median(rates),
    }


def _iqr(values: list[float]) -> float:
    ordered = sorted(values)
    return ordered[(3 * len(ordered)) // 4 if len(ordered) > 1 else 0] - ordered[len(ordered) // 4]


def tabulate(measured: Measured, bases: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """concurrency -> method -> row with its ratios to its own base: the untouched model, asked the same."""
    ratios = {"ttft_ratio": "ttft_ms", "tpot_ratio": "tpot_ms", "throughput_ratio": "tokens_per_s"}
    tables = {}
    for concurrency, methods in measured.items():
        rows = {method: summarize(blocks) for method, blocks in methods.items()}
        tables[str(concurrency)] = {
            method: row | {ratio: row[metric] / rows[bases[method]][metric] for ratio, metric in ratios.items()}
            for method, row in rows.items()
        }
    return tables


def check_targets(rows: Mapping[str, Mapping[str, float]]) -> list[dict[str, Any]]:
    """The targets against the rows of concurrency 1; those whose methods were not measured are left out."""
    reached = []
    for name, metric, method, against, limit in TARGETS:
        if method in rows and against in rows:
            ratio = rows[method][metric] / rows[against][metric]
            reached.append({"target": name, "limit": limit, "reached": ratio, "met": ratio <= limit})
    return reached


def show(result: dict[str, Any], console: Console) -> None:
    columns = (
        ("requests", "requests", ".0f"),
        ("prompt", "prompt_tokens", ".0f"),
        ("TTFT ms", "ttft_ms", ".1f"),
        ("x base", "ttft_ratio", ".2f"),
        ("TPOT ms", "tpot_ms", ".2f"),
        ("x base", "tpot_ratio", ".2f"),
        ("tokens/s", "tokens_per_s", ".1f"),
        ("x base", "throughput_ratio", ".2f"),
    )
    for concurrency, rows in result["concurrency"].items():
        table = Table("method", *(Column(label, justify="right") for label, _, _ in columns))
        table.title = f"concurrency {concurrency}"
        for method, row in rows.items():
            table.add_row(method, *(format(row[name], digits) for _, name, digits in columns))
        console.print(table)
    for target in result["targets"]:
        verdict = "[green]met[/]" if target["met"] else "[red]missed[/]"
        console.print(f"{target['target']}: {target['reached']:.2f} (at most {target['limit']}) {verdict}")

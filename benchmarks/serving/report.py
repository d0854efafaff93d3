"""From timings to the table, the targets and the one JSON object at the end."""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import median
from types import MappingProxyType
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from benchmarks.serving.load import Block
from benchmarks.serving.methods import BASE_METHOD, LONGER_PROMPT, SECOND_TURN, decoupled_name

Measured = dict[int, dict[str, list[Block]]]  # concurrency -> method -> its blocks, one a round


# At concurrency 1: name, and a metric of a method at most `limit` times that of another.
TARGETS = (
    ("TTFT, 64 entries", "ttft_ms", "memory_B64_all", BASE_METHOD, 2.5),
    ("TPOT, 64 entries", "tpot_ms", "memory_B64_all", BASE_METHOD, 1.25),
    ("TTFT, decoupled, acting on the generation", "ttft_ms", decoupled_name("generation"), BASE_METHOD, 1.25),
    ("TTFT, decoupled, acting on the text", "ttft_ms", decoupled_name("text"), BASE_METHOD, 1.4),
    ("TPOT, decoupled", "tpot_ms", decoupled_name("generation"), BASE_METHOD, 1.15),
    (
        "TTFT of a second turn, decoupled, acting on the generation",
        "ttft_ms",
        decoupled_name("generation") + SECOND_TURN,
        BASE_METHOD + SECOND_TURN,
        1.0,
    ),
    ("TTFT, 256 entries against the longer prompt", "ttft_ms", "memory_B256_all", LONGER_PROMPT, 0.5),
)

RETRIEVAL_LIMIT_MS = 1.0


def summarize(blocks: list[Block]) -> dict[str, float]:
    """Medians over all requests (times) and over blocks (throughput); the spread is the quartiles' distance."""
    timings = [timing for block in blocks for timing in block.timings]
    ttft = [1000 * timing.ttft for timing in timings]
    tpot = [1000 * timing.tpot for timing in timings if not math.isnan(timing.tpot)]
    whole = [t.ttft + (t.tpot * (t.output_tokens - 1) if t.output_tokens > 1 else 0.0) for t in timings]
    return {
        "requests": len(timings),
        "prompt_tokens": median(timing.prompt_tokens for timing in timings),
        "ttft_ms": median(ttft),
        "ttft_iqr_ms": _iqr(ttft),
        "tpot_ms": median(tpot) if tpot else float("nan"),
        "tpot_iqr_ms": _iqr(tpot) if tpot else float("nan"),
        "e2e_s": median(whole),
        "tokens_per_s": median(block.tokens_per_second for block in blocks),
    }


def _iqr(values: list[float]) -> float:
    ordered = sorted(values)
    return ordered[(3 * len(ordered)) // 4 if len(ordered) > 1 else 0] - ordered[len(ordered) // 4]


def with_ratios(rows: dict[str, dict[str, float]], bases: Mapping[str, str]) -> dict[str, dict[str, float]]:
    """Each method's row of one concurrency, with its ratios to its own base: the untouched model, asked the same."""
    ratios = {"ttft_ratio": "ttft_ms", "tpot_ratio": "tpot_ms", "throughput_ratio": "tokens_per_s"}
    return {
        method: row
        | {ratio: row[metric] / rows[bases.get(method, BASE_METHOD)][metric] for ratio, metric in ratios.items()}
        for method, row in rows.items()
    }


def tabulate(measured: Measured, bases: Mapping[str, str] = MappingProxyType({})) -> dict[str, dict[str, Any]]:
    """concurrency -> method -> row; `bases` names what a method is compared with, if it is not the first one."""
    return {
        str(concurrency): with_ratios({method: summarize(blocks) for method, blocks in methods.items()}, bases)
        for concurrency, methods in measured.items()
    }


def check_targets(rows: dict[str, dict[str, float]]) -> list[dict[str, Any]]:
    """The targets against the rows of concurrency 1; those whose methods were not measured are left out."""
    reached = []
    for name, metric, method, against, limit in TARGETS:
        if method not in rows or against not in rows:
            continue
        ratio = rows[method][metric] / rows[against][metric]
        reached.append({"target": name, "limit": limit, "reached": ratio, "met": ratio <= limit})
    return reached


def check_retrieval(milliseconds: dict[str, float]) -> list[dict[str, Any]]:
    """The target on retrieval alone, against the slowest of the widths measured."""
    slowest = max(milliseconds.values())
    name, limit = "retrieval, 512 entries, ms", RETRIEVAL_LIMIT_MS
    return [{"target": name, "limit": limit, "reached": slowest, "met": slowest < limit}]


def show(result: dict[str, Any], console: Console) -> None:
    for concurrency, rows in result["concurrency"].items():
        console.print(table(concurrency, rows))
    for target in result["targets"]:
        verdict = "[green]met[/]" if target["met"] else "[red]missed[/]"
        console.print(f"{target['target']}: {target['reached']:.2f} (at most {target['limit']}) {verdict}")
    for method, parts in result["breakdown_ms"].items():
        steps = [f"{part.removesuffix('_ms')} {value:.2f} ms" for part, value in parts.items()]
        console.print(f"{method}: {', '.join(steps)}")


def table(concurrency: str, rows: dict[str, dict[str, float]]) -> Table:
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
    result = Table("method", *(Column(label, justify="right") for label, _, _ in columns))
    result.title = f"concurrency {concurrency}"
    for method, row in rows.items():
        result.add_row(method, *(format(row[name], digits) for _, name, digits in columns))
    return result

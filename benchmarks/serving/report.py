"""From timings to the table, the targets and the one JSON object at the end."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.serving.load import Block
from benchmarks.serving.methods import BASE_METHOD, LONGER_PROMPT

Measured = dict[int, dict[str, list[Block]]]  # concurrency -> method -> its blocks, one a round


@dataclass(frozen=True)
class Target:
    """`metric` of `method` at most `limit` times that of `against`, at concurrency 1."""

    name: str
    metric: str
    method: str
    against: str
    limit: float


TARGETS = (
    Target("TTFT, 64 entries", "ttft_ms", "memory_B64_all", BASE_METHOD, 2.5),
    Target("TPOT, 64 entries", "tpot_ms", "memory_B64_all", BASE_METHOD, 1.25),
    Target("TTFT, 256 entries against the longer prompt", "ttft_ms", "memory_B256_all", LONGER_PROMPT, 0.5),
)

RETRIEVAL_LIMIT_MS = 1.0


def summarize(blocks: list[Block]) -> dict[str, float]:
    """Medians over all requests (times) and over blocks (throughput); the spread is the quartiles' distance."""
    timings = [timing for block in blocks for timing in block.timings]
    ttft = [1000 * timing.ttft for timing in timings]
    tpot = [1000 * timing.tpot for timing in timings if not math.isnan(timing.tpot)]
    return {
        "requests": len(timings),
        "prompt_tokens": median(timing.prompt_tokens for timing in timings),
        "ttft_ms": median(ttft),
        "ttft_iqr_ms": _iqr(ttft),
        "tpot_ms": median(tpot) if tpot else float("nan"),
        "tpot_iqr_ms": _iqr(tpot) if tpot else float("nan"),
        "tokens_per_s": median(block.tokens_per_second for block in blocks),
    }


def _iqr(values: list[float]) -> float:
    ordered = sorted(values)
    return ordered[(3 * len(ordered)) // 4 if len(ordered) > 1 else 0] - ordered[len(ordered) // 4]


def with_ratios(rows: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Each method's row of one concurrency, with its ratios to the untouched model."""
    base = rows[BASE_METHOD]
    return {
        method: row
        | {
            "ttft_ratio": row["ttft_ms"] / base["ttft_ms"],
            "tpot_ratio": row["tpot_ms"] / base["tpot_ms"],
            "throughput_ratio": row["tokens_per_s"] / base["tokens_per_s"],
        }
        for method, row in rows.items()
    }


def tabulate(measured: Measured) -> dict[str, dict[str, dict[str, float]]]:
    """concurrency -> method -> row."""
    return {
        str(concurrency): with_ratios({method: summarize(blocks) for method, blocks in methods.items()})
        for concurrency, methods in measured.items()
    }


def check_targets(rows: dict[str, dict[str, float]]) -> list[dict[str, Any]]:
    """The targets against the rows of concurrency 1."""
    reached = []
    for target in TARGETS:
        ratio = rows[target.method][target.metric] / rows[target.against][target.metric]
        reached.append({"target": target.name, "limit": target.limit, "reached": ratio, "met": ratio <= target.limit})
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
        console.print(
            f"{method}: " + ", ".join(f"{part.removesuffix('_ms')} {value:.2f} ms" for part, value in parts.items())
        )


def table(concurrency: str, rows: dict[str, dict[str, float]]) -> Table:
    result = Table(title=f"concurrency {concurrency}")
    result.add_column("method")
    for column in ("requests", "prompt", "TTFT ms", "x none", "TPOT ms", "x none", "tokens/s", "x none"):
        result.add_column(column, justify="right")
    for method, row in rows.items():
        result.add_row(
            method,
            f"{row['requests']:.0f}",
            f"{row['prompt_tokens']:.0f}",
            f"{row['ttft_ms']:.1f}",
            f"{row['ttft_ratio']:.2f}",
            f"{row['tpot_ms']:.2f}",
            f"{row['tpot_ratio']:.2f}",
            f"{row['tokens_per_s']:.1f}",
            f"{row['throughput_ratio']:.2f}",
        )
    return result

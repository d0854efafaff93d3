"""From blocks to the tables and the targets, and the file that has them after every block."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

from rich.console import Console
from rich.table import Column, Table

from benchmarks.serving.methods import IDLE, LONGER_PROMPT, LORA, NONE, SECOND_TURN, decoupled_name, gated_name
from benchmarks.serving.passes import WARM_UP, Block
from benchmarks.serving.timing import Timing
from selector.runtime.files import replace_file

RATIOS: Final = ("ttft_ms", "tpot_ms", "tokens_per_s")  # what `x` and `x_own` of a row are of
Rows = dict[str, dict[str, Any]]  # method -> its numbers


class Target(NamedTuple):
    """In cells of so many requests at a time, a metric of a method is at most (or at least) so many times another's."""

    concurrency: int
    metric: str
    method: str
    base: str
    limit: float
    least: bool = False


SAME_PASS, GENERATION, TEXT = gated_name("same_pass"), decoupled_name("generation"), decoupled_name("text")
TARGETS: Final = (
    *(Target(1, "ttft_ms", method, NONE, 1.02) for method in (IDLE, gated_name("closed"))),
    *(Target(1, "tpot_ms", method, NONE, 1.01) for method in (IDLE, gated_name("closed"))),
    Target(1, "ttft_ms", SAME_PASS, NONE, 1.05),
    Target(1, "tpot_ms", SAME_PASS, NONE, 1.04),
    Target(64, "tpot_ms", SAME_PASS, NONE, 1.05),
    Target(64, "tokens_per_s", SAME_PASS, LORA, 1.5, least=True),
    Target(1, "ttft_ms", "memory_B64_all", NONE, 2.5),
    Target(1, "tpot_ms", "memory_B64_all", NONE, 1.25),
    Target(1, "ttft_ms", GENERATION, NONE, 1.25),
    Target(1, "ttft_ms", TEXT, NONE, 1.4),
    Target(1, "tpot_ms", GENERATION, NONE, 1.15),
    Target(1, "ttft_ms", SECOND_TURN + GENERATION, SECOND_TURN + NONE, 1.0),
    Target(1, "ttft_ms", "memory_B256_all", LONGER_PROMPT, 0.5),
)


class Record:
    """What is known so far. The result's file is complete after each block, its blocks are lines of another one."""

    def __init__(self, path: Path, result: dict[str, Any], bases: Mapping[str, Mapping[str, str]]) -> None:
        """
        Args:
            result: what is known before the first block; changed here.
            bases: method -> ratio -> the method that it is divided by.
        """
        self.path, self.result, self.bases = path, result, bases
        self._blocks: dict[str, dict[str, list[Block]]] = defaultdict(lambda: defaultdict(list))  # by cell and method
        path.parent.mkdir(parents=True, exist_ok=True)
        self.blocks = blocks_of(path)
        self.blocks.unlink(missing_ok=True)
        result |= {"cells": {}, "targets": [], "failed_requests": 0}
        self.save()

    def keep(self, block: Block) -> None:
        with self.blocks.open("a") as file:
            file.write(json.dumps(block) + "\n")
        cell, method, failed = block["cell"], block["method"], block.get("failed", ())
        self.result["failed_requests"] += len(failed)
        if failed:
            self.result.setdefault("first_failures", {}).setdefault(method, failed[0])
        elif block["pass"] != WARM_UP:
            self._blocks[cell][method].append(block)
            self.result["cells"][cell] = tabulate(self._blocks[cell], self.bases)
            self.result["targets"] = check_targets(self.result["cells"])
        self.save()

    def tell(self, **known: Any) -> None:
        """Add to the result."""
        self.result |= known
        self.save()

    def save(self) -> None:
        replace_file(self.path, (json.dumps(self.result, indent=1) + "\n").encode())


def blocks_of(path: Path) -> Path:
    """Where the blocks of a result lie: beside it."""
    return path.with_suffix(".blocks.jsonl")


def tabulate(methods: Mapping[str, Sequence[Block]], bases: Mapping[str, Mapping[str, str]]) -> Rows:
    """The rows of a cell, and their ratios to those of their bases that were measured in it."""
    rows: Rows = {method: summarize(blocks) for method, blocks in methods.items()}
    for method, row in rows.items():
        for ratio, base in bases.get(method, {}).items():
            if base in rows:
                row[ratio] = [round(row[metric] / rows[base][metric], 3) for metric in RATIOS]
    return rows


def summarize(blocks: Sequence[Block]) -> dict[str, Any]:
    """Medians over all requests (times) and over blocks (throughput); the spread is the quartiles' distance."""
    timings = [Timing(*timing) for block in blocks for timing in block["requests"]]
    ttft, tpot = ([1000 * getattr(timing, name) for timing in timings] for name in ("ttft", "tpot"))
    rates = [sum(Timing(*timing).output_tokens for timing in block["requests"]) / block["seconds"] for block in blocks]
    return {
        "requests": len(timings),
        "prompt_tokens": median(timing.prompt_tokens for timing in timings),
        "ttft_ms": round(median(ttft), 3),
        "ttft_iqr_ms": round(quartiles_distance(ttft), 3),
        "tpot_ms": round(median(tpot), 4),
        "tpot_iqr_ms": round(quartiles_distance(tpot), 4),
        "tokens_per_s": round(median(rates), 1),
    }


def quartiles_distance(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return ordered[3 * len(ordered) // 4] - ordered[len(ordered) // 4]


def check_targets(cells: Mapping[str, Rows]) -> list[dict[str, Any]]:
    """The targets in each cell that has both methods."""
    reached = []
    for cell, rows in cells.items():
        for target in TARGETS:
            concurrency, metric, method, base, limit, least = target
            if cell.startswith(f"c{concurrency}_") and method in rows and base in rows:
                ratio = rows[method][metric] / rows[base][metric]
                met = ratio >= limit if least else ratio <= limit
                reached.append({"cell": cell, **target._asdict(), "reached": round(ratio, 3), "met": met})
    return reached


def show(result: Mapping[str, Any], console: Console) -> None:
    """A table for each cell, and the targets. `x` is relative to no plugin, `x own` to the same server's base."""
    for cell, rows in result["cells"].items():
        table = Table("method", *(Column(label, justify="right") for label in ("requests", "prompt")), title=cell)
        for label in ("TTFT ms", "TPOT ms", "tokens/s"):
            for column in (label, "x", "x own"):
                table.add_column(column, justify="right")
        for method, row in rows.items():
            ratios = zip(row.get("x", [""] * 3), row.get("x_own", [""] * 3), strict=True)
            times = [(row[metric], *both) for metric, both in zip(RATIOS, ratios, strict=True)]
            shown = [f"{number}" for group in times for number in group]
            table.add_row(method, str(row["requests"]), f"{row['prompt_tokens']:.0f}", *shown)
        console.print(table)
    for target in result["targets"]:
        verdict, bound = "[green]met[/]" if target["met"] else "[red]missed[/]", "least" if target["least"] else "most"
        what = f"{target['cell']}: {target['metric']} of {target['method']} / {target['base']}"
        console.print(f"{what}: {target['reached']:.2f} (at {bound} {target['limit']}) {verdict}")

"""The result as the Markdown table that docs/results.md and the README quote."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.from_a_table.asked import WITHOUT_ADAPTER

SHOWN = (64, 512)  # tokens of a question


def table(result: Mapping[str, Any]) -> str:
    """Of each way: how many answers are right, what it stores and took to learn, and its times to first token.

    In brackets: relative to the untouched model on the same server.
    """
    times = {(row["way"], row["length"]): row["ttft_ms"] for row in result["first_token"]}
    lengths = [length for length in SHOWN if ("untouched", length) in times]
    head = ["", f"tickets right, of {result['questions']}", f"base questions right, of {result['base']}"]
    head += ["MB", "learned in, s", *(f"first token, {length} tokens, s" for length in lengths)]
    rows = []
    for way, found in result["methods"].items():
        reference = WITHOUT_ADAPTER if way.startswith("LoRA") else "untouched"
        cells = [way, str(found["right"]), str(found.get("base_right", "")), f"{found['bytes'] / 1e6:.1f}"]
        cells.append(f"{found['seconds']:.0f}")
        for length in lengths:
            taken = times[way, length]
            ratio = f" ({taken / times[reference, length]:.1f})" if way != "untouched" else ""
            cells.append(f"{taken / 1000:.2f}{ratio}")
        rows.append(cells)
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines).replace("|  |", "| |")

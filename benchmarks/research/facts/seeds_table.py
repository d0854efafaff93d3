"""A table of shares, of several seeds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def seeds_table(rows: Sequence[dict[str, Any]], by: Sequence[str]) -> str:
    """Means over seeds, and the worst seed in brackets; in Markdown."""
    columns = [name for name in rows[0] if name not in (*by, "seed")]
    lines = [f"| {' | '.join((*by, *columns))} |", f"|{'---|' * (len(by) + len(columns))}"]
    for key in dict.fromkeys(tuple(row[name] for name in by) for row in rows):
        own = [row for row in rows if tuple(row[name] for name in by) == key]
        cells = []
        for column in columns:
            values = [row[column] for row in own if row[column] == row[column]]
            worst = min if column in ("known", "found", "right") else max
            cells.append(f"{sum(values) / len(values):.3f} ({worst(values):.3f})" if values else "-")
        lines.append(f"| {' | '.join((*key, *cells))} |")
    return "\n".join(lines)

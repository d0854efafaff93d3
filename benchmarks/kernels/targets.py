"""What was asked for, and what was found."""

from __future__ import annotations

from typing import Any

OF_ROOFLINE = 0.7
# Of the layer loop: phase and rows, entries, and the least speed with memory, of that without.
LAYER_TARGETS = (
    ("decode 1", 256, 0.95),
    ("decode 64", 256, 0.93),
    ("decode 1", 32, 0.98),
    ("decode 64", 32, 0.98),
    ("prefill 2048", 256, 1 / 1.15),
)


def check(result: dict[str, Any]) -> list[dict[str, Any]]:
    """One row for each target whose section has times."""
    rows = [
        _row(f"memory attention, {case['case']}: of its roofline", OF_ROOFLINE, case["of_roofline"])
        for case in result.get("attention", [])
        if "of_roofline" in case
    ]
    for case in result.get("layers", []):
        for step, entries, least in LAYER_TARGETS:
            if "speed" in case and case["case"].startswith(f"{step}, B = {entries},"):
                rows.append(_row(f"all layers, {case['case']}: speed, of that without memory", least, case["speed"]))
    return rows


def _row(name: str, least: float, found: float) -> dict[str, Any]:
    return {"target": name, "at_least": round(least, 3), "found": round(found, 3), "met": found >= least}

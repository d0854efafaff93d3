"""Memory attention alone: each workload against the twin, and against the roofline."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.geometries import Geometry
from benchmarks.kernels.timing import Peaks, microseconds
from benchmarks.kernels.workloads import FORMS, TOLERANCE, Case, Workload, build, deviation

BUDGETS = (4, 32, 256, 512)
DECODES, PREFILLS = (1, 64, 256), (512, 2048, 8192)
MAP_ROWS = 16
ROTATED_BYTES = 1 << 28  # that a graph's calls read before they come back to the first layer; more than a cache holds
MOST_LAYERS = 2048
OF_ROOFLINE = 0.7  # what is asked for


def cases() -> Iterator[Case]:
    """Every size with both forms; and, at one size each, maps and as many memories as requests."""
    for phase, sizes in (("decode", DECODES), ("prefill", PREFILLS)):
        for rows in sizes:
            for entries in BUDGETS:
                yield Case(phase, rows, entries, "merged")
                yield Case(phase, rows, entries, "decoupled")
            yield Case(phase, rows, 32, "decoupled", MAP_ROWS)
    yield Case("decode", 64, 32, "decoupled", page_sets=8)
    yield Case("decode", 64, 256, "merged", page_sets=64)


def small_cases() -> Iterator[Case]:
    """What the interpreter can do in a minute: the same kinds of steps, and one that is split."""
    for form in FORMS:
        yield Case("decode", 1, 4, form)
        yield Case("prefill", 5, 4, form)
    yield Case("decode", 3, 2, "merged", page_sets=2)
    yield Case("prefill", 5, 4, "decoupled", map_rows=3)
    yield Case("decode", 1, 66, "decoupled", map_rows=3)


def measure(
    geometry: Geometry, dtype: torch.dtype, device: str, peaks: Peaks | None, tell: Callable[[str], None]
) -> list[dict[str, Any]]:
    """One row for each case; without `peaks`, small cases and no times."""
    results = []
    for case in cases() if peaks else small_cases():
        workload = build(case, geometry, dtype, device)
        found = workload.self_output.clone()
        workload.add_memory(found)
        error = deviation(found, workload.by_twin())
        result: dict[str, Any] = {
            "case": case.name,
            "phase": case.phase,
            "rows": case.rows,
            "entries": case.entries,
            "deviation": error,
            "right": error < TOLERANCE[dtype],
            "launches": 2 if workload.shape.split else 1,
            "bytes": workload.bytes,
            "operations": workload.operations,
        }
        if peaks:
            layers = max(1, min(MOST_LAYERS, ROTATED_BYTES // workload.bytes))
            taken = _time(build(case, geometry, dtype, device, layers))
            best = peaks.roofline_us(workload.bytes, workload.operations)
            result |= {"us": taken, "roofline_us": best, "of_roofline": best / taken}
            result["of_roofline_or_launch"] = max(best, peaks.launch_us) / taken
            result["met"] = result["of_roofline"] >= OF_ROOFLINE
        results.append(result)
        times = f"  {result['us']:9.1f} us, {result['of_roofline']:.2f} of the roofline" if peaks else ""
        tell(f"{case.name:56} off by {error:.1e}{times}")
    return results


def _time(workload: Workload) -> float:
    """Microseconds of one layer."""
    output = workload.self_output.clone()
    return microseconds([partial(workload.add_memory, output, layer) for layer in range(len(workload.pools))])

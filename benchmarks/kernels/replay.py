"""One CUDA graph over changing plans, tables and bundles, each replay against the twin.

In the interpreter the same calls run without a graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks.geometries import Geometry
from benchmarks.kernels.timing import capture
from benchmarks.kernels.workloads import TOLERANCE, Case, Workload, build, deviation
from inducekv_vllm.attention.kernels.tiles import StepPlan, idle_plan, plan_tiles

ROWS, SMALL_ROWS = 64, 4
ENTRIES, SMALL_ENTRIES = 128, 3
REPLAYS = 6


def measure(
    geometry: Geometry, dtype: torch.dtype, device: str, tell: Callable[[str], None], timed: bool
) -> list[dict[str, Any]]:
    """Captured with an idle plan, as in an engine, then replayed. The first replay is idle and changes nothing."""
    rows, entries = (ROWS, ENTRIES) if timed else (SMALL_ROWS, SMALL_ENTRIES)
    workload = build(Case("decode", rows, entries, "merged", 3, page_sets=4), geometry, dtype, device)
    output, start = workload.self_output, workload.self_output.clone()
    _copy_plan(workload, idle_plan(workload.shape))

    def call() -> None:
        workload.add_memory(output)

    replay = capture([call]).replay if device == "cuda" else call
    results = []
    rng = np.random.default_rng(0)
    for number in range(REPLAYS if timed else 3):
        if number:
            _next_step(workload, rng)
        output.copy_(start)
        replay()
        found = output.clone()
        output.copy_(start)
        expected = workload.by_twin()
        with_memory = workload.step.tile_rows.flatten()
        with_memory = with_memory[with_memory >= 0].long()
        without = torch.ones(rows, dtype=torch.bool, device=device)
        without[with_memory] = False
        error = deviation(found, expected)
        result = {
            "rows_with_memory": len(with_memory),
            "deviation": error,
            "untouched": bool(torch.equal(found[without], start[without])),
        }
        result["right"] = bool(error < TOLERANCE[dtype] and result["untouched"])
        results.append(result)
        tell(f"replay {number}: {len(with_memory):3} of {rows} rows with memory, off by {error:.1e}")
    return results


def _next_step(workload: Workload, rng: np.random.Generator) -> None:
    """Other rows, lengths, terms and forms; and the pool's pages are those of another bundle. No address changes."""
    tables, rows = workload.tables, len(workload.query)
    S, sets = tables.token_index.shape[1], workload.case.page_sets
    set_of_row = np.arange(rows) % min(sets, rows)
    lengths = rng.integers(1, S + 1, sets)[set_of_row]
    device = tables.length.device
    tables.length[1:] = torch.from_numpy(lengths).to(device)
    # Some memories are read as trained ones are.
    first = np.where(rng.random(sets) < 0.5, np.arange(sets) * S, -1)
    tables.first_token[1:] = torch.from_numpy(first[set_of_row]).to(device)
    tables.log_weight[1:] = torch.from_numpy(rng.normal(size=(rows, S))).to(device)
    tables.key_scale[1:] = torch.from_numpy(rng.random((rows, S))).to(device)
    tables.decoupled[1:] = torch.from_numpy(rng.integers(0, 2, rows)).to(device)
    tables.map_length[1:] = workload.case.map_rows * tables.decoupled[1:]  # merged memory has no maps
    for pages in (workload.pools[0].keys, workload.pools[0].values):
        pages.copy_(torch.from_numpy(rng.normal(size=tuple(pages.shape))))
    # Some rows share a slot, and some have no memory.
    slots = (1 + set_of_row + sets * rng.integers(0, rows // sets, rows)) * (rng.random(rows) < 0.7)
    slots[0] = 1
    _copy_plan(workload, plan_tiles(slots, np.concatenate([[0], lengths])[slots], workload.shape))


def _copy_plan(workload: Workload, plan: StepPlan) -> None:
    """In place, as between graph replays."""
    for own, new in zip(workload.step.plan, plan.arrays(), strict=True):
        own.copy_(torch.from_numpy(new))

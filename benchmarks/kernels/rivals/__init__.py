"""Who else does the work of a step with memory, and how fast: self-attention included in all of them.

    kernels        self-attention, then this repository's kernels over one resident copy of the pages
    concatenated   the pages copied in front of each request's keys, step by step, then FlashAttention (copies.py)
    copied         the copies are made once and kept: FlashAttention over longer caches, and bytes for each request

Decoupled memory has a softmax of its own, so its rivals attend a second time, to the pages and a null token, and add
the result; `copied` keeps what that reads.

Copies have no place for a weight of a token, so they do the paper's `sqrt` weighting, and are compared with the
kernels' result for it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.geometries import Geometry
from benchmarks.kernels.timing import microseconds
from benchmarks.kernels.workloads import FORMS, TOLERANCE, Case, deviation

from .copies import concatenated, copied
from .inputs import Inputs, Rival, draw_inputs

CONTEXT, SMALL_CONTEXT = 1024, 16  # tokens in the KV cache of each request that decodes
LAYERS = 8  # whose pages and caches a graph goes through


def cases() -> list[Case]:
    """Decode and prefill, both forms; and as many memories as a server has tasks."""
    found = [Case("decode", rows, entries, "merged") for rows in (1, 64) for entries in (32, 256)]
    found.append(Case("decode", 64, 256, "decoupled"))
    found += [Case("decode", 64, 32, form, page_sets=8) for form in FORMS]
    found += [Case("prefill", 2048, entries, form) for entries in (32, 256) for form in FORMS]
    return found


def small_cases() -> list[Case]:
    found = [Case("decode", 4, 2, form, page_sets=2) for form in FORMS]
    return found + [Case("prefill", 5, 2, form) for form in FORMS]


def measure(
    geometry: Geometry, dtype: torch.dtype, device: str, tell: Callable[[str], None], timed: bool
) -> list[dict[str, Any]]:
    """One row for each rival and case. A rival that fails is reported with its error."""
    results = []
    for case in cases() if timed else small_cases():
        inputs = draw_inputs(case, geometry, dtype, device, LAYERS if timed else 1, CONTEXT if timed else SMALL_CONTEXT)
        for name, prepare in RIVALS.items():
            result: dict[str, Any] = {"case": case.name, "rival": name}
            try:
                result |= measure_rival(prepare(inputs), inputs, dtype, timed)
            except Exception as error:
                result |= {"right": False, "error": f"{type(error).__name__}: {error}"[:500]}
            results.append(result)
            off = "" if result.get("deviation") is None else f"  off by {result['deviation']:.1e}"
            times = f"  {result['us']:9.1f} us" if "us" in result else ""
            tell(f"{case.name:40} {name:14}{off}{times}{'  ' + result['error'] if 'error' in result else ''}")
    return results


def measure_rival(rival: Rival, inputs: Inputs, dtype: torch.dtype, timed: bool) -> dict[str, Any]:
    result: dict[str, Any] = {"bytes_for_each_request": rival.bytes_for_each_request, "right": True}
    if rival.expected is not None:
        error = deviation(rival.run(0), rival.expected(0))
        # Both round, each in its own order.
        result |= {"deviation": error, "right": error < 2 * TOLERANCE[dtype]}
    if timed:
        result["us"] = microseconds([partial(rival.run, layer) for layer in range(len(inputs.caches))])
    return result


def without_memory(inputs: Inputs) -> Rival:
    return Rival(lambda layer: inputs.self_attention(layer)[0])


def kernels(inputs: Inputs) -> Rival:
    return Rival(lambda layer: inputs.by_kernels(inputs.prior, layer))


RIVALS: dict[str, Callable[[Inputs], Rival]] = {
    "no memory": without_memory,
    "kernels": kernels,
    "concatenated": concatenated,
    "copied": copied,
}

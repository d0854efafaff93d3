"""All layers' attention and projections, with and without memory, under one CUDA graph.

A layer is its four matrix products (queries, keys and values; attention's output; both of the MLP) and self-attention
by FlashAttention. Norms, rotations, activations and the vocabulary are left out: they take the same time with
memory and without, so that the ratio of both is rather worse here than in a whole model.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.geometries import Geometry
from benchmarks.kernels.self_attention import attend_rows
from benchmarks.kernels.timing import microseconds
from benchmarks.kernels.workloads import TOLERANCE, Case, Phase, Workload, build, deviation

CONTEXT, SMALL_CONTEXT = 1024, 16  # tokens in the KV cache of each request that decodes
STEPS: tuple[tuple[Phase, int], ...] = (("decode", 1), ("decode", 64), ("prefill", 2048))
MAP_ROWS = 16
WEIGHT_SIZE = 0.3  # of a matrix product's output, so that hidden states keep their size without norms


def cases() -> list[Case]:
    """Those of the targets; with the same sizes in every form."""
    found = []
    for phase, rows in STEPS:
        for entries in (32, 256):
            found += [Case(phase, rows, entries, "merged"), Case(phase, rows, entries, "decoupled")]
        found.append(Case(phase, rows, 32, "decoupled", MAP_ROWS))
    return found


def small_cases() -> list[Case]:
    return [Case("decode", 2, 2, "merged"), Case("prefill", 5, 2, "decoupled", 3)]


@dataclass(frozen=True, eq=False)
class Layer:
    """One layer's weights, and the cached keys and values of its requests."""

    qkv: Tensor  # [d, (H + 2 J) D]
    out: Tensor  # [H D, d]
    up: Tensor  # [d, 2 I]
    down: Tensor  # [I, d]
    keys: Tensor  # [R, CONTEXT, J, D]; empty in a prefill
    values: Tensor


def measure(
    geometry: Geometry, dtype: torch.dtype, device: str, tell: Callable[[str], None], timed: bool
) -> list[dict[str, Any]]:
    """One row for each case: the time of all layers without and with memory, or without `timed` only the deviation."""
    g = geometry if timed else replace(geometry, layers=2, hidden_size=32, intermediate_size=48)
    results = []
    for case in cases() if timed else small_cases():
        workload = build(case, g, dtype, device, g.layers)
        layers = [_layer(g, case, dtype, device, CONTEXT if timed else SMALL_CONTEXT) for _ in range(g.layers)]
        hidden = torch.randn(case.rows, g.hidden_size, device=device).to(dtype)
        found = forward(layers, hidden, workload, _by_kernels)
        error = deviation(found, forward(layers, hidden, workload, _by_twin))
        # A layer rounds what the one before has rounded.
        right = error < TOLERANCE[dtype] * math.sqrt(2 * g.layers)
        result: dict[str, Any] = {"case": case.name, "deviation": error, "right": right}
        if timed:
            plain, injected = (
                microseconds([partial(forward, layers, hidden, workload, how)]) for how in (None, _by_kernels)
            )
            result |= {"plain_us": plain, "memory_us": injected, "speed": plain / injected}
        results.append(result)
        times = f"  {plain:9.1f} us, {result['speed']:.3f} of its speed with memory" if timed else ""
        tell(f"{case.name:56} off by {error:.1e}{times}")
    return results


AddMemory = Callable[[Workload, int, Tensor, Tensor, Tensor], None]  # query, self-attention's output and log-sum-exp


def _by_kernels(workload: Workload, layer: int, query: Tensor, output: Tensor, lse: Tensor) -> None:
    replace(workload, query=query).with_lse(lse).add_memory(output, layer)


def _by_twin(workload: Workload, layer: int, query: Tensor, output: Tensor, lse: Tensor) -> None:
    output.copy_(replace(workload, query=query, self_output=output).with_lse(lse).by_twin(layer))


def forward(layers: list[Layer], hidden: Tensor, workload: Workload, add_memory: AddMemory | None) -> Tensor:
    """Hidden states [R, d] through all layers."""
    g, R = workload.geometry, len(hidden)
    J, D = g.kv_heads, g.head_size
    for number, layer in enumerate(layers):
        qkv = hidden @ layer.qkv
        query, key, value = qkv.view(R, -1, D).split([g.heads, J, J], dim=1)  # [R, H, D], [R, J, D] twice
        is_prompt = workload.case.phase == "prefill"
        keys, values = (key[None], value[None]) if is_prompt else (layer.keys, layer.values)
        output, lse = attend_rows(query, keys, values, causal=is_prompt, scale=g.scale)  # [R, H, D], [R, H]
        if add_memory is not None:
            add_memory(workload, number, query, output, lse)
        hidden = torch.addmm(hidden, output.reshape(R, -1), layer.out)
        hidden = torch.addmm(hidden, (hidden @ layer.up)[:, : layer.down.shape[0]], layer.down)
    return hidden


def _layer(g: Geometry, case: Case, dtype: torch.dtype, device: str, context: int) -> Layer:
    def weight(inputs: int, outputs: int) -> Tensor:
        return (torch.randn(inputs, outputs, device=device) * WEIGHT_SIZE / math.sqrt(inputs)).to(dtype)

    cached = (case.rows if case.phase == "decode" else 0, context, g.kv_heads, g.head_size)
    keys, values = (torch.randn(cached, device=device).to(dtype) for _ in range(2))
    width = g.heads * g.head_size
    return Layer(
        weight(g.hidden_size, width + 2 * g.kv_heads * g.head_size),
        weight(width, g.hidden_size),
        weight(g.hidden_size, 2 * g.intermediate_size),
        weight(g.intermediate_size, g.hidden_size),
        keys,
        values,
    )

"""The tensors that all rivals share, and what each of them gives back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.geometries import Geometry
from benchmarks.kernels.self_attention import attend_rows
from benchmarks.kernels.workloads import Case, Workload, build, with_sqrt_weighting


@dataclass(frozen=True)
class Rival:
    run: Callable[[int], Tensor]  # a layer to its output
    expected: Callable[[int], Tensor] | None = None  # the same output by another way
    bytes_for_each_request: int = 0  # of a layer, beside what is shared


@dataclass(frozen=True, eq=False)
class Inputs:
    """A step of n requests of R rows in all: one row each in decode, one request in prefill."""

    prior: Workload
    sqrt: Workload  # the same with the paper's weighting, which copies can have
    caches: list[tuple[Tensor, Tensor]]  # for each layer, keys and values [n, T, J, D]

    @property
    def case(self) -> Case:
        return self.prior.case

    @property
    def geometry(self) -> Geometry:
        return self.prior.geometry

    @property
    def page_bytes(self) -> int:
        """Of one layer's pages of one memory."""
        g = self.geometry
        return 2 * g.kv_heads * self.case.tokens * g.head_size * self.prior.query.element_size()

    def attend(self, keys: Tensor, values: Tensor, causal: bool = False) -> tuple[Tensor, Tensor]:
        """Output [R, H, D] and log-sum-exp [R, H] of attention over each request's keys and values [n, T, J, D]."""
        return attend_rows(self.prior.query, keys, values, causal=causal, scale=self.geometry.scale)

    @property
    def causal(self) -> bool:
        return self.case.phase == "prefill"

    def self_attention(self, layer: int) -> tuple[Tensor, Tensor]:
        """Self-attention."""
        return self.attend(*self.caches[layer], causal=self.causal)

    def by_kernels(self, workload: Workload, layer: int) -> Tensor:
        output, lse = self.self_attention(layer)
        workload.with_lse(lse).add_memory(output, layer)
        return output


def draw_inputs(case: Case, geometry: Geometry, dtype: torch.dtype, device: str, layers: int, context: int) -> Inputs:
    """Random tensors; `context` is the number of cached tokens of a request that decodes."""
    prior = build(case, geometry, dtype, device, layers)
    alpha = prior.tables.log_weight[1:].exp()
    tokens = context if case.phase == "decode" else case.rows
    shape = (case.slots, tokens, geometry.kv_heads, geometry.head_size)

    def draw() -> Tensor:
        return torch.randn(shape, device=device).to(dtype)

    return Inputs(prior, with_sqrt_weighting(prior, alpha), [(draw(), draw()) for _ in range(layers)])

"""Who else does the work of a step with memory, and how fast: self-attention included in all of them.

    no memory      self-attention alone
    kernels        self-attention, then this repository's kernels over one resident copy of the pages
    concatenated   the pages copied in front of each request's keys, step by step, then FlashAttention
    copied         the copies are made once and kept: FlashAttention over longer caches, and bytes for each request

Decoupled memory has a softmax of its own, so its rivals attend a second time, to the pages and a null token, and add
the result; `copied` keeps what that reads. Copies have no place for a weight of a token or a layer's bias, so they do
the paper's `sqrt` weighting, and are compared with the kernels' result for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from benchmarks.geometries import Geometry
from benchmarks.kernels.timing import microseconds
from benchmarks.kernels.workloads import FORMS, TOLERANCE, Case, Workload, build, deviation, with_sqrt_weighting

Attended = tuple[Tensor, Tensor]  # output [n, R, H, D], log-sum-exp [n, R, H] float32
HALF = (torch.float16, torch.bfloat16)


def attend(query: Tensor, keys: Tensor, values: Tensor, *, causal: bool, scale: float) -> Attended:
    """Attend within each of n requests.

    Args:
        query: [n, R, H, D].
        keys: [n, T, J, D], H a multiple of J.
        values: as the keys.
        causal: row r does not see the last R - 1 - r tokens; what comes before the R own tokens is seen by every row.
    """
    if query.is_cuda and query.dtype in HALF:
        return _by_torch(query, keys, values, causal, scale)
    own, keys, values = (x.transpose(1, 2) for x in (query, keys, values))  # [n, heads, tokens, D]
    keys, values = (x.repeat_interleave(own.shape[1] // keys.shape[1], dim=1) for x in (keys, values))
    R, T = query.shape[1], keys.shape[2]
    mask = torch.full((R, T), -torch.inf, device=query.device).triu(T - R + 1).to(query.dtype) if causal else None
    if not query.is_cuda:
        output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            own, keys, values, 0.0, False, attn_mask=mask, scale=scale
        )
        return output.transpose(1, 2), lse.float().transpose(1, 2)
    logits = own @ keys.mT * scale  # float32 on a GPU, which FlashAttention does not take
    if mask is not None:
        logits = logits + mask
    return (logits.softmax(-1) @ values).transpose(1, 2), logits.logsumexp(-1).transpose(1, 2)


def attend_rows(query: Tensor, keys: Tensor, values: Tensor, *, causal: bool, scale: float) -> Attended:
    """`attend` for the rows of a step: query [R, H, D] of n requests, each with R / n of them.

    Returns:
        Output [R, H, D], log-sum-exp [R, H] float32.
    """
    of_request = query.unflatten(0, (len(keys), -1))  # [n, R / n, H, D]
    output, lse = attend(of_request, keys, values, causal=causal, scale=scale)
    return output.flatten(0, 1), lse.flatten(0, 1)


def _by_torch(query: Tensor, keys: Tensor, values: Tensor, causal: bool, scale: float) -> Attended:
    own, keys, values = (x.transpose(1, 2) for x in (query, keys, values))
    # Its causal mask ends at the last token, as that of `attend`.
    output, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
        own, keys, values, 0.0, causal, False, scale=scale
    )
    return output.transpose(1, 2), lse[..., : query.shape[1]].transpose(1, 2)


CONTEXT, SMALL_CONTEXT = 1024, 16  # tokens in the KV cache of each request that decodes
LAYERS = 8  # whose pages and caches a graph goes through
Pages = tuple[Tensor, Tensor]


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


@dataclass(frozen=True, eq=False)
class Inputs:
    """A step of n requests of R rows in all: one row each in decode, one request in prefill."""

    prior: Workload
    sqrt: Workload  # the same with the paper's weighting and without a bias, which copies can have
    caches: list[Pages]  # for each layer, keys and values [n, T, J, D]
    slots: Tensor  # [n] int64

    @property
    def causal(self) -> bool:
        return self.prior.case.phase == "prefill"

    def attend(self, keys: Tensor, values: Tensor, causal: bool = False) -> tuple[Tensor, Tensor]:
        """Output [R, H, D] and log-sum-exp [R, H] of attention over each request's keys and values [n, T, J, D]."""
        return attend_rows(self.prior.query, keys, values, causal=causal, scale=self.prior.geometry.scale)

    def without_memory(self, layer: int) -> Tensor:
        return self.attend(*self.caches[layer], causal=self.causal)[0]

    def by_kernels(self, workload: Workload, layer: int) -> Tensor:
        output, lse = self.attend(*self.caches[layer], causal=self.causal)
        workload.with_lse(lse).add_memory(output, layer)
        return output

    def gathered(self, layer: int) -> Pages:
        """What a request attends to: its scaled pages with its own keys and values, or with a null token.

        Returns:
            [n, S + T, J, D] twice for merged memory, [n, S + 1, J, D] for decoupled.
        """
        pool, tables = self.sqrt.pools[layer], self.sqrt.tables
        place = tables.token_index[self.slots].long()
        place = place + torch.arange(place.shape[1], device=place.device)  # [n, S]
        scale = tables.key_scale[self.slots, :, None, None]  # [n, S, 1, 1]
        keys, values = (x[:, place].permute(1, 2, 0, 3) * scale.to(x.dtype) for x in (pool.keys, pool.values))
        values = values * pool.value_gate[1].to(values.dtype)
        if self.prior.case.form == "decoupled":  # a token of zeros: its logit is 0, and it adds nothing
            return pad(keys, (0, 0, 0, 0, 0, 1)), pad(values, (0, 0, 0, 0, 0, 1))
        own_keys, own_values = self.caches[layer]
        return torch.cat([keys, own_keys], dim=1), torch.cat([values, own_values], dim=1)

    def over(self, pages: Pages, layer: int) -> Tensor:
        """The output of attention over copied pages."""
        if self.prior.case.form == "decoupled":
            return self.without_memory(layer) + self.attend(*pages)[0]
        return self.attend(*pages, causal=self.causal)[0]


def draw_inputs(case: Case, geometry: Geometry, dtype: torch.dtype, device: str, layers: int, context: int) -> Inputs:
    """Random tensors; `context` is the number of cached tokens of a request that decodes."""
    prior = build(case, geometry, dtype, device, layers)
    sqrt = with_sqrt_weighting(prior, prior.tables.log_weight[1:].exp())
    sqrt = replace(sqrt, pools=[replace(pool, bias=torch.zeros_like(pool.bias)) for pool in sqrt.pools])
    tokens = context if case.phase == "decode" else case.rows
    shape = (case.requests, tokens, geometry.kv_heads, geometry.head_size)

    def draw() -> Tensor:
        return torch.randn(shape, device=device).to(dtype)

    slots = torch.from_numpy(case.slot_of_request).long().to(device)
    return Inputs(prior, sqrt, [(draw(), draw()) for _ in range(layers)], slots)


def copied(inputs: Inputs) -> Callable[[int], Tensor]:
    kept = [inputs.gathered(layer) for layer in range(len(inputs.caches))]
    return lambda layer: inputs.over(kept[layer], layer)


# From the inputs to a function from a layer to its output.
RIVALS: dict[str, Callable[[Inputs], Callable[[int], Tensor]]] = {
    "no memory": lambda inputs: inputs.without_memory,
    "kernels": lambda inputs: lambda layer: inputs.by_kernels(inputs.prior, layer),
    "concatenated": lambda inputs: lambda layer: inputs.over(inputs.gathered(layer), layer),
    "copied": copied,
}
COPIES = ("concatenated", "copied")


def measure(
    geometry: Geometry, dtype: torch.dtype, device: str, tell: Callable[[str], None], timed: bool
) -> list[dict[str, Any]]:
    """One row for each rival and case. A rival that fails is reported with its error."""
    results = []
    for case in cases() if timed else small_cases():
        inputs = draw_inputs(case, geometry, dtype, device, LAYERS if timed else 1, CONTEXT if timed else SMALL_CONTEXT)
        for name, prepare in RIVALS.items():
            result: dict[str, Any] = {"case": case.name, "rival": name, "right": True}
            try:
                run = prepare(inputs)
                if name in COPIES:
                    error = deviation(run(0), inputs.by_kernels(inputs.sqrt, 0))
                    # Both round, each in its own order.
                    result |= {"deviation": error, "right": error < 2 * TOLERANCE[dtype]}
                if timed:
                    result["us"] = microseconds([partial(run, layer) for layer in range(len(inputs.caches))])
            except Exception as error:  # the others are still worth their time on a borrowed machine
                result |= {"right": False, "error": f"{type(error).__name__}: {error}"[:500]}
            results.append(result)
            tell(", ".join(f"{key} {value}" for key, value in result.items()))
    return results

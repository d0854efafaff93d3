"""Who else does the work of a decode step with merged memory, and how fast: self-attention included in all of them.

    kernels        self-attention, then this repository's kernels over one resident copy of the pages
    flex           FlexAttention over [pages ; every request's keys] with a block mask, compiled
    concatenated   each request's pages copied in front of its keys, step by step, then FlashAttention
    copied         the copies are made once and kept: FlashAttention over longer caches, and bytes for each request
    lora           no memory: self-attention, and a LoRA adapter of the same bytes beside the four attention projections

`flex` knows no scale for a value, and `concatenated` and `copied` no weight for a token. So `flex` does `prior`
weighting, the copies the paper's `sqrt`, and each is compared with the kernels' result for the same weighting.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from benchmarks.geometries import Geometry
from benchmarks.kernels.self_attention import attend
from benchmarks.kernels.timing import microseconds
from benchmarks.kernels.workloads import TOLERANCE, Case, Workload, build, deviation, with_sqrt_weighting

CONTEXT, SMALL_CONTEXT = 1024, 16  # tokens in the KV cache of each request
SIZES, SMALL_SIZES = [(1, 32), (1, 256), (64, 32), (64, 256)], [(2, 2)]  # requests, and entries of their memory
LAYERS = 8  # whose pages and caches a graph goes through


@dataclass(frozen=True, eq=False)
class Rivalry:
    """The tensors that all rivals share."""

    prior: Workload
    sqrt: Workload
    caches: list[tuple[Tensor, Tensor]]  # for each layer, keys and values [R, CONTEXT, J, D]

    @property
    def geometry(self) -> Geometry:
        return self.prior.geometry

    def attend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Output [R, H, D] and log-sum-exp [R, H] of attention over keys and values [R, T, J, D]."""
        output, lse = attend(self.prior.query[:, None], keys, values, causal=False, scale=self.geometry.scale)
        return output[:, 0], lse[:, 0]

    def plain(self, layer: int) -> tuple[Tensor, Tensor]:
        """Self-attention."""
        return self.attend(*self.caches[layer])

    def kernels(self, workload: Workload, layer: int) -> Tensor:
        output, lse = self.plain(layer)
        replace(workload, self_lse=lse).add_memory(output, layer)
        return output


def measure(
    geometry: Geometry, dtype: torch.dtype, device: str, tell: Callable[[str], None], timed: bool
) -> list[dict[str, Any]]:
    """One row for each rival and case. A rival that fails is reported with its error."""
    results = []
    for rows, entries in SIZES if timed else SMALL_SIZES:
        case = Case("decode", rows, entries, "merged")
        rivalry = _rivalry(case, geometry, dtype, device, LAYERS if timed else 1, CONTEXT if timed else SMALL_CONTEXT)
        for name, prepare in RIVALS.items():
            result: dict[str, Any] = {"case": case.name, "rival": name}
            try:
                result |= prepare(rivalry).measured(rivalry, dtype, timed)
            except Exception as error:
                result |= {"right": False, "error": f"{type(error).__name__}: {error}"[:500]}
            results.append(result)
            off = "" if result.get("deviation") is None else f"  off by {result['deviation']:.1e}"
            times = f"  {result['us']:9.1f} us" if "us" in result else ""
            tell(f"{case.name:32} {name:14}{off}{times}{'  ' + result['error'] if 'error' in result else ''}")
    return results


@dataclass(frozen=True)
class Rival:
    run: Callable[[int], Tensor]  # a layer to the output [R, H, D]
    like: Callable[[int], Tensor] | None  # the kernels' output for the same work
    bytes_for_each_request: int = 0  # of a layer, beside what is shared

    def measured(self, rivalry: Rivalry, dtype: torch.dtype, timed: bool) -> dict[str, Any]:
        result: dict[str, Any] = {"bytes_for_each_request": self.bytes_for_each_request, "right": True}
        if self.like is not None:
            error = deviation(self.run(0), self.like(0))
            # Both round, each in its own order.
            result |= {"deviation": error, "right": error < 2 * TOLERANCE[dtype]}
        if timed:
            layers = len(rivalry.caches)
            result["us"] = microseconds([partial(self.run, layer) for layer in range(layers)])
        return result


def _rivalry(case: Case, geometry: Geometry, dtype: torch.dtype, device: str, layers: int, context: int) -> Rivalry:
    prior = build(case, geometry, dtype, device, layers)
    alpha = prior.tables.log_weight[1:].exp()
    shape = (case.rows, context, geometry.kv_heads, geometry.head_size)
    caches = [tuple(torch.randn(shape, device=device).to(dtype) for _ in range(2)) for _ in range(layers)]
    return Rivalry(prior, with_sqrt_weighting(prior, alpha), caches)  # type: ignore[arg-type]


def _without_memory(rivalry: Rivalry) -> Rival:
    return Rival(lambda layer: rivalry.plain(layer)[0], like=None)


def _kernels(rivalry: Rivalry) -> Rival:
    return Rival(lambda layer: rivalry.kernels(rivalry.prior, layer), like=None)


def _flex(rivalry: Rivalry) -> Rival:
    """One sequence of R queries over [S pages ; R contexts]; a query sees the pages and its own context."""
    g, workload = rivalry.geometry, rivalry.prior
    R, S = len(workload.query), workload.case.tokens
    context = rivalry.caches[0][0].shape[1]
    device = workload.query.device
    weights = workload.tables.log_weight[1:] + workload.pools[0].bias[1:, None]  # [R, S]

    def seen(batch: Tensor, head: Tensor, row: Tensor, token: Tensor) -> Tensor:
        return (token < S) | ((token - S) // context == row)

    def weigh(score: Tensor, batch: Tensor, head: Tensor, row: Tensor, token: Tensor) -> Tensor:
        return torch.where(token < S, score + weights[row, token.clamp(max=S - 1)], score)

    mask: BlockMask = create_block_mask(seen, None, None, R, S + R * context, device=str(device))
    flex = torch.compile(flex_attention, dynamic=False) if device.type == "cuda" else flex_attention
    joined = []
    for pool, (keys, values) in zip(workload.pools, rivalry.caches, strict=True):
        place = workload.tables.token_index[1].long()
        own = [x.flatten(0, 1).transpose(0, 1) for x in (keys, values)]  # [J, R context, D]
        pages = pool.keys[:, place], (pool.values[:, place].float() * pool.gate[1]).to(keys.dtype)
        joined.append([torch.cat([p, o], dim=1)[None] for p, o in zip(pages, own, strict=True)])

    def run(layer: int) -> Tensor:
        query = workload.query.transpose(0, 1)[None]  # [1, H, R, D]
        output = flex(
            query, *joined[layer], score_mod=weigh, block_mask=mask, scale=g.scale, enable_gqa=g.heads > g.kv_heads
        )
        return output[0].transpose(0, 1)

    return Rival(run, like=lambda layer: rivalry.kernels(workload, layer))


def _copies(rivalry: Rivalry, layer: int) -> tuple[Tensor, Tensor]:
    """Each request's scaled pages [R, S, J, D]. They have no place for a layer's bias."""
    workload, pool = rivalry.sqrt, rivalry.sqrt.pools[layer]
    place = workload.tables.token_index[1].long()
    scale = workload.tables.key_scale[1:, :, None, None]  # [R, S, 1, 1]
    keys, values = (x[:, place].transpose(0, 1) * scale.to(x.dtype) for x in (pool.keys, pool.values))
    return keys, (values * pool.gate[1].to(values.dtype))


def _joined(rivalry: Rivalry, layer: int) -> tuple[Tensor, Tensor]:
    """The copies in front of each request's own keys and values [R, S + CONTEXT, J, D]."""
    copied_keys, copied_values = _copies(rivalry, layer)
    keys, values = rivalry.caches[layer]
    return torch.cat([copied_keys, keys], dim=1), torch.cat([copied_values, values], dim=1)


def _concatenated(rivalry: Rivalry) -> Rival:
    def run(layer: int) -> Tensor:
        return rivalry.attend(*_joined(rivalry, layer))[0]

    return Rival(run, like=lambda layer: _unbiased(rivalry, layer))


def _copied(rivalry: Rivalry) -> Rival:
    kept = [_joined(rivalry, layer) for layer in range(len(rivalry.caches))]

    def run(layer: int) -> Tensor:
        return rivalry.attend(*kept[layer])[0]

    return Rival(run, lambda layer: _unbiased(rivalry, layer), bytes_for_each_request=_page_bytes(rivalry))


def _unbiased(rivalry: Rivalry, layer: int) -> Tensor:
    """What the kernels make of `sqrt` weighting without a layer's bias."""
    pools = [replace(pool, bias=torch.zeros_like(pool.bias)) for pool in rivalry.sqrt.pools]
    return rivalry.kernels(replace(rivalry.sqrt, pools=pools), layer)


def _lora(rivalry: Rivalry) -> Rival:
    """Shrink and expand of the four projections, at the largest rank that takes no more bytes than the pages."""
    g, query = rivalry.geometry, rivalry.prior.query
    width, kv_width = g.heads * g.head_size, g.kv_heads * g.head_size
    sizes = [(g.hidden_size, width), (g.hidden_size, kv_width), (g.hidden_size, kv_width), (width, g.hidden_size)]
    rank = max(1, _page_bytes(rivalry) // (query.element_size() * sum(i + o for i, o in sizes)))

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, device=query.device).to(query.dtype)

    rows = [[(draw(len(query), i), draw(len(query), o)) for i, o in sizes] for _ in rivalry.caches]
    adapters = [[(draw(i, rank), draw(rank, o)) for i, o in sizes] for _ in rivalry.caches]

    def run(layer: int) -> Tensor:
        output, _ = rivalry.plain(layer)
        for (x, y), (shrink, expand) in zip(rows[layer], adapters[layer], strict=True):
            torch.addmm(y, x @ shrink, expand, out=y)
        return output

    return Rival(run, like=None)


def _page_bytes(rivalry: Rivalry) -> int:
    """Of one layer's pages of one memory."""
    g, workload = rivalry.geometry, rivalry.prior
    return 2 * g.kv_heads * workload.case.tokens * g.head_size * workload.query.element_size()


RIVALS: dict[str, Callable[[Rivalry], Rival]] = {
    "no memory": _without_memory,
    "kernels": _kernels,
    "flex": _flex,
    "concatenated": _concatenated,
    "copied": _copied,
    "lora": _lora,
}

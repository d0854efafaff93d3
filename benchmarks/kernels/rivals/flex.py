"""FlexAttention: one sequence of all rows over [pages of every memory ; keys of every request]."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from .work import Rival, Work

Sees = Callable[[Tensor, Tensor], Tensor]  # whether a row sees a token


def flex(work: Work) -> Rival:
    run = _merged(work) if work.case.form == "merged" else _decoupled(work)
    return Rival(run, like=lambda layer: work.by_kernels(work.prior, layer))


def _merged(work: Work) -> Callable[[int], Tensor]:
    R, pages = work.case.rows, work.token_index.numel()
    tokens = work.caches[0][0].shape[1]  # T of a request
    own_page = _sees_page(work)

    def sees(row: Tensor, token: Tensor) -> Tensor:
        own = token - pages
        own_key = own <= row if work.causal else own // tokens == row
        return torch.where(token < pages, own_page(row, token), own_key)

    attention = _compiled(work, sees, R, pages + len(work.caches[0][0]) * tokens)
    joined = []
    for layer, cache in enumerate(work.caches):
        own = (x.flatten(0, 1).transpose(0, 1) for x in cache)  # [J, n T, D]
        joined.append([torch.cat([page, x], dim=1) for page, x in zip(_pages(work, layer), own, strict=True)])
    return lambda layer: attention(*joined[layer])


def _decoupled(work: Work) -> Callable[[int], Tensor]:
    """Self-attention, and a second attention over the pages and a null token: a key and a value of zeros."""
    pages = work.token_index.numel()
    own_page = _sees_page(work)
    attention = _compiled(work, lambda row, token: (token == pages) | own_page(row, token), work.case.rows, pages + 1)
    padded = [
        [torch.nn.functional.pad(x, (0, 0, 0, 1)) for x in _pages(work, layer)] for layer in range(len(work.caches))
    ]
    return lambda layer: work.plain(layer)[0] + attention(*padded[layer])


def _pages(work: Work, layer: int) -> tuple[Tensor, Tensor]:
    """Keys and gated values of all memories, [J, memories S, D]."""
    pool, place = work.prior.pools[layer], work.token_index.flatten()
    return pool.keys[:, place], (pool.values[:, place].float() * pool.gate[1]).to(pool.values.dtype)


def _sees_page(work: Work) -> Sees:
    S, memory, slot = work.case.tokens, work.memory_of_request, _slot_of_row(work)
    return lambda row, token: (token // S == memory[slot[row]]) & (token < work.memories * S)


def _slot_of_row(work: Work) -> Tensor:
    """[R], from 0."""
    return torch.arange(work.case.rows, device=work.prior.query.device) % work.case.slots


def _compiled(work: Work, sees: Sees, rows: int, tokens: int) -> Callable[[Tensor, Tensor], Tensor]:
    """Attention of all rows over keys and values [J, T, D], weighted where a token is a page's; [R, H, D]."""
    g, prior = work.geometry, work.prior
    device, S, pages, slot = prior.query.device, work.case.tokens, work.token_index.numel(), _slot_of_row(work)
    weights = prior.tables.log_weight[1:] + prior.pools[0].bias[1:, None]  # [n, S]

    def seen(batch: Tensor, head: Tensor, row: Tensor, token: Tensor) -> Tensor:
        return sees(row, token)

    def weigh(score: Tensor, batch: Tensor, head: Tensor, row: Tensor, token: Tensor) -> Tensor:
        return torch.where(token < pages, score + weights[slot[row], token % S], score)

    mask = create_block_mask(seen, None, None, rows, tokens, device=str(device))
    function = torch.compile(flex_attention, dynamic=False) if device.type == "cuda" else flex_attention
    query = prior.query.transpose(0, 1)[None]  # [1, H, R, D]

    def run(keys: Tensor, values: Tensor) -> Tensor:
        output = function(
            query,
            keys[None],
            values[None],
            score_mod=weigh,
            block_mask=mask,
            scale=g.scale,
            enable_gqa=g.heads > g.kv_heads,
        )
        return output[0].transpose(0, 1)

    return run

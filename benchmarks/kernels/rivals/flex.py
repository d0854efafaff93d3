"""FlexAttention: one sequence of all rows over [pages of every memory ; keys of every request]."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from .inputs import Inputs, Rival

Sees = Callable[[Tensor, Tensor], Tensor]  # whether a row sees a token


def flex(inputs: Inputs) -> Rival:
    run = _merged(inputs) if inputs.case.form == "merged" else _decoupled(inputs)
    return Rival(run, expected=lambda layer: inputs.by_kernels(inputs.prior, layer))


def _merged(inputs: Inputs) -> Callable[[int], Tensor]:
    R, pages = inputs.case.rows, inputs.token_index.numel()
    tokens = inputs.caches[0][0].shape[1]  # T of a request
    own_page, causal = _sees_page(inputs), inputs.causal

    def sees(row: Tensor, token: Tensor) -> Tensor:
        own = token - pages
        own_key = own <= row if causal else own // tokens == row
        return torch.where(token < pages, own_page(row, token), own_key)

    attention = _compiled(inputs, sees, R, pages + len(inputs.caches[0][0]) * tokens)
    joined = []
    for layer, cache in enumerate(inputs.caches):
        own = (x.flatten(0, 1).transpose(0, 1) for x in cache)  # [J, n T, D]
        joined.append([torch.cat([page, x], dim=1) for page, x in zip(_pages(inputs, layer), own, strict=True)])
    return lambda layer: attention(*joined[layer])


def _decoupled(inputs: Inputs) -> Callable[[int], Tensor]:
    """Self-attention, and a second attention over the pages and a null token: a key and a value of zeros."""
    rows, pages, own_page = inputs.case.rows, inputs.token_index.numel(), _sees_page(inputs)
    attention = _compiled(inputs, lambda row, token: (token == pages) | own_page(row, token), rows, pages + 1)
    padded = [
        [torch.nn.functional.pad(x, (0, 0, 0, 1)) for x in _pages(inputs, layer)] for layer in range(len(inputs.caches))
    ]
    return lambda layer: inputs.self_attention(layer)[0] + attention(*padded[layer])


def _pages(inputs: Inputs, layer: int) -> tuple[Tensor, Tensor]:
    """Keys and gated values of all memories, [J, memories S, D]."""
    pool, place = inputs.prior.pools[layer], inputs.token_index.flatten()
    return pool.keys[:, place], (pool.values[:, place].float() * pool.gate[1]).to(pool.values.dtype)


def _sees_page(inputs: Inputs) -> Sees:
    S, pages, memory = inputs.case.tokens, inputs.token_index.numel(), inputs.memory_of_row
    return lambda row, token: (token // S == memory[row]) & (token < pages)


def _compiled(inputs: Inputs, sees: Sees, rows: int, tokens: int) -> Callable[[Tensor, Tensor], Tensor]:
    """Attention of all rows over keys and values [J, T, D], weighted where a token is a page's; [R, H, D]."""
    g, prior = inputs.geometry, inputs.prior
    device, S, pages, slot = prior.query.device, inputs.case.tokens, inputs.token_index.numel(), prior.step.row_slot
    weights = prior.tables.log_weight + prior.pools[0].bias[:, None]  # [n + 1, S]

    def seen(batch: Tensor, head: Tensor, row: Tensor, token: Tensor) -> Tensor:
        return sees(row, token)

    def weigh(score: Tensor, batch: Tensor, head: Tensor, row: Tensor, token: Tensor) -> Tensor:
        return torch.where(token < pages, score + weights[slot[row], token % S], score)

    mask = create_block_mask(seen, None, None, rows, tokens, device=str(device))
    function = flex_attention
    if device.type == "cuda":
        torch.compiler.reset()  # of one function there are eight compilations; later ones would run without
        function = torch.compile(flex_attention, dynamic=False, fullgraph=True)
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

"""Copies of the pages for each request, made in each step or once. They have no place for a layer's bias."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from .work import Rival, Work

Pages = tuple[Tensor, Tensor]


def concatenated(work: Work) -> Rival:
    return Rival(lambda layer: _attend(work, layer, _gathered(work, layer)), like=_without_bias(work))


def copied(work: Work) -> Rival:
    kept = [_gathered(work, layer) for layer in range(len(work.caches))]
    return Rival(lambda layer: _attend(work, layer, kept[layer]), _without_bias(work), work.page_bytes)


def _gathered(work: Work, layer: int) -> Pages:
    """What a request attends to: its scaled pages with its own keys and values, or with a null token.

    Returns:
        [n, S + T, J, D] twice for merged memory, [n, S + 1, J, D] for decoupled.
    """
    pool, tables = work.sqrt.pools[layer], work.sqrt.tables
    place = tables.token_index[1:].long()  # [n, S]
    scale = tables.key_scale[1:, :, None, None]  # [n, S, 1, 1]
    keys, values = (x[:, place].permute(1, 2, 0, 3) * scale.to(x.dtype) for x in (pool.keys, pool.values))
    values = values * pool.gate[1].to(values.dtype)
    if work.case.form == "decoupled":
        return _with_null(keys), _with_null(values)
    own_keys, own_values = work.caches[layer]
    return torch.cat([keys, own_keys], dim=1), torch.cat([values, own_values], dim=1)


def _with_null(x: Tensor) -> Tensor:
    """A token of zeros behind those of [n, S, J, D]: its logit is 0, and it adds nothing."""
    return pad(x, (0, 0, 0, 0, 0, 1))


def _attend(work: Work, layer: int, pages: Pages) -> Tensor:
    if work.case.form == "decoupled":
        return work.plain(layer)[0] + work.attend(*pages)[0]
    return work.attend(*pages, causal=work.causal)[0]


def _without_bias(work: Work) -> Callable[[int], Tensor]:
    """What the kernels make of `sqrt` weighting without a layer's bias."""
    pools = [replace(pool, bias=torch.zeros_like(pool.bias)) for pool in work.sqrt.pools]
    return lambda layer: work.by_kernels(replace(work.sqrt, pools=pools), layer)

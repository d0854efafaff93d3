"""Copies of the pages for each request, made in each step or once. They have no place for a layer's bias."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from .inputs import Inputs, Rival

Pages = tuple[Tensor, Tensor]


def concatenated(inputs: Inputs) -> Rival:
    return Rival(lambda layer: _attend(inputs, layer, _gathered(inputs, layer)), expected=_without_bias(inputs))


def copied(inputs: Inputs) -> Rival:
    kept = [_gathered(inputs, layer) for layer in range(len(inputs.caches))]
    return Rival(lambda layer: _attend(inputs, layer, kept[layer]), _without_bias(inputs), inputs.page_bytes)


def _gathered(inputs: Inputs, layer: int) -> Pages:
    """What a request attends to: its scaled pages with its own keys and values, or with a null token.

    Returns:
        [n, S + T, J, D] twice for merged memory, [n, S + 1, J, D] for decoupled.
    """
    pool, tables = inputs.sqrt.pools[layer], inputs.sqrt.tables
    place = tables.token_index[1:].long()  # [n, S]
    scale = tables.key_scale[1:, :, None, None]  # [n, S, 1, 1]
    keys, values = (x[:, place].permute(1, 2, 0, 3) * scale.to(x.dtype) for x in (pool.keys, pool.values))
    values = values * pool.gate[1].to(values.dtype)
    if inputs.case.form == "decoupled":
        return _with_null(keys), _with_null(values)
    own_keys, own_values = inputs.caches[layer]
    return torch.cat([keys, own_keys], dim=1), torch.cat([values, own_values], dim=1)


def _with_null(x: Tensor) -> Tensor:
    """A token of zeros behind those of [n, S, J, D]: its logit is 0, and it adds nothing."""
    return pad(x, (0, 0, 0, 0, 0, 1))


def _attend(inputs: Inputs, layer: int, pages: Pages) -> Tensor:
    if inputs.case.form == "decoupled":
        return inputs.self_attention(layer)[0] + inputs.attend(*pages)[0]
    return inputs.attend(*pages, causal=inputs.causal)[0]


def _without_bias(inputs: Inputs) -> Callable[[int], Tensor]:
    """What the kernels make of `sqrt` weighting without a layer's bias."""
    pools = [replace(pool, bias=torch.zeros_like(pool.bias)) for pool in inputs.sqrt.pools]
    return lambda layer: inputs.by_kernels(replace(inputs.sqrt, pools=pools), layer)

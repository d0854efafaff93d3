"""Tiled memory attention for training: requests share the payloads, and nothing is copied per request.

The same function as `injection.attend`, computed in tiles of entries. The backward pass recomputes each tile's logits,
so the memory it needs does not grow with the number of entries.

    with tiled_attention(backbone): ...      every forward pass inside uses it

Shapes: n requests, N entries, m payload tokens, H query heads, J KV heads, G = H / J, D head size, V size of a head's
values, T query tokens, S tokens of the request itself, R = G T rows of a KV head, E entries of a tile.
"""

import contextlib
import math
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from .injection import TensorMemory, Terms, attention_with
from .model import Backbone, attention_named

TILED_ATTENTION_NAME: Final = "inducekv_tiled"
# Logits of one tile: few enough for the CPU cache, enough for efficient matrix products.
TILE_ELEMENTS = 2**19
# Below every logit, and finite, so that differences of running maxima are not NaN.
_FLOOR: Final = -1e30


@contextlib.contextmanager
def tiled_attention(backbone: Backbone) -> Iterator[None]:
    """Within the context, the language model attends to injected memory in tiles. Differentiable once, not twice."""
    with attention_named(backbone, TILED_ATTENTION_NAME):
        yield


def attend_tiled(
    query: Tensor,  # [n, H, T, D]
    key: Tensor,  # [n, J, S, D]
    value: Tensor,  # [n, J, S, D]
    visible: Tensor,  # [n or 1, T, S] bool
    scaling: float,
    memory: TensorMemory,
    terms: Terms,
    layer: int,
) -> Tensor:
    """One softmax over [memory ; remainder ; self], merged by log-sum-exps: [n, T, H, D]."""
    n, H, T, D = query.shape
    J = key.shape[1]
    dtype = torch.promote_types(query.dtype, torch.float32)
    query = (query.to(dtype) * scaling).reshape(n, J, H // J, T, D)
    self_logits = torch.einsum("njgtd,njsd->njgts", query, key.to(dtype))  # [n, J, G, T, S]
    self_logits = self_logits.masked_fill(~visible[:, None, None], -math.inf)

    memory_output, memory_lse = _attend_memory(query.flatten(2, 3), memory, terms, layer)
    bias = memory.layer_bias[layer].to(dtype)
    memory_lse = memory_lse.view(n, J, H // J, T) + bias
    remainder = (terms.log_remainder.to(dtype) + bias)[:, None, None, None].expand_as(memory_lse)
    lse = torch.stack([self_logits.logsumexp(dim=-1), memory_lse, remainder]).logsumexp(dim=0)  # [n, J, G, T]

    output = torch.einsum("njgts,njsd->njgtd", (self_logits - lse[..., None]).exp(), value.to(dtype))
    share = memory.value_gates[layer].to(dtype) * (memory_lse - lse).exp()  # [n, J, G, T]
    output = output + share[..., None] * memory_output.view_as(output)
    return output.reshape(n, H, T, D).transpose(1, 2)


def attend_decoupled_tiled(
    query: Tensor,  # [n, H, T, D]
    scaling: float,
    memory: TensorMemory,
    terms: Terms,
    layer: int,
) -> Tensor:
    """`injection.attend_decoupled` from the output and log-sum-exp over the memory: [n, T, H, V]."""
    n, H, T, D = query.shape
    J = memory.payload_keys.shape[2]
    dtype = torch.promote_types(query.dtype, torch.float32)
    output, lse = _attend_memory((query.to(dtype) * scaling).reshape(n, J, H // J * T, D), memory, terms, layer)
    # softmax([l ; 0]) v = (sum e^l v / sum e^l) (sum e^l / (1 + sum e^l))
    share = memory.value_gates[layer].to(dtype) * torch.sigmoid(lse + memory.layer_bias[layer].to(dtype))
    return (share[..., None] * output).reshape(n, H, T, -1).transpose(1, 2)


def _attend_memory(query: Tensor, memory: TensorMemory, terms: Terms, layer: int) -> tuple[Tensor, Tensor]:
    """`memory_attention` for query [n, J, R, D], already times the softmax scale."""
    scales = (term.to(query.dtype) for term in (terms.key_scale, terms.log_weight, terms.value_scale))
    return memory_attention(query, memory.payload_keys[layer], memory.payload_values[layer], *scales)


def memory_attention(
    query: Tensor,  # [n, J, R, D], already times the softmax scale
    keys: Tensor,  # [N, J, m, D], any float type
    values: Tensor,  # [N, J, m, V], any float type
    key_scale: Tensor,  # [n, N]
    log_weight: Tensor,  # [n, N], -inf leaves an entry out
    value_scale: Tensor,  # [n, N]
) -> tuple[Tensor, Tensor]:
    """Attention over the memory alone: output [n, J, R, V], and log-sum-exp of its logits [n, J, R].

    Rows without entries have output 0 and log-sum-exp -inf.
    """
    result: tuple[Tensor, Tensor] = _MemoryAttention.apply(  # type: ignore[no-untyped-call]
        query, keys, values, key_scale, log_weight, value_scale
    )
    return result


class _MemoryAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        key_scale: Tensor,
        log_weight: Tensor,
        value_scale: Tensor,
    ) -> tuple[Tensor, Tensor]:
        n, J, R, _ = query.shape
        V = values.shape[-1]
        rows = _heads_first(query)  # [J, n R, D]
        largest = query.new_full((J, n, R, 1), _FLOOR)
        total = query.new_zeros(J, n, R, 1)
        output = query.new_zeros(J, n * R, V)
        weighted = _has_log_weights(log_weight)
        for tile in _tiles(keys, query):
            k, v = _payload(keys, tile, query.dtype), _payload(values, tile, query.dtype)
            logits = torch.bmm(rows, k.transpose(1, 2)).view(J, n, R, -1)  # [J, n, R, E m]
            logits.mul_(_per_token(key_scale, tile, keys))
            if weighted:
                logits.add_(_per_token(log_weight, tile, keys))
            rise = torch.maximum(largest, logits.amax(dim=-1, keepdim=True))
            shrink = (largest - rise).exp_()  # [J, n, R, 1]: rescales the sums so far
            largest = rise
            share = logits.sub_(largest).exp_()
            total.mul_(shrink).add_(share.sum(dim=-1, keepdim=True))
            share.mul_(_per_token(value_scale, tile, keys))
            output.view(J, n, R, V).mul_(shrink)
            output.baddbmm_(share.view(J, n * R, -1), v)
        output.view(J, n, R, V).div_(total.masked_fill(total == 0, 1))
        lse = (total.log() + largest).masked_fill(total == 0, -math.inf)  # [J, n, R, 1]
        output, lse = output.view(J, n, R, V).transpose(0, 1), lse.squeeze(-1).transpose(0, 1)
        ctx.save_for_backward(query, keys, values, key_scale, log_weight, value_scale, output, lse)
        return output, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, output_gradient: Tensor, lse_gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, keys, values, key_scale, log_weight, value_scale, output, lse = ctx.saved_tensors
        for_query, for_keys, for_values, for_key_scale, for_log_weight, for_value_scale = ctx.needs_input_grad
        n, J, R, D = query.shape
        rows, upstream = _heads_first(query), _heads_first(output_gradient)  # [J, n R, D] and [J, n R, V]
        # The softmax's common term: the derivative by a shift of all logits of a row.
        common = ((output_gradient * output).sum(dim=-1) - lse_gradient).transpose(0, 1)[..., None]  # [J, n, R, 1]
        lse = lse.masked_fill(lse == -math.inf, 0).transpose(0, 1)[..., None]  # [J, n, R, 1]
        d_query = torch.zeros_like(rows) if for_query else None
        d_keys = torch.zeros_like(keys) if for_keys else None
        d_values = torch.zeros_like(values) if for_values else None
        d_key_scale, d_log_weight, d_value_scale = (
            torch.zeros_like(key_scale) if needed else None
            for needed in (for_key_scale, for_log_weight, for_value_scale)
        )
        for_logits = for_query or for_keys or for_key_scale or for_log_weight
        weighted = _has_log_weights(log_weight)
        for tile in _tiles(keys, query):
            k, v = _payload(keys, tile, query.dtype), _payload(values, tile, query.dtype)
            product = torch.bmm(rows, k.transpose(1, 2)).view(J, n, R, -1)  # [J, n, R, E m]: before any scale
            share = product * _per_token(key_scale, tile, keys)
            if weighted:
                share.add_(_per_token(log_weight, tile, keys))
            share.sub_(lse).exp_()  # [J, n, R, E m]: the softmax over the memory
            per_token_value = _per_token(value_scale, tile, keys)
            if d_values is not None:
                scaled = (share * per_token_value).view(J, n * R, -1)
                d_values[tile] = _unpayload(torch.bmm(scaled.transpose(1, 2), upstream), keys).to(values.dtype)
            slope = torch.bmm(upstream, v.transpose(1, 2)).view(J, n, R, -1).mul_(share)  # [J, n, R, E m]
            if d_value_scale is not None:
                d_value_scale[:, tile] = _sum_of_entry(slope, keys)
            if not for_logits:
                continue
            slope.mul_(per_token_value).sub_(share.mul_(common))  # d loss / d logit
            if d_log_weight is not None:
                d_log_weight[:, tile] = _sum_of_entry(slope, keys)
            if d_key_scale is not None:
                d_key_scale[:, tile] = _sum_of_entry(product.mul_(slope), keys)
            if d_query is None and d_keys is None:
                continue
            slope.mul_(_per_token(key_scale, tile, keys))
            if d_query is not None:
                d_query.baddbmm_(slope.view(J, n * R, -1), k)
            if d_keys is not None:
                scaled = slope.view(J, n * R, -1)
                d_keys[tile] = _unpayload(torch.bmm(scaled.transpose(1, 2), rows), keys).to(keys.dtype)
        if d_query is not None:
            d_query = d_query.view(J, n, R, D).transpose(0, 1)
        return d_query, d_keys, d_values, d_key_scale, d_log_weight, d_value_scale


def _heads_first(tensor: Tensor) -> Tensor:
    """[n, J, R, D] -> [J, n R, D]: one matrix product of a KV head serves all requests."""
    return tensor.transpose(0, 1).flatten(1, 2)


def _tiles(keys: Tensor, query: Tensor) -> Iterator[slice]:
    """Consecutive entries, so many that a tile has about TILE_ELEMENTS logits."""
    N, J, m, _ = keys.shape
    n, _, R, _ = query.shape
    size = max(1, TILE_ELEMENTS // (n * J * R * m))
    for start in range(0, N, size):
        yield slice(start, min(start + size, N))


def _payload(payload: Tensor, tile: slice, dtype: torch.dtype) -> Tensor:
    """A tile of [N, J, m, size] as [J, E m, size]."""
    return payload[tile].to(dtype).transpose(0, 1).flatten(1, 2)


def _unpayload(tensor: Tensor, keys: Tensor) -> Tensor:
    """[J, E m, size] back to [E, J, m, size]."""
    _, J, m, _ = keys.shape
    return tensor.view(J, -1, m, tensor.shape[-1]).transpose(0, 1)


def _per_token(term: Tensor, tile: slice, keys: Tensor) -> Tensor:
    """[n, N] -> [n, 1, E m]: numbers, repeated for each payload token of a tile's entries."""
    return term[:, tile].repeat_interleave(keys.shape[2], dim=1)[:, None]


def _sum_of_entry(tensor: Tensor, keys: Tensor) -> Tensor:
    """[J, n, R, E m] -> [n, E]."""
    n, m = tensor.shape[1], keys.shape[2]
    # One axis after the other: torch sums two axes at once some twenty times slower.
    summed: Tensor = tensor.sum(dim=2).sum(dim=0).view(n, -1, m).sum(dim=-1)
    return summed


def _has_log_weights(log_weight: Tensor) -> bool:
    return bool((log_weight != 0).any())


AttentionInterface.register(TILED_ATTENTION_NAME, attention_with(attend_tiled, attend_decoupled_tiled))
AttentionMaskInterface.register(TILED_ATTENTION_NAME, sdpa_mask)

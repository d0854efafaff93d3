"""Memory attention on the CPU, and the log-sum-exp of self-attention, which the CPU kernel does not return.

Prefill uses PyTorch's fused CPU attention, which returns a log-sum-exp. The G query heads of a KV head are folded into
the row axis, so K is not repeated. Decode is one matrix product over all rows of a batch. Softmax sums are float32.
"""

import torch
from torch import Tensor

from ..cpu_ops import fused_attention
from ..resident_bundle import LayerMemory
from ..slots import RequestMemory
from .step import DecodeBatch, PrefillSpan

Attended = tuple[Tensor, Tensor]  # output [R, H, D], log-sum-exp [R, H] float32


def short_prompt_attention(
    query: Tensor, key: Tensor, value: Tensor, stored: LayerMemory, span: PrefillSpan, scale: float
) -> Tensor:
    """Attend from a prompt without earlier tokens, [R, H, D], to [memory ; own key and value [R, J, D]]: [R, H, D].

    One attention in place of two and a merge: for a few rows, each operation takes no longer than its call.
    """
    assert span.whole_mask is not None
    keys, values = _tokens_of(stored, span.memory)  # [J, S, D]
    if stored.value_gate != 1:
        values = values * stored.value_gate
    behind = (key.new_zeros(key.shape[1], 1, key.shape[2]),) if span.memory.has_remainder else ()
    keys, values = (
        torch.cat([of_memory, *behind, own.transpose(0, 1)], dim=1) for of_memory, own in ((keys, key), (values, value))
    )  # [J, S + R, D], with a remainder one more
    mask = span.whole_mask
    if stored.bias:
        mask = torch.cat([mask[:, : -len(key)] + stored.bias, mask[:, -len(key) :]], dim=1)
    output, _ = fused_attention(*_by_head(query, keys, values), mask[None, None], scale)  # [J, G, R, D]
    return output.permute(2, 0, 1, 3).reshape(query.shape)


def prefill_memory_attention(query: Tensor, stored: LayerMemory, memory: RequestMemory, scale: float) -> Attended:
    """Attend from all rows of one request, query [R, H, D], to its tokens."""
    keys, values = _tokens_of(stored, memory)
    mask = None if memory.log_weight is None else memory.log_weight[None, None, None]  # [1, 1, 1, S]
    return _attend_folded(query, keys, values, mask, scale)


def decode_memory_attention(query: Tensor, stored: LayerMemory, batch: DecodeBatch, scale: float) -> Attended:
    """Attend from one row of each of n requests, query [n, H, D], to its memory tokens."""
    shared = isinstance(batch.tokens, slice) or batch.tokens.ndim == 1  # all requests read the same tokens
    if shared and batch.key_scale is None:
        mask = None if batch.log_weight is None else batch.log_weight[None, None]  # [1, 1, n G, S]
        keys, values = stored.keys[:, batch.tokens], stored.values[:, batch.tokens]  # [J, S, D]
        return _attend_folded(query, keys, values, mask, scale, rows_first=True)

    n, H, D = query.shape
    J = stored.keys.shape[0]
    G = H // J
    keys, values = stored.keys[:, batch.tokens].float(), stored.values[:, batch.tokens].float()
    if shared:  # one matrix product over keys and values [J, S, D] for all requests
        logits = query.float().view(n, J, G, D).transpose(0, 1).reshape(J, n * G, D) @ keys.transpose(1, 2)
        logits = logits.view(J, n, G, -1).transpose(0, 1)  # [n, J, G, S]
    else:
        keys, values = keys.transpose(0, 1), values.transpose(0, 1)  # [n, J, S, D]
        logits = query.float().view(n, J, G, D) @ keys.transpose(2, 3)  # [n, J, G, S]

    logits = logits * (scale if batch.key_scale is None else (batch.key_scale * scale)[:, None, None])
    if batch.log_weight is not None:
        logits = logits + batch.log_weight.view(n, 1, G, -1)
    lse = logits.logsumexp(-1)  # [n, J, G]
    weights = (logits - lse[..., None]).exp_()  # [n, J, G, S]
    if batch.value_scale is not None:
        weights *= batch.value_scale[:, None, None]
    if shared:
        output = weights.transpose(0, 1).reshape(J, n * G, -1) @ values  # [J, n G, D]
        output = output.view(J, n, G, D).transpose(0, 1)
    else:
        output = weights @ values  # [n, J, G, D]
    return output.reshape(n, H, D), lse.reshape(n, H)


def prefill_self_lse(query: Tensor, key: Tensor, kv_cache: Tensor, span: PrefillSpan, scale: float) -> Tensor:
    """Compute the log-sum-exp [R, H] float32 of one request's causal self-attention.

    Args:
        query: [R, H, D], the span's rows, rotated.
        key: [R, J, D], the span's own keys, rotated; these are all keys if there is no earlier token.
        kv_cache: [blocks, J, C, 2 D], as packed by the CPU backend.
    """
    R, H, D = query.shape
    J = key.shape[1]
    if span.blocks is None:
        keys = key.transpose(0, 1)  # [J, R, D]
        mask = None
    else:
        assert span.causal_mask is not None
        seen = packed_keys(kv_cache)[span.blocks]  # [K, J, D, C]
        keys = seen.permute(1, 0, 3, 2).contiguous().view(J, -1, D)[:, : span.causal_mask.shape[1]]  # [J, T, D]
        mask = span.causal_mask[None, None]
    _, lse = fused_attention(*_by_head(query, keys, keys), mask, scale, is_causal=mask is None)
    return lse.permute(2, 0, 1).reshape(R, H)


def decode_self_lse(query: Tensor, kv_cache: Tensor, batch: DecodeBatch, scale: float) -> Tensor:
    """Compute the log-sum-exp [n, H] float32 of each request's self-attention; query [n, H, D], rotated."""
    n, H, D = query.shape
    J = kv_cache.shape[1]
    # To index by a matrix, or to copy all of blocks that are nearly empty, would take several times as long.
    seen = packed_keys(kv_cache)[..., : batch.self_mask.shape[-1]]
    keys = seen.index_select(0, batch.blocks.view(-1)).view(*batch.blocks.shape, *seen.shape[1:]).float()
    logits = query.float().view(n, 1, J, H // J, D) @ keys  # [n, K, J, G, C]
    return torch.add(batch.self_mask, logits, alpha=scale).logsumexp((1, 4)).view(n, H)


def packed_keys(kv_cache: Tensor) -> Tensor:
    """View the keys in a cache [blocks, J, C, 2 D], which the CPU kernel packs block by block, as [blocks, J, D, C]."""
    blocks, J, C, two_d = kv_cache.shape
    return kv_cache.as_strided((blocks, J, two_d // 2, C), (kv_cache.stride(0), kv_cache.stride(1), C, 1))


def _tokens_of(stored: LayerMemory, memory: RequestMemory) -> tuple[Tensor, Tensor]:
    """The keys and values of a request's memory, scaled as its entries are: [J, S, D] each."""
    keys, values = stored.keys[:, memory.tokens], stored.values[:, memory.tokens]
    if memory.key_scale is not None:
        keys = keys * memory.key_scale[:, None].to(keys.dtype)
    if memory.value_scale is not None:
        values = values * memory.value_scale[:, None].to(values.dtype)
    return keys, values


def _by_head(query: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[J, G, R, D], and [J, G, S, D] twice, without a copy: query [R, H, D], keys and values [J, S, D]."""
    (R, H, D), J = query.shape, len(keys)
    rows = query.view(R, J, H // J, D).permute(1, 2, 0, 3)
    return rows, keys[:, None].expand(-1, H // J, -1, -1), values[:, None].expand(-1, H // J, -1, -1)


def _attend_folded(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float, rows_first: bool = False
) -> Attended:
    """Attend from query [R, H, D] to keys and values [J, S, D], with the G heads of a KV head folded into rows.

    Folded rows are in (head, row) order, or (row, head) with `rows_first`; the mask is [1, 1, 1 or G R, S].
    """
    R, H, D = query.shape
    J = keys.shape[0]
    G = H // J
    to_folded, back = ((1, 0, 2, 3), (1, 0, 2, 3)) if rows_first else ((1, 2, 0, 3), (2, 0, 1, 3))
    shape = (J, R, G) if rows_first else (J, G, R)
    rows = query.view(R, J, G, D).permute(to_folded).reshape(1, J, G * R, D)
    output, lse = fused_attention(rows, keys[None], values[None], mask, scale)
    return (
        output.view(*shape, D).permute(back).reshape(R, H, D),
        lse.reshape(shape).permute(back[:3]).reshape(R, H),
    )

"""Which rows of a scheduler step attend to which pages.

Computed once per step by the metadata builder and used by every layer. Rows that prefill are attended request by
request; rows that decode are batched by the shape of their memory, so that no layer loops over requests.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .pages import RequestMemory, ResidentBundle


@dataclass(frozen=True, eq=False)
class PrefillSpan:
    """The rows of one request that computes several tokens in this step."""

    memory: RequestMemory
    rows: slice  # R rows of the step's query tensor
    blocks: Tensor | None  # [ceil(T / C)] KV-cache blocks of all T tokens so far; None where there is no earlier token
    causal_mask: Tensor | None  # [R, T] float32, 0 or -inf; None where there is no earlier token


@dataclass(frozen=True, eq=False)
class DecodeBatch:
    """One row each of n requests that read equally many tokens of the same bundle."""

    bundle: ResidentBundle
    rows: slice | Tensor  # [n] rows of the step's query tensor
    token_index: Tensor | None  # [n, S]
    key_scale: Tensor | None  # [n, S]
    log_weight: Tensor | None  # [n G, S], every request's row for each of the G query heads of a KV head
    value_scale: Tensor | None  # [n, S]
    log_remainder: Tensor | None  # [n]
    blocks: Tensor  # [n, K] KV-cache blocks of each request, of the longest one K
    self_mask: Tensor  # [n, K, 1, 1, C] float32, 0 up to each request's own length, -inf beyond


@dataclass(frozen=True, eq=False)
class StepMemory:
    """Every row of the step that has memory, exactly once."""

    prefills: tuple[PrefillSpan, ...]
    decodes: tuple[DecodeBatch, ...]


def plan_step(
    memories: Sequence[RequestMemory | None],
    query_starts: Sequence[int],
    seq_lens: Sequence[int],
    block_table: Tensor,
    block_size: int,
    heads_per_kv_head: int,
) -> StepMemory | None:
    """Sort the step's rows by what they need.

    Args:
        memories: [n], each request's memory, or None.
        query_starts: [n + 1], the first row of each request.
        seq_lens: [n], tokens of each request when this step is done.
        block_table: [n, at least ceil(max(seq_lens) / C)] KV-cache blocks.
        block_size: C.
        heads_per_kv_head: G.

    Returns:
        None when no row has memory.
    """
    prefills: list[PrefillSpan] = []
    decoding: dict[tuple[int, int | None], list[int]] = {}  # (bundle, S if pages are picked) -> requests
    for request, memory in enumerate(memories):
        num_rows = query_starts[request + 1] - query_starts[request]
        if memory is None or num_rows == 0:
            continue
        if num_rows == 1:
            picked = None if memory.token_index is None else memory.num_tokens
            decoding.setdefault((id(memory.bundle), picked), []).append(request)
        else:
            rows = slice(query_starts[request], query_starts[request + 1])
            prefills.append(_prefill_span(memory, rows, seq_lens[request], block_table[request], block_size))
    if not prefills and not decoding:
        return None
    decodes = [
        _decode_batch(requests, memories, query_starts, seq_lens, block_table, block_size, heads_per_kv_head)
        for requests in decoding.values()
    ]
    return StepMemory(tuple(prefills), tuple(decodes))


def _prefill_span(memory: RequestMemory, rows: slice, seq_len: int, block_row: Tensor, block_size: int) -> PrefillSpan:
    num_rows = rows.stop - rows.start
    context = seq_len - num_rows
    if context == 0:
        return PrefillSpan(memory, rows, blocks=None, causal_mask=None)
    position = torch.arange(context, seq_len, device=block_row.device)  # [R]
    visible = torch.arange(seq_len, device=block_row.device) <= position[:, None]  # [R, T]
    mask = torch.zeros(num_rows, seq_len, device=block_row.device).masked_fill_(~visible, -math.inf)
    return PrefillSpan(memory, rows, blocks=block_row[: -(-seq_len // block_size)].long(), causal_mask=mask)


def _decode_batch(
    requests: list[int],
    memories: Sequence[RequestMemory | None],
    query_starts: Sequence[int],
    seq_lens: Sequence[int],
    block_table: Tensor,
    block_size: int,
    heads_per_kv_head: int,
) -> DecodeBatch:
    batch = [memory for r in requests if (memory := memories[r]) is not None]
    rows = [query_starts[r] for r in requests]
    lengths = torch.tensor([seq_lens[r] for r in requests], device=block_table.device)  # [n]
    num_blocks = -(-max(seq_lens[r] for r in requests) // block_size)
    position = torch.arange(num_blocks * block_size, device=block_table.device)  # [K C]
    beyond = (position >= lengths[:, None]).view(len(rows), num_blocks, block_size)  # [n, K, C]
    self_mask = torch.zeros(beyond.shape, device=beyond.device).masked_fill_(beyond, -math.inf)
    log_weight = _stack([m.log_weight for m in batch], batch, neutral=0.0)
    remainders = [m.log_remainder for m in batch]
    return DecodeBatch(
        bundle=batch[0].bundle,
        rows=slice(rows[0], rows[0] + len(rows)) if rows[-1] - rows[0] + 1 == len(rows) else torch.tensor(rows),
        token_index=_stack([m.token_index for m in batch], batch),
        key_scale=_stack([m.key_scale for m in batch], batch, neutral=1.0),
        log_weight=None if log_weight is None else log_weight.repeat_interleave(heads_per_kv_head, dim=0),
        value_scale=_stack([m.value_scale for m in batch], batch, neutral=1.0),
        log_remainder=torch.tensor(remainders) if any(m.has_remainder for m in batch) else None,
        blocks=block_table[requests, :num_blocks].long(),
        self_mask=self_mask[:, :, None, None],
    )


def _stack(
    per_request: list[Tensor | None], batch: list[RequestMemory], neutral: float = 0.0
) -> Tensor | None:  # n of [S] -> [n, S]
    if all(tensor is None for tensor in per_request):
        return None
    fill = torch.full((batch[0].num_tokens,), neutral)
    return torch.stack([fill if tensor is None else tensor for tensor in per_request])

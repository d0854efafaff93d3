"""The rows of a scheduler step and the memory they attend to.

The metadata builder computes this once per step, and every layer uses it. Prefill rows are handled request by request.
Decode rows are batched by the shape of their memory, so that no layer loops over requests.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from ..resident_bundle import ResidentBundle
from ..slots import ActingRows, RequestMemory

SHORT: Final = 256  # rows of a prompt that attends to memory and itself at once: of more, that would skip no tokens


@dataclass(frozen=True, eq=False)
class ScheduledStep:
    """One scheduler step with n requests. Merged memory acts on all of a request's rows."""

    acting: Sequence[ActingRows]  # of the requests with merged memory, at least one
    seq_lens: Sequence[int]  # [n], tokens of each request after this step
    block_table: Tensor  # [n, at least ceil(max(seq_lens) / C)] KV-cache blocks
    block_size: int  # C
    heads_per_kv_head: int  # G


@dataclass(frozen=True, eq=False)
class PrefillSpan:
    """The rows of one request that computes several tokens in this step; T tokens so far."""

    memory: RequestMemory
    rows: slice  # R rows of the step's query tensor
    blocks: Tensor | None  # [ceil(T / C)] KV-cache blocks; None if there is no earlier token
    causal_mask: Tensor | None  # [R, T] float32, 0 or -inf; None if there is no earlier token
    # [R, S + R] float32 of memory and own tokens, with the remainder's column between; None if there is an earlier
    # token, or R is more than `SHORT`
    whole_mask: Tensor | None


@dataclass(frozen=True, eq=False)
class DecodeBatch:
    """One row each of n requests that read the same tokens of a bundle, or the same number of tokens."""

    bundle: ResidentBundle
    rows: slice | Tensor  # [n] rows of the step's query tensor
    tokens: slice | Tensor  # [S] places in the bundle for all requests, or [n, S] for each of them
    key_scale: Tensor | None  # [n, S]
    log_weight: Tensor | None  # [n G, S], each request's row repeated for the G query heads of a KV head
    value_scale: Tensor | None  # [n, S]
    log_remainder: Tensor | None  # [n]
    blocks: Tensor  # [n, K] KV-cache blocks of each request; K blocks for the longest
    # [n, K, 1, 1, C] float32, 0 up to each request's own length, -inf beyond; C is the longest one's if K is 1
    self_mask: Tensor


@dataclass(frozen=True, eq=False)
class StepMemory:
    """Every row of the step that has memory, each exactly once."""

    prefills: tuple[PrefillSpan, ...]
    decodes: tuple[DecodeBatch, ...]

    def only_span(self, num_rows: int) -> PrefillSpan | None:
        """A short prompt that is all of a step with so many rows."""
        if len(self.prefills) != 1 or self.prefills[0].whole_mask is None:
            return None
        return self.prefills[0] if self.prefills[0].rows == slice(0, num_rows) else None


def plan_step(step: ScheduledStep) -> StepMemory:
    """Group the step's rows with memory."""
    prefills: list[PrefillSpan] = []
    # (bundle, S, where adjacent entries begin) -> requests
    decoding: dict[tuple[int, int, int | None], list[ActingRows]] = {}
    for acting in step.acting:
        memory = acting.memory
        if acting.end - acting.first == 1:
            key = id(memory.bundle), memory.num_tokens, memory.first_entry
            decoding.setdefault(key, []).append(acting)
        else:
            prefills.append(_prefill_span(step, acting))
    return StepMemory(tuple(prefills), tuple(_decode_batch(step, decodes) for decodes in decoding.values()))


def _prefill_span(step: ScheduledStep, acting: ActingRows) -> PrefillSpan:
    rows, num_rows = slice(acting.first, acting.end), acting.end - acting.first
    seq_len, device = step.seq_lens[acting.request], step.block_table.device
    if num_rows == seq_len:
        whole_mask = _whole_mask(acting.memory, num_rows) if num_rows <= SHORT else None
        return PrefillSpan(acting.memory, rows, blocks=None, causal_mask=None, whole_mask=whole_mask)
    position = torch.arange(seq_len - num_rows, seq_len, device=device)  # [R]
    visible = torch.arange(seq_len, device=device) <= position[:, None]  # [R, T]
    mask = torch.zeros(num_rows, seq_len, device=device).masked_fill_(~visible, -math.inf)
    blocks = step.block_table[acting.request, : -(-seq_len // step.block_size)].long()
    return PrefillSpan(acting.memory, rows, blocks=blocks, causal_mask=mask, whole_mask=None)


def _whole_mask(memory: RequestMemory, num_rows: int) -> Tensor:
    """See `PrefillSpan`."""
    weights = torch.zeros(memory.num_tokens) if memory.log_weight is None else memory.log_weight
    if memory.has_remainder:
        weights = torch.cat([weights, torch.tensor([memory.log_remainder])])
    return torch.cat(
        [weights.expand(num_rows, -1), torch.full((num_rows, num_rows), -math.inf).triu(diagonal=1)], dim=1
    )


def _decode_batch(step: ScheduledStep, decodes: list[ActingRows]) -> DecodeBatch:
    batch = [each.memory for each in decodes]
    rows, requests = [each.first for each in decodes], [each.request for each in decodes]
    device = step.block_table.device
    lengths = torch.tensor([step.seq_lens[r] for r in requests], device=device)  # [n]
    longest = max(step.seq_lens[r] for r in requests)
    num_blocks, block_size = -(-longest // step.block_size), min(longest, step.block_size)
    position = torch.arange(num_blocks * block_size, device=device)  # [K C]
    beyond = (position >= lengths[:, None]).view(len(rows), num_blocks, 1, 1, block_size)
    log_weight = _stack([m.log_weight for m in batch], batch, neutral=0.0)
    remainders = [m.log_remainder for m in batch]
    return DecodeBatch(
        bundle=batch[0].bundle,
        rows=slice(rows[0], rows[0] + len(rows)) if rows[-1] - rows[0] + 1 == len(rows) else torch.tensor(rows),
        tokens=_tokens_of(batch),
        key_scale=_stack([m.key_scale for m in batch], batch, neutral=1.0),
        log_weight=None if log_weight is None else log_weight.repeat_interleave(step.heads_per_kv_head, dim=0),
        value_scale=_stack([m.value_scale for m in batch], batch, neutral=1.0),
        log_remainder=torch.tensor(remainders) if any(m.has_remainder for m in batch) else None,
        blocks=step.block_table[requests, :num_blocks].long(),
        self_mask=torch.zeros(beyond.shape, device=device).masked_fill_(beyond, -math.inf),
    )


def _tokens_of(batch: list[RequestMemory]) -> slice | Tensor:
    """[S] for memories that read the same tokens, [n, S] for others."""
    if batch[0].first_entry is not None:
        return batch[0].tokens
    tokens = (memory.tokens for memory in batch)
    return torch.stack([torch.arange(t.start, t.stop) if isinstance(t, slice) else t for t in tokens])


def _stack(per_request: list[Tensor | None], batch: list[RequestMemory], neutral: float) -> Tensor | None:
    """n rows [S], or None for a neutral one, as [n, S]; None if all are neutral."""
    if all(tensor is None for tensor in per_request):
        return None
    fill = torch.full((batch[0].num_tokens,), neutral)
    return torch.stack([fill if tensor is None else tensor for tensor in per_request])

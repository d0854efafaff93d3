"""Sums of final hidden states by KV-cache block, kept beside the cache: a key pass need not compute a cached prefix.

A block's sum is of the tokens whose K and V it holds. It is filled with the block, by whatever request, and starts anew
when the block's first token is written; so it is valid whenever the block is. That needs full attention, which drops
no block of a prefix.

Shapes: R rows of a step, C tokens of a block, d hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class BlockSums:
    """2 d float32 numbers for each block."""

    def __init__(self, num_blocks: int, block_size: int, hidden_size: int, device: torch.device) -> None:
        self.block_size = block_size  # C
        # Over all tokens of a block, over its text tokens. The last row belongs to no block.
        self._sums = torch.zeros(num_blocks + 1, 2, hidden_size, device=device)

    def begins_block(self, num_computed: Sequence[int], num_scheduled: Sequence[int]) -> bool:
        """Whether a step writes the first token of a block.

        Args:
            num_computed: of each request, its tokens before the step.
            num_scheduled: of each request, its rows in the step.
        """
        C = self.block_size
        return any(-computed % C < rows for computed, rows in zip(num_computed, num_scheduled, strict=True))

    def add(self, hidden: Tensor, is_text: Tensor, slots: Tensor, begins_block: bool = True) -> None:
        """Add the rows of a step.

        Args:
            hidden: [R, d], any float type.
            is_text: [R] bool, False for tokens that stand for media.
            slots: [R] int64, a row's place in the KV cache: block times C plus offset.
            begins_block: False if no row is the first of its block, as in most steps.
        """
        blocks = slots // self.block_size  # [R]
        if begins_block:
            begun = torch.where(slots % self.block_size == 0, blocks, len(self._sums) - 1)  # [R]
            self._sums.index_fill_(0, begun, 0)
        rows = hidden.float()
        self._sums.flatten(1).index_add_(0, blocks, torch.cat([rows, rows * is_text[:, None]], dim=1))

    def of(self, blocks: Tensor) -> Tensor:
        """The sum over these blocks, int64 numbers on the device: [2, d]."""
        return self._sums.index_select(0, blocks).sum(dim=0)

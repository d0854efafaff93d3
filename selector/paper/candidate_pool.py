"""The pool U of the selection: the previous memory's entries and the current task's.

Shapes: N candidates, K of them taken, L layers, J KV heads, m payload tokens, D head size, d hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from inducekv_vllm.bundle import Bundle, EntryRecord

from ..backbone.extraction import Extraction
from ..data.examples import Example, entry_records


@dataclass(frozen=True)
class CandidatePool:
    """The pool U (paper, Algorithm 1): the previous memory's entries, then the current task's.

    Previous entries come first, so that they win ties.
    """

    keys: Tensor  # [N, d] float32, unit norm
    payload_keys: Tensor  # [L, N, J, m, D] float16: what a bundle stores is what is optimised over
    payload_values: Tensor  # [L, N, J, m, D] float16
    records: tuple[EntryRecord, ...]  # [N]
    num_previous: int

    @classmethod
    def join(cls, previous: Bundle | None, current: Extraction, examples: Sequence[Example]) -> CandidatePool:
        """`current` holds the entries of `examples` in float16."""
        records = entry_records(examples)
        # A bundle rounds its keys; round the pool's the same way.
        keys = current.keys.half().float()
        num_previous = 0
        if previous is not None:
            keys = torch.cat([previous.retrieval_keys.float(), keys])
            records, num_previous = previous.metadata.entries + records, previous.num_entries
        payload_keys, payload_values = current.payload_keys, current.payload_values
        if previous is not None:
            payload_keys = torch.cat([previous.payload_keys, payload_keys], dim=1)
            payload_values = torch.cat([previous.payload_values, payload_values], dim=1)
        return cls(keys, payload_keys, payload_values, records, num_previous)

    def __len__(self) -> int:
        return len(self.records)

    def take(self, rows: Tensor) -> CandidatePool:
        """The candidates `rows` [K] int64, in increasing order, with copies of their payloads."""
        return CandidatePool(
            self.keys[rows],
            self.payload_keys[:, rows],
            self.payload_values[:, rows],
            tuple(self.records[row] for row in rows.tolist()),
            int((rows < self.num_previous).sum()),
        )

"""Stored examples, found by their query keys: those nearest to a question's.

Shapes: n questions, N stored examples, d hidden size, k neighbours.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import safetensors
import safetensors.torch
import torch
from torch import Tensor

from benchmarks.continual.methods.rehearsal import number_that_fit
from inducekv_vllm.errors import ConfigError
from inducekv_vllm.footprint import FLOAT16_BYTES
from selector.data.examples import Example
from selector.runtime.files import replace_file


@dataclass(frozen=True)
class Neighbours:
    """Query keys r(x) of N examples, as the memory stores its own; and the number of neighbours to use."""

    keys: Tensor  # [N, d] float16
    k: int
    answers: tuple[str, ...] = ()  # [N], if the examples themselves are not stored

    @classmethod
    def none(cls, hidden_size: int, k: int) -> Neighbours:
        """Nothing stored yet."""
        return cls(torch.zeros(0, hidden_size, dtype=torch.float16), k)

    def __len__(self) -> int:
        return len(self.keys)

    def nearest(self, queries: Tensor) -> Tensor:
        """Rows of the nearest, nearest first and of equal ones the first stored: [n, min(k, N)] int64.

        Args:
            queries: [n, d] float32, unit norm.
        """
        scores = queries.float() @ self.keys.float().T  # [n, N]
        return scores.argsort(dim=1, descending=True, stable=True)[:, : self.k]

    def after(self, keys: Tensor, answers: Sequence[str] = ()) -> Neighbours:
        """With more examples after these; `keys` [n, d] of any float type."""
        return Neighbours(torch.cat([self.keys, keys.half()]), self.k, (*self.answers, *answers))

    @property
    def stored_bytes(self) -> int:
        """Of the keys, and of the answers in UTF-8."""
        return self.keys.nbytes + sum(len(answer.encode()) for answer in self.answers)

    def write(self, path: Path) -> None:
        # In one piece: safetensors writes several metadata entries in any order.
        metadata = {"neighbours": json.dumps({"k": self.k, "answers": self.answers})}
        replace_file(path, safetensors.torch.save({"keys": self.keys.contiguous()}, metadata=metadata))

    @classmethod
    def read(cls, path: Path) -> Neighbours:
        with safetensors.safe_open(str(path), framework="pt") as file:
            metadata = json.loads(file.metadata()["neighbours"])
            return cls(file.get_tensor("keys"), metadata["k"], tuple(metadata["answers"]))


def key_bytes(hidden_size: int) -> int:
    """Of one stored query key."""
    return FLOAT16_BYTES * hidden_size


def drawn(examples: Sequence[Example], sizes: Sequence[int], allowed: int, seed: tuple[int, ...]) -> list[Example]:
    """Examples drawn at random without repetition, as many as fit into `allowed` bytes, in their own order.

    Raises ConfigError: not even one does.
    """
    order = np.random.default_rng(seed).permutation(len(examples)).tolist()
    count = number_that_fit((sizes[row] for row in order), allowed)
    if not count:
        raise ConfigError(
            f"an example of the task {examples[0].task!r} takes {sizes[order[0]]} bytes where it is stored, "
            f"the budget allows {allowed} for each task"
        )
    return [examples[row] for row in sorted(order[:count])]

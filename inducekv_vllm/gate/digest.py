"""What tells the evidence of one gate from that of another."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from .evidence import TurnMarks


def token_digest(layers: Sequence[int], marks: TurnMarks, tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of all that turns a prompt into evidence: what a gate looks at, but not its rule.

    Gates of one digest find the same evidence in a prompt of one model.

    Args:
        tensors: those that it looks with, by name, on the CPU and as they are stored.
    """
    sha = hashlib.sha256(json.dumps([list(layers), list(marks.begin), marks.end]).encode())
    for name, tensor in sorted(tensors.items()):
        sha.update(f"\n{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        sha.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()

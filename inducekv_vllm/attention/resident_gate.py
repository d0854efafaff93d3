"""The part of a bundle's relevance gate that a worker applies to tokens, on its device.

Shapes: S layers, K tasks that the gate's classifiers know, P prototypes of a layer, J KV heads, V size of their values,
F = J V.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..bundle import Gate
from ..gate import MeanScores, TokenScores, TurnMarks
from ..vllm_seams.device import Device


@dataclass(frozen=True, eq=False)
class ResidentGate:
    """The features of this rank's KV heads alone; the sums over features are added up over the ranks."""

    layers: tuple[int, ...]  # [S]
    marks: TurnMarks
    scores: TokenScores  # float32
    means: MeanScores | None = None  # float32

    @classmethod
    def load(cls, gate: Gate, heads: slice, value_size: int, is_counted: bool, device: Device) -> ResidentGate:
        """Copy a gate to the device, beside the running steps. Any thread may call it.

        Args:
            heads: the KV heads of this rank.
            is_counted: False if another rank has the same heads, and adds theirs to the sums.
        """
        features = slice(heads.start * value_size, heads.stop * value_size)

        def copied(stored: Tensor) -> Tensor:
            return device.upload(stored).to(torch.float32, copy=True)

        with torch.inference_mode(), device.beside_steps():
            center, scale = copied(gate.center[:, features]), copied(gate.scale[:, features])
            prototypes = copied(gate.prototypes[:, :, features])
            if not is_counted:  # every token is 0 then, and so are the sums
                scale.zero_()
            means = None
            if (stored := gate.mean_scores) is not None:
                directions, offsets = copied(stored.directions[:, :, features]), copied(stored.offsets)
                means = MeanScores(center, scale, directions, offsets, stored.clause_ends)
            return cls(gate.layers, gate.marks, TokenScores(center, scale, prototypes, copied(gate.floors)), means)

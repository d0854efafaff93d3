"""Adapters of their own for each task, frozen afterwards and summed: O-LoRA, and RegLoRA of SEFE.

The sum of adapters is one adapter whose rank is the sum of theirs, so a stream has a single one: each task trains its
own rows of A and columns of B, an equal share of the rank, and the others stay as they are to the bit. It takes the
bytes of the other adapters, and is served as they are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor, nn

from benchmarks.fit import Penalty
from benchmarks.research.continual.methods.lora import AdapterTraining, Lora
from inducekv_vllm.errors import ConfigError
from selector.runtime.files import replace_file

LARGE = "large.safetensors"
Pair = tuple[nn.Parameter, nn.Parameter]  # of a layer: A [rank, in], B [out, rank]


@dataclass(frozen=True)
class SlicedLora(Lora):
    """Each task's own slice of one adapter, with nothing that ties the slices."""

    def penalty(self, training: AdapterTraining) -> Penalty | None:
        """Keeps all but the task's own slice as it is. Raises ConfigError: a task's share has no rank."""
        own = slice_of(training)
        for a, b in pairs(training.parameters):
            rows = torch.zeros(len(a), dtype=torch.bool)
            rows[own] = True
            a.register_hook(lambda gradient, rows=rows: gradient * rows[:, None])
            b.register_hook(lambda gradient, rows=rows: gradient * rows)
        return self.tie(training, own)

    def tie(self, training: AdapterTraining, own: slice) -> Penalty | None:
        return None


@dataclass(frozen=True)
class OLora(SlicedLora):
    """O-LoRA (Wang et al., 2023): the new A is held orthogonal to the earlier ones.

    loss + strength sum over layers and earlier tasks of |A_new A_old^T|; strength 0.5 is that of the published order 1.
    """

    name: str = "o_lora"
    strength: float = 0.5  # lambda 1; lambda 2 is 0, as published

    def tie(self, training: AdapterTraining, own: slice) -> Penalty | None:
        if own.start == 0:
            return None
        of_layers = list(pairs(training.parameters))
        earlier = [a[: own.start].detach().clone() for a, _ in of_layers]

        def overlap(batch: Sequence[Any], predicted: Sequence[Tensor]) -> Tensor:
            products = [(a[own] @ old.T).abs().sum() for (a, _), old in zip(of_layers, earlier, strict=True)]
            return self.strength * torch.stack(products).sum()

        return overlap


@dataclass(frozen=True)
class RegLora(SlicedLora):
    """RegLoRA of SEFE (Chen et al., 2025): where earlier tasks changed the weights most, later ones are held to 0.

    loss + strength mean over matrices of the mean |(B A)_ij| over the places ij of the `share` largest |B A| of each
    earlier task. SEFE's rewriting of training rows into other forms of answer is not part of it.
    """

    name: str = "reg_lora"
    strength: float = 2500.0
    share: float = 0.02

    def tie(self, training: AdapterTraining, own: slice) -> Penalty | None:
        if training.previous is None:
            return None
        of_layers, places = list(pairs(training.parameters)), read_places(training)

        def change(batch: Sequence[Any], predicted: Sequence[Tensor]) -> Tensor:
            found = zip(of_layers, places, strict=True)
            held = [(b[:, own] @ a[own]).flatten()[at].abs().mean() for (a, b), at in found]
            return self.strength * torch.stack(held).mean()

        return change

    def keep(self, training: AdapterTraining) -> dict[str, Any]:
        """The places of all tasks so far; only training needs them."""
        own, of_layers = slice_of(training), list(pairs(training.parameters))
        earlier: Sequence[Tensor | None] = [None] * len(of_layers)
        if training.previous is not None:
            earlier = read_places(training)
        kept = []
        for (a, b), old in zip(of_layers, earlier, strict=True):
            size = (b[:, own] @ a[own]).detach().abs().flatten()
            largest = size.topk(math.ceil(self.share * len(size))).indices.int()
            kept.append(largest if old is None else torch.unique(torch.cat([old, largest])))
        tensors = {f"{number:04d}": places for number, places in enumerate(kept)}
        replace_file(training.out / LARGE, safetensors.torch.save(tensors))
        return {"training_state_bytes": sum(places.nbytes for places in kept)}


def slice_of(training: AdapterTraining) -> slice:
    """The task's share of the rank. Raises ConfigError: a share has no rank."""
    rank, tasks = len(next(pairs(training.parameters))[0]), training.context.num_tasks
    if rank < tasks:
        raise ConfigError(f"an adapter of rank {rank} has no rank for each of {tasks} tasks: give a larger budget")
    edges = np.linspace(0, rank, tasks + 1).astype(int)
    return slice(int(edges[training.context.number]), int(edges[training.context.number + 1]))


def pairs(parameters: Sequence[nn.Parameter]) -> Iterator[Pair]:
    """A and B of each adapted layer, as peft orders them."""
    return zip(parameters[::2], parameters[1::2], strict=True)


def read_places(training: AdapterTraining) -> list[Tensor]:
    """Of each layer, in the order of the parameters: places in the flattened [out, in], int32."""
    assert training.previous is not None
    tensors = safetensors.torch.load_file(training.previous / LARGE)
    return [tensors[name].long() for name in sorted(tensors)]

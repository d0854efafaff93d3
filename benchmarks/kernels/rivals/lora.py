"""LoRA adapters of at most the bytes of a memory's pages, one a memory: shrink and expand of the attention projections.

Queries, keys and values share their input, so their shrinks are one product, as in vLLM. Rows lie in the order of their
adapters and each adapter has equally many, so that every product is one batched product. Both favour this rival: in
vLLM an index finds the adapter of each row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .inputs import Inputs, Rival

ALIGNMENT = 16  # bytes that a row of rank r is a multiple of, so that products are fast


@dataclass(frozen=True, eq=False)
class Projections:
    """Projections of one input in one layer, and A adapters of rank r."""

    inputs: Tensor  # [A, R / A, d]
    outputs: Tensor  # [A, R / A, sum of o]
    shrink: Tensor  # [A, d, number of projections * r]
    expand: list[Tensor]  # [A, r, o] of each projection

    def adapt(self) -> None:
        """Add to the outputs, in place, what the adapters give."""
        shrunk = torch.bmm(self.inputs, self.shrink).chunk(len(self.expand), dim=2)  # [A, R / A, r] each
        columns = self.outputs.split([matrix.shape[2] for matrix in self.expand], dim=2)
        for x, matrix, output in zip(shrunk, self.expand, columns, strict=True):
            output.baddbmm_(x, matrix)

    def adapted(self) -> Tensor:
        """What `adapt` is to leave in the outputs: each projection's adapter as one matrix, in float32."""
        shrink = self.shrink.float().chunk(len(self.expand), dim=2)
        matrices = [a @ b.float() for a, b in zip(shrink, self.expand, strict=True)]  # [A, d, o] each
        return self.outputs + self.inputs.float() @ torch.cat(matrices, dim=2)


@dataclass(frozen=True, eq=False)
class Layer:
    outputs: Tensor  # [A, R / A, sum of o] of all projections
    projections: list[Projections]  # of queries, keys and values; of attention's output


def lora(inputs: Inputs) -> Rival:
    layers = [_draw(inputs) for _ in inputs.caches]
    expected = torch.cat([part.adapted() for part in layers[0].projections], dim=2)  # before `run` adds to the outputs

    def run(layer: int) -> Tensor:
        inputs.self_attention(layer)
        for part in layers[layer].projections:
            part.adapt()
        return layers[layer].outputs

    rank = layers[0].projections[0].expand[0].shape[1]
    return Rival(run, expected=lambda layer: expected, more={"rank": rank})


def _draw(inputs: Inputs) -> Layer:
    g, query, adapters = inputs.geometry, inputs.prior.query, inputs.memories
    width, kv_width = g.heads * g.head_size, g.kv_heads * g.head_size
    sizes = [(g.hidden_size, [width, kv_width, kv_width]), (width, [g.hidden_size])]
    bytes_of_a_rank = query.element_size() * sum(i + o for i, widths in sizes for o in widths)
    multiple = ALIGNMENT // query.element_size()
    rank = max(multiple, inputs.page_bytes // bytes_of_a_rank // multiple * multiple)

    def draw(*shape: int) -> Tensor:
        return torch.randn(adapters, *shape, device=query.device).to(query.dtype)

    outputs = draw(len(query) // adapters, sum(o for _, widths in sizes for o in widths))
    parts = zip(sizes, outputs.split([sum(widths) for _, widths in sizes], dim=2), strict=True)
    return Layer(
        outputs,
        [
            Projections(
                inputs=draw(len(query) // adapters, i),
                outputs=own,
                shrink=draw(i, len(widths) * rank) / math.sqrt(i),
                expand=[draw(rank, o) / math.sqrt(rank) for o in widths],
            )
            for (i, widths), own in parts
        ],
    )

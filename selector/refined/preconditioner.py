"""Coordinates in which a step moves what reaches the residual stream alike in all directions.

What memory adds to a layer's attention goes through the output projection W, which stretches some directions many
times more than others. A step that is even before W overshoots along the first, and hardly moves the others: trained
so, memory falls behind LoRA of W itself, which takes its steps behind W. Values and the outer halves of maps therefore
are T C, where training moves C and

    T = (W^T W / w + RIDGE I)^(-1/2),    w: the mean eigenvalue of W^T W

so that a projection that stretches all directions alike has T = I, but for the ridge. It is the inverse square root of
ZCA whitening [Bell & Sejnowski, 1997], of the columns of W in place of data. What starts at 0 starts at C = 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self

import torch
from torch import Tensor, nn

from ..backbone.loading import output_projection
from ..backbone.model import Backbone

RIDGE: Final = 0.05  # of the mean eigenvalue: what W hardly writes is moved some four times as far, at most


@dataclass(frozen=True)
class Preconditioner:
    """T of each layer and KV head, symmetric, float32."""

    values: Tensor  # [L, J, V, V]: of one head's values, which all G heads of the group write
    maps: Tensor  # [L, J, G V, G V]: of a group's outputs together

    @classmethod
    def of(cls, backbone: Backbone, layers: Sequence[int] | None = None) -> Self | None:
        """Of these layers [L]; None for all.

        Returns:
            None: the output projections have names of their own, or read something else than a row of heads (MLA).
        """
        attentions = backbone.attention_layers()
        projections = [output_projection(attentions[layer]) for layer in layers or range(len(attentions))]
        J, H, V = backbone.num_kv_heads, backbone.num_heads, backbone.value_dim
        weights = [each.weight for each in projections if isinstance(each, nn.Linear) and each.in_features == H * V]
        if len(weights) < len(projections):
            return None
        values, maps = [], []
        for weight in weights:
            heads = weight.detach().float().view(-1, J, H // J, V).movedim(0, 2)  # [J, G, d, V]
            group = heads.movedim(1, 2).flatten(-2)  # [J, d, G V]
            maps.append(whitening(group.mT @ group).cpu())  # where entries are trained
            values.append(whitening((heads.mT @ heads).sum(dim=1)).cpu())
        return cls(torch.stack(values), torch.stack(maps))

    def values_of(self, coordinates: Tensor) -> Tensor:
        """payload_values from C [L, K, J, m, V]: [L, K, J, m, V]."""
        return torch.einsum("lkjmv,ljvw->lkjmw", coordinates, self.values)

    def map_out_of(self, coordinates: Tensor) -> Tensor:
        """map_out from C [L, K, J, G V, r]: [L, K, J, G V, r]."""
        return torch.einsum("ljcd,lkjdr->lkjcr", self.maps, coordinates)


def whitening(gram: Tensor) -> Tensor:
    """(G / mean eigenvalue + RIDGE I)^(-1/2) of symmetric matrices [..., n, n] that are not negative."""
    eigenvalues, vectors = torch.linalg.eigh(gram)
    mean = eigenvalues.mean(dim=-1, keepdim=True).clamp(min=torch.finfo(gram.dtype).tiny)  # 0, if G is
    scaled = eigenvalues.clamp(min=0) / mean  # [..., n]
    whitened: Tensor = (vectors * (scaled + RIDGE).rsqrt()[..., None, :]) @ vectors.mT
    return whitened

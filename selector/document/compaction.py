"""A text's keys and values, compacted layer by layer, each for queries that have seen the compacted ones before it.

One forward pass over the references: in each layer their queries say which of the text's keys to keep and with which
values, and then attend to these.

Shapes: n references of T tokens, L layers, J KV heads, G query heads of each, D and V sizes of a key and a value,
N tokens of the text, m that are kept, R = tokens of all references times G.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from ..backbone.injection import TensorMemory, Terms, attention_with, injected
from ..backbone.model import Backbone, attention_named
from ..backbone.tiled_attention import attend_decoupled_tiled, attend_tiled
from .matching import Kept, Queries, kept

COMPACTING: Final = "inducekv_compacting"
QUERIES: Final = 4096  # R, about: of more, each token keeps those of some heads


@dataclass(frozen=True)
class Compacted:
    """What is left of a text."""

    keys: Tensor  # [L, J, m, D]
    values: Tensor  # [L, J, m, V]
    lost: Tensor  # [L, J], see `matching.Kept`

    def memory(self, hidden_size: int) -> TensorMemory:
        return memory_of(self.keys, self.values, hidden_size)


def memory_of(keys: Tensor, values: Tensor, hidden_size: int) -> TensorMemory:
    """Merged memory of one entry, whose tokens count like a request's: keys [L, J, m, D], values [L, J, m, V]."""
    L, d = len(keys), hidden_size
    return TensorMemory(
        retrieval_keys=torch.full((1, d), d**-0.5),  # there is nothing to choose from
        payload_keys=keys[:, None],
        payload_values=values[:, None],
        temperature=torch.tensor(1.0),
        value_gates=torch.ones(L),
        layer_bias=torch.zeros(L),
        weighting="uniform",
        form="merged",
    )


@torch.no_grad()
def compacted(backbone: Backbone, text: TensorMemory, references: Sequence[Tensor], m: int) -> Compacted:
    """The m keys and values of each layer and KV head that act most like those of the text.

    Args:
        text: one entry of merged memory, with all its N tokens.
        references: each [T] int64.
    """
    ids = pad_sequence(list(references), batch_first=True).to(backbone.device)  # [n, T]
    lengths = torch.tensor([len(each) for each in references], device=backbone.device)
    real = torch.arange(ids.shape[1], device=backbone.device) < lengths[:, None]  # [n, T]
    compacting = _Compacting(real, m)
    AttentionInterface.register(COMPACTING, attention_with(compacting.attend, attend_decoupled_tiled))
    AttentionMaskInterface.register(COMPACTING, sdpa_mask)
    terms = text.terms(text.retrieval_keys.expand(len(ids), -1))
    with attention_named(backbone, COMPACTING), injected(text, terms):
        backbone.model.base_model(input_ids=ids, attention_mask=real.long(), use_cache=False)
    found = compacting.found()
    return Compacted(found.keys.cpu(), found.values.cpu(), found.lost)


class _Compacting:
    """What the references' attention does in each layer."""

    def __init__(self, real: Tensor, m: int) -> None:
        """`real`: [n, T] bool, which tokens are no padding."""
        self._real, self._m = real, m
        self._kept: list[list[Kept]] = []  # of each layer, of each KV head

    def attend(
        self,
        query: Tensor,  # [n, H, T, D]
        key: Tensor,  # [n, J, S, D]
        value: Tensor,  # [n, J, S, V]
        visible: Tensor,  # [n or 1, T, S] bool
        scaling: float,
        text: TensorMemory,
        terms: Terms,
        layer: int,
    ) -> Tensor:
        """Compact this layer's keys and values, and attend to what is left: [n, T, H, V]."""
        seen = self._queries(query, key, value, visible, scaling)
        pairs = zip(seen, text.payload_keys[layer, 0], text.payload_values[layer, 0], strict=True)
        self._kept.append([kept(queries, keys, values, self._m) for queries, keys, values in pairs])
        left = self.found(slice(-1, None)).memory(text.retrieval_keys.shape[1])
        return attend_tiled(query, key, value, visible, scaling, left, terms, 0)

    def found(self, layers: slice = slice(None)) -> Compacted:
        of_layers = self._kept[layers]
        keys, values = (
            torch.stack([torch.stack([getattr(head, name) for head in heads]) for heads in of_layers])
            for name in ("keys", "values")
        )
        return Compacted(keys, values, torch.tensor([[head.lost for head in heads] for heads in of_layers]))

    def _queries(self, query: Tensor, key: Tensor, value: Tensor, visible: Tensor, scaling: float) -> Iterator[Queries]:
        """Of each KV head, and what they see of their own requests."""
        n, H, T, D = query.shape
        J = key.shape[1]
        one_in = max(1, round(int(self._real.sum()) * H // J / QUERIES))
        heads, tokens = torch.arange(H // J), torch.arange(T)
        g, t = ((heads[:, None] + tokens) % one_in == 0).nonzero(as_tuple=True)  # [r] and [r]
        real, visible = self._real[:, t], visible[:, t].expand(n, -1, -1)
        grouped = (query.float() * scaling).view(n, J, H // J, T, D)[:, :, g, t]  # [n, J, r, D]
        for of_head, own_keys, own_values in zip(grouped.unbind(1), key.unbind(1), value.unbind(1), strict=True):
            logits = (of_head @ own_keys.float().mT).masked_fill(~visible, -torch.inf)  # [n, r, S]
            mass = logits.logsumexp(dim=-1)  # [n, r]
            output = (logits - mass[..., None]).exp() @ own_values.float()  # [n, r, V]
            yield Queries(of_head[real], mass[real], output[real])

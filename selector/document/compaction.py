"""A text's keys and values, compacted layer by layer, each for queries that have seen the compacted ones before it.

One forward pass over the references of all blocks of the text: in each layer a block's references say by their queries
which of its keys and values to keep, and then attend to these.

Shapes: n references of T tokens, L layers, J KV heads, G query heads of each, D and V sizes of a key and a value,
N tokens of a block, m that are kept of all, R = tokens of a block's references times G.
"""

from __future__ import annotations

from collections.abc import Sequence
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
QUERIES: Final = 4096  # R of all blocks, about: of more, each token keeps those of some heads
LEAST_QUERIES: Final = 1024  # R of a block
MOVES: Final = 160  # of kept keys and values, in each layer, at most
WORK: Final = 2**25  # logits of those moves, in each layer, about
LONG: Final = 1024  # tokens of a text, whose reading takes the time of half of that work; of a longer one more


@dataclass(frozen=True)
class Part:
    """A block of a text that is compacted by itself."""

    memory: TensorMemory  # merged, one entry with all its N tokens
    references: list[Tensor]  # each [T] int64
    kept: int  # tokens that are to be left


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
def compacted(backbone: Backbone, parts: Sequence[Part]) -> Compacted:
    """The keys and values of each layer and KV head that act most like those of the parts, behind one another."""
    references = [each for part in parts for each in part.references]
    ids = pad_sequence(references, batch_first=True).to(backbone.device)  # [n, T]
    lengths = torch.tensor([len(each) for each in references], device=backbone.device)
    real = torch.arange(ids.shape[1], device=backbone.device) < lengths[:, None]  # [n, T]
    compacting = _Compacting(parts, real)
    AttentionInterface.register(COMPACTING, attention_with(compacting.attend, attend_decoupled_tiled))
    AttentionMaskInterface.register(COMPACTING, sdpa_mask)
    any_memory = parts[0].memory
    with attention_named(backbone, COMPACTING), injected(any_memory, _terms(any_memory, len(ids))):
        backbone.model.base_model(input_ids=ids, attention_mask=real.long(), use_cache=False)
    keys, values, lost = (torch.stack(of_layers).cpu() for of_layers in zip(*compacting.found, strict=True))
    return Compacted(keys, values, lost)


class _Compacting:
    """What the references' attention does in each layer."""

    def __init__(self, parts: Sequence[Part], real: Tensor) -> None:
        """`real`: [n, T] bool, which tokens are no padding."""
        self._parts, self._real = parts, real
        self.found: list[tuple[Tensor, Tensor, Tensor]] = []  # of each layer: as of `Kept`, of all parts

    def attend(
        self,
        query: Tensor,  # [n, H, T, D]
        key: Tensor,  # [n, J, S, D]
        value: Tensor,  # [n, J, S, V]
        visible: Tensor,  # [n or 1, T, S] bool
        scaling: float,
        any_memory: TensorMemory,
        terms: Terms,
        layer: int,
    ) -> Tensor:
        """Compact this layer's keys and values, and attend to what is left: [n, T, H, V]."""
        visible = visible.expand(len(query), -1, -1)
        of_parts = torch.tensor([len(part.references) for part in self._parts]).cumsum(0)[:-1].tolist()
        most = max(LEAST_QUERIES, QUERIES // len(self._parts))
        split = (each.tensor_split(of_parts) for each in (query, key, value, visible, self._real))
        own = list(zip(*split, strict=True))  # of each part
        asked = [_queries(q, k, v, seen, real, scaling, most) for q, k, v, seen, real in own]
        logits = sum(each.own_mass.numel() * part.kept for each, part in zip(asked, self._parts, strict=True))
        tokens = sum(part.memory.payload_keys.shape[3] for part in self._parts)
        moves = min(MOVES, WORK * LONG // (logits * (LONG + tokens)) + 1)
        outputs, found = list[Tensor](), list[Kept]()
        for part, queries, (q, k, v, seen, _) in zip(self._parts, asked, own, strict=True):
            keys, values = (
                each[layer, 0].to(query.device) for each in (part.memory.payload_keys, part.memory.payload_values)
            )
            with torch.autocast(query.device.type, enabled=False):
                found.append(kept(queries, keys, values, part.kept, moves))
            left = memory_of(found[-1].keys[None], found[-1].values[None], any_memory.retrieval_keys.shape[1])
            outputs.append(attend_tiled(q, k, v, seen, scaling, left, _terms(left, len(q)), 0))
        keys, values = (torch.cat([getattr(each, name) for each in found], dim=1) for name in ("keys", "values"))
        self.found.append((keys, values, torch.stack([each.lost for each in found]).mean(dim=0)))
        return torch.cat(outputs)


def _queries(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor, real: Tensor, scaling: float, most: int
) -> Queries:
    """Of the KV heads, about so many of each, and what they see of their own requests."""
    n, H, T, D = query.shape
    J = key.shape[1]
    one_in = max(1, round(int(real.sum()) * H // J / most))
    heads, tokens = torch.arange(H // J), torch.arange(T)
    g, t = ((heads[:, None] + tokens) % one_in == 0).nonzero(as_tuple=True)  # [r] and [r]
    grouped = (query.float() * scaling).view(n, J, H // J, T, D)[:, :, g, t]  # [n, J, r, D]
    logits = (grouped @ key.float().mT).masked_fill(~visible[:, None, t], -torch.inf)  # [n, J, r, S]
    mass = logits.logsumexp(dim=-1)  # [n, J, r]
    output = (logits - mass[..., None]).exp() @ value.float()  # [n, J, r, V]
    return Queries(*(each.transpose(0, 1)[:, real[:, t]] for each in (grouped, mass, output)))


def _terms(memory: TensorMemory, n: int) -> Terms:
    return memory.terms(memory.retrieval_keys.expand(n, -1))

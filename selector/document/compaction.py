"""A text's keys and values, compacted layer by layer, each for queries that have seen the compacted ones before it.

One forward pass over the references of all blocks of the text: in each layer a block's references say by their queries
which of its keys and values to keep, and then attend to these.

Shapes: references of T tokens, L layers, H query heads, J KV heads, D and V sizes of a key and a value, N tokens of a
block, m that are kept of all, R = tokens of a block's references times H / J.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Final, NamedTuple

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from inducekv_vllm.attention.cpu_ops import fused_attention
from inducekv_vllm.attention.merged.merge import merge_memory

from ..backbone.injection import TensorMemory
from ..backbone.loading import decoder
from ..backbone.model import Backbone, attention_named
from .matching import Kept, Queries, kept

COMPACTING: Final = "inducekv_compacting"
QUERIES: Final = 4096  # R of a block, about: of more, each token keeps those of some heads
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
    positions = torch.cat([torch.arange(len(each)) for each in references])
    compacting = _Compacting(parts)
    AttentionInterface.register(COMPACTING, compacting.attend)
    AttentionMaskInterface.register(COMPACTING, _no_mask)
    with attention_named(backbone, COMPACTING):
        decoder(backbone.model)(
            input_ids=torch.cat(references)[None].to(backbone.device),
            position_ids=positions[None].to(backbone.device),
            use_cache=False,
        )
    keys, values, lost = (torch.stack(of_layers).cpu() for of_layers in zip(*compacting.found, strict=True))
    return Compacted(keys, values, lost)


class _Compacting:
    """The attention of references that stand behind one another, each for itself behind what is left of its part."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = parts
        self.found: list[tuple[Tensor, Tensor, Tensor]] = []  # of each layer: as of `Kept`, of all parts

    def attend(
        self,
        module: torch.nn.Module,
        query: Tensor,  # [1, H, T of all references, D]
        key: Tensor,  # [1, J, T, D]
        value: Tensor,  # [1, J, T, V]
        attention_mask: None,
        scaling: float,
        **_: object,
    ) -> tuple[Tensor, None]:
        """Compact this layer's keys and values, and attend to what is left: [1, T, H, V]."""
        layer, dtype = len(self.found), query.dtype
        with torch.autocast(query.device.type, enabled=False):
            asking = self._of_parts(query, key, value, scaling=scaling)
            queries = [_queries(each, key.shape[1]) for each in asking]
            moves = self._moves(queries)
            outputs, found = list[Tensor](), list[Kept]()
            for part, of_part, references in zip(self._parts, queries, asking, strict=True):
                keys, values = (
                    each[layer, 0].to(query.device) for each in (part.memory.payload_keys, part.memory.payload_values)
                )
                found.append(kept(of_part, keys, values, part.kept, moves))
                outputs += [_behind(found[-1], each) for each in references]
        keys, values = (torch.cat([getattr(each, name) for each in found], dim=1) for name in ("keys", "values"))
        self.found.append((keys, values, torch.stack([each.lost for each in found]).mean(dim=0)))
        return torch.cat(outputs, dim=1).to(dtype), None

    def _of_parts(self, *tensors: Tensor, scaling: float) -> list[list[Own]]:
        """Of the references of each part, from query, key and value [1, heads, T, size] of all."""
        lengths = [len(each) for part in self._parts for each in part.references]
        of_each = zip(*(torch.split(each[0], lengths, dim=1) for each in tensors), strict=True)
        own = (Own(q.float() * scaling, *self_attention(q, k, v, scaling)) for q, k, v in of_each)
        return [list(itertools.islice(own, len(part.references))) for part in self._parts]

    def _moves(self, queries: Sequence[Queries]) -> int:
        """How many there is time for, in this layer."""
        logits = sum(each.own_mass.numel() * part.kept for each, part in zip(queries, self._parts, strict=True))
        tokens = sum(part.memory.payload_keys.shape[3] for part in self._parts)
        return min(MOVES, WORK * LONG // (logits * (LONG + tokens)))


class Own(NamedTuple):
    """What a reference of T tokens asks in a layer, and what it sees of itself, as float32."""

    query: Tensor  # [H, T, D], times the softmax scale
    output: Tensor  # [H, T, V]
    mass: Tensor  # [H, T], its logarithm


def _queries(references: Sequence[Own], J: int) -> Queries:
    """Of the KV heads, about `QUERIES` of each."""
    G = len(references[0].query) // J
    one_in = max(1, round(sum(each.query.shape[1] for each in references) * G / QUERIES))
    found = list[Queries]()
    for own in references:
        heads, tokens = torch.arange(G), torch.arange(own.query.shape[1])
        g, t = ((heads[:, None] + tokens) % one_in == 0).nonzero(as_tuple=True)  # [r] and [r]
        query, output, mass = (each.view(J, G, *each.shape[1:])[:, g, t] for each in own)  # [J, r, ...]
        found.append(Queries(query, mass, output))
    return Queries(*(torch.cat([getattr(each, field.name) for each in found], dim=1) for field in fields(Queries)))


def _behind(left: Kept, own: Own) -> Tensor:
    """The attention of a reference behind what is left: [1, T, H, V]."""
    seen = merge_memory(own.output, own.mass, *attention(own.query, left.keys, left.values), 1.0, 0.0, None)
    return seen.transpose(0, 1)[None]


def self_attention(query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> list[Tensor]:
    """The causal `attention` of a reference to itself in the dtype of its products, as float32."""
    dtype = values.dtype  # rotated keys and queries of a float32 model stay float32, whatever its products have
    return [each.float() for each in attention(query.to(dtype), keys.to(dtype), values, scaling, is_causal=True)]


def attention(
    query: Tensor,  # [H, T, D]
    keys: Tensor,  # [J, S, D]
    values: Tensor,  # [J, S, V]
    scaling: float = 1.0,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor]:
    """The output [H, T, V], and the logarithm of the mass of what is seen [H, T]."""
    keys, values = (each.repeat_interleave(len(query) // len(each), dim=0) for each in (keys, values))
    compute = fused_attention if query.device.type == "cpu" else plain_attention
    output, mass = compute(query[None], keys[None], values[None], None, scaling, is_causal)
    return output[0], mass[0]


def plain_attention(
    query: Tensor, keys: Tensor, values: Tensor, mask: None, scale: float, is_causal: bool = False
) -> tuple[Tensor, Tensor]:
    """`fused_attention` on any device, without a mask."""
    logits = query @ keys.mT * scale  # [N, h, R, S]
    if is_causal:
        logits = logits.masked_fill(torch.ones_like(logits, dtype=torch.bool).triu(1), -torch.inf)
    mass = logits.logsumexp(dim=-1)
    return (logits - mass[..., None]).exp() @ values, mass


def _no_mask(*_: object, **__: object) -> None:
    """References are told apart by their lengths."""

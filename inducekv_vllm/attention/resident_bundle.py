"""A bundle in the resident pool, once for all requests.

Shapes: see the package; B entries of m tokens and r rows of a map.
"""

from dataclasses import dataclass

from torch import Tensor

from ..errors import UnsupportedModel
from ..retrieval.entry_terms import Form, Weighting
from .host_bundle import HostPart
from .ranges import Region
from .resident_gate import ResidentGate


@dataclass(frozen=True, eq=False)
class LayerMemory:
    """What lies in one layer of the pool on this rank, and a bundle's numbers for it. The entries are in order."""

    keys: Tensor  # [J, B m, D], before RoPE, as at position 0
    values: Tensor  # [J, B m, V], before the value gate; V is D but for latents (MLA)
    value_gate: float
    bias: float
    # The same memory as rows of maps of the attention output, for a bundle that has any.
    map_in: Tensor | None = None  # [J, B r, G D]
    map_out: Tensor | None = None  # [J, B r, G D], transposed, before the value gate


@dataclass(frozen=True, eq=False, kw_only=True)
class ResidentBundle(HostPart):
    """The part of a bundle that a worker needs, and where it lies in the pool."""

    digest: str
    num_entries: int  # B
    payload_tokens: int  # m
    weighting: Weighting
    form: Form
    layers: tuple[LayerMemory, ...]  # [L]
    map_rank: int  # r; 0: no maps
    region: Region
    nbytes: int  # of the region
    first_token: int  # place in the pool
    first_map_row: int  # place among the rows of maps
    gate: ResidentGate | None = None  # beside the pool


def kv_heads_of_rank(num_kv_heads: int, tp_rank: int, tp_size: int) -> slice:
    """Return the KV heads of a tensor-parallel rank as in vLLM: an equal share, or one replicated head.

    Raises:
        UnsupportedModel: the heads cannot be split evenly.
    """
    if num_kv_heads >= tp_size:
        if num_kv_heads % tp_size:
            raise UnsupportedModel(f"{num_kv_heads} KV heads cannot be shared out over {tp_size} ranks")
        share = num_kv_heads // tp_size
        return slice(tp_rank * share, (tp_rank + 1) * share)
    if tp_size % num_kv_heads:
        raise UnsupportedModel(f"{num_kv_heads} KV heads cannot be replicated over {tp_size} ranks")
    head = tp_rank // (tp_size // num_kv_heads)
    return slice(head, head + 1)

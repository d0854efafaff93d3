"""The resident pool: for each layer one block of keys and one of values, of fixed size and address, for all bundles.

It is allocated once, before vLLM measures how much memory is left for the KV cache. Loading and unloading a bundle
writes its tokens and never moves an address, so a captured CUDA graph stays valid. Tokens are overwritten with zeros
before they are free again: of a bundle that is gone, the pool holds nothing.

A bundle lies in one range of all layers, also of those that its memory is not in: its tokens, entry by entry, then its
rows of maps. A row of a map is as long as G tokens and begins at a multiple of G: the inner halves of maps lie among
the keys, their outer ones among the values.

Shapes: see the package; P tokens of the pool, B entries of m tokens, r rank of a map, V size of a head's values.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..bundle import Bundle
from ..bundle.rows import map_rank, rows_of, token_rows
from ..errors import CapacityError, UnsupportedModel
from ..pace import rest
from ..vllm_seams.device import Device
from .host_bundle import HostBundle
from .ranges import Ranges, Region
from .resident_bundle import LayerMemory, ResidentBundle
from .resident_gate import ResidentGate

ENTRY_TOKENS = 8  # what the size of a pool counts as one entry: the paper's payload
AT_ONCE = 2**19  # numbers of the pool that are written between two rests


@dataclass(frozen=True)
class PoolShape:
    """The size of a rank's pool."""

    entries: int  # of ENTRY_TOKENS tokens
    num_layers: int  # L
    num_kv_heads: int  # J of this rank
    heads_per_kv_head: int  # G
    head_size: int  # D
    value_size: int  # V

    @property
    def has_maps(self) -> bool:
        """Whether bundles may have maps of the attention output: not those of latents."""
        return self.value_size == self.head_size

    @property
    def num_map_rows(self) -> int:
        """P / G: the rows of maps that fit the pool if it holds nothing else."""
        return -(-self.entries * ENTRY_TOKENS // self.heads_per_kv_head)

    @property
    def num_tokens(self) -> int:
        """P"""
        return self.num_map_rows * self.heads_per_kv_head

    def nbytes(self, dtype: torch.dtype) -> int:
        numbers = self.num_layers * self.num_kv_heads * self.num_tokens * (self.head_size + self.value_size)
        return numbers * dtype.itemsize


class MemoryPool:
    """See the module docstring."""

    def __init__(self, shape: PoolShape, dtype: torch.dtype, device: Device) -> None:
        """Raises CapacityError if the device's memory has no room for it."""
        needed, free = shape.nbytes(dtype), device.free_bytes()
        if needed > free:
            raise CapacityError(
                f"--memory-pool-entries {shape.entries} needs {needed / 2**20:.1f} MiB "
                f"({needed // shape.entries} bytes an entry), and {free / 2**20:.1f} MiB are free"
            )
        self.shape = shape
        self.ranges = Ranges(shape.num_map_rows, self._erase)  # of G tokens each
        self._device = device
        size = (shape.num_layers, shape.num_kv_heads, shape.num_tokens)
        self.keys = torch.zeros(*size, shape.head_size, dtype=dtype, device=device.torch_device)  # [L, J, P, D]
        self.values = torch.zeros(*size, shape.value_size, dtype=dtype, device=device.torch_device)  # [L, J, P, V]

    @property
    def num_free_tokens(self) -> int:
        return self.ranges.num_free * self.shape.heads_per_kv_head

    def store(self, host: HostBundle, heads: slice, gate: ResidentGate | None = None) -> ResidentBundle:
        """Copy a bundle's KV heads `heads` into a free range, beside the running steps. Any thread may call it.

        Raises:
            CapacityError: it does not fit.
        """
        self._check_geometry(host.bundle, heads)
        region = self._allocate(host.bundle)
        try:
            resident = self._resident(host, region, gate)
            with torch.inference_mode(), self._device.beside_steps():
                self._fill(resident, host.bundle, heads)
        except BaseException:
            region.release()
            raise
        return resident

    def _allocate(self, bundle: Bundle) -> Region:
        """Find room. Raises CapacityError."""
        G = self.shape.heads_per_kv_head
        length = rows_of(bundle.metadata, G)
        try:
            return self.ranges.allocate(length)
        except CapacityError as error:
            raise CapacityError(
                f"the bundle does not fit into the memory pool: its {bundle.num_entries} entries take {length * G} "
                f"adjacent tokens; {self.num_free_tokens} of {self.shape.num_tokens} are free, at most "
                f"{self.ranges.largest_free * G} of them adjacent; unload a bundle, or start the server with a larger "
                f"--memory-pool-entries than {self.shape.entries}"
            ) from error

    def _check_geometry(self, bundle: Bundle, heads: slice) -> None:
        L, V = bundle.metadata.backbone.num_layers, bundle.payload_values.shape[-1]
        _, _, J, _, D = bundle.payload_keys.shape
        own = (self.shape.num_layers, self.shape.num_kv_heads, self.shape.head_size, self.shape.value_size)
        if own != (L, len(range(J)[heads]), D, V):
            raise UnsupportedModel(
                f"the memory pool has {own[0]} layers of {own[1]} KV heads of size {_sizes(*own[2:])} on this rank, "
                f"the bundle has {L} layers of {len(range(J)[heads])} KV heads of size {_sizes(D, V)}"
            )

    def _resident(self, host: HostBundle, region: Region, gate: ResidentGate | None) -> ResidentBundle:
        bundle = host.bundle
        G, rank = self.shape.heads_per_kv_head, map_rank(bundle.metadata)
        first_token = region.place.start * G
        first_map_row = region.place.start + token_rows(bundle.metadata, G)
        tokens = slice(first_token, first_token + bundle.num_entries * bundle.payload_tokens)
        rows = slice(first_map_row, first_map_row + bundle.num_entries * rank)
        places = {layer: place for place, layer in enumerate(bundle.metadata.memory_layers)}
        layers = [
            LayerMemory(
                keys=self.keys[layer, :, tokens],
                values=self.values[layer, :, tokens],
                value_gate=float(bundle.value_gates[places[layer]]) if layer in places else 0.0,
                bias=float(bundle.layer_bias[places[layer]]) if layer in places else 0.0,
                map_in=self.map_rows(self.keys[layer])[:, rows] if rank else None,
                map_out=self.map_rows(self.values[layer])[:, rows] if rank else None,
            )
            for layer in range(self.shape.num_layers)
        ]
        return ResidentBundle(
            digest=bundle.digest,
            num_entries=bundle.num_entries,
            payload_tokens=bundle.payload_tokens,
            weighting=bundle.metadata.weighting,
            form=bundle.metadata.form,
            layers=tuple(layers),
            map_rank=rank,
            region=region,
            nbytes=sum(each[:, :, : len(region.place) * G].nbytes for each in (self.keys, self.values)),
            first_token=first_token,
            first_map_row=first_map_row,
            gate=gate,
            **vars(host.part),
        )

    def _erase(self, place: range) -> None:
        """Overwrite a range, counted in rows of maps, with zeros. Any thread may call it."""
        G = self.shape.heads_per_kv_head
        tokens = slice(place.start * G, place.stop * G)
        with torch.inference_mode(), self._device.beside_steps():
            for layers in self._layers_at_once(len(place) * G):
                self.keys[layers, :, tokens] = 0
                self.values[layers, :, tokens] = 0
                rest()

    def _layers_at_once(self, tokens: int) -> Iterator[slice]:
        """Layers of which so many tokens are written between two rests: of a small bundle, all of them."""
        L, of_layer = self.shape.num_layers, tokens * self.shape.num_kv_heads * self.shape.head_size
        step = max(1, AT_ONCE // max(of_layer, 1))
        return (slice(first, min(first + step, L)) for first in range(0, L, step))

    def _layers_of(self, bundle: Bundle, tokens: int) -> Iterator[tuple[slice, slice]]:
        """Layers of the pool, and where a bundle has them, of which so many tokens are written between two rests.

        Memory in some layers is written one layer at a time.
        """
        if bundle.metadata.layers is None:
            return ((layers, layers) for layers in self._layers_at_once(tokens))
        numbers = enumerate(bundle.metadata.layers)
        return ((slice(layer, layer + 1), slice(place, place + 1)) for place, layer in numbers)

    def map_rows(self, layers: Tensor) -> Tensor:
        """Layers' keys or values [..., J, P, D] as rows of maps: [..., J, P / G, G D]; latents have no maps."""
        return layers.view(*layers.shape[:-2], self.shape.num_map_rows, -1)

    def _fill(self, resident: ResidentBundle, bundle: Bundle, heads: slice) -> None:
        B, m, r = bundle.num_entries, bundle.payload_tokens, resident.map_rank
        tokens = slice(resident.first_token, resident.first_token + B * m)
        rows = slice(resident.first_map_row, resident.first_map_row + B * r)
        for layers, places in self._layers_of(bundle, B * m):
            self._write(self.keys[layers, :, tokens], bundle.payload_keys[places], heads)
            self._write(self.values[layers, :, tokens], bundle.payload_values[places], heads)
        if bundle.map_in is None or bundle.map_out is None:
            return
        for layers, places in self._layers_of(bundle, B * r * self.shape.heads_per_kv_head):
            self._write(self.map_rows(self.keys[layers])[:, :, rows], bundle.map_in[places], heads)
            self._write(self.map_rows(self.values[layers])[:, :, rows], bundle.map_out[places].mT, heads)

    def _write(self, target: Tensor, source: Tensor, heads: slice) -> None:
        """Copy [l, B, all heads, x, y] to [l, J, B x, y]."""
        own = self._device.upload(source[:, :, heads]).transpose(1, 2)  # [l, J, B, x, y]
        target.view(own.shape).copy_(own)
        rest()


def _sizes(keys: int, values: int) -> str:
    return str(keys) if keys == values else f"{keys} (values of {values})"

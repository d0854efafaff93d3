"""The resident pool: for each layer one block of keys and one of values, of fixed size and address, for all bundles.

It is allocated once, before vLLM measures how much memory is left for the KV cache. Loading and unloading a bundle
writes its tokens and never moves an address, so a captured CUDA graph stays valid. Tokens are overwritten with zeros
before they are free again: of a bundle that is gone, the pool holds nothing that no other bundle has.

Bundles whose entries have equal payload digests share them: an entry that is in the pool already is not copied again.

A row of a map is as long as G tokens, a page of the pool: the inner halves of maps lie among the keys, their outer ones
among the values.

Shapes: see the package; P tokens of the pool, r rank of a map, N entries that are copied.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..bundle import Bundle
from ..bundle.runs import runs_of
from ..errors import CapacityError, UnsupportedModel
from ..host.device import Device
from ..pace import rest
from ..retrieval.page_terms import IntArray
from .page_allocator import PageAllocator, Region
from .pages import LayerPages, ResidentBundle, span_of
from .placement import Placement, map_rank

ENTRY_TOKENS = 8  # what the size of a pool counts as one entry: the paper's payload


@dataclass(frozen=True)
class PoolShape:
    """The size of a rank's pool."""

    entries: int  # of ENTRY_TOKENS tokens
    num_layers: int  # L
    num_kv_heads: int  # J of this rank
    heads_per_kv_head: int  # G
    head_size: int  # D

    @property
    def page_tokens(self) -> int:
        """A page holds a row of a map."""
        return self.heads_per_kv_head

    @property
    def num_pages(self) -> int:
        """P / G; also the rows of maps that fit the pool if it holds nothing else."""
        return -(-self.entries * ENTRY_TOKENS // self.page_tokens)

    @property
    def num_tokens(self) -> int:
        """P"""
        return self.num_pages * self.page_tokens

    def nbytes(self, dtype: torch.dtype) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.num_tokens * self.head_size * dtype.itemsize


class PagePool:
    """See the module docstring."""

    def __init__(self, shape: PoolShape, dtype: torch.dtype, device: Device, beside: int = 0) -> None:
        """Raises CapacityError if the device's memory has no room for it, and for as many bytes beside it."""
        needed, free = shape.nbytes(dtype) + beside, device.free_bytes()
        if needed > free:
            raise CapacityError(
                f"--memory-pool-entries {shape.entries} needs {needed / 2**20:.1f} MiB "
                f"({needed // shape.entries} bytes an entry), and {free / 2**20:.1f} MiB are free"
            )
        self.shape = shape
        self.allocator = PageAllocator(shape.num_pages, shape.page_tokens, self._erase)
        self._device = device
        size = (shape.num_layers, shape.num_kv_heads, shape.num_tokens, shape.head_size)
        self.keys = torch.zeros(size, dtype=dtype, device=device.torch_device)  # [L, J, P, D]
        self.values = torch.zeros(size, dtype=dtype, device=device.torch_device)  # [L, J, P, D]

    @property
    def page_bytes(self) -> int:
        return 2 * self.keys[:, :, : self.shape.page_tokens].nbytes

    def store(self, bundle: Bundle, heads: slice, region: Region) -> ResidentBundle:
        """Copy what the pool does not have of a bundle's KV heads `heads` into free tokens, beside the running steps.

        Any thread may call it.

        Args:
            region: has the payloads that were not read with the bundle: `read_bundle(known=region.share)`. The bundle
                keeps it; after an error the caller releases it.

        Raises:
            CapacityError: it does not fit.
        """
        self._check_geometry(bundle, heads)
        placement = Placement.of(bundle, region, self.shape.heads_per_kv_head)
        self._allocate(bundle, placement, region)
        resident = self._resident(bundle, placement, region)
        with torch.inference_mode(), self._device.beside_steps():
            for layer in range(self.shape.num_layers):
                self._fill(resident, placement, bundle, layer, heads)
        region.divide(placement.pieces(bundle))
        return resident

    def _allocate(self, bundle: Bundle, placement: Placement, region: Region) -> None:
        """Find room for what is not shared. Raises CapacityError."""
        try:
            placement.lie_in(region)
        except CapacityError as error:
            needed, free = placement.new_tokens, self.allocator.num_free
            new = f"{len(placement.new)} entries"
            if placement.num_shared:
                new += f" that are not there yet, of {bundle.num_entries},"
            scattered = ""
            if needed <= free:
                rows, G = placement.map_rows[placement.new].size, self.shape.page_tokens
                scattered = (
                    f", but its {rows} rows of maps take {G} adjacent ones each, and there are "
                    f"{self.allocator.num_free_pages} times {G}"
                )
            raise CapacityError(
                f"the bundle does not fit into the memory pool: its {new} take {needed} tokens, {free} of "
                f"{self.shape.num_tokens} are free{scattered}; unload a bundle, or start the server with a larger "
                f"--memory-pool-entries than {self.shape.entries}"
            ) from error

    def _check_geometry(self, bundle: Bundle, heads: slice) -> None:
        L, _, J, _, D = bundle.payload_keys.shape
        own = (self.shape.num_layers, self.shape.num_kv_heads, self.shape.head_size)
        if own != (L, len(range(J)[heads]), D):
            raise UnsupportedModel(
                f"the memory pool has {own[0]} layers of {own[1]} KV heads of size {own[2]} on this rank, "
                f"the bundle has {L} layers of {len(range(J)[heads])} KV heads of size {D}"
            )

    def _resident(self, bundle: Bundle, placement: Placement, region: Region) -> ResidentBundle:
        shape, has_maps = self.shape, map_rank(bundle) > 0
        layers = [
            LayerPages(
                keys=self.keys[layer],
                values=self.values[layer],
                gate=float(bundle.value_gates[layer]),
                bias=float(bundle.layer_bias[layer]),
                map_in=self.map_rows(self.keys[layer]) if has_maps else None,
                map_out=self.map_rows(self.values[layer]) if has_maps else None,
            )
            for layer in range(shape.num_layers)
        ]
        return ResidentBundle(
            digest=bundle.digest,
            num_entries=bundle.num_entries,
            payload_tokens=bundle.payload_tokens,
            weighting=bundle.metadata.weighting,
            form=bundle.metadata.form,
            layers=tuple(layers),
            map_rank=map_rank(bundle),
            pages=self.allocator.pages_of(placement.all_tokens()),
            page_bytes=self.page_bytes,
            num_shared=placement.num_shared,
            region=region,
            tokens=placement.tokens,
            null_tokens=placement.null_tokens,
            map_rows=placement.map_rows,
        )

    def _erase(self, tokens: IntArray) -> None:
        """Overwrite tokens [n], ascending, with zeros. Any thread may call it."""
        with torch.inference_mode(), self._device.beside_steps():
            for first, end in runs_of(tokens):
                span = slice(int(tokens[first]), int(tokens[end - 1]) + 1)
                for layer in range(self.shape.num_layers):
                    self.keys[layer, :, span] = 0
                    self.values[layer, :, span] = 0
                    rest()

    def map_rows(self, layer: Tensor) -> Tensor:
        """A layer's keys or values [J, P, D] as rows of maps: [J, P / G, G D]."""
        return layer.view(self.shape.num_kv_heads, self.shape.num_pages, -1)

    def _fill(self, resident: ResidentBundle, placement: Placement, bundle: Bundle, layer: int, heads: slice) -> None:
        pages = resident.layers[layer]

        def write(target: Tensor, places: IntArray, source: Tensor) -> None:  # [J, x, y], [n, k], [n, J, k, y]
            where = span_of(places.reshape(-1))
            own = self._device.upload(source[:, heads]).transpose(0, 1)  # [J, n, k, y]
            if isinstance(where, slice):
                target[:, where].view(own.shape).copy_(own)
            else:
                target.index_copy_(1, self._device.upload(where), own.flatten(1, 2).to(target.dtype))
            rest()

        if len(new := placement.new):
            read = placement.sources(bundle)  # [N]
            write(pages.keys, placement.tokens[new], bundle.payload_keys[layer, read])
            write(pages.values, placement.tokens[new], bundle.payload_values[layer, read])
            if bundle.map_in is not None and bundle.map_out is not None:
                assert pages.map_in is not None
                assert pages.map_out is not None
                write(pages.map_in, placement.map_rows[new], bundle.map_in[layer, read])
                write(pages.map_out, placement.map_rows[new], bundle.map_out[layer, read].transpose(-1, -2))
        for null in placement.new_nulls.tolist():
            pages.keys[:, null] = 0
            pages.values[:, null] = 0

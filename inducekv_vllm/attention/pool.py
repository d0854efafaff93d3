"""The resident pool: for each layer one block of keys and one of values, of fixed size and address, for all bundles.

It is allocated once, before vLLM measures how much memory is left for the KV cache. Loading and unloading a bundle
writes its pages and never moves an address, so a captured CUDA graph stays valid. Pages are overwritten with zeros
before they are free again: of a bundle that is gone, the pool holds nothing.

A row of a map is as long as G tokens, so maps lie in the same pages: their inner halves among the keys, their outer
ones among the values.

Shapes: see the package; P tokens of the pool, r rank of a map.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..bundle import Bundle
from ..device import Device
from ..errors import CapacityError, UnsupportedModel
from ..page_terms import IntArray
from .page_allocator import PageAllocator, Region
from .pages import LayerPages, ResidentBundle, span_of

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
        """A page holds about one entry, and whole rows of maps."""
        return -(-ENTRY_TOKENS // self.heads_per_kv_head) * self.heads_per_kv_head

    @property
    def num_pages(self) -> int:
        return -(-self.entries * ENTRY_TOKENS // self.page_tokens)

    @property
    def num_tokens(self) -> int:
        """P"""
        return self.num_pages * self.page_tokens

    @property
    def num_map_rows(self) -> int:
        """P / G: the rows of maps that fit the pool if it holds nothing else."""
        return self.num_tokens // self.heads_per_kv_head

    def nbytes(self, dtype: torch.dtype) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.num_tokens * self.head_size * dtype.itemsize

    def pages_of(self, bundle: Bundle) -> tuple[int, int]:
        """The pages of a bundle's tokens and of its maps."""
        tokens = bundle.num_entries * bundle.payload_tokens + len(set(null_groups(bundle)))
        map_rows = bundle.num_entries * map_rank(bundle)
        return -(-tokens // self.page_tokens), -(-map_rows * self.heads_per_kv_head // self.page_tokens)


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
        self.allocator = PageAllocator(shape.num_pages, self._erase)
        self._device = device
        size = (shape.num_layers, shape.num_kv_heads, shape.num_tokens, shape.head_size)
        self.keys = torch.zeros(size, dtype=dtype, device=device.torch_device)  # [L, J, P, D]
        self.values = torch.zeros(size, dtype=dtype, device=device.torch_device)  # [L, J, P, D]

    @property
    def page_bytes(self) -> int:
        return 2 * self.keys[:, :, : self.shape.page_tokens].nbytes

    def store(self, bundle: Bundle, heads: slice) -> ResidentBundle:
        """Copy a bundle's KV heads `heads` into free pages, beside the running steps. Any thread may call it.

        Raises:
            CapacityError: it does not fit. The pool does not change.
        """
        self._check_geometry(bundle, heads)
        token_pages, map_pages = self.shape.pages_of(bundle)
        try:
            region = self.allocator.allocate(token_pages + map_pages)
        except CapacityError as error:
            page = self.shape.page_tokens
            raise CapacityError(
                f"the bundle does not fit into the memory pool: its {bundle.num_entries} entries take "
                f"{(token_pages + map_pages) * page} tokens, {self.allocator.num_free * page} of "
                f"{self.shape.num_tokens} are free; unload a bundle, or start the server with a larger "
                f"--memory-pool-entries than {self.shape.entries}"
            ) from error
        try:
            resident = self._resident(bundle, region)
            with torch.inference_mode(), self._device.beside_steps():
                for layer in range(self.shape.num_layers):
                    self._fill(resident, bundle, layer, heads)
        except BaseException:
            region.release()
            raise
        return resident

    def _check_geometry(self, bundle: Bundle, heads: slice) -> None:
        L, _, J, _, D = bundle.payload_keys.shape
        own = (self.shape.num_layers, self.shape.num_kv_heads, self.shape.head_size)
        if own != (L, len(range(J)[heads]), D):
            raise UnsupportedModel(
                f"the memory pool has {own[0]} layers of {own[1]} KV heads of size {own[2]} on this rank, "
                f"the bundle has {L} layers of {len(range(J)[heads])} KV heads of size {D}"
            )

    def _resident(self, bundle: Bundle, region: Region) -> ResidentBundle:
        shape, token_pages = self.shape, self.shape.pages_of(bundle)[0]
        B, m, groups = bundle.num_entries, bundle.payload_tokens, np.array(null_groups(bundle), dtype=np.int64)
        places = _places(region.pages[:token_pages], shape.page_tokens)
        # A group's null token follows its entries.
        entries_before = np.arange(B)[:, None] * m + (groups[:, None] if len(groups) else 0)  # [B, 1]
        tokens = places[entries_before + np.arange(m)]  # [B, m]
        null_tokens = places[(np.searchsorted(groups, groups, side="right")) * m + groups]
        rows_of_page = shape.page_tokens // shape.heads_per_kv_head
        r = map_rank(bundle)
        map_rows = _places(region.pages[token_pages:], rows_of_page)[: B * r].reshape(B, r)
        layers = [
            LayerPages(
                keys=self.keys[layer],
                values=self.values[layer],
                gate=float(bundle.value_gates[layer]),
                bias=float(bundle.layer_bias[layer]),
                map_in=self.map_rows(self.keys[layer]) if map_rows.size else None,
                map_out=self.map_rows(self.values[layer]) if map_rows.size else None,
            )
            for layer in range(shape.num_layers)
        ]
        return ResidentBundle(
            digest=bundle.digest,
            num_entries=B,
            payload_tokens=m,
            weighting=bundle.metadata.weighting,
            form=bundle.metadata.form,
            layers=tuple(layers),
            map_rank=r,
            nbytes=len(region.pages) * self.page_bytes,
            region=region,
            tokens=tokens,
            null_tokens=null_tokens,
            map_rows=map_rows,
        )

    def _erase(self, pages: IntArray) -> None:
        """Overwrite pages with zeros. Any thread may call it."""
        runs = np.split(pages, np.flatnonzero(np.diff(pages) != 1) + 1)  # of adjacent pages
        with torch.inference_mode(), self._device.beside_steps():
            for run in runs:
                if len(run):
                    tokens = slice(int(run[0]) * self.shape.page_tokens, (int(run[-1]) + 1) * self.shape.page_tokens)
                    self.keys[:, :, tokens] = 0
                    self.values[:, :, tokens] = 0

    def map_rows(self, layer: Tensor) -> Tensor:
        """A layer's keys or values [J, P, D] as rows of maps: [J, P / G, G D]."""
        return layer.view(self.shape.num_kv_heads, self.shape.num_map_rows, -1)

    def _fill(self, resident: ResidentBundle, bundle: Bundle, layer: int, heads: slice) -> None:
        pages = resident.layers[layer]

        def write(target: Tensor, places: IntArray, source: Tensor) -> None:  # [J, x, y], [B, n], [B, J, n, y]
            own = self._device.upload(source[:, heads]).transpose(0, 1)  # [J, B, n, y]
            where = span_of(places.reshape(-1))
            if isinstance(where, slice):
                target[:, where].view(own.shape).copy_(own)
            else:
                scattered = own.flatten(1, 2).to(target.dtype, copy=True)
                target.index_copy_(1, self._device.upload(where), scattered)
                scattered.zero_()  # freed memory keeps its content

        write(pages.keys, resident.tokens, bundle.payload_keys[layer])
        write(pages.values, resident.tokens, bundle.payload_values[layer])
        for null in np.unique(resident.null_tokens).tolist():
            pages.keys[:, null] = 0
            pages.values[:, null] = 0
        if bundle.map_in is not None and bundle.map_out is not None:
            assert pages.map_in is not None
            assert pages.map_out is not None
            write(pages.map_in, resident.map_rows, bundle.map_in[layer])
            write(pages.map_out, resident.map_rows, bundle.map_out[layer].transpose(-1, -2))


def map_rank(bundle: Bundle) -> int:
    return 0 if bundle.metadata.output_map is None else bundle.metadata.output_map.rank


def null_groups(bundle: Bundle) -> list[int]:
    """The group of each entry of decoupled memory: entries of one group are followed by one null token.

    They are read together, and adjacent tokens without a copy: behind a gate the entries of a task, otherwise all
    entries. Merged memory has no null tokens.
    """
    if bundle.metadata.form == "merged":
        return []
    tasks = [entry.task if bundle.gate is not None else "" for entry in bundle.metadata.entries]
    changes = [previous != task for previous, task in itertools.pairwise(tasks)]
    return list(itertools.accumulate(changes, initial=0))[: len(tasks)]


def _places(pages: IntArray, unit: int) -> IntArray:
    """The places of these pages of `unit` places each."""
    return (pages[:, None] * unit + np.arange(unit)).reshape(-1)

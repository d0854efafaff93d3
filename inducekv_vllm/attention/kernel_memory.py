"""Memory attention of a GPU worker: one launch of the kernels after each layer's self-attention.

Decoupled memory works around any attention backend. Merged memory needs the log-sum-exp of self-attention, which
FlashAttention gives (`merged/flash.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from triton import OutOfResources

from ..errors import UnsupportedModel
from ..vllm_seams.device import Device
from ..vllm_seams.logs import logger_of
from ..vllm_seams.requirements import check_merged
from .attach import KeepsLse
from .kernel_step import GraphBuffers, StepLaunch, rows_with_memory
from .kernel_tables import KernelTables
from .kernels import launch
from .kernels.geometry import KernelGeometry
from .kernels.layout import LayerPool, StepTensors
from .kernels.tiles import LaunchShape, Processors, idle_plan
from .latent import LatentLayer
from .memory_attention import AttentionLayer, attach_to_decoders
from .pool import MemoryPool
from .slots import ActingRows, RequestMemory

if TYPE_CHECKING:
    from vllm.config import ModelConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from ..vllm_seams.runner import StepRows

logger = logger_of(__name__)


class KernelMemoryAttention:
    """`MemoryAttention` with the kernels."""

    def __init__(
        self,
        pool: MemoryPool,
        tables: KernelTables,
        device: Device,
        model: ModelConfig,
        processors: Processors,
        most_graph_rows: int,
        add_memory: Callable[..., None] = launch.add_memory,
    ) -> None:
        """Raises UnsupportedModel if the kernels cannot serve this model.

        Args:
            most_graph_rows: rows of the largest graph that has attention in it; 0 if there is none.
            add_memory: `kernels.launch.add_memory`, or another function that does the same.
        """
        self.merged_refusal: UnsupportedModel | None = None
        self._device, self._model = device, model
        self._most_graph_rows, self._add_memory = most_graph_rows, add_memory
        self.most_entries: int | None = tables.most_entries
        self._tables = tables
        self._layers = [_layer_pool(pool, tables, layer) for layer in range(pool.shape.num_layers)]
        self._num_heads = pool.shape.num_kv_heads * pool.shape.heads_per_kv_head
        self._geometry = KernelGeometry(
            kv_heads=pool.shape.num_kv_heads,
            heads_per_kv_head=pool.shape.heads_per_kv_head,
            head_size=pool.shape.head_size,
            element_size=pool.keys.element_size(),
            most_tokens=pool.shape.num_tokens,
            processors=processors,
        )
        try:
            for layer_pool in self._layers:
                launch.check(layer_pool, tables.slots, self._num_heads)
        except ValueError as error:
            raise UnsupportedModel(f"InduceKV cannot serve memory: {error}") from error
        self._graphs: GraphBuffers  # from `attach` on
        self.deciding: dict[int, Callable[[], None]] = {}
        self._in_step = False
        self._step: StepLaunch | None = None  # of the running step, unless it replays a graph

    def attach(self, kv_cache: KVCacheConfig, layers: Mapping[str, AttentionLayer], builders: Sequence[Any]) -> None:
        """See `MemoryAttention`."""
        try:
            check_merged(kv_cache, [(name, layer.impl) for name, layer in layers.items()], KeepsLse, self._model)
        except UnsupportedModel as refusal:
            self.merged_refusal = refusal
            logger.info("only decoupled memory can be served: %s", refusal)
        # A graph is captured before the bundles of its steps are known, so it can do every form that is served.
        self._graphs = GraphBuffers(self._geometry, self._most_graph_rows, self.merged_refusal is None, self._device)
        attach_to_decoders(layers, self)

    def cached_values(self, kv_cache: Tensor) -> Tensor:
        """See `MemoryAttention`. vLLM's backends for CUDA have a token's value behind its key: [blocks, J, C, 2 D]."""
        return kv_cache[..., kv_cache.shape[-1] // 2 :]

    def fill(self, memory: RequestMemory) -> None:
        """See `MemoryAttention`."""
        self._tables.write(memory)

    # ---- before a step ------------------------------------------------------------------------------------------

    def begin_step(self, rows: StepRows, acting: Sequence[ActingRows]) -> None:
        """See `MemoryAttention`."""
        self._in_step = True
        found = rows_with_memory(acting, sum(rows.num_scheduled))
        if rows.graph_rows is not None:
            if found is None:
                self._graphs.clear()
            else:
                self._graphs.write(rows.graph_rows, found)
        elif found is not None:
            self._step = StepLaunch.of_step(found, self._geometry, self._device)

    def decide_in(self, layer: int, decide: Callable[[], None]) -> None:
        """See `MemoryAttention`."""
        self.deciding[layer] = decide

    def end_step(self) -> None:
        """See `MemoryAttention`."""
        self._in_step = False
        self._step = None
        self.deciding.clear()

    # ---- in a layer's forward pass -------------------------------------------------------------------------------

    def acts(self, num_rows: int) -> bool:
        """See `AddsMemory`."""
        return self._launch(num_rows) is not None

    def needs_lse(self, num_rows: int) -> bool:
        """See `AddsMemory`."""
        launch = self._launch(num_rows)
        return launch is not None and launch.shape.lse

    def cacheable(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """See `AddsMemory`. Here the limits of what loads have to suffice: to look at them would cost every request."""
        return key, value

    def add(self, layer: int, query: Tensor, output: Tensor, self_lse: Tensor | None, scale: float) -> None:
        """See `AddsMemory`."""
        if (now := self._launch(len(query))) is not None:
            self._add_memory(
                self._layers[layer], self._tables.slots, now.tensors, query, output, self_lse, scale, now.shape
            )

    def add_latent(self, layer: int, latents: LatentLayer, query: Tensor, output: Tensor) -> None:
        """See `AddsLatentMemory`. What rows without memory have read is 0."""
        if (now := self._launch(len(query))) is not None:
            absorbed = latents.absorbed(query)  # [rows, H, D]
            read = absorbed.new_zeros(*absorbed.shape[:2], latents.value_size)  # [rows, H, V]
            self._add_memory(
                self._layers[layer], self._tables.slots, now.tensors, absorbed, read, None, latents.scale, now.shape
            )
            latents.add(read, output)

    def _launch(self, num_rows: int) -> StepLaunch | None:
        """Outside a step vLLM captures a graph, or makes a dummy run that prepares one: both launch what graphs do."""
        if self._in_step:
            return self._step
        return self._graphs.launch(num_rows) if num_rows <= self._graphs.most_rows else None

    # ---- at start ------------------------------------------------------------------------------------------------

    def warm_up(self) -> None:
        """Launch every variant of the kernels once without rows, so that no step waits for a compiler.

        Raises:
            UnsupportedModel: a variant does not fit the GPU.
        """
        device, pool = self._device.torch_device, self._layers[0]
        size = (1, self._num_heads, pool.keys.shape[-1])
        query, output = (torch.zeros(size, dtype=pool.keys.dtype, device=device) for _ in range(2))
        lse = torch.zeros(size[:2], device=device)
        variants = self._geometry.variants(lse=self.merged_refusal is None)
        for shape in variants:
            step = StepTensors.from_plan(idle_plan(shape), self._geometry.kv_heads, device)
            try:
                self._add_memory(pool, self._tables.slots, step, query, output, lse if shape.lse else None, 1.0, shape)
            except OutOfResources as error:  # only the compiler knows what its code takes
                raise self._too_large(shape, error) from error
        logger.info("%d variants of the memory attention kernels are compiled", len(variants))

    def _too_large(self, shape: LaunchShape, error: OutOfResources) -> UnsupportedModel:
        g = self._geometry
        return UnsupportedModel(
            f"InduceKV cannot serve memory on this GPU: with {g.heads_per_kv_head} query heads of size {g.head_size} "
            f"for a KV head, in {self._layers[0].keys.dtype}, memory attention {'with' if shape.maps else 'without'} "
            f"maps needs {error.required} of {error.name}, and a program has {error.limit}"
        )


def _layer_pool(pool: MemoryPool, tables: KernelTables, layer: int) -> LayerPool:
    return LayerPool(
        keys=pool.keys[layer],
        values=pool.values[layer],
        value_gate=tables.value_gate[layer],
        bias=tables.bias[layer],
        map_in=pool.map_rows(pool.keys[layer]),
        map_out=pool.map_rows(pool.values[layer]),
    )

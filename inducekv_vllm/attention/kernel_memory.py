"""Memory attention of a GPU worker: one launch of the kernels after each layer's self-attention.

Decoupled memory works around any attention backend. Merged memory needs the log-sum-exp of self-attention, which
FlashAttention gives (`merged/flash.py`).

Nothing is launched in a layer in which no memory of a step does anything.

CUDA graphs are captured for kinds of steps, and each step chooses. Those without memory launch nothing of it.
Those for decoupled memory in a wide and deep model's usual layers launch in those alone. Those with decoupled memory
without maps launch a kernel that can do no more. The second of two memories is launched behind the first one, in graphs
of a kind of their own: it acts on what that has made of the output.
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
from .kernel_step import GraphBuffers, GraphKind, StepLaunch, graph_kind, in_rounds
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
LATENT_ROWS = 1024  # of a prompt whose queries are taken into the space of latents at a time: they are wide there
MOST_LATENT_HEADS = 16  # that read a latent in one program: what they have read so far stays in its registers


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
        most_memories: int = 1,
        few_layers: Sequence[int] = (),
        choose_graphs: Callable[[GraphKind], None] = lambda _: None,
        kernels: Any = launch,
    ) -> None:
        """Raises UnsupportedModel if the kernels cannot serve this model.

        Args:
            most_graph_rows: rows of the largest graph that has attention in it; 0 if there is none.
            most_memories: of one request, 1 or 2.
            few_layers: the layers that memory is usually in; empty if it is in all.
            choose_graphs: called with what the running step needs, and at its end with what no memory needs.
            kernels: `kernels.launch`, or whatever has an `add_memory` that does the same.
        """
        self.merged_refusal: UnsupportedModel | None = None
        self._device, self._model = device, model
        self._most_graph_rows, self._most_memories = most_graph_rows, most_memories
        self._choose_graphs, self._kernels = choose_graphs, kernels
        self._few = frozenset(few_layers)
        self.most_entries: int | None = tables.most_entries
        self._tables = tables
        self._num_heads = pool.shape.num_kv_heads * pool.shape.heads_per_kv_head
        groups = 1 if pool.shape.has_maps else groups_of_heads(pool.shape.heads_per_kv_head)
        self._layers = [_layer_pool(pool, tables, layer, groups) for layer in range(pool.shape.num_layers)]
        self._geometry = KernelGeometry(
            kv_heads=pool.shape.num_kv_heads * groups,
            heads_per_kv_head=pool.shape.heads_per_kv_head // groups,
            head_size=pool.shape.head_size,
            value_size=pool.shape.value_size,
            element_size=pool.keys.element_size(),
            most_tokens=pool.shape.num_tokens,
            processors=processors,
        )
        if launch.INTERPRETED and pool.keys.is_cuda:
            raise UnsupportedModel(
                "InduceKV cannot serve memory on a GPU with TRITON_INTERPRET=1: Triton interprets kernels where there "
                "is none"
            )
        try:
            for layer_pool in self._layers:
                launch.check(layer_pool, self._num_heads)
        except ValueError as error:
            raise UnsupportedModel(f"InduceKV cannot serve memory: {error}") from error
        self._graphs: GraphBuffers  # from `attach` on
        self._graphs_behind: GraphBuffers | None = None  # of the second of two memories
        self._captured = GraphKind.NONE  # what is launched outside of steps
        self.deciding: dict[int, Callable[[], None]] = {}
        self._in_step = False
        self._layers_of_step = frozenset[int]()  # in which its memories do anything
        self._step: StepLaunch | None = None  # of the running step, unless it replays a graph
        self._step_behind: StepLaunch | None = None
        self._pieces: list[tuple[slice, StepLaunch]] = []  # of a step with many rows, for latents

    def attach(self, kv_cache: KVCacheConfig, layers: Mapping[str, AttentionLayer], builders: Sequence[Any]) -> None:
        try:
            check_merged(kv_cache, [(name, layer.impl) for name, layer in layers.items()], KeepsLse, self._model)
        except UnsupportedModel as refusal:
            self.merged_refusal = refusal
            logger.info("only decoupled memory can be served: %s", refusal)
        can_merge, rows = self.merged_refusal is None, self._most_graph_rows
        self._graphs = GraphBuffers(self._geometry, rows, can_merge, self._device, few=bool(self._few))
        if self._most_memories > 1:
            self._graphs_behind = GraphBuffers(self._geometry, rows, False, self._device)
        attach_to_decoders(layers, self)

    def cached_values(self, kv_cache: Tensor) -> Tensor:
        """See `MemoryAttention`. vLLM's backends for CUDA have a token's value behind its key: [blocks, J, C, 2 D]."""
        return kv_cache[..., kv_cache.shape[-1] // 2 :]

    def fill(self, memory: RequestMemory) -> None:
        self._tables.write(memory)

    # ---- before a step ------------------------------------------------------------------------------------------

    def begin_step(self, rows: StepRows, acting: Sequence[ActingRows]) -> None:
        self._in_step = True
        found, behind = in_rounds(acting, sum(rows.num_scheduled))
        self._layers_of_step = frozenset[int]().union(*(each.layers for each in (found, behind) if each is not None))
        if rows.graph_rows is not None:
            kind = graph_kind(found, behind, self._few)
            self._choose_graphs(kind)
            if found is not None:
                self._graphs.write(rows.graph_rows, found, kind)
            if behind is not None:
                assert self._graphs_behind is not None
                self._graphs_behind.write(rows.graph_rows, behind, kind)
            return
        self._step, self._step_behind = (
            None if each is None else StepLaunch.of_step(each, self._geometry, self._device) for each in (found, behind)
        )
        if not self._geometry.has_maps and sum(rows.num_scheduled) > LATENT_ROWS:
            self._pieces = [
                (rows_of_piece, StepLaunch.of_step(piece, self._geometry, self._device))
                for each in (found, behind)
                if each is not None
                for rows_of_piece, piece in each.pieces(LATENT_ROWS)
            ]

    def decide_in(self, layer: int, decide: Callable[[], None]) -> None:
        self.deciding[layer] = decide

    def end_step(self) -> None:
        self._in_step = False
        self._step, self._step_behind, self._pieces = None, None, []
        self._layers_of_step = frozenset()
        self.deciding.clear()
        self._choose_graphs(GraphKind.NONE)  # for vLLM's own dummy steps

    # ---- in a layer's forward pass -------------------------------------------------------------------------------

    def acts(self, layer: int, num_rows: int) -> bool:
        return self._launch(num_rows) is not None and self._launches_in(layer)

    def needs_lse(self, num_rows: int) -> bool:
        launch = self._launch(num_rows)
        return launch is not None and launch.shape.lse

    def cacheable(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """See `AddsMemory`. Here the limits of what loads have to suffice: to look at them would cost every request."""
        return key, value

    def add(self, layer: int, query: Tensor, output: Tensor, self_lse: Tensor | None, scale: float) -> None:
        now = self._launch(len(query))
        if now is None:
            return
        self._launch_kernel(layer, now, query, output, self_lse, scale)
        if (behind := self._launch_behind(len(query))) is not None:
            self._launch_kernel(layer, behind, query, output, None, scale)

    def add_latent(self, layer: int, latents: LatentLayer, query: Tensor, output: Tensor) -> None:
        """See `AddsLatentMemory`. What rows without memory have read is 0."""
        whole = [self._launch(len(query)), self._launch_behind(len(query))]
        for rows, now in self._pieces or [(slice(None), each) for each in whole if each is not None]:
            absorbed = latents.absorbed(query[rows])  # [rows, H, D]
            read = absorbed.new_zeros(*absorbed.shape[:2], latents.value_size)  # [rows, H, V]
            self._launch_kernel(layer, now, absorbed, read, None, latents.scale)
            latents.add(read, output[rows])

    def _launches_in(self, layer: int) -> bool:
        if self._in_step:
            return layer in self._layers_of_step
        return self._captured != GraphKind.FEW or layer in self._few

    def _launch(self, num_rows: int) -> StepLaunch | None:
        """Outside a step vLLM captures a graph, or makes a dummy run that prepares one: both launch what graphs do."""
        if self._in_step:
            return self._step
        if self._captured == GraphKind.NONE or num_rows > self._graphs.most_rows:
            return None
        return self._graphs.launch(num_rows, self._captured)

    def _launch_behind(self, num_rows: int) -> StepLaunch | None:
        """`_launch` of the second of two memories."""
        if self._in_step:
            return self._step_behind
        if self._captured != GraphKind.TWO or self._graphs_behind is None or num_rows > self._graphs.most_rows:
            return None
        return self._graphs_behind.launch(num_rows, self._captured)

    def _launch_kernel(
        self, layer: int, now: StepLaunch, query: Tensor, output: Tensor, self_lse: Tensor | None, scale: float
    ) -> None:
        self._kernels.add_memory(
            self._layers[layer], self._tables.slots, now.tensors, query, output, self_lse, scale, now.shape
        )

    # ---- at start ------------------------------------------------------------------------------------------------

    @property
    def graph_kinds(self) -> tuple[GraphKind, ...]:
        """What graphs are captured for."""
        return self._graphs.kinds if self._graphs_behind is None else (*self._graphs.kinds, GraphKind.TWO)

    def capture_for(self, kind: GraphKind) -> None:
        """The graphs that are captured from now on are for these steps."""
        self._captured = kind

    def warm_up(self) -> None:
        """Compile every variant of the kernels and launch it once without rows, so that no step waits for a compiler.

        Raises:
            UnsupportedModel: a variant does not fit the GPU.
        """
        device, pool = self._device.torch_device, self._layers[0]
        query, output = (
            torch.zeros(1, self._num_heads, part.shape[-1], dtype=part.dtype, device=device)
            for part in (pool.keys, pool.values)
        )
        lse = torch.zeros(1, self._num_heads, device=device)
        launches = []
        for shape in self._geometry.variants(lse=self.merged_refusal is None):
            step = StepTensors.from_plan(idle_plan(shape), self._geometry.kv_heads, device)
            launches.append((step, query, output, lse if shape.lse else None, 1.0, shape))
        launch.compile_all([launch.arguments_of(pool, self._tables.slots, *each) for each in launches])
        for step, *rest, shape in launches:
            try:
                self._kernels.add_memory(pool, self._tables.slots, step, *rest, shape)
            except OutOfResources as error:  # only the compiler knows what its code takes
                raise self._too_large(shape, error) from error
        logger.info("%d variants of the memory attention kernels are compiled", len(launches))

    def _too_large(self, shape: LaunchShape, error: OutOfResources) -> UnsupportedModel:
        g = self._geometry
        return UnsupportedModel(
            f"InduceKV cannot serve memory on this GPU: with {g.heads_per_kv_head} query heads of size {g.head_size} "
            f"for a KV head, in {self._layers[0].keys.dtype}, memory attention {'with' if shape.maps else 'without'} "
            f"maps needs {error.required} of {error.name}, and a program has {error.limit}"
        )


def groups_of_heads(heads: int) -> int:
    """Into how few equal groups of up to MOST_LATENT_HEADS these query heads of one KV head can be divided."""
    return next(n for n in range(1, heads + 1) if heads % n == 0 and heads // n <= MOST_LATENT_HEADS)


def _layer_pool(pool: MemoryPool, tables: KernelTables, layer: int, groups: int) -> LayerPool:
    """A layer for the kernels; one KV head is as many as it has groups of query heads."""
    keys, values = pool.keys[layer], pool.values[layer]
    terms = {"value_gate": tables.value_gate[layer], "bias": tables.bias[layer]}
    if not pool.shape.has_maps:
        return LayerPool(keys=keys.expand(groups, -1, -1), values=values.expand(groups, -1, -1), **terms)
    return LayerPool(keys=keys, values=values, **terms, map_in=pool.map_rows(keys), map_out=pool.map_rows(values))

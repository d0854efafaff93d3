"""Lets memory act on the output of any attention backend: its implementation adds the running step's memory.

vLLM makes a layer's implementation of the class that its backend names, and calls it directly: there is no hook behind
self-attention. A backend of our own would have to be written for each of vLLM's. So `attach` changes the class of the
finished implementation to a subclass of its own one, which works for any backend and for those of plugins.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, Protocol

from torch import Tensor


class AddsMemory(Protocol):
    """What the layers ask in every forward pass."""

    deciding: dict[int, Callable[[], None]]  # by layer: what is decided once the layer's values are in the KV cache

    def acts(self, layer: int, num_rows: int) -> bool:
        """Whether memory acts in a layer on any row of a pass of this many rows, or may in the graph that is captured.

        `add` is called where it does.
        """
        ...

    def needs_lse(self, num_rows: int) -> bool:
        """Whether `add` needs the log-sum-exp of self-attention for a forward pass of this many rows."""
        ...

    def cacheable(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """What the KV cache may hold of a layer's keys and values [rows, J, D]: finite numbers in rows with memory.

        A block keeps what one request has left in it for the next one.
        """
        ...

    def add(self, layer: int, query: Tensor, output: Tensor, self_lse: Tensor | None, scale: float) -> None:
        """Add the step's memory to the output of a layer's self-attention, in place.

        Args:
            query, output: [rows, H, D]; rows beyond those of the step are padding.
            self_lse: [rows, H] float32, if `needs_lse`.
            scale: the softmax scale.
        """
        ...


class KeepsLse:
    """An implementation that can keep the log-sum-exp of its self-attention.

    vLLM fixes what `forward` takes and returns, so its caller sets `keeps_lse` before, and takes `self_lse` after.
    """

    keeps_lse: bool = False
    self_lse: Tensor | None = None  # [rows without padding, H] float32, of the last forward pass

    @property
    def lse_refusal(self) -> str | None:
        """Why it cannot after all."""
        return None


def attach(impl: Any, layer_index: int, memory: AddsMemory) -> None:
    """Make a layer's attention implementation, of whatever class, add memory to its output."""
    kind: Any = type(impl)
    impl.__class__ = _with_memory(kind)
    impl.layer_index, impl.memory = layer_index, memory


def _unquantised(query: Tensor, output: Tensor, layer: Any) -> Tensor:
    """Queries, which vLLM may have quantised for the KV cache."""
    return query if query.dtype == output.dtype else query.to(output.dtype) * layer._q_scale.to(output.dtype)


@cache
def _with_memory(base: Any) -> type:
    class MemoryImpl(base):  # type: ignore[misc]
        memory: AddsMemory
        layer_index: int
        self_lse: Tensor | None

        def do_kv_cache_update(self, layer: Any, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> None:
            super().do_kv_cache_update(layer, *self.memory.cacheable(self.layer_index, key, value), *args, **kwargs)

        def forward(
            self,
            layer: Any,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            kv_cache: Any,
            attn_metadata: Any,
            output: Tensor,
            *args: Any,
            **kwargs: Any,
        ) -> Tensor:
            is_profiling, num_rows = attn_metadata is None, len(query)
            self.keeps_lse = not is_profiling and self.memory.needs_lse(num_rows)
            result: Tensor = super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs)
            if is_profiling:
                return result
            lse: Tensor | None = None
            if self.keeps_lse:
                lse, self.self_lse = self.self_lse, None
                assert lse is not None
                query, output = query[: len(lse)], output[: len(lse)]
            if (decide := self.memory.deciding.pop(self.layer_index, None)) is not None:
                decide()  # memory may act from this layer on
            if not self.memory.acts(self.layer_index, num_rows):
                return result
            self.memory.add(self.layer_index, _unquantised(query, output, layer), output, lse, self.scale)
            return result

    MemoryImpl.__name__ = MemoryImpl.__qualname__ = f"Memory{base.__name__}"
    return MemoryImpl

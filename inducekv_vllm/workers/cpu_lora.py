"""LoRA on CPUs, computed adapter by adapter instead of token by token.

vLLM's own (vllm.lora.ops.torch_ops) gathers an adapter's matrices for every token, which takes most of the time of a
small model's answer, and until 0.33 gave tokens without an adapter another request's (vllm-project/vllm#48421). Here
all tokens of a batch with the same adapter share one matrix product; tokens without an adapter are left alone. A
compiled model keeps vLLM's own LoRA: otherwise the adapters of one batch would become part of the compiled code.
"""

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.platforms import current_platform

from ..vllm_seams.patches import patch

NO_ADAPTER = -1


def install() -> None:
    """Make vLLM's LoRA layers compute adapter by adapter; call it before the model is loaded."""
    patch(current_platform, "get_punica_wrapper", lambda _: lambda: f"{__name__}.GroupedPunica")


class GroupedPunica(PunicaWrapperCPU):
    """vLLM's LoRA on CPUs with one matrix product for all tokens of an adapter."""

    def update_metadata(self, *args: Any, **kwargs: Any) -> None:
        super().update_metadata(*args, **kwargs)
        self._groups = list(_rows_of_adapters(self.token_lora_indices))

    def _apply_shrink(self, y: Tensor, x: Tensor, w_t_all: Tensor, scale: float) -> None:
        """y [tokens, rank] = scale * x [tokens, in] A^T, with each token's A of `w_t_all` [adapters, 1, rank, in]."""
        y = y.view(-1, y.shape[-1])
        for adapter, rows in self._groups:
            y[rows] = scale * (x[rows].to(y.dtype) @ w_t_all[adapter, 0].to(y.dtype).T)

    def _apply_expand(
        self, y: Tensor, x: Tensor, w_t_all: Tensor, y_offset: int, y_slice_size: int, add_inputs: bool = True
    ) -> None:
        """y [tokens, y_offset : y_offset + y_slice_size] += x [tokens, rank] B^T, with each token's own B.

        `w_t_all` is [adapters, 1, y_slice_size, rank]; without `add_inputs` y is overwritten.
        """
        columns = y[:, y_offset : y_offset + y_slice_size]
        for adapter, rows in self._groups:
            product = x[rows].to(y.dtype) @ w_t_all[adapter, 0].to(y.dtype).T
            columns[rows] = columns[rows] + product if add_inputs else product


def _rows_of_adapters(adapters: Tensor) -> Iterator[tuple[int, Tensor | slice]]:
    """Each adapter of the batch with its rows; `adapters` [tokens], -1 for none."""
    present = sorted(set(adapters.tolist()))
    for adapter in present:
        if adapter != NO_ADAPTER:
            yield adapter, slice(None) if len(present) == 1 else (adapters == adapter).nonzero().squeeze(1)

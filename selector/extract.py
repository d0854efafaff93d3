"""Extract memory entries from a frozen backbone: retrieval keys and KV payloads of training prefixes.

Letters: N examples, n of them in a batch, T prompt tokens, m payload tokens, L layers, J KV heads, D head size,
d hidden size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from inducekv_vllm.errors import ConfigError

from .backbone import Backbone, Inputs, pool_retrieval_keys
from .data import Example


@dataclass(frozen=True)
class Extraction:
    """The entries e(x) of N prefixes (paper, Eq. key_rewrite and payload_rewrite)."""

    keys: Tensor  # [N, d] float32, unit norm
    payload_keys: Tensor  # [L, N, J, m, D], before RoPE, after k_norm where the model has one
    payload_values: Tensor  # [L, N, J, m, D]


def extract(
    backbone: Backbone,
    examples: Sequence[Example],
    payload_tokens: int,
    *,
    batch_size: int = 8,
    payload_dtype: torch.dtype = torch.float32,
    progress: bool = False,
) -> Extraction:
    """Run the frozen model over every prefix once and keep its key and its pooled keys and values.

    Nothing is written to disk, so an interruption leaves nothing behind.

    Args:
        payload_tokens: m.
        payload_dtype: bundles keep float16; float32 suits payloads that are to be refined.
        progress: show a progress bar on standard error.

    Raises:
        ConfigError: `payload_tokens` or `batch_size` below 1.
        TaskDataError: the model's processor refuses an example.
    """
    if payload_tokens < 1:
        raise ConfigError(f"payload_tokens must be at least 1, found {payload_tokens}")
    shape = (backbone.num_layers, len(examples), backbone.num_kv_heads, payload_tokens, backbone.head_dim)
    keys: list[Tensor] = []
    payload_keys = torch.empty(shape, dtype=payload_dtype)
    payload_values = torch.empty(shape, dtype=payload_dtype)
    start = 0
    for inputs in _batches(backbone, examples, batch_size, "Extracting entries", progress):
        pooling = pooling_matrices(inputs["attention_mask"].sum(dim=1).tolist(), payload_tokens).to(backbone.device)
        rows = slice(start, start + len(pooling))
        with _pooled_projections(backbone, pooling, payload_keys[:, rows], payload_values[:, rows]):
            hidden = backbone.hidden_states(inputs)  # [n, T, d]
        keys.append(pool_retrieval_keys(hidden, inputs["attention_mask"]).cpu())
        start = rows.stop
    return Extraction(torch.cat(keys), payload_keys, payload_values)


def extract_keys(
    backbone: Backbone, examples: Sequence[Example], *, batch_size: int = 8, progress: bool = False
) -> Tensor:
    """Retrieval keys alone: [N, d] float32, unit norm. Raises as `extract` does."""
    batches = _batches(backbone, examples, batch_size, "Extracting keys", progress)
    return torch.cat([backbone.retrieval_keys(inputs).cpu() for inputs in batches])


def pooling_matrices(lengths: Sequence[int], payload_tokens: int) -> Tensor:
    """P_m of each prefix (paper, Eq. payload_rewrite): row s of a matrix averages the tokens of segment s.

    m consecutive segments of floor(T / m) tokens, the last taking the remainder; where T < m, segment s is the token
    floor(s T / m). Columns beyond a prefix's own T are zero.

    Returns:
        [n, m, max T] float32.
    """
    m = payload_tokens
    matrices = torch.zeros(len(lengths), m, max(lengths))
    for matrix, T in zip(matrices, lengths, strict=True):
        for s in range(m):
            if m > T:
                begin, end = s * T // m, s * T // m + 1
            else:
                begin, end = s * (T // m), (s + 1) * (T // m) if s < m - 1 else T
            matrix[s, begin:end] = 1 / (end - begin)
    return matrices


def _batches(
    backbone: Backbone, examples: Sequence[Example], batch_size: int, title: str, progress: bool
) -> Iterator[Inputs]:
    """Prefixes in the order of the examples, padded on the right, where padding changes nothing."""
    if batch_size < 1:
        raise ConfigError(f"batch_size must be at least 1, found {batch_size}")
    starts = range(0, len(examples), batch_size)
    for start in track(starts, title, console=Console(stderr=True), disable=not progress, transient=True):
        batch = [backbone.encode_example(example) for example in examples[start : start + batch_size]]
        yield backbone.collate(batch)


@contextlib.contextmanager
def _pooled_projections(
    backbone: Backbone,
    pooling: Tensor,  # [n, m, T]
    payload_keys: Tensor,  # [L, n, J, m, D], filled in
    payload_values: Tensor,  # [L, n, J, m, D], filled in
) -> Iterator[None]:
    """Inside, each layer's keys (before RoPE) and values of a forward pass are pooled as they are made."""

    def keep(destination: Tensor) -> Any:
        def hook(module: torch.nn.Module, arguments: Any, output: Tensor) -> None:
            n, _, T = pooling.shape
            tokens = output.reshape(n, T, backbone.num_kv_heads, backbone.head_dim)
            # At least float32, as the sums are over many tokens.
            tokens = tokens.to(torch.promote_types(tokens.dtype, torch.float32))
            destination.copy_(torch.einsum("nmt,ntjd->njmd", pooling.to(tokens.dtype), tokens))

        return hook

    handles = []
    try:
        module: Any
        for layer, module in enumerate(backbone.attention_layers()):
            key_source = getattr(module, "k_norm", None) or module.k_proj
            handles.append(key_source.register_forward_hook(keep(payload_keys[layer])))
            handles.append(module.v_proj.register_forward_hook(keep(payload_values[layer])))
        yield
    finally:
        for handle in handles:
            handle.remove()

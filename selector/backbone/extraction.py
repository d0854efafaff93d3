"""Extract memory entries from a frozen backbone: query keys and KV payloads of training prefixes.

Under `torchrun` each process takes whole batches, the same ones that a single process would make.

Letters: N examples, n of them in a batch, T prompt tokens, m payload tokens, L layers, J KV heads, D head size,
d hidden size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from ..data.examples import Example
from ..paper.candidate_pool import Pool
from ..runtime.checks import require_at_least
from ..runtime.distributed import in_step, is_main, merge_rows, together
from .model import Backbone, Inputs, pool_query_keys


@dataclass(frozen=True)
class Extraction:
    """The entries e(x) of N prefixes (paper, Eq. key_rewrite and payload_rewrite)."""

    query_keys: Tensor  # [N, 2, d] float32, unit norm: the mean over all tokens, and over the text tokens
    payload_keys: Tensor  # [L, N, J, m, D], before RoPE, after k_norm where the model has one
    payload_values: Tensor  # [L, N, J, m, D]
    pool: Pool | None = None  # where the payloads are on disk; the tensors are then maps of the files

    @property
    def keys(self) -> Tensor:
        """r(x) of each prefix: [N, d] float32, unit norm."""
        return self.query_keys[:, 0].contiguous()


def extract(
    backbone: Backbone,
    examples: Sequence[Example],
    payload_tokens: int,
    *,
    batch_size: int = 8,
    payload_dtype: torch.dtype = torch.float32,
    pool: Pool | None = None,
    progress: bool = False,
) -> Extraction:
    """Run the frozen model over every prefix once and keep its query key and its pooled keys and values. Collective.

    Args:
        payload_tokens: m.
        payload_dtype: bundles keep float16; float32 suits payloads that are to be refined.
        pool: where payloads go, in float16 whatever `payload_dtype` is; without one they are kept in memory, and an
            interruption leaves nothing behind. A pool that is finished is not made again.
        progress: show a progress bar on standard error.

    Raises:
        ConfigError: `payload_tokens` or `batch_size` below 1, or the pool cannot be written.
        TaskDataError: the model's processor refuses an example.
    """
    require_at_least(1, payload_tokens=payload_tokens)
    if pool is not None and (finished := pool.query_keys()) is not None:
        return _in_pool(finished, pool)
    shape = (backbone.num_layers, len(examples), backbone.num_kv_heads, payload_tokens, backbone.head_dim)
    query_keys = _no_query_keys(backbone, len(examples))
    payload_keys, payload_values = (torch.zeros(shape if pool is None else 0, dtype=payload_dtype) for _ in range(2))

    def keep(start: int, inputs: Inputs) -> None:
        pooling = pooling_matrices(inputs["attention_mask"].sum(dim=1).tolist(), payload_tokens).to(backbone.device)
        rows = slice(start, start + len(pooling))
        keys, values = (torch.empty(shape[0], len(pooling), *shape[2:], dtype=payload_dtype) for _ in range(2))
        with _pooled_projections(backbone, pooling, keys, values):
            hidden = backbone.hidden_states(inputs)  # [n, T, d]
        query_keys[rows] = pool_query_keys(hidden, inputs["attention_mask"], backbone.text_mask(inputs)).cpu()
        if pool is not None:
            pool.write(start, keys, values)
        else:
            payload_keys[:, rows], payload_values[:, rows] = keys, values

    with pool.whole_or_gone() if pool is not None else contextlib.nullcontext():
        _each_batch(backbone, examples, batch_size, "Extracting entries", progress, keep)
        merge_rows([query_keys, payload_keys, payload_values])
        if pool is None:
            return Extraction(query_keys, payload_keys, payload_values)
        pool.finish(query_keys)
    return _in_pool(query_keys, pool)


def extract_query_keys(
    backbone: Backbone, examples: Sequence[Example], *, batch_size: int = 8, progress: bool = False
) -> Tensor:
    """Query keys alone: [N, 2, d] float32, unit norm. Collective; raises as `extract` does."""
    query_keys = _no_query_keys(backbone, len(examples))

    def keep(start: int, inputs: Inputs) -> None:
        found = backbone.query_keys(inputs).cpu()
        query_keys[start : start + len(found)] = found

    _each_batch(backbone, examples, batch_size, "Extracting keys", progress, keep)
    merge_rows([query_keys])
    return query_keys


class QueryKeysOf(Protocol):
    """`extract_query_keys`, or what gives the same keys."""

    def __call__(
        self, backbone: Backbone, examples: Sequence[Example], *, batch_size: int, progress: bool = False
    ) -> Tensor: ...


def extract_keys(
    backbone: Backbone, examples: Sequence[Example], *, batch_size: int = 8, progress: bool = False
) -> Tensor:
    """Retrieval keys alone: [N, d] float32, unit norm. Collective; raises as `extract` does."""
    return extract_query_keys(backbone, examples, batch_size=batch_size, progress=progress)[:, 0].contiguous()


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


def _no_query_keys(backbone: Backbone, count: int) -> Tensor:
    """[N, 2, d] zeros, in the type that the backbone's keys have."""
    dtype = torch.promote_types(backbone.model.dtype, torch.float32)
    return torch.zeros(count, 2, backbone.hidden_size, dtype=dtype)


def _in_pool(query_keys: Tensor, pool: Pool) -> Extraction:
    payload_keys, payload_values = (payload[:, pool.num_previous :] for payload in pool.mapped())
    return Extraction(query_keys, payload_keys, payload_values, pool)


def _each_batch(
    backbone: Backbone,
    examples: Sequence[Example],
    batch_size: int,
    title: str,
    progress: bool,
    work: Callable[[int, Inputs], None],
) -> None:
    """Give `work` this process's batches, each with the row of its first example. Collective.

    Prefixes stand in the order of the examples, padded on the right, where padding changes nothing.
    """
    require_at_least(1, batch_size=batch_size)
    steps = in_step(range(0, len(examples), batch_size))
    shown = progress and is_main()
    for mine in track(steps, title, console=Console(stderr=True), disable=not shown, transient=True):
        with together():
            for start in mine:
                batch = [backbone.encode_example(example) for example in examples[start : start + batch_size]]
                work(start, backbone.collate(batch))


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

"""Extract memory entries from a frozen backbone: retrieval keys and KV payloads of training prefixes.

Of latent attention (MLA), keys are latents with the part that RoPE rotates, before that, and values are latents.

Shapes: N examples, n of them in a batch, T prompt tokens, m payload tokens, L layers, J KV heads, D head size, V size
of a head's values, d hidden size.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..data.examples import Example
from ..runtime.progress import track
from .loading import key_norm, value_projection
from .model import Backbone, Inputs, pool_retrieval_keys


@dataclass(frozen=True)
class Extraction:
    """The entries e(x) of N prefixes (paper, Eq. key_rewrite and payload_rewrite)."""

    keys: Tensor  # [N, d] float32, unit norm: r(x) of each prefix
    payload_keys: Tensor  # [L, N, J, m, D], before RoPE, after k_norm where the model has one
    payload_values: Tensor  # [L, N, J, m, V]


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

    Args:
        payload_tokens: m.
        payload_dtype: bundles keep float16; float32 suits payloads that are to be refined.
        progress: show a progress bar on standard error.

    Raises:
        TaskDataError: the model's processor refuses an example.
    """
    N, J, m = len(examples), backbone.num_kv_heads, payload_tokens
    retrieval_keys = _no_keys(backbone, N)
    payload_keys, payload_values = (
        torch.zeros(backbone.num_layers, N, J, m, size, dtype=payload_dtype)
        for size in (backbone.head_dim, backbone.value_dim)
    )

    def keep(start: int, inputs: Inputs) -> None:
        pooling = pooling_matrices(inputs["attention_mask"].sum(dim=1).tolist(), m).to(backbone.device)
        rows = slice(start, start + len(pooling))
        with _pooled_projections(backbone, pooling, payload_keys[:, rows], payload_values[:, rows]):
            hidden = backbone.hidden_states(inputs)  # [n, T, d]
        retrieval_keys[rows] = pool_retrieval_keys(hidden, inputs["attention_mask"]).cpu()

    _each_batch(backbone, examples, batch_size, "Extracting entries", progress, keep)
    return Extraction(retrieval_keys, payload_keys, payload_values)


def extract_keys(
    backbone: Backbone, examples: Sequence[Example], *, batch_size: int = 8, progress: bool = False
) -> Tensor:
    """Retrieval keys alone: [N, d] float32, unit norm. Raises as `extract` does."""
    retrieval_keys = _no_keys(backbone, len(examples))

    def keep(start: int, inputs: Inputs) -> None:
        keys = backbone.retrieval_keys(inputs).cpu()
        retrieval_keys[start : start + len(keys)] = keys

    _each_batch(backbone, examples, batch_size, "Extracting keys", progress, keep)
    return retrieval_keys


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


def _no_keys(backbone: Backbone, count: int) -> Tensor:
    """[N, d] zeros, in the type that the backbone's keys have."""
    dtype = torch.promote_types(backbone.model.dtype, torch.float32)
    return torch.zeros(count, backbone.hidden_size, dtype=dtype)


def _each_batch(
    backbone: Backbone,
    examples: Sequence[Example],
    batch_size: int,
    title: str,
    progress: bool,
    work: Callable[[int, Inputs], None],
) -> None:
    """Call `work` with each batch and the row of its first example. Padding on the right changes nothing."""
    for start in track(range(0, len(examples), batch_size), title, progress):
        batch = [backbone.encode_example(example) for example in examples[start : start + batch_size]]
        work(start, backbone.collate(batch))


@contextlib.contextmanager
def _pooled_projections(
    backbone: Backbone,
    pooling: Tensor,  # [n, m, T]
    payload_keys: Tensor,  # [L, n, J, m, D], filled in
    payload_values: Tensor,  # [L, n, J, m, V], filled in
) -> Iterator[None]:
    """Inside, each layer's keys (before RoPE) and values of a forward pass are pooled as they are made."""

    def keep(destination: Tensor, norm: Any) -> Any:
        def hook(module: torch.nn.Module, arguments: Any, output: Tensor) -> None:
            n, _, T = pooling.shape
            shape = (n, T, backbone.num_kv_heads, backbone.head_dim)
            tokens = output.reshape(shape) if norm is None else _normed(norm, output, shape)
            # At least float32, as the sums are over many tokens.
            tokens = tokens.to(torch.promote_types(tokens.dtype, torch.float32))
            destination.copy_(torch.einsum("nmt,ntjd->njmd", pooling.to(tokens.dtype), tokens))

        return hook

    def keep_latents(attention: Any, keys: Tensor, values: Tensor) -> Any:
        def hook(module: torch.nn.Module, arguments: Any, output: Tensor) -> None:
            V = backbone.value_dim
            tokens = torch.cat([attention.kv_a_layernorm(output[..., :V]), output[..., V:]], dim=-1)  # [n, T, D]
            tokens = tokens.to(torch.promote_types(tokens.dtype, torch.float32))
            pooled = torch.einsum("nmt,ntd->nmd", pooling.to(tokens.dtype), tokens)[:, None]
            keys.copy_(pooled)
            values.copy_(pooled[..., :V])

        return hook

    handles = []
    try:
        module: Any
        for layer, module in enumerate(backbone.attention_layers()):
            if backbone.is_latent:
                hook = keep_latents(module, payload_keys[layer], payload_values[layer])
                handles.append(module.kv_a_proj_with_mqa.register_forward_hook(hook))
                continue
            handles.append(module.k_proj.register_forward_hook(keep(payload_keys[layer], key_norm(module))))
            of_values = keep(payload_values[layer], getattr(module, "v_norm", None))
            handles.append(value_projection(module).register_forward_hook(of_values))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _normed(norm: Any, projected: Tensor, shape: tuple[int, int, int, int]) -> Tensor:
    """Projected keys [n, T, J D] after `k_norm`, which is over one head or over all heads of a token: `shape`."""
    weight = getattr(norm, "weight", None)  # Gemma 4's norm of values has none
    over_a_head = weight is None or weight.shape[-1] == shape[-1]
    keys: Tensor = norm(projected.reshape(shape) if over_a_head else projected)
    return keys.reshape(shape)

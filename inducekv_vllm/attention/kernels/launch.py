"""Checks and launches the kernels. Shapes: see the package."""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime._async_compile import AsyncCompileMode

from . import device
from .layout import LayerPool, SlotTables, StepTensors
from .tiles import LaunchShape, Processors, lanes_per_row

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
HEAD_SIZES = range(16, 257, 8)
LATENT_SIZES, ROTATED_SIZES = range(16, 513, 8), range(16, 129, 8)  # of values, and of what keys have beside them
MOST_HEADS_PER_KV_HEAD = 128
MAP_ROWS_AT_A_TIME = 16
# Triton decides when it is first imported, by TRITON_INTERPRET, whether kernels are compiled or interpreted.
INTERPRETED = not isinstance(device.memory_tiles, triton.JITFunction)


def add_memory(
    pool: LayerPool,
    tables: SlotTables,
    step: StepTensors,
    query: Tensor,
    output: Tensor,
    self_lse: Tensor | None,
    scale: float,
    shape: LaunchShape,
) -> None:
    """Add memory to the output of self-attention, in place. Rows that stand in no tile are not touched.

    It never waits for the device, and allocates only the partial results of a split.

    Args:
        pool: as `check` has accepted it.
        step: a plan for `shape`.
        query: [R, H, D], rotated.
        output: [R, H, V], of self-attention.
        self_lse: [R, H] float32, the natural log-sum-exp of self-attention, with any strides; needed if `shape.lse`.
        scale: the softmax scale.
    """
    arguments = arguments_of(pool, tables, step, query, output, self_lse, scale, shape)
    kernel, grid = device.memory_tiles, (shape.programs, len(pool.keys), 1)
    if INTERPRETED:
        kernel[grid](**arguments)
        return
    # Triton's own launch looks at each argument for what it may assume of it, and makes a text of that to find what it
    # has compiled: most of a launch's time on the host. Here what may differ between calls finds it.
    seen = tables, shape.kind, *(_traits(tensor) for tensor in (query, output, self_lse) if tensor is not None)
    if (compiled := pool.compiled.get(seen)) is None:
        compiled = pool.compiled[seen] = kernel.warmup(grid=grid, **arguments)
    compiled[grid](*map(arguments.__getitem__, kernel.arg_names))


def _traits(tensor: Tensor) -> tuple[Any, ...]:
    """What the kernel is compiled for; the strides of log-sum-exps are not part of it."""
    return tensor.dtype, tensor.data_ptr() % 16, tensor.stride()[:2] if tensor.dim() == 3 else None


def compile_all(launches: Sequence[dict[str, Any]]) -> None:
    """Compile the kernel for each of these arguments, side by side: most of the compiler runs outside Python's lock."""
    if INTERPRETED:
        return
    threads = min(len(launches), len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(threads) as executor, AsyncCompileMode(executor):
        for arguments in launches:
            device.memory_tiles.warmup(grid=(1, 1), **arguments)


def arguments_of(
    pool: LayerPool,
    tables: SlotTables,
    step: StepTensors,
    query: Tensor,
    output: Tensor,
    self_lse: Tensor | None,
    scale: float,
    shape: LaunchShape,
) -> dict[str, Any]:
    """The kernel's arguments by name, with Triton's `num_warps` and `num_stages`; without any check."""
    _, H, D = query.shape
    J, V = pool.keys.shape[0], pool.values.shape[-1]
    G = H // J
    lse = self_lse if shape.lse else None
    of_step = _arguments_of_step(tables, step, shape, J, V)
    return {
        **(pool.arguments_with_maps if shape.maps else pool.arguments),
        **of_step,
        "query": query,
        "output": output,
        "self_lse": lse,
        "scale": scale,
        "query_row": query.stride(0),
        "query_head": query.stride(1),
        "output_row": output.stride(0),
        "output_head": output.stride(1),
        "lse_row": 0 if lse is None else lse.stride(0),
        "lse_head": 0 if lse is None else lse.stride(1),
        "Z": D - V,
        "ZP": 0 if D == V else triton.next_power_of_2(D - V),
        "G": G,
        "LANES": lanes_per_row(G, shape.maps),
        # The interpreter multiplies the bits of bfloat16 numbers as if they were whole numbers.
        "UPCAST": INTERPRETED and query.dtype == torch.bfloat16,
        # Left to itself a float32 product is rounded to TF32.
        "PRECISION": "ieee" if query.dtype == torch.float32 else "tf32",
    }


@lru_cache(maxsize=1)  # every layer of a step asks
def _arguments_of_step(tables: SlotTables, step: StepTensors, shape: LaunchShape, J: int, V: int) -> dict[str, Any]:
    """Layers run one after the other and share the partial results."""
    partial_output = partial_sums = None
    if shape.split:
        parts = (shape.parts, J, shape.block_rows, V)
        partial_output = torch.empty(parts, dtype=torch.float32, device=step.count.device)
        partial_sums = torch.empty((*parts[:2], 2, parts[2]), dtype=torch.float32, device=step.count.device)
    return {
        **vars(tables),
        **vars(step),
        "partial_output": partial_output,
        "partial_sums": partial_sums,
        "column_slot": tables.length.stride(0),
        "terms_slot": tables.token_index.stride(0),
        "map_slot": tables.map_index.stride(0),
        "height": shape.height,
        "J": J,
        "V": V,
        "VP": triton.next_power_of_2(V),
        "BM": shape.block_rows,
        "BN": shape.block_tokens,
        "BK": MAP_ROWS_AT_A_TIME,
        # Keys are found by a read of their places, which takes as many stages as the read of the keys.
        "INDIRECT_STAGES": shape.stages if shape.stages == 2 else 2 * shape.stages - 1,
        "MAPS": shape.maps,
        "LSE": shape.lse,
        "SPLIT": shape.split,
        "num_warps": shape.warps,
        "num_stages": shape.stages,
    }


def processors(of: torch.device) -> Processors:
    """The limits of a CUDA device."""
    properties = triton.runtime.driver.active.utils.get_device_properties(of.index or 0)
    return Processors(properties["multiprocessor_count"], properties["max_shared_mem"])


def check(pool: LayerPool, num_heads: int) -> None:
    """What depends on the model, once; the shapes of tables and plans are those that `layout.py` makes.

    Raises:
        ValueError: the kernels cannot work with this pool.
    """
    heads, _, head_size = pool.keys.shape
    value_size = pool.values.shape[-1]
    if value_size < head_size:
        if value_size not in LATENT_SIZES or head_size - value_size not in ROTATED_SIZES:
            raise ValueError(
                f"memory attention on GPUs needs latents of a multiple of 8 numbers, up to {LATENT_SIZES[-1]} and "
                f"{ROTATED_SIZES[-1]} that are rotated, found {value_size} and {head_size - value_size}"
            )
    elif head_size not in HEAD_SIZES:
        raise ValueError(
            f"memory attention on GPUs needs a head size that is a multiple of 8 from {HEAD_SIZES[0]} to "
            f"{HEAD_SIZES[-1]}, found {head_size}"
        )
    if num_heads % heads or num_heads // heads > MOST_HEADS_PER_KV_HEAD:
        raise ValueError(
            f"memory attention on GPUs needs 1 to {MOST_HEADS_PER_KV_HEAD} query heads for each KV head, "
            f"found {num_heads} query heads and {heads} KV heads"
        )
    if pool.keys.dtype not in DTYPES:
        raise ValueError(f"the pool must be {', '.join(map(str, DTYPES))}, found {pool.keys.dtype}")

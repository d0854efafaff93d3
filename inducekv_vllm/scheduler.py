"""The prefix cache around the answer pass of a request with memory.

Memory may act from a later position than the first. K and V before that position are the untouched model's, so their
blocks keep vLLM's hashes and are shared with every other request. Hashes are chained: one extra key, in the block of
the first active position, keeps that block and all later ones, of the prompt or generated, apart from untouched ones
and from those of any other memory.

`--scheduler-cls inducekv_vllm.scheduler.memory_scheduler` selects it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import BlockHash, generate_block_hash_extra_keys, hash_block_tokens
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from .engine.wire import InjectionSpec, parse_spec


def memory_scheduler(*, vllm_config: Any, **options: Any) -> Scheduler:
    """The scheduler of an engine with memory: vLLM's own choice of two, with the prefix cache as described above."""
    asynchronous = vllm_config.scheduler_config.async_scheduling
    return (_MemoryAsyncScheduler if asynchronous else _MemoryScheduler)(vllm_config=vllm_config, **options)


class _MemoryRequests(Scheduler):
    def add_request(self, request: Request) -> None:
        spec = parse_spec(request.sampling_params.extra_args if request.sampling_params else None)
        # Without a hasher there is no prefix cache.
        if isinstance(spec, InjectionSpec) and spec.start > 0 and request._block_hasher is not None:
            hash_fn = get_hash_fn_by_name(self.vllm_config.cache_config.prefix_caching_hash_algo)
            request._block_hasher = block_hasher(self.hash_block_size, hash_fn, spec)
            del request.block_hashes[spec.start // self.hash_block_size :]  # vLLM's, made with the request
            request.update_block_hashes()
        super().add_request(request)


class _MemoryScheduler(_MemoryRequests, Scheduler):
    pass


class _MemoryAsyncScheduler(_MemoryRequests, AsyncScheduler):
    pass


def block_hasher(
    block_size: int, hash_fn: Callable[[Any], bytes], spec: InjectionSpec
) -> Callable[[Request], list[BlockHash]]:
    """vLLM's hasher of a request's new full blocks, with the memory in the block of its first active position."""

    def hash_new_blocks(request: Request) -> list[BlockHash]:
        hashes: list[BlockHash] = []
        parent = request.block_hashes[-1] if request.block_hashes else None
        for first in range(len(request.block_hashes) * block_size, request.num_tokens - block_size + 1, block_size):
            end = first + block_size
            extra_keys, _ = generate_block_hash_extra_keys(request, first, end, 0)
            if first <= spec.start < end:
                extra_keys = (*(extra_keys or ()), ("inducekv", spec.content, spec.start))
            parent = hash_block_tokens(hash_fn, parent, request.all_token_ids[first:end], extra_keys)
            hashes.append(parent)
        return hashes

    return hash_new_blocks

"""One request for memory: it is decided when the prompt is there, and goes back to where memory begins to act.

    undecided   the prompt runs through the untouched model, like any other; in the step that completes it, the first
                rank's worker decides (`workers/decisions.py`) and attaches its decision to the step's output
    starting    the sampled token is dropped, and the next step computes the positions from A on again, with memory
    settled     it runs with what was decided; behind a closed gate, the first token stands, and nothing else happened

A is the first position that memory acts on; for a stored answer, which is said behind the prompt, the prompt's last.
K and V before it are the untouched model's, so their blocks keep vLLM's hashes and are shared with every other request.
Hashes are chained: one extra key, in A's block, keeps that block and all later ones, of the prompt or generated, apart
from untouched ones and from those of any other memory. Of two memories, the block in which the later one begins has the
keys of both: the blocks before it are those of every request that has the earlier one there.

Until the decision, nobody else gets the block of the prompt's last token, even if that fills it: where A lies in it,
the request goes back in place. Otherwise vLLM's own preemption gives it other blocks.

`--scheduler-cls inducekv_vllm.scheduler.memory_scheduler` selects it.
"""

import operator
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property, partial, wraps
from typing import Any

from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import block_pool, kv_cache_utils
from vllm.v1.core.kv_cache_utils import BlockHash, generate_block_hash_extra_keys, hash_block_tokens
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from .protocol import (
    DECISIONS,
    JUDGE,
    MEDIA,
    STARTS,
    BlockKey,
    Decided,
    DecideSpec,
    InjectionSpec,
    Start,
    parse_specs,
)
from .vllm_seams.patches import patch

NEVER = 1 << 60  # a step
EXTRA_KEYS = ("generate_block_hash_extra_keys", "generate_lookahead_block_hash_extra_keys")  # the latter since 0.33


def memory_scheduler(*, vllm_config: Any, **options: Any) -> Scheduler:
    """The scheduler of an engine with memory: vLLM's own choice of two, with the steps described above."""
    asynchronous = vllm_config.scheduler_config.async_scheduling
    return (_MemoryAsyncScheduler if asynchronous else _MemoryScheduler)(vllm_config=vllm_config, **options)


class _Phase(Enum):
    UNDECIDED = "the worker will decide once it knows the prompt"
    STARTING = "the worker hears with the request's next step what was decided"
    SETTLED = "the request runs with what was decided"


@dataclass
class _Asked:
    """A request whose memory depends on its prompt, until its last output."""

    decided: Decided | None = None
    start: Start | None = None  # that the worker has not heard of
    held_logprobs: Any = None  # of the prompt; they came with the token that was dropped

    @property
    def phase(self) -> _Phase:
        if self.decided is None:
            return _Phase.UNDECIDED
        return _Phase.SETTLED if self.start is None else _Phase.STARTING

    @cached_property
    def packed(self) -> str:
        """What is decided, as outputs bring it."""
        assert self.decided is not None
        return self.decided.pack()


class _MemoryRequests(Scheduler):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.asked: dict[str, _Asked] = {}  # by request id
        self.lacking_media: set[str] = set()  # of any request, see `_media_again`
        patch(self.kv_cache_manager.coordinator, "cache_blocks", lambda cache: partial(self._cache_blocks, cache))
        if self.enable_kv_cache_events:
            tell_events_of_memory()

    # ---- the steps of a request, in their order ------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        specs = parse_specs(request.sampling_params.extra_args if request.sampling_params else None)
        to_decide = [spec for spec in specs if isinstance(spec, DecideSpec)]
        if to_decide and request.request_id not in self.requests:
            self.asked[request.request_id] = _Asked()
            request.skip_reading_prefix_cache |= any(spec.retrieval for spec in to_decide)  # until it is decided
        else:
            self._keep_apart(request, [spec for spec in specs if isinstance(spec, InjectionSpec)])
        super().add_request(request)
        if request.sampling_params is not None and JUDGE in (request.sampling_params.extra_args or {}):
            self.waiting.remove_requests([request])  # a request for memory waits for its answer
            self.waiting.prepend_request(request)

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        output = super().schedule(*args, **kwargs)
        for request_id in self.asked.keys() - self.requests.keys():  # aborted
            del self.asked[request_id]
        if media := self._media_again(output):
            setattr(output, MEDIA, media)
        starts = {}
        for request_id, asked in self.asked.items():
            if asked.start is not None and request_id in output.num_scheduled_tokens:
                starts[request_id], asked.start = asked.start, None
        if starts:
            setattr(output, STARTS, starts)
        return output

    def _media_again(self, output: SchedulerOutput) -> dict[str, list[Any]]:
        """The features of a request that is to encode media whose data the worker does not have, by its id.

        vLLM sends a new request without the data that the prefix cache makes needless. When those blocks are gone and
        it goes on from an earlier position, vLLM's V1 runner has nothing to encode and ends the engine.
        """
        new = {each.req_id: each.mm_features for each in output.scheduled_new_reqs}
        if not (new or self.lacking_media):
            return {}
        whole = {name for name, sent in new.items() if all(map(operator.is_, sent, self.requests[name].mm_features))}
        lacking = ((self.lacking_media | new.keys()) - whole) & self.requests.keys()
        needed = lacking.intersection(output.scheduled_encoder_inputs) - new.keys()
        self.lacking_media = lacking - needed
        return {name: self.requests[name].mm_features for name in needed}

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        super()._update_after_schedule(scheduler_output)
        for request_id, asked in self.asked.items():
            if asked.phase is _Phase.UNDECIDED and request_id in scheduler_output.num_scheduled_tokens:
                request = self.requests[request_id]
                if not request.is_prefill_chunk:  # asynchronous scheduling must not run ahead of the decision
                    request.next_decode_eligible_step = NEVER

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        decisions: Mapping[str, Decided] = getattr(model_runner_output, DECISIONS, {})
        going_back = {}
        for request_id, decided in decisions.items():
            if (start := self._decided(request_id, decided, model_runner_output)) is not None:
                going_back[request_id] = start
        self._return_prompt_logprobs(model_runner_output)
        outputs: dict[int, EngineCoreOutputs] = super().update_from_output(scheduler_output, model_runner_output)
        for request_id, start in going_back.items():
            if (request := self.requests.get(request_id)) is not None and not request.is_finished():
                self.go_back(request, start)
        self._deliver(outputs)
        return outputs

    # ---- decisions -----------------------------------------------------------------------------------------------

    def _decided(self, request_id: str, decided: Decided, output: ModelRunnerOutput) -> Start | None:
        """Take what is decided. What a request starts with that goes back, so that its token is dropped."""
        asked, request = self.asked.get(request_id), self.requests.get(request_id)
        if asked is None or asked.phase is not _Phase.UNDECIDED:
            return None
        if request is None or request.is_finished():
            del self.asked[request_id]
            return None
        request.next_decode_eligible_step = 0
        request.skip_reading_prefix_cache = request.get_skip_reading_prefix_cache()
        asked.decided = decided
        if decided.error is not None:
            self._drop_token(asked, request_id, output)
            self.encoder_cache_mismatch_reqs.add(request_id)  # vLLM ends these with an error
            return None
        start = decided.start(request.num_prompt_tokens)
        if decided.same_pass:
            self._take_blocks(request, start)
        if start.redo_from is None:
            return None
        self._drop_token(asked, request_id, output)
        asked.start = start
        return start

    def _drop_token(self, asked: _Asked, request_id: str, output: ModelRunnerOutput) -> None:
        """No output, no check for a stop, no step of a grammar."""
        output.sampled_token_ids[output.req_id_to_index[request_id]] = []
        asked.held_logprobs = output.prompt_logprobs_dict.pop(request_id, None)

    def go_back(self, request: Request, start: Start) -> None:
        """Let the request compute the positions from A on again, in blocks of its own; with LoRA, all of them."""
        assert start.redo_from is not None
        num_cached = (request.num_prompt_tokens - 1) // self.hash_block_size  # see `_cache_blocks`
        self._take_blocks(request, start)
        if request.status != RequestStatus.RUNNING:  # preempted meanwhile, in asynchronous scheduling
            request.drop_stale_output = True
        elif (
            start.adapter is None
            and len(self.kv_cache_config.kv_cache_groups) == 1
            and start.redo_from // self.hash_block_size >= num_cached
        ):
            request.num_computed_tokens = start.redo_from
            request.num_output_placeholders = 0  # asynchronous scheduling: the dropped token's
            # Drafts that follow the dropped token are ignored.
            request.is_prefill_chunk, request.spec_token_ids = True, []
        else:
            events = len(request.events)
            self.running.remove(request)
            self._preempt_request(request, time.monotonic(), drop_stale_output=True)
            del request.events[events:]  # to vLLM's metrics it is no preemption

    def _take_blocks(self, request: Request, start: Start) -> None:
        """A request's blocks are those of its memories, from A's on, or all those of its adapter."""
        self._keep_apart(request, start.injections)
        if start.adapter is not None:
            request.lora_request = start.adapter.lora_request
            request.block_hashes.clear()
            request.update_block_hashes()

    def _keep_apart(self, request: Request, injections: Sequence[InjectionSpec]) -> None:
        """From A's block on, the request's blocks are its memories'."""
        if request._block_hasher is None or not injections:  # without a hasher there is no prefix cache
            return
        hash_fn = get_hash_fn_by_name(self.vllm_config.cache_config.prefix_caching_hash_algo)
        keys, lookahead = tuple(spec.block_key for spec in injections), lookahead_of(self.vllm_config)
        request._block_hasher = BlockHasher(self.hash_block_size, hash_fn, keys, lookahead)
        first_active = min(spec.first_active for spec in injections)
        del request.block_hashes[first_active // self.hash_block_size :]  # vLLM's
        request.update_block_hashes()

    def _cache_blocks(self, cache: Callable[[Request, int], None], request: Request, num_tokens: int) -> None:
        """Cache a request's full blocks: that of the prompt's last token waits until it is known what is in it."""
        asked = self.asked.get(request.request_id)
        if asked is not None and asked.phase is _Phase.UNDECIDED:
            num_tokens = min(num_tokens, request.num_prompt_tokens - 1)
        cache(request, num_tokens)

    # ---- outputs -------------------------------------------------------------------------------------------------

    def _return_prompt_logprobs(self, output: ModelRunnerOutput) -> None:
        """Those that came with a dropped token come with the next one."""
        for request_id, asked in self.asked.items():
            index = output.req_id_to_index.get(request_id)
            if asked.held_logprobs is not None and index is not None and output.sampled_token_ids[index]:
                output.prompt_logprobs_dict[request_id], asked.held_logprobs = asked.held_logprobs, None

    def _deliver(self, outputs: dict[int, EngineCoreOutputs]) -> None:
        """Attach decisions to all outputs of their requests.

        The API process merges those that have not been read and keeps the fields of the last, which may be any: a stop
        string ends an answer there.
        """
        for client in outputs.values():
            for output in client.outputs:
                asked = self.asked.get(output.request_id)
                if asked is None or asked.decided is None:
                    continue
                output.kv_transfer_params = {**(output.kv_transfer_params or {}), "inducekv": asked.packed}
                if output.finished:
                    del self.asked[output.request_id]


class _MemoryScheduler(_MemoryRequests, Scheduler):
    pass


class _MemoryAsyncScheduler(_MemoryRequests, AsyncScheduler):
    pass


@dataclass(frozen=True)
class BlockHasher:
    """vLLM's hasher of a request's new full blocks, with each memory in the block of its first active position."""

    block_size: int
    hash_fn: Callable[[Any], bytes]
    keys: tuple[BlockKey, ...]  # in the order of the request's memories
    lookahead: int = 0  # tokens behind a block that its hash covers: what makes drafts has seen them

    def __call__(self, request: Request) -> list[BlockHash]:
        hashes: list[BlockHash] = []
        parent, size = request.block_hashes[-1] if request.block_hashes else None, self.block_size
        for first in range(len(request.block_hashes) * size, request.num_tokens - self.lookahead - size + 1, size):
            end, seen = first + size, first + size + self.lookahead
            extra_keys, _ = generate_block_hash_extra_keys(request, first, seen, 0)
            extra_keys = self.with_memories(extra_keys, first, end)
            if self.lookahead:  # as vLLM has them, so that blocks before the memory are shared
                extra_keys = (extra_keys, *request.all_token_ids[end:seen])
            parent = hash_block_tokens(self.hash_fn, parent, request.all_token_ids[first:end], extra_keys)
            hashes.append(parent)
        return hashes

    def with_memories(self, extra_keys: tuple[Any, ...] | None, first: int, end: int) -> tuple[Any, ...] | None:
        """What is hashed beside the tokens `first` to `end`: all memories that act on them, if one begins there."""
        acting = [key for key in self.keys if key[2] < end]
        return (*(extra_keys or ()), *acting) if any(first <= key[2] for key in acting) else extra_keys


def lookahead_of(config: Any) -> int:
    """The tokens behind a block that its hash covers: since vLLM 0.33, with EAGLE and its kin."""
    return int(getattr(config, "num_hash_lookahead_tokens", 0))


def tell_events_of_memory() -> None:
    """Let vLLM's KV cache events have the memory: who tells blocks by their tokens and these keys must not take one
    with memory for an untouched one.
    """
    plain, lookahead = EXTRA_KEYS
    patch(block_pool, plain, lambda _: with_memory_keys(getattr(kv_cache_utils, plain)))
    if hasattr(block_pool, lookahead):
        patch(block_pool, lookahead, lambda _: with_memory_keys(getattr(kv_cache_utils, lookahead)))


def with_memory_keys(generate: Callable[..., Any]) -> Callable[..., Any]:
    """One of vLLM's `EXTRA_KEYS`, with the memory."""

    @wraps(generate)
    def extra_keys(
        request: Request, start_token_idx: int, end_token_idx: int, *others: Any, **named: Any
    ) -> tuple[tuple[Any, ...] | None, int]:
        keys, next_mm_idx = generate(request, start_token_idx, end_token_idx, *others, **named)
        if isinstance(hasher := request._block_hasher, BlockHasher):
            keys = hasher.with_memories(keys, start_token_idx, end_token_idx)
        return keys, next_mm_idx

    return extra_keys

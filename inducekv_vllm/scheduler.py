"""One request for memory: it is decided when the prompt is there, and goes back to where memory begins to act.

    undecided   the prompt runs through the untouched model, like any other; in the step that completes it, the first
                rank's worker decides (`workers/undecided.py`) and attaches its decision to the step's output
    closed      the sampled token stands; nothing else has happened
    open        the token is dropped, and the next step computes the positions from A on again, with memory

A is the first position that memory acts on; for stored answers, which enter the next token's distribution, the prompt's
last one. K and V before it are the untouched model's, so their blocks keep vLLM's
hashes and are shared with every other request. Hashes are chained: one extra key, in A's block, keeps that block and
all later ones, of the prompt or generated, apart from untouched ones and from those of any other memory.

If A's block is not full, nobody else has it, and the request goes back in place. Otherwise vLLM's own preemption gives
it other blocks. A prompt that the same owner has asked about before is decided at once.

`--scheduler-cls inducekv_vllm.scheduler.memory_scheduler` selects it.
"""

from __future__ import annotations

import hashlib
import time
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from cachetools import LRUCache
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import BlockHash, generate_block_hash_extra_keys, hash_block_tokens
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from .engine.wire import DECISIONS, STARTS, DecideSpec, Decision, InjectionSpec, Start, parse_spec
from .host.config import InduceKVConfig

NEVER = 1 << 60  # a step


def memory_scheduler(*, vllm_config: Any, **options: Any) -> Scheduler:
    """The scheduler of an engine with memory: vLLM's own choice of two, with the steps described above."""
    asynchronous = vllm_config.scheduler_config.async_scheduling
    return (_MemoryAsyncScheduler if asynchronous else _MemoryScheduler)(vllm_config=vllm_config, **options)


class _MemoryRequests(Scheduler):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = InduceKVConfig.from_vllm(self.vllm_config) or InduceKVConfig()
        # By request id.
        self.undecided: dict[str, tuple[DecideSpec, bytes]] = {}  # with its `_identity`
        self.decisions: dict[str, Decision] = {}  # for the API process
        self.told: set[str] = set()  # requests whose first output has brought it
        self.starts: dict[str, Start] = {}  # for the workers, with the request's next step
        self.without_media: dict[str, None] = {}  # the worker has no pixels: the prefix cache had what they become
        self.prompt_logprobs: dict[str, Any] = {}  # came with the token that was dropped
        self.known: LRUCache[bytes, Decision] = LRUCache(config.decision_cache_entries)  # by `_identity`
        self.rewound: Counter[str] = Counter()  # how requests went back

    # ---- the steps of a request, in their order ------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        spec = parse_spec(request.sampling_params.extra_args if request.sampling_params else None)
        if isinstance(spec, InjectionSpec):
            self._keep_apart(request, spec)
        elif spec is not None and request.request_id not in self.requests:
            identity = _identity(request, spec)
            known = self.known.get(identity)
            if known is not None and (known.valid_until is None or time.time() < known.valid_until):
                self.decisions[request.request_id] = replace(known, source="cached", seconds=0.0, same_pass=False)
                self.starts[request.request_id] = start = _start_of(request, spec, known)
                self._take_blocks(request, start)
            else:
                self.undecided[request.request_id] = spec, identity
                request.skip_reading_prefix_cache |= spec.retrieval  # until it is decided
        super().add_request(request)

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        output = super().schedule(*args, **kwargs)
        for new in output.scheduled_new_reqs:
            if new.req_id in self.undecided and any(feature.data is None for feature in new.mm_features):
                self.without_media[new.req_id] = None
        for state in (self.undecided, self.decisions, self.starts, self.prompt_logprobs, self.without_media):
            for request_id in [each for each in state if each not in self.requests]:  # aborted
                del state[request_id]
        self.told &= self.decisions.keys()
        starts = {each: self.starts.pop(each) for each in list(self.starts) if each in output.num_scheduled_tokens}
        if starts:
            setattr(output, STARTS, starts)
        return output

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        super()._update_after_schedule(scheduler_output)
        for request_id in self.undecided.keys() & scheduler_output.num_scheduled_tokens.keys():
            request = self.requests[request_id]
            if not request.is_prefill_chunk:  # asynchronous scheduling must not run ahead of the decision
                request.next_decode_eligible_step = NEVER

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        decisions: Mapping[str, Decision] = getattr(model_runner_output, DECISIONS, {})
        rewinding = [each for each, decision in decisions.items() if self._decided(each, decision, model_runner_output)]
        self._return_prompt_logprobs(model_runner_output)
        outputs: dict[int, EngineCoreOutputs] = super().update_from_output(scheduler_output, model_runner_output)
        for request_id in rewinding:
            if (request := self.requests.get(request_id)) is not None and not request.is_finished():
                self._rewind(request, self.starts[request_id])
        self._tell(outputs)
        return outputs

    # ---- decisions -----------------------------------------------------------------------------------------------

    def _decided(self, request_id: str, decision: Decision, output: ModelRunnerOutput) -> bool:
        """Take a decision; whether the request goes back, and its token is dropped."""
        undecided, request = self.undecided.pop(request_id, None), self.requests.get(request_id)
        if undecided is None or request is None or request.is_finished():
            return False
        spec, identity = undecided
        request.next_decode_eligible_step = 0
        request.skip_reading_prefix_cache = request.get_skip_reading_prefix_cache()
        self.decisions[request_id] = decision
        if decision.error is None:
            if self.known.maxsize:
                self.known[identity] = decision
            media = request.mm_features if request_id in self.without_media else None
            start = _start_of(request, spec, decision, media)
            if decision.same_pass:
                self._take_blocks(request, start)
                return False
            if start.injection is None and start.adapter is None and start.answers is None:
                return False
            self.starts[request_id] = start
        # Dropped: no output, no check for a stop, no step of a grammar.
        index = output.req_id_to_index[request_id]
        output.sampled_token_ids[index] = []
        if (held := output.prompt_logprobs_dict.pop(request_id, None)) is not None:
            self.prompt_logprobs[request_id] = held
        if decision.error is not None:
            self.encoder_cache_mismatch_reqs.add(request_id)  # vLLM ends these with an error
            return False
        return True

    def _rewind(self, request: Request, start: Start) -> None:
        """Let the request compute the positions from A on again, in blocks of its own; with LoRA, all of them."""
        num_full = len(request.block_hashes)
        self._take_blocks(request, start)
        if request.status != RequestStatus.RUNNING:  # preempted meanwhile, in asynchronous scheduling
            request.drop_stale_output = True
            self.rewound["preempted"] += 1
        elif (
            start.adapter is None
            and len(self.kv_cache_config.kv_cache_groups) == 1
            and start.position // self.hash_block_size >= num_full
        ):
            request.num_computed_tokens = start.position
            request.num_output_placeholders = 0  # asynchronous scheduling: the dropped token's
            # Drafts that follow the dropped token are ignored.
            request.is_prefill_chunk, request.spec_token_ids = True, []
            self.rewound["in place"] += 1
        else:
            events = len(request.events)
            self.running.remove(request)
            self._preempt_request(request, time.monotonic(), drop_stale_output=True)
            del request.events[events:]  # to vLLM's metrics it is no preemption
            self.rewound["other blocks"] += 1

    def _take_blocks(self, request: Request, start: Start) -> None:
        """A request's blocks are those of its memory, from A's on, or all those of its adapter."""
        if start.injection is not None:
            self._keep_apart(request, start.injection)
        elif start.adapter is not None:
            request.lora_request = start.adapter.lora_request
            request.block_hashes.clear()
            request.update_block_hashes()

    def _keep_apart(self, request: Request, injection: InjectionSpec) -> None:
        """From A's block on, the request's blocks are its memory's."""
        if request._block_hasher is None:  # without a hasher there is no prefix cache
            return
        hash_fn = get_hash_fn_by_name(self.vllm_config.cache_config.prefix_caching_hash_algo)
        request._block_hasher = block_hasher(self.hash_block_size, hash_fn, injection)
        del request.block_hashes[injection.start // self.hash_block_size :]  # vLLM's
        request.update_block_hashes()

    # ---- outputs -------------------------------------------------------------------------------------------------

    def _return_prompt_logprobs(self, output: ModelRunnerOutput) -> None:
        """Those that came with a dropped token come with the next one."""
        for request_id in list(self.prompt_logprobs):
            index = output.req_id_to_index.get(request_id)
            if index is not None and output.sampled_token_ids[index]:
                output.prompt_logprobs_dict[request_id] = self.prompt_logprobs.pop(request_id)

    def _tell(self, outputs: dict[int, EngineCoreOutputs]) -> None:
        """Attach decisions to the requests' first outputs, and to their last: not every client sees the first."""
        for client in outputs.values():
            for output in client.outputs:
                decision = self.decisions.get(output.request_id)
                if decision is None or (output.request_id in self.told and not output.finished):
                    continue
                output.kv_transfer_params = {**(output.kv_transfer_params or {}), "inducekv": decision.to_json()}
                self.told.add(output.request_id)
                if output.finished:
                    del self.decisions[output.request_id]


class _MemoryScheduler(_MemoryRequests, Scheduler):
    pass


class _MemoryAsyncScheduler(_MemoryRequests, AsyncScheduler):
    pass


def _start_of(request: Request, spec: DecideSpec, decision: Decision, media: Sequence[Any] | None = None) -> Start:
    """Answers that are stored enter behind the prompt: its last token is computed again."""
    injection, facts = decision.injection, decision.facts
    return Start(
        position=request.num_prompt_tokens - 1 if injection is None else injection.start,
        injection=injection,
        adapter=dict(spec.adapters).get(decision.task or ""),
        answers=None if facts is None else facts.answers,
        media=media,
    )


def _identity(request: Request, spec: DecideSpec) -> bytes:
    """A digest that two requests share only if they have one owner and their decisions would be the same.

    It includes the user's cache salt: users who must not share prefix blocks must not share decisions either.
    """
    sha = hashlib.sha256(array("q", request.prompt_token_ids or ()).tobytes())
    for feature in request.mm_features:
        sha.update(f"\n{feature.modality} {feature.mm_position.offset} {feature.identifier}".encode())
    adapter = request.lora_request.lora_name if request.lora_request is not None else None
    sha.update(repr((adapter, request.cache_salt, spec)).encode())
    return sha.digest()


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

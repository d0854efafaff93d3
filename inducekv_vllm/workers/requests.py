"""The requests of a worker that ask for memory: one record each, which follows the schedule.

    undecided   the untouched model computes the prompt; the step that completes it is followed by a decision
    complete    the prompt is there, and the step's output brings the decision
    settled     the request runs with what was decided, or with what its parameters said from the beginning

Shapes: T prompt tokens of a request, d hidden size, H evidence of a gate, F features of a layer's values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from ..attention.ranges import Region
from ..attention.resident_bundle import ResidentBundle
from ..attention.slots import ActingRows, RequestMemory, Slots
from ..bundle.lookup import QueryFeatures
from ..errors import InduceKVError
from ..protocol import MEDIA, STARTS, Decided, DecideSpec, InjectionSpec, Start, parse_specs
from ..retrieval.entry_terms import EntryTerms, FloatArray, Retrieval, entry_terms
from ..vllm_seams.device import HostCopy
from .answering import put_answer

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput

    from ..vllm_seams.runner import RunnerTables, StepRows

Blocks = Sequence[Sequence[int]]  # of each group of the KV cache, a request's blocks in order


class Phase(Enum):
    """See the module docstring."""

    UNDECIDED = auto()
    COMPLETE = auto()
    SETTLED = auto()


@dataclass
class PromptFeatures:
    """What is known of a prompt while it is computed, and on its way to the host."""

    seen: int = 0  # tokens whose hidden states are in `total`
    total: Tensor | float = 0.0  # [d] float32, once a row has been seen
    key: HostCopy | None = None  # [d]
    # [n, H] by the number of a memory that has a gate, and which of the n is this prompt's.
    evidence: dict[int, tuple[HostCopy, int]] = field(default_factory=dict)
    refusal: InduceKVError | None = None  # why nothing can be decided

    def add(self, hidden: Tensor) -> None:
        """Add the final hidden states [rows, d] of the prompt's next rows, in order."""
        self.total = self.total + hidden.float().sum(0)
        self.seen += len(hidden)

    def wait(self, memories: int) -> list[QueryFeatures]:
        """Wait for all, for each of so many memories. Raises InduceKVError: one is not finite: the model overflowed."""
        if self.refusal is not None:
            raise self.refusal
        key = _arrived(self.key)
        return [
            QueryFeatures(key=key, evidence=_arrived(*self.evidence.get(memory, (None,)))) for memory in range(memories)
        ]


def _arrived(copy: HostCopy | None, row: int | None = None) -> FloatArray | None:
    """A row of it, or all."""
    if copy is None:
        return None
    found = copy.wait() if row is None else copy.wait()[row]
    if not bool(found.isfinite().all()):
        raise InduceKVError("the model's hidden states for this prompt are not finite, so it has no query key")
    return found.numpy()


@dataclass(frozen=True, eq=False)
class _Injection:
    content: str  # it identifies the slot
    terms: EntryTerms
    first_active: int


@dataclass(eq=False)
class AskedMemory:
    """One memory of a request."""

    spec: DecideSpec | InjectionSpec
    bundle: ResidentBundle
    injection: _Injection | None = None
    slot: RequestMemory | None = None  # what is read in it; None without an injection, and while it is preempted


@dataclass(eq=False)
class WorkerRequest:
    """One request, from its first step to its end."""

    id: str
    memories: tuple[AskedMemory, ...]  # its own first
    prompt: Sequence[int]  # [T]
    blocks: list[list[int]]  # until the prompt is complete
    params: SamplingParams
    phase: Phase = Phase.UNDECIDED
    features: PromptFeatures = field(default_factory=PromptFeatures)
    decided: Decided | None = None  # if it was taken before or in the forward pass
    answer: tuple[int, ...] | None = None  # what it says, in tokens

    @property
    def bundles(self) -> list[ResidentBundle]:
        return [memory.bundle for memory in self.memories]

    @property
    def needs_key(self) -> bool:
        """Whether it is decided by the final hidden states of its prompt."""
        return any(isinstance(memory.spec, DecideSpec) and memory.spec.retrieval for memory in self.memories)

    def extend(self, blocks: Blocks) -> None:
        """It has got more blocks."""
        if self.phase is Phase.UNDECIDED:
            for own, new in zip(self.blocks, blocks, strict=True):
                own.extend(new)

    def restart(self, blocks: Blocks) -> None:
        """It was preempted, and goes on with these blocks alone."""
        if self.phase is Phase.UNDECIDED:
            self.blocks = [list(each) for each in blocks]
            self.features = PromptFeatures()

    def follow(self, answer: tuple[int, ...]) -> None:
        """From now on, its next tokens are those of this answer."""
        self.answer = answer
        put_answer(self.params, answer)


class WorkerRequests:
    """The worker calls every method before, or in, the step's forward pass."""

    def __init__(
        self,
        slots: Slots,
        resident: Callable[[str], ResidentBundle],
        release: Callable[[Region], object] = Region.release,
        has_answer: Callable[[str], object] = lambda request_id: None,
    ) -> None:
        """
        Args:
            resident: the bundle of a digest, which is loaded.
            release: drops a request's reference to its bundle's region. A step waits for it.
            has_answer: hears of a request whose next tokens are those of an answer.
        """
        self.slots = slots
        self.by_id: dict[str, WorkerRequest] = {}
        self._resident, self._release, self._has_answer = resident, release, has_answer

    @property
    def any_undecided(self) -> bool:
        """Few steps have such a request: the others are spared a look at each of their rows."""
        return any(request.phase is Phase.UNDECIDED for request in self.by_id.values())

    def follow(self, scheduled: SchedulerOutput, runner: RunnerTables) -> None:
        """Follow the schedule of a step."""
        for request_id in scheduled.finished_req_ids:
            self._finish(request_id)
        for request_id in scheduled.preempted_req_ids or ():
            self._preempt(request_id)
        for data in scheduled.scheduled_new_reqs:
            self._start(data)
        cached = scheduled.scheduled_cached_reqs
        for request_id, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if (request := self.by_id.get(request_id)) is None:
                continue
            if request_id in cached.resumed_req_ids:
                assert blocks is not None
                self._resume(request, blocks)
            elif blocks is not None:
                request.extend(blocks)
        for request_id, features in getattr(scheduled, MEDIA, {}).items():
            runner.give_media(request_id, features)
        starts: dict[str, Start] = getattr(scheduled, STARTS, {})
        for request_id, start in starts.items():
            self._settle(self.by_id[request_id], start, runner, is_running=request_id in cached.req_ids)

    def take_up(self, request: WorkerRequest, decided: Decided | Start) -> None:
        """From its next rows on, the request reads the memories and says the answer that was decided."""
        if decided.answer is not None:
            request.follow(decided.answer)
            self._has_answer(request.id)
        for spec in decided.injections:
            self._inject(request, spec)

    def _start(self, data: NewRequestData) -> None:
        """Start a request that asks for memory, or let a known one go on.

        To the V2 runner resumed requests come back as new; to any runner, so does one that was preempted before its
        first step.
        """
        params = data.sampling_params
        if params is None or not (specs := parse_specs(params.extra_args)):
            return
        if (known := self.by_id.get(data.req_id)) is not None:
            known.params = params
            if known.answer is not None:
                put_answer(params, known.answer)
            self._resume(known, data.block_ids)
            return
        assert data.prompt_token_ids is not None  # a request with memory has no prompt embeddings
        request = self.by_id[data.req_id] = WorkerRequest(
            id=data.req_id,
            memories=tuple(AskedMemory(spec, self._resident(spec.bundle)) for spec in specs),
            prompt=data.prompt_token_ids,
            blocks=[list(each) for each in data.block_ids],
            params=params,
        )
        for spec in specs:
            if isinstance(spec, InjectionSpec):
                request.phase = Phase.SETTLED
                self._inject(request, spec)

    def _settle(self, request: WorkerRequest, start: Start, runner: RunnerTables, *, is_running: bool) -> None:
        """A request goes on as it was decided; a token that was sampled before is taken back.

        The runner hears of a new request after this, with all that was known of it.
        """
        request.phase = Phase.SETTLED
        self.take_up(request, start)
        if not is_running:
            return
        if start.redo_from is not None:
            runner.take_back(request.id, start.redo_from)
        if start.adapter is not None:
            runner.switch_adapter(request.id, start.adapter.lora_request)

    def _inject(self, request: WorkerRequest, spec: InjectionSpec) -> None:
        (memory,) = (each for each in request.memories if each.spec.bundle == spec.bundle)
        assert memory.injection is None, f"request {request.id} has this memory already"
        terms = _terms(spec, memory.bundle)
        memory.bundle.region.retain()
        memory.injection = _Injection(spec.content, terms, spec.first_active)
        self._take_slot(memory)

    def _take_slot(self, memory: AskedMemory) -> None:
        """Its bundle may have been unloaded."""
        if memory.injection is not None and memory.slot is None:
            memory.slot = self.slots.acquire(memory.injection.content, memory.bundle, memory.injection.terms)

    def _resume(self, request: WorkerRequest, blocks: Blocks) -> None:
        for memory in request.memories:
            self._take_slot(memory)
        request.restart(blocks)

    def _preempt(self, request_id: str) -> None:
        """Release its slots; it keeps its memories."""
        request = self.by_id.get(request_id)
        for memory in () if request is None else request.memories:
            if memory.injection is not None and memory.slot is not None:
                self.slots.release(memory.injection.content)
                memory.slot = None

    def _finish(self, request_id: str) -> None:
        """The last request that has an unloaded bundle releases its region."""
        self._preempt(request_id)
        request = self.by_id.pop(request_id, None)
        for memory in () if request is None else request.memories:
            if memory.injection is not None:
                self._release(memory.bundle.region)


def acting_rows(requests: Mapping[str, WorkerRequest], step: StepRows) -> list[ActingRows]:
    """The rows of a step that memory acts on, in their order; of a request with two memories, once for each.

    Args:
        requests: by id; those without memory may be left out.
    """
    found, end = list[ActingRows](), 0
    if not requests:
        return found
    for number, request_id in enumerate(step.request_ids):
        first, end = end, end + step.num_scheduled[number]
        request, round_number = requests.get(request_id), 0
        for memory in () if request is None else reversed(request.memories):  # the one that is shared acts first
            if memory.injection is None or memory.slot is None:
                continue
            begin = first + max(0, memory.injection.first_active - step.num_computed[number])
            if begin < end:
                found.append(ActingRows(memory.slot, number, begin, end, round_number))
                round_number += 1
    return found


def _terms(spec: InjectionSpec, bundle: ResidentBundle) -> EntryTerms:
    return entry_terms(
        Retrieval(np.asarray(spec.entries, dtype=np.int64), np.asarray(spec.weights, dtype=np.float32)),
        bundle.weighting,
        payload_tokens=bundle.payload_tokens,
        num_entries=bundle.num_entries,
        num_expired=spec.expired,
        remainder=bundle.weighting == "sqrt",
    )

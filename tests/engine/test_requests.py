"""The requests of a worker follow the schedule: what each reads, and what is let go."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError

from inducekv_vllm.attention.decoupled import active_rows
from inducekv_vllm.attention.pool import PoolShape
from inducekv_vllm.attention.slots import RequestMemory, Slots
from inducekv_vllm.errors import CapacityError
from inducekv_vllm.frontend.request import MEMORIES_OPTION, memory_names, require_top_k
from inducekv_vllm.frontend.served_bundle import ServedBundle
from inducekv_vllm.protocol import MEDIA, STARTS, DecideSpec, InjectionSpec, Start, TaskAdapter, extra_args_of
from inducekv_vllm.vllm_seams.config import InduceKVConfig
from inducekv_vllm.vllm_seams.runner import StepRows
from inducekv_vllm.workers.answering import ANSWER
from inducekv_vllm.workers.requests import Phase, WorkerRequest, WorkerRequests, acting_rows
from tests.unit.inducekv_vllm.attention.pools import fitting_bundle, poisoned_pool, store

SHAPE = PoolShape(entries=40, num_layers=1, num_kv_heads=1, heads_per_kv_head=1, head_size=8, value_size=8)
ANSWERED = (7, 8)


class Worker:
    """The table of requests over two bundles, "first" and "other", and the calls of its runner."""

    def __init__(self) -> None:
        self.pool, self.filled = poisoned_pool(SHAPE), list[RequestMemory]()
        self.bundles = {
            "first": store(self.pool, fitting_bundle(SHAPE, 2, 1)),
            "other": store(self.pool, fitting_bundle(SHAPE, 2, 1, map_rank=1)),
        }
        self.requests = WorkerRequests(Slots(2, self.filled.append), self.bundles.__getitem__)
        self.calls: list[tuple[Any, ...]] = []

    def follow(
        self,
        new: dict[str, Any] | None = None,
        *,
        running: tuple[str, ...] = (),
        resumed: tuple[str, ...] = (),
        preempted: str = "",
        finished: str = "",
        starts: dict[str, Start] | None = None,
        media: dict[str, list[object]] | None = None,
    ) -> list[WorkerRequest]:
        """The requests that are new and undecided."""

        def call(name: str) -> Any:
            return lambda *given: self.calls.append((name, *given))

        runner: Any = SimpleNamespace(**{name: call(name) for name in ("give_media", "take_back", "switch_adapter")})
        cached = SimpleNamespace(
            req_ids=[*running, *resumed],
            new_block_ids=[None] * len(running) + [([0],)] * len(resumed),
            resumed_req_ids=set(resumed),
        )
        scheduled: Any = SimpleNamespace(
            finished_req_ids=set(finished),
            preempted_req_ids=set(preempted),
            scheduled_new_reqs=[started(name, spec) for name, spec in (new or {}).items()],
            scheduled_cached_reqs=cached,
            **{STARTS: starts or {}, MEDIA: media or {}},
        )
        known = set(self.requests.by_id)
        self.requests.follow(scheduled, runner)
        undecided = [each for each in self.requests.by_id.values() if each.phase is Phase.UNDECIDED]
        return [each for each in undecided if each.id not in known]

    def memory(self, request_id: str) -> RequestMemory | None:
        request = self.requests.by_id.get(request_id)
        return None if request is None else request.memories[0].slot


def started(name: str, spec: Any) -> Any:
    specs = spec if isinstance(spec, tuple) else (spec,) * (spec is not None)
    params = SamplingParams(extra_args=extra_args_of(specs))
    return SimpleNamespace(req_id=name, sampling_params=params, prompt_token_ids=[5, 6, 7], block_ids=([0],))


def injection(bundle: str, first_active: int = 0, weight: float = 1.0) -> InjectionSpec:
    return InjectionSpec(bundle, (0, 1), (weight, 1.0), first_active)


DECIDE = DecideSpec("first", False, None)


def test_slots_have_the_memory_of_running_requests() -> None:
    """Requests of equal content share one, preempted ones have none, and an unloaded bundle stays for its last one."""
    worker = Worker()
    free = worker.pool.num_free_tokens
    assert worker.follow({"a": injection("first"), "b": injection("first"), "c": injection("other"), "d": None}) == []
    first, other = worker.filled
    assert [first.bundle, other.bundle] == [worker.bundles["first"], worker.bundles["other"]]
    assert {name: worker.memory(name) for name in "abcd"} == {"a": first, "b": first, "c": other, "d": None}

    worker.follow(preempted="bc")
    worker.bundles.pop("first").region.release()  # the bundle is unloaded
    worker.follow(finished="a")
    assert [worker.memory(name) for name in "abc"] == [None] * 3
    worker.follow({"e": injection("other", weight=0.5)}, resumed=("b", "d"))
    with pytest.raises(CapacityError, match="all 2 memory slots"):
        worker.follow(resumed=("c",))
    memory = worker.memory("b")
    assert memory is not None
    assert memory.bundle is first.bundle
    assert worker.pool.num_free_tokens == free
    worker.follow(finished="bced")
    assert worker.requests.slots.used == 0
    assert worker.requests.by_id == {}
    assert worker.pool.num_free_tokens == free + 2


def test_a_request_is_decided_once() -> None:
    """Whether its start comes with its first step or with a later one; and it may come back as a new one."""
    worker, start = Worker(), Start(2, (injection("first", first_active=2),), answer=ANSWERED)
    (request,) = worker.follow({"a": DECIDE})
    assert (request.phase, worker.memory("a")) == (Phase.UNDECIDED, None)
    worker.follow(running=("a",), starts={"a": start})
    memory = worker.memory("a")
    assert request.phase is Phase.SETTLED
    assert memory is not None
    assert (request.params.extra_args or {})[ANSWER] == ANSWERED
    assert worker.calls == [("take_back", "a", 2)]

    assert worker.follow({"b": DECIDE}, starts={"b": start}) == []
    assert worker.memory("b") is memory
    assert len(worker.calls) == 1  # it has sampled nothing

    before = request.params
    worker.follow(preempted="a")
    assert worker.follow({"a": DECIDE}) == []
    assert worker.memory("a") is not None
    assert request.params is not before
    assert (request.params.extra_args or {})[ANSWER] == ANSWERED


def test_a_request_goes_on_with_an_adapter_and_its_media() -> None:
    """Its pixels are given to any request, also one without memory."""
    worker, adapter = Worker(), TaskAdapter("style", 3, "/adapters/style")
    worker.follow({"a": DECIDE})
    media = {"a": ["features"], "without": ["others"]}
    worker.follow(resumed=("a",), starts={"a": Start(0, adapter=adapter)}, media=media)
    assert worker.calls == [
        ("give_media", "a", ["features"]),
        ("give_media", "without", ["others"]),
        ("take_back", "a", 0),
        ("switch_adapter", "a", adapter.lora_request),
    ]
    assert worker.memory("a") is None
    worker.follow({"b": DECIDE}, starts={"b": Start(adapter=adapter)})  # vLLM tells the runner after this
    assert len(worker.calls) == 4


def test_the_rows_that_memory_acts_on() -> None:
    worker = Worker()
    worker.follow(
        {"a": injection("first"), "c": injection("other", first_active=7), "d": DECIDE, "e": injection("first")}
    )
    step = StepRows(["c", "x", "a", "d", "e"], [4, 0, 9, 0, 2], [6, 2, 1, 3, 0])
    rows = [(each.memory, each.request, each.first, each.end) for each in acting_rows(worker.requests.by_id, step)]
    assert rows == [(worker.memory("c"), 0, 3, 6), (worker.memory("a"), 2, 8, 9)]
    assert acting_rows({}, step) == []
    assert np.cumsum(step.num_scheduled)[-1] == step.starts[-1]


def test_a_request_with_two_memories_holds_a_slot_of_each() -> None:
    """The shared one acts first, each from its own position on; a preempted request lets go of both."""
    worker = Worker()
    free = worker.pool.num_free_tokens
    both = (injection("other", first_active=5), injection("first", first_active=2))
    worker.follow({"a": both, "b": injection("first", first_active=2)})
    own, shared = (memory.slot for memory in worker.requests.by_id["a"].memories)
    assert own is not None
    assert shared is worker.memory("b")
    step = StepRows(["a", "b"], [0, 0], [7, 4])
    rows = [(each.memory, each.first, each.end, each.round) for each in acting_rows(worker.requests.by_id, step)]
    assert rows == [(shared, 2, 7, 0), (own, 5, 7, 1), (shared, 9, 11, 0)]
    assert [each.memory for each in active_rows(acting_rows(worker.requests.by_id, step))] == [shared, own]
    worker.follow(preempted="a")
    assert [memory.slot for memory in worker.requests.by_id["a"].memories] == [None, None]
    worker.follow(resumed=("a",))
    worker.bundles["first"].region.release()  # the shared bundle is replaced
    worker.follow(finished="b")
    assert worker.requests.by_id["a"].memories[1].slot is not None
    worker.follow(finished="a")
    assert (worker.requests.slots.used, worker.pool.num_free_tokens) == (0, free + 2)


@pytest.mark.parametrize(
    ("setting", "listed", "found"),
    [
        ({}, None, ("acme",)),
        ({"shared": "manual"}, None, ("acme", "manual")),
        ({"shared": "manual"}, ["acme"], ("acme",)),
        ({"shared": "manual"}, ["acme", "manual@0123"], ("acme", "manual@0123")),
        ({"shared": "manual"}, ["acme", "bolt"], "can be 'manual' alone, which this server shares, found 'bolt'"),
        ({"shared": "manual", "max_memories": 2}, ["acme", "bolt"], ("acme", "bolt")),
        ({"max_memories": 2}, ["acme", "bolt"], ("acme", "bolt")),
        ({}, ["acme", "bolt"], "has 2 names, and a request to this server may have 1"),
    ],
)
def test_a_request_names_no_memory_that_a_gateway_does_not_see_unless_the_server_allows_it(
    setting: dict[str, Any], listed: list[str] | None, found: tuple[str, ...] | str
) -> None:
    config = InduceKVConfig(bundles={"manual": "manual.safetensors"}, **setting)
    arguments = {} if listed is None else {MEMORIES_OPTION: listed}
    if isinstance(found, tuple):
        assert memory_names("acme", arguments, config) == found
    else:
        with pytest.raises(VLLMValidationError, match=found):
            memory_names("acme", arguments, config)


@pytest.mark.parametrize(
    ("weighting", "entries", "found", "reason"),
    [
        ("sqrt", 12, 0, "must be a whole number from 1 to 12, the memory's entries; found 0"),
        ("prior", 12, 13, "from 1 to 12"),
        ("sqrt", 12, True, "found True"),
        ("sqrt", 12, "two", "found 'two'"),
        ("uniform", 12, 2, "has nothing to choose from: the memory gives a request all entries of its task"),
        ("sqrt", 0, 2, "has nothing to choose from: the memory has no entries"),
    ],
)
def test_a_number_of_entries_that_means_nothing_is_refused(
    weighting: str, entries: int, found: object, reason: str
) -> None:
    metadata: Any = SimpleNamespace(weighting=weighting, entries=(None,) * entries)
    require_top_k(12, ServedBundle(SimpleNamespace(weighting="sqrt", entries=(None,) * 12), "", 0))  # type: ignore[arg-type]
    with pytest.raises(VLLMValidationError, match=reason):
        require_top_k(found, ServedBundle(metadata, "", 0))

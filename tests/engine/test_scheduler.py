"""A request goes back once, in place or to other blocks, synchronous or not, preempted or aborted.

The scheduler without a model: a batch queue of two, as in vLLM's engine, and a worker that decides as it is told, with
its own table of requests. Asynchronous scheduling puts the next step together before the decision of the last one is
known.
"""

from collections import deque
from dataclasses import replace
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalKwargsItem, PlaceholderRange
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from inducekv_vllm.attention.pool import PoolShape
from inducekv_vllm.attention.slots import Slots
from inducekv_vllm.facts import FactFound
from inducekv_vllm.protocol import (
    DECISIONS,
    STARTS,
    Decided,
    DecideSpec,
    Decision,
    Failed,
    InjectionSpec,
    Start,
    TaskAdapter,
    Untouched,
    extra_args_of,
)
from inducekv_vllm.vllm_seams.config import SCHEDULER_CLS
from inducekv_vllm.workers.requests import WorkerRequests
from server.demo import CHECKPOINT
from tests.unit.inducekv_vllm.attention.pools import fitting_bundle, poisoned_pool, store

BLOCK = 32
SHAPE = PoolShape(entries=4, num_layers=1, num_kv_heads=1, heads_per_kv_head=1, head_size=8, value_size=8)
RIGHT, DROPPED = 7, 666  # tokens: 666 is the untouched model's, where memory ought to act
PROMPT = list(range(20, 120))  # three full blocks and a part


class Runner:
    """A model runner's tables: of a new request it knows nothing before the step that begins it."""

    def __init__(self, is_v2: bool) -> None:
        self.is_v2, self.known, self.given = is_v2, set[str](), list[str]()

    def take_back(self, name: str, redo_from: int) -> None:
        assert name in self.known

    def switch_adapter(self, name: str, adapter: object) -> None:
        assert self.is_v2 or name in self.known

    def give_media(self, name: str, features: list[object]) -> None:
        """To a request that the runner knows, and that has come back: V2's come as new ones."""
        assert not self.is_v2
        assert name in self.known
        self.given.append(name)

    def process_logits(self, name: str) -> None:
        pass

    def update(self, step: SchedulerOutput) -> None:
        self.known -= step.finished_req_ids
        if self.is_v2:
            self.known -= step.preempted_req_ids or set()
        self.known |= {new.req_id for new in step.scheduled_new_reqs}


class Engine:
    """A scheduler and a stand-in for its worker."""

    def __init__(self, is_async: bool, blocks: int = 64, is_v2: bool = True) -> None:
        options = {"max_model_len": 512, "block_size": BLOCK, "dtype": "float32", "max_num_seqs": 8}
        config = EngineArgs(model=str(CHECKPOINT), scheduler_cls=SCHEDULER_CLS, **options).create_engine_config()  # type: ignore[arg-type]
        config.scheduler_config.async_scheduling = is_async  # the CPU's platform clears it
        config.cache_config.num_gpu_blocks = blocks
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
        cache = KVCacheConfig(blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
        self.scheduler: Any = config.scheduler_config.get_scheduler_cls()(
            vllm_config=config,
            kv_cache_config=cache,
            structured_output_manager=StructuredOutputManager(config),
            include_finished_set=False,
            log_stats=True,
            block_size=BLOCK,
            hash_block_size=BLOCK,
        )
        self.scheduler.use_v2_model_runner = is_v2
        bundle = store(poisoned_pool(SHAPE), fitting_bundle(SHAPE, 2, 1, map_rank=1))
        self.runner = Runner(is_v2)
        self.table = WorkerRequests(Slots(16, lambda memory: None), lambda digest: bundle)
        hash_fn = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hash_fn)
        self.hasher = get_request_block_hasher(BLOCK, hash_fn)
        self.room = 2 if is_async else 1
        self.flying: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self.steps: list[dict[str, int]] = []  # rows by request
        self.decisions: dict[str, Decided] = {}  # that the worker will make
        self.starts: dict[str, Start] = {}  # that it was told
        self.delivered: dict[str, list[Decided]] = {}
        self.answers: dict[str, list[int]] = {}
        self.requests: dict[str, Request] = {}

    def add(
        self,
        name: str,
        prompt: list[int],
        decision: Decision | Decided | None = None,
        max_tokens: int = 6,
        picture: PlaceholderRange | None = None,
        **changes: Any,
    ) -> Request:
        """`changes` of the request's sampling parameters."""
        decided = Decided((decision,)) if isinstance(decision, Decision) else decision
        given = () if decided is None else decided.each
        others = ("own", "shared") if len(given) > 1 else ("digest",)
        bundles = [each.injection.bundle if each.injection else name for each, name in zip(given, others, strict=False)]
        specs = tuple(DecideSpec(name, False, None) for name in bundles)
        extra = extra_args_of(specs)
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.0, extra_args=extra, **changes)
        if decided is not None:
            self.decisions[name] = decided
        media = [MultiModalFeatureSpec(MultiModalKwargsItem.dummy(), "image", "id", at) for at in [picture] if at]
        self.requests[name] = Request(name, prompt, params, None, block_hasher=self.hasher, mm_features=media)
        self.scheduler.add_request(self.requests[name])
        return self.requests[name]

    def turn(self) -> None:
        """As `EngineCore.step_with_batch_queue`."""
        if self.scheduler.has_requests():
            step = self.scheduler.schedule()
            self.steps.append(dict(step.num_scheduled_tokens))
            self.flying.append((step, self._execute(step)))
            if len(self.flying) < self.room:
                return
        step, output = self.flying.popleft()
        for client in self.scheduler.update_from_output(step, output).values():
            for each in client.outputs:
                self.answers.setdefault(each.request_id, []).extend(each.new_token_ids)
                if each.kv_transfer_params is not None:
                    delivered = self.delivered.setdefault(each.request_id, [])
                    delivered.append(Decided.unpack(each.kv_transfer_params["inducekv"]))

    def drain(self) -> None:
        while self.scheduler.has_requests() or self.flying:
            self.turn()
        assert DROPPED not in [token for tokens in self.answers.values() for token in tokens]
        assert not self.scheduler.asked

    def _execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        self.table.follow(step, self.runner)
        self.runner.update(step)
        started: dict[str, Start] = getattr(step, STARTS, {})
        self.starts.update(started)
        cached = step.scheduled_cached_reqs
        ends = {new.req_id: new.num_computed_tokens for new in step.scheduled_new_reqs}
        ends |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        ends = {name: ends[name] + count for name, count in step.num_scheduled_tokens.items()}
        whole = [name for name in ends if ends[name] >= self.requests[name].num_prompt_tokens]
        output = ModelRunnerOutput(
            req_ids=list(ends),
            req_id_to_index={name: index for index, name in enumerate(ends)},
            sampled_token_ids=[[self._token(name)] if name in whole else [] for name in ends],
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        )
        decided = {name: self.decisions.pop(name) for name in whole if name in self.decisions and name not in started}
        if decided:
            setattr(output, DECISIONS, decided)
        return output

    def _token(self, name: str) -> int:
        decision = self.decisions.get(name, Decided((CLOSED,)))
        goes_back = decision.redo_from(self.requests[name].num_prompt_tokens) is not None
        return DROPPED if goes_back and name not in self.starts else RIGHT


def opened(first_active: int) -> Decision:
    return Decision(InjectionSpec("digest", (1,), (1.0,), first_active), task="a", margins=(1.0,))


def started(decision: Decision, redo_from: int) -> Start:
    return Start(redo_from, Decided((decision,)).injections, answer=decision.answer)


CLOSED = Decision(Untouched("outside"), margins=(-1.0,))
FOUND = Decision(Untouched(), fact=FactFound(3, 0.98, (7, 8)))


@pytest.mark.parametrize("is_v2", [False, True])
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(
    ("decision", "length", "rows", "how"),
    [
        (CLOSED, 100, [100, 1, 1, 1, 1, 1], None),
        (opened(99), 100, [100, 1, 1, 1, 1, 1, 1], "in place"),
        (opened(70), 100, [100, 36, 1, 1, 1, 1, 1], "other blocks"),  # two blocks of the prompt are found in the cache
        (opened(0), 100, [100, 100, 1, 1, 1, 1, 1], "other blocks"),
        (opened(95), 96, [96, 1, 1, 1, 1, 1, 1], "in place"),  # the last block is full, and nobody else has it yet
        (opened(70), 96, [96, 26, 1, 1, 1, 1, 1], "in place"),
        (opened(63), 96, [96, 64, 1, 1, 1, 1, 1], "other blocks"),
        (replace(opened(99), same_pass=True), 100, [100, 1, 1, 1, 1, 1], None),
        (FOUND, 100, [100, 1, 1, 1, 1, 1, 1], "in place"),
        (FOUND, 96, [96, 1, 1, 1, 1, 1, 1], "in place"),
        (replace(FOUND, same_pass=True), 100, [100, 1, 1, 1, 1, 1], None),
        (replace(opened(70), fact=FOUND.fact), 100, [100, 36, 1, 1, 1, 1, 1], "other blocks"),
    ],
)
def test_a_request_goes_back_once_and_others_go_on(
    decision: Decision, length: int, rows: list[int], how: str | None, is_async: bool, is_v2: bool
) -> None:
    engine = Engine(is_async, is_v2=is_v2)
    request = engine.add("m", PROMPT[:length], decision)
    engine.add("other", [5] * 40, max_tokens=8)
    engine.drain()
    assert [step["m"] for step in engine.steps if "m" in step] == rows
    assert request.num_preemptions == (how == "other blocks")
    assert engine.answers == {"m": [RIGHT] * 6, "other": [RIGHT] * 8}
    redo_from = length - 1 if decision.injection is None else decision.injection.first_active
    assert engine.starts == ({"m": started(decision, redo_from)} if how else {})
    assert engine.delivered["m"] == [Decided((decision,))] * 6  # with every token
    begun = [step.keys() for step in engine.steps]
    first_other = next(i for i, names in enumerate(begun) if "other" in names)
    assert all("other" in names for names in begun[first_other : first_other + 8])  # it waits for nobody
    fresh = Request("x", list(request.all_token_ids), request.sampling_params, None)
    fresh.block_hashes = []
    assert request._block_hasher is not None
    assert list(request.block_hashes) == request._block_hasher(fresh)
    assert request.num_output_placeholders == 0


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(
    ("decision", "shared"),
    [(CLOSED, 96), (opened(95), 64), (replace(opened(95), same_pass=True), 64), (opened(70), 64), (opened(63), 64)],
)
def test_a_full_last_block_is_shared_once_it_is_known_what_is_in_it(
    decision: Decision, shared: int, is_async: bool
) -> None:
    engine = Engine(is_async)
    engine.add("m", PROMPT[:96], decision)
    engine.drain()
    engine.add("untouched", PROMPT)
    engine.drain()
    assert next(step["untouched"] for step in engine.steps if "untouched" in step) == 100 - shared


def opened_for(own: int | None, shared: int | None) -> Decided:
    """Two memories, each from its own position on, or behind a closed gate."""
    made = [
        CLOSED if first is None else Decision(InjectionSpec(bundle, (1,), (1.0,), first), task="a")
        for bundle, first in (("own", own), ("shared", shared))
    ]
    return Decided(tuple(made))


@pytest.mark.parametrize("blocks", [64, 8])
@pytest.mark.parametrize("is_v2", [False, True])
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(
    "decision",
    [
        CLOSED,
        opened(70),
        opened(0),
        replace(opened(99), same_pass=True),
        FOUND,
        Decision(TaskAdapter("style", 3, "/adapters/style")),
        Decision(TaskAdapter("style", 3, "/adapters/style"), fact=FOUND.fact),
        opened_for(99, 70),
        opened_for(None, 0),
    ],
)
def test_a_prompt_that_is_asked_again_is_decided_and_answered_again(
    decision: Decision | Decided, is_async: bool, is_v2: bool, blocks: int
) -> None:
    """One by one and several at once, preempted or not."""
    engine = Engine(is_async, blocks, is_v2)
    decided = decision if isinstance(decision, Decided) else Decided((decision,))
    for names in ("a", "b", "cde", "fgh"):
        for name in names:
            engine.add(name, PROMPT, decided, max_tokens=40)
        engine.drain()
        for name in names:
            start = decided.start(100)
            assert engine.starts.get(name) == (None if start.redo_from is None else start)
            assert engine.answers[name] == [RIGHT] * 40
    assert blocks == 64 or any(engine.requests[name].num_preemptions for name in "cdefgh")


@pytest.mark.parametrize("is_async", [False, True])
def test_one_token_only(is_async: bool) -> None:
    engine = Engine(is_async)
    engine.add("m", PROMPT, opened(99), max_tokens=1)
    engine.drain()
    assert engine.answers["m"] == [RIGHT]


def test_aborted_before_its_decision() -> None:
    engine = Engine(is_async=True)
    engine.add("m", PROMPT, opened(99))
    engine.turn()
    engine.scheduler.finish_requests("m", RequestStatus.FINISHED_ABORTED)
    engine.drain()
    assert "m" not in engine.answers
    assert engine.starts == {}


@pytest.mark.parametrize("decision", [None, CLOSED, opened(40), opened(0)])
@pytest.mark.parametrize("uses_mrope", [False, True])
@pytest.mark.parametrize("is_v2", [False, True])
@pytest.mark.parametrize("is_async", [False, True])
def test_a_picture_that_is_encoded_after_all_is_sent_again(
    decision: Decision | None, uses_mrope: bool, is_async: bool, is_v2: bool
) -> None:
    """The request came without it: with M-RoPE, without its pixels alone."""
    engine = Engine(is_async, is_v2=is_v2)
    engine.scheduler.model_uses_mrope = uses_mrope
    for name in ("first", "again"):
        engine.add(name, PROMPT, decision, picture=PlaceholderRange(5, 30))
        for _ in range(3 + is_async):
            engine.turn()
        assert engine.runner.given == []
        if name == "again":
            assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
            engine.scheduler.reset_encoder_cache()
        engine.drain()
    assert engine.runner.given == ([] if is_v2 else ["again"])
    assert not engine.scheduler.lacking_media


@pytest.mark.parametrize("decision", [opened(70), opened(99), CLOSED, FOUND, replace(opened(99), same_pass=True)])
def test_preempted_while_its_decision_is_under_way(decision: Decision) -> None:
    engine = Engine(is_async=True)
    engine.add("m", PROMPT, decision)
    engine.turn()
    engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    engine.drain()
    assert engine.answers["m"] == [RIGHT] * 6
    goes_back = (decision.injection or decision.answer) is not None and not decision.same_pass
    redo_from = 99 if decision.injection is None else decision.injection.first_active
    assert engine.starts == ({"m": started(decision, redo_from)} if goes_back else {})


def test_what_cannot_be_decided_ends_with_an_error_and_no_token() -> None:
    engine = Engine(is_async=True)
    engine.add("m", PROMPT, Decision(Failed("not finite")))
    engine.drain()
    assert engine.answers["m"] == []
    assert [each.error for each in engine.delivered["m"]] == ["not finite"]


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("is_v2", [False, True])
def test_few_blocks(is_async: bool, is_v2: bool) -> None:
    engine = Engine(is_async, blocks=25, is_v2=is_v2)
    kinds = (opened(99), CLOSED, opened(70), None)
    requests = [engine.add(f"m{i}", [200 + i] * 100, kinds[i % 4], max_tokens=100) for i in range(8)]
    engine.drain()
    assert all(engine.answers[request.request_id] == [RIGHT] * 100 for request in requests)
    in_other_blocks = 2  # those of `opened(70)` go back so, which vLLM counts as well
    assert sum(request.num_preemptions for request in requests) > in_other_blocks
    assert engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == 24


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(
    ("own", "shared", "redone"),
    [(99, 70, 70), (40, 70, 40), (None, 70, 70), (99, None, 99), (None, None, None)],
)
def test_a_request_with_two_memories_goes_back_to_where_the_first_one_begins(
    own: int | None, shared: int | None, redone: int | None, is_async: bool
) -> None:
    engine = Engine(is_async)
    decided = opened_for(own, shared)
    engine.add("m", PROMPT, decided)
    engine.drain()
    assert engine.answers["m"] == [RIGHT] * 6
    assert engine.delivered["m"] == [decided] * 6
    assert engine.starts.get("m", Start()) == Start(redone, decided.injections)


def test_blocks_tell_which_memories_act_in_them_and_in_which_order() -> None:
    """Tenants with one shared memory have its blocks in common, up to where their own begins."""
    engine, hashes = Engine(is_async=False), dict[str, list[bytes]]()
    other = replace(opened(64), outcome=InjectionSpec("other", (1,), (1.0,), 64))
    asked = {
        "untouched": None,
        "acme": opened_for(own=64, shared=32),
        "closed": opened_for(own=None, shared=32),
        "bolt": Decided((other, opened_for(None, 32).each[1])),
        "swapped": Decided(tuple(reversed(opened_for(own=64, shared=32).each))),
        "together": opened_for(own=32, shared=32),
        "together, swapped": Decided(tuple(reversed(opened_for(own=32, shared=32).each))),
    }
    for name, decided in asked.items():
        engine.decisions.clear()
        hashes[name] = list(engine.add(name, PROMPT, decided).block_hashes)
        engine.drain()
        hashes[name] = list(engine.requests[name].block_hashes)[:3]
    first, second, third = (dict(zip(hashes, each, strict=True)) for each in zip(*hashes.values(), strict=True))
    assert len(set(first.values())) == 1  # nothing acts in it
    with_shared = {second[name] for name in ("acme", "closed", "bolt", "swapped")}
    assert len(with_shared) == 1
    assert len({second[name] for name in ("untouched", "together", "together, swapped")} | with_shared) == 4
    assert len(set(third.values())) == 7

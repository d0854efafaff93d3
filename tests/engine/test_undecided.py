"""What prompts tell index and gate: hidden states of every step, and values from the blocks of a request."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from vllm import SamplingParams
from vllm.v1.attention.backend import AttentionType
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec, UniformTypeKVCacheSpecs

from inducekv_vllm.attention.cpu_memory import CPUMemoryAttention
from inducekv_vllm.attention.kernel_memory import KernelMemoryAttention
from inducekv_vllm.attention.resident_gate import ResidentGate
from inducekv_vllm.attention.slots import Slots
from inducekv_vllm.bundle.lookup import LookupResult, QueryFeatures
from inducekv_vllm.errors import InduceKVError, UnsupportedModel
from inducekv_vllm.facts import FactFound
from inducekv_vllm.gate import TurnMarks, evidence, last_averaged
from inducekv_vllm.protocol import (
    Decided,
    DecideSpec,
    Decision,
    Failed,
    InjectionSpec,
    TaskAdapter,
    Untouched,
    extra_args_of,
)
from inducekv_vllm.vllm_seams.runner import StepRows
from inducekv_vllm.workers import prompts
from inducekv_vllm.workers.cached_values import CachedValues
from inducekv_vllm.workers.decisions import Deciding, StepDecisions, joins
from inducekv_vllm.workers.prompts import PromptReader
from inducekv_vllm.workers.requests import Phase, WorkerRequest, WorkerRequests
from tests.bundles import D, J, random_gate
from tests.unit.inducekv_vllm.attention.pools import CPU

BLOCKS, IMAGE = 12, 9
FOUND = FactFound(3, 0.98, (7, 8))


def as_on_cpu(kv_cache: Tensor) -> Tensor:
    return CPUMemoryAttention.cached_values(None, kv_cache)  # type: ignore[arg-type]


def as_on_gpu(kv_cache: Tensor) -> Tensor:
    return KernelMemoryAttention.cached_values(None, kv_cache)  # type: ignore[arg-type]


def spec(C: int, dtype: torch.dtype = torch.float32) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=C, num_kv_heads=J, head_size=D, dtype=dtype)


class Cache:
    """Layers 0 and 1 in one group of a KV cache, layer 2 in another one with blocks of another size."""

    def __init__(self, view: Any, kernel_block: int | None = None) -> None:
        self.sizes = (4, 4, 8)
        self.layers: dict[str, Any] = {}
        for index, C in enumerate(self.sizes):
            own = kernel_block or C
            kv_cache = torch.full((BLOCKS * C // own, J, own, 2 * D), float("nan"))
            self.layers[f"layers.{index}.attn"] = SimpleNamespace(
                attn_type=AttentionType.DECODER,
                kv_cache=kv_cache,
                kv_cache_dtype="auto",
                num_kv_heads=J,
                head_size=D,
                kv_sharing_target_layer_name=None,
                _v_scale=torch.tensor(0.5),
            )
        names = list(self.layers)
        self.groups = [
            SimpleNamespace(layer_names=names[:2], kv_cache_spec=spec(4)),
            SimpleNamespace(layer_names=[*names[2:], "mamba"], kv_cache_spec=spec(8)),
        ]
        self.view = view

    def values(self) -> CachedValues:
        config: Any = SimpleNamespace(kv_cache_groups=self.groups)
        return CachedValues(config, self.layers, self.view, CPU)

    def write(self, values: Tensor, blocks: list[list[int]]) -> None:
        """The values [T, 3, J, D] of a request, as an attention kernel does."""
        for index, layer in enumerate(self.layers.values()):
            C, own = self.sizes[index], self.view(layer.kv_cache)
            for at, value in enumerate(values[:, index]):
                slot = blocks[index // 2][at // C] * C + at % C
                own[slot // own.shape[2], :, slot % own.shape[2]] = value


def drawn(T: int, seed: int = 0) -> Tensor:
    return torch.randn(T, 3, J, D, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("view", [as_on_cpu, as_on_gpu])
@pytest.mark.parametrize("kernel_block", [None, 2])
def test_values_are_read_where_they_were_written(view: Any, kernel_block: int | None) -> None:
    cache = Cache(view, kernel_block)
    values, blocks = drawn(11), [[3, 0, 5], [4, 1]]
    cache.write(values, blocks)
    positions = [0, 3, 4, 7, 10]
    found = cache.values().read((0, 2), blocks, positions)
    assert torch.equal(found, values[positions][:, [0, 2]].flatten(2))


def test_a_quantised_cache_is_scaled_back() -> None:
    cache = Cache(as_on_gpu)
    values = drawn(4).clamp(-2, 2)
    cache.write(values, [[0], [0]])
    for layer in cache.layers.values():
        layer.kv_cache = layer.kv_cache.nan_to_num().div(layer._v_scale).to(torch.float8_e4m3fn).view(torch.uint8)
        layer.kv_cache_dtype = "fp8"
    found = cache.values().read((1, 2), [[0], [0]], [0, 1, 2, 3])
    torch.testing.assert_close(found, values[:, 1:].flatten(2), rtol=2**-4, atol=2**-7)


@pytest.mark.parametrize(
    ("change", "layer", "reason"),
    [
        ({}, 3, "it has no KV cache of its own"),
        ({"kv_sharing_target_layer_name": "layers.0.attn"}, 1, "it has the values of layer layers.0.attn"),
        ({"kv_cache": torch.zeros(2, J, 4, 3 * D)}, 1, r"unknown layout \[2, 2, 4, 24\]"),
    ],
)
def test_layers_without_values_of_every_token_are_refused(change: dict[str, Any], layer: int, reason: str) -> None:
    cache = Cache(as_on_cpu)
    vars(cache.layers["layers.1.attn"]).update(change)
    values = cache.values()
    values.check((0, 2))
    with pytest.raises(UnsupportedModel, match=rf"looks at layer {layer} cannot be served: .*{reason}"):
        values.check((0, layer))


WINDOW: Any = SlidingWindowSpec(block_size=4, num_kv_heads=J, head_size=D, dtype=torch.float32, sliding_window=4)


@pytest.mark.parametrize(
    ("own", "reason"),
    [
        (WINDOW, r"\(SlidingWindowSpec\) does not keep every token"),
        (
            UniformTypeKVCacheSpecs(block_size=4, kv_cache_specs={"layers.0.attn": spec(4), "layers.1.attn": WINDOW}),
            r"\(SlidingWindowSpec\) does not keep every token",
        ),
        (spec(4, torch.int8), r"its KV cache is quantised \(int8_per_token_head\)"),  # a scale for each token
    ],
)
def test_caches_without_every_value_are_refused(own: Any, reason: str) -> None:
    cache = Cache(as_on_cpu)
    cache.groups[0].kv_cache_spec = own
    cache.layers["layers.1.attn"].kv_cache_dtype = "int8_per_token_head"
    values = cache.values()
    values.check((2,))
    with pytest.raises(UnsupportedModel, match=rf"layer 1 .*{reason}"):
        values.check((1, 2))


PROMPT = [1, 5, 6, 2, IMAGE, IMAGE, 7, 8, 3, 4, 4]  # a turn from position 4 to 7
GATE = random_gate(layers=(0, 2), marks=TurnMarks((6, 2), 3), floors=torch.zeros(2, 4))
TEXT, MEDIA = [6, 7], [4, 5]  # that decide


class Requests:
    """Undecided ones on one rank, of a bundle with this gate."""

    def __init__(self, *, retrieval: bool = False) -> None:
        self.cache = Cache(as_on_cpu)
        gate = ResidentGate.load(GATE, slice(0, J), D, True, CPU)
        self.bundle: Any = SimpleNamespace(gate=gate)
        self.spec = DecideSpec("digest", retrieval, None)
        self.table = WorkerRequests(Slots(2, lambda memory: None), lambda digest: self.bundle)
        self.values = self.cache.values()
        reader = PromptReader(self.values, {IMAGE}, lambda sums: sums, CPU)
        attention: Any = None
        self.decisions = StepDecisions(self.table, reader, None, attention, is_alone=True)

    def start(self, request_id: str, blocks: list[list[int]]) -> None:
        params = SamplingParams(extra_args=extra_args_of((self.spec,)))
        new = SimpleNamespace(req_id=request_id, sampling_params=params, prompt_token_ids=PROMPT, block_ids=blocks)
        self.follow(scheduled_new_reqs=[new])

    def extend(self, request_id: str, blocks: list[list[int]]) -> None:
        self.follow(cached=(request_id, blocks, set()))

    def restart(self, request_id: str, blocks: list[list[int]]) -> None:
        self.follow(cached=(request_id, blocks, {request_id}))

    def finish(self, request_ids: set[str]) -> None:
        self.follow(finished_req_ids=request_ids)

    def follow(self, cached: tuple[str, list[list[int]], set[str]] | None = None, **changes: Any) -> None:
        """A schedule with these changes alone."""
        request_id, blocks, resumed = cached or ("", [], set())
        ids = [request_id] if cached else []
        cached_reqs = SimpleNamespace(req_ids=ids, new_block_ids=[blocks] * len(ids), resumed_req_ids=resumed)
        scheduled: Any = SimpleNamespace(
            finished_req_ids=(), preempted_req_ids=None, scheduled_new_reqs=[], scheduled_cached_reqs=cached_reqs
        )
        vars(scheduled).update(changes)
        runner: Any = None
        self.table.follow(scheduled, runner)

    def step(self, request_id: str, computed: int, scheduled: int, hidden: Tensor | None = None) -> list[WorkerRequest]:
        """One step of it, beside another request with one row."""
        rows = StepRows(["other", request_id], [7, computed], [1, scheduled])
        other = torch.full((1, 16), 1e6)
        self.decisions.after_pass(rows, lambda _: None if hidden is None else torch.cat([other, hidden]))
        complete = [request for request in self.table.by_id.values() if request.phase is Phase.COMPLETE]
        assert [request.id for request in complete] in ([], [request_id])
        for request in complete:
            request.phase = Phase.SETTLED
        return complete


def told(request: WorkerRequest) -> QueryFeatures:
    (features,) = request.features.wait(1)
    return features


def check_evidence(request: WorkerRequest, values: Tensor) -> None:
    looked_at = last_averaged(values[TEXT + MEDIA][:, [0, 2]].flatten(2), len(TEXT))
    expected = GATE.token_scores.evidence(looked_at)
    assert expected.any()
    np.testing.assert_array_equal(told(request).evidence, expected)


def test_a_long_prompt_is_read_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of at most one token, whose mean is its own: the evidence of all."""
    in_pieces = evidence.in_pieces
    monkeypatch.setattr(evidence, "WINDOW", 1)
    monkeypatch.setattr(evidence, "in_pieces", lambda text, media: in_pieces(text, media, 2))
    monkeypatch.setattr(prompts, "PIECE", 1)
    requests, values = Requests(), drawn(11)
    read, most = requests.values.read, list[int]()
    monkeypatch.setattr(requests.values, "read", lambda *given: (most.append(len(given[2])), read(*given))[1])
    requests.start("r", [[2, 1, 4], [0, 3]])
    requests.cache.write(values, [[2, 1, 4], [0, 3]])
    (request,) = requests.step("r", 0, 11)
    check_evidence(request, values)
    assert (max(most), len(most)) == (2, 3)


def test_evidence_is_there_after_the_last_prompt_token() -> None:
    """Also of a request that was preempted meanwhile, and goes on with other blocks."""
    requests, values = Requests(), drawn(11)
    requests.start("r", [[3], [4]])
    assert not requests.step("r", 0, 4)
    for request_id in ("r", "other"):
        requests.extend(request_id, [[0], []])
        requests.restart(request_id, [[2], [0]])
        requests.extend(request_id, [[1, 4], [3]])
    requests.cache.write(values, [[2, 1, 4], [0, 3]])
    (request,) = requests.step("r", 4, 7)
    check_evidence(request, values)
    requests.start("r", [[2, 1, 4], [0, 3]])  # and does not decide again when it comes as a new request
    assert not requests.step("r", 0, 11)
    requests.finish({"r", "unknown"})
    assert not requests.table.by_id


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunks", [[11], [1, 2, 8], [10, 1]])
def test_the_key_depends_on_neither_chunks_nor_preemption(chunks: list[int], dtype: torch.dtype) -> None:
    hidden = (torch.randn(11, 16, generator=torch.Generator().manual_seed(0)) + 5).to(dtype)
    requests = Requests(retrieval=True)
    requests.cache.write(drawn(11), [[3, 0, 5], [4, 1]])
    requests.start("r", [[3, 0, 5], [4, 1]])
    assert not requests.step("r", 0, 10, hidden[:10])
    requests.restart("r", [[3, 0, 5], [4, 1]])
    done = 0
    for part in hidden.split(chunks):
        completed = requests.step("r", done, len(part), part)
        done += len(part)
    (request,) = completed
    expected = torch.nn.functional.normalize(hidden.double().mean(0), dim=0)
    np.testing.assert_allclose(told(request).key, expected.numpy(), atol=1e-6)


def test_prompts_that_are_complete_in_one_step_are_read_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has its own blocks; a long one and one with pictures are read by themselves."""
    monkeypatch.setattr(prompts, "WINDOW", 2)
    monkeypatch.setattr(evidence, "WINDOW", 2)
    monkeypatch.setattr(prompts, "PIECE", 11)
    texts = {"a": [7, 8, 11, 5], "b": [5] * 5, "c": [11, 8, 7], "picture": [IMAGE, 7], "long": [8] * 12}
    blocks = {"a": [[0, 1], [1, 0]], "b": [[2, 3], [3, 2]], "c": [[4, 5], [5, 4]]}
    blocks |= {"picture": [[6, 7], [6]], "long": [[8, 9, 10, 11], [7, 8]]}
    requests = Requests()
    read, sizes = requests.values.read_several, list[int]()
    monkeypatch.setattr(requests.values, "read_several", lambda *given: (sizes.append(len(given[1])), read(*given))[1])
    values = {}
    for name, text in texts.items():
        prompt = [6, 2, *text, 3]
        new = SimpleNamespace(
            req_id=name,
            sampling_params=SamplingParams(extra_args=extra_args_of((requests.spec,))),
            prompt_token_ids=prompt,
            block_ids=blocks[name],
        )
        requests.follow(scheduled_new_reqs=[new])
        values[name] = drawn(len(prompt), seed=len(values))
        requests.cache.write(values[name], blocks[name])
    rows = StepRows(list(texts), [0] * len(texts), [len(text) + 3 for text in texts.values()])
    requests.decisions.after_pass(rows, lambda _: None)
    assert sorted(sizes) == [1, 1, 1, 2]  # a and b are a piece, into which c does not fit
    for name, text in texts.items():
        media = [at for at, token in enumerate(text, start=2) if token == IMAGE]
        at = [place for place in range(2, 2 + len(text)) if place not in media]
        looked_at = last_averaged(values[name][at + media][:, [0, 2]].flatten(2), len(at))
        found = told(requests.table.by_id[name]).evidence
        np.testing.assert_allclose(found, GATE.token_scores.evidence(looked_at), rtol=0, atol=1e-6)


def test_numbers_that_are_not_finite_decide_nothing() -> None:
    requests = Requests()
    requests.cache.write(drawn(11) * torch.nan, [[3, 0, 5], [4, 1]])
    requests.start("r", [[3, 0, 5], [4, 1]])
    (request,) = requests.step("r", 0, 11)
    with pytest.raises(InduceKVError, match="not finite"):
        request.features.wait(1)


@pytest.mark.parametrize("shared", [False, True])
def test_ranks_add_up(shared: bool) -> None:
    """Each has a KV head of its own, or two ranks have the same, and one of them counts."""
    heads = [(slice(0, 1), True), (slice(1, 2), True)]
    if shared:
        heads = [heads[0], (slice(0, 1), False), heads[1], (slice(1, 2), False)]
    values = drawn(4)[:, [0, 2]]  # [t, S, J, D]
    gates = [ResidentGate.load(GATE, own, D, counted, CPU) for own, counted in heads]
    sums: list[Tensor] = []
    for gate, (own, _) in zip(gates, heads, strict=True):
        gate.scores.evidence(values[:, :, own].flatten(2), lambda part: sums.append(part) or part)
    total = torch.stack(sums).sum(0)
    for gate, (own, _) in zip(gates, heads, strict=True):
        found = gate.scores.evidence(values[:, :, own].flatten(2), lambda part: total)
        torch.testing.assert_close(found, GATE.token_scores.evidence(values.flatten(2)), rtol=0, atol=1e-6)


def raising(error: Exception) -> Any:
    def find(*given: object, **options: object) -> None:
        raise error

    return find


def errors_in(caplog: pytest.LogCaptureFixture) -> list[Any]:
    """By id: where vLLM's own handlers are there, a record reaches the fixture twice."""
    records = {id(record): record for record in caplog.records if "the decision about a request failed" in record.msg}
    return [record.exc_info[1] for record in records.values() if record.exc_info]


@pytest.mark.parametrize("error", [KeyError("word"), RuntimeError("a tensor"), InduceKVError("known")])
def test_a_decision_that_raises_ends_its_own_request(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    """With an error, and a line in the log if nobody expected it."""
    index = SimpleNamespace(lookup=lambda *given: LookupResult(None, None))
    asked = [Requests(), Requests()]
    reader = SimpleNamespace(question=lambda prompt: SimpleNamespace(text="a question"))
    for each, found in zip(asked, (raising(error), lambda *given, **options: None), strict=True):
        facts = SimpleNamespace(find=found)
        each.bundle = SimpleNamespace(gate=None, index=index, words=None, reader=reader, facts=facts)
        each.start("r", [[3, 0, 5], [4, 1]])
    deciding = Deciding({IMAGE})
    first, second = (deciding.decide(request) for each in asked for request in each.step("r", 0, 11))
    unexpected = not isinstance(error, InduceKVError)
    assert first.error is not None
    assert (type(error).__name__ if unexpected else "known") in first.error
    assert second.error is None
    assert errors_in(caplog) == ([error] if unexpected else [])


def test_evidence_that_cannot_be_read_ends_its_own_request(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    requests, error = Requests(), RuntimeError("a tensor")
    monkeypatch.setattr(requests.values, "read", raising(error))
    requests.start("r", [[3, 0, 5], [4, 1]])
    (request,) = requests.step("r", 0, 11)
    decision = Deciding({IMAGE}).decide(request)
    assert decision.error is not None
    assert "RuntimeError" in decision.error
    assert errors_in(caplog) == [error]


class Late:
    """A bundle whose entries act from layers 0 and 2 on."""

    first_layers = np.array([0, 2])


@pytest.mark.parametrize(
    ("decision", "does_join"),
    [
        (Decision(InjectionSpec("d", (1,), (1.0,), 10)), True),
        (Decision(InjectionSpec("d", (0, 1), (1.0, 1.0), 10)), False),  # layer 0 is computed
        (Decision(InjectionSpec("d", (1,), (1.0,), 9)), False),  # so is an earlier token
        (Decision(Untouched("outside")), False),
        (Decision(Untouched(), fact=FOUND), True),
        (Decision(TaskAdapter("a", 1, "/a"), fact=FOUND), False),
        (Decision(Failed("not finite")), False),
    ],
)
def test_what_can_join_the_pass(decision: Decision, does_join: bool) -> None:
    request: Any = SimpleNamespace(prompt=PROMPT, bundles=[Late])
    assert joins(request, Decided((decision,)), layer=2) == does_join


@pytest.mark.parametrize(
    ("own", "shared", "do_join"),
    [((1, 10), (1, 10), True), ((1, 10), (0, 10), False), ((1, 9), (1, 10), False), (None, (1, 10), True)],
)
def test_two_memories_join_the_pass_together(
    own: tuple[int, int] | None, shared: tuple[int, int], do_join: bool
) -> None:
    """Or neither does."""
    outcomes = [
        Untouched("outside") if each is None else InjectionSpec("d", (each[0],), (1.0,), each[1])
        for each in (own, shared)
    ]
    decided = Decided(tuple(Decision(outcome) for outcome in outcomes))
    request: Any = SimpleNamespace(prompt=PROMPT, bundles=[Late, Late])
    assert joins(request, decided, layer=2) == do_join

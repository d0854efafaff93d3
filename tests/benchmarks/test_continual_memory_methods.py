"""Every memory method on two tasks of the demo world, a random tiny LLaVA, a handful of examples and a few steps."""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.continual.methods import METHODS, Artifact, RunContext
from benchmarks.continual.methods.built_memory import Built, shares
from benchmarks.continual.methods.memory import BUNDLE, selector_settings
from benchmarks.continual.methods.paper_memory import Paper
from benchmarks.continual.methods.refined_memory import Refined
from inducekv_vllm.bundle import Bundle, read_bundle
from inducekv_vllm.engine.memory_index import MemoryIndex
from inducekv_vllm.engine.offline import MemoryLLM
from inducekv_vllm.page_terms import page_terms
from selector.backbone import injection, routing
from selector.backbone.extraction import extract, extract_query_keys
from selector.backbone.model import Backbone
from selector.data.examples import entry_records
from selector.paper.settings import PaperSettings
from selector.refined.settings import RefinedSettings
from tests.benchmarks.conftest import DemoSuite
from tests.inducekv_vllm.parity import TOLERANCE, deviation, engine, greedy, make_world, prompts

ORDER = ("guild", "field")
BUDGET, M = 4, 2
SMALL: dict[type, dict[str, Any]] = {
    Built: {"payload_tokens": M},
    Paper: {"iterations": 2, "inner_steps": 1},
    Refined: {"steps": 2, "entries_per_task": 2, "learning_rate": 0.1},
}
MEMORIES = [name for name, method in METHODS.items() if isinstance(method, tuple(SMALL))]
PAPER = [name for name in MEMORIES if isinstance(METHODS[name], Paper)]
REFINED = [name for name in MEMORIES if isinstance(METHODS[name], Refined)]


def small(name: str) -> Any:
    """The method with less to do; what makes it an ablation stays."""
    method = METHODS[name]
    kind = next(kind for kind in SMALL if isinstance(method, kind))
    default = {field.name: field.default for field in fields(kind)}
    changes = {k: v for k, v in SMALL[kind].items() if k == "payload_tokens" or getattr(method, k) == default[k]}
    return replace(method, **changes)


Learned = Callable[[str], list[tuple[Artifact, Bundle]]]  # both tasks' artifacts and bundles, by a method's name


@dataclass(frozen=True)
class Stream:
    """Two tasks, and a folder for the states of methods."""

    model: Path
    tasks: tuple[Any, ...]
    base: Any
    folder: Path

    def learn(self, method: Any, number: int, previous: Path | None, out: Path) -> tuple[Artifact, Bundle]:
        out.mkdir(parents=True)
        artifact = method.learn(
            self.tasks[number], previous, out, RunContext(self.model, BUDGET, 0, number, 2, self.base.train)
        )
        return artifact, read_bundle(out / BUNDLE)


@pytest.fixture(scope="module")
def stream(demo_suite: DemoSuite, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Stream:
    suite = demo_suite(8, 3, 4, *ORDER)[1]
    return Stream(model, suite.tasks, suite.base, tmp_path_factory.mktemp("stream"))


@pytest.fixture(scope="module")
def learned(stream: Stream) -> Learned:
    """Both tasks by a method's name; each method learns once."""
    done: dict[str, list[tuple[Artifact, Bundle]]] = {}

    def learn(name: str) -> list[tuple[Artifact, Bundle]]:
        if name not in done:
            first, second = (stream.folder / name / str(number) for number in range(2))
            done[name] = [stream.learn(small(name), 0, None, first), stream.learn(small(name), 1, first, second)]
        return done[name]

    return learn


@pytest.fixture(scope="module")
def backbone(tiny_backbone: Backbone) -> Backbone:
    return tiny_backbone


def of_task(bundle: Bundle, task: str) -> list[int]:
    return [row for row, entry in enumerate(bundle.metadata.entries) if entry.task == task]


def payloads(bundle: Bundle, rows: list[int]) -> list[torch.Tensor]:
    return [bundle.retrieval_keys[rows], bundle.payload_keys[:, rows], bundle.payload_values[:, rows]]


def test_there_is_every_memory_method_once() -> None:
    assert MEMORIES == [
        "random_memory",
        "kcenter_memory",
        "paper",
        "paper_no_bilevel",
        "paper_no_anchors",
        "paper_no_coverage",
        "fixed_calibration",
        "paper_no_gates",
        "paper_uniform",
        "refined",
        "refined_no_gate",
        "refined_prefix_key",
        "refined_no_quotas",
        "refined_no_refinement",
        "refined_sqrt",
    ]


@pytest.mark.parametrize("name", MEMORIES)
def test_a_state_is_a_sound_bundle_that_goes_on_from_the_one_before(
    name: str, learned: Learned, stream: Stream, backbone: Backbone
) -> None:
    (first_artifact, first), (artifact, bundle) = learned(name)
    for one, number in ((first, 1), (bundle, 2)):
        one.require_backbone(backbone.fingerprint)
        assert one.num_entries <= one.metadata.budget == BUDGET
        assert of_task(one, ORDER[number - 1])
    assert bundle.metadata.parent_digest == first.digest
    assert (artifact.kind, artifact.path) == ("bundle", BUNDLE)
    assert artifact.stored_bytes >= sum(t.nbytes for t in (bundle.payload_keys, bundle.payload_values))
    assert artifact.report["digest"] == bundle.digest
    held = artifact.report["composition"]
    assert held.get("after", held) == {task: len(of_task(bundle, task)) for task in ORDER if of_task(bundle, task)}
    assert not (stream.folder / name / "1" / "progress").exists()
    assert first_artifact != artifact


@pytest.mark.parametrize("name", ["random_memory", "kcenter_memory", "paper", "refined_no_quotas"])
def test_the_same_task_again_gives_the_same_bundle(name: str, learned: Learned, stream: Stream) -> None:
    expected = learned(name)[1][1].digest
    again = stream.learn(small(name), 1, stream.folder / name / "0", stream.folder / name / "again")[1]
    assert again.digest == expected


@pytest.mark.parametrize("name", MEMORIES)
def test_the_serving_side_recalls_what_the_selector_retrieves(
    name: str, learned: Learned, stream: Stream, backbone: Backbone
) -> None:
    """Gate, entries and the terms of attention, by the code that runs in the server and by the reference's."""
    bundle = learned(name)[1][1]
    asked = [example for task in (*stream.tasks, stream.base) for example in task.test]
    keys = extract_query_keys(backbone, asked, batch_size=8)
    opened, prior = routing.routing(bundle, keys)
    terms = injection.Memory.from_bundle(bundle).terms(keys[:, 0], log_prior=prior)
    memory = MemoryIndex.from_bundle(bundle, str(stream.folder / name / "1" / BUNDLE))
    for row, key in enumerate(keys.numpy()):
        lookup = memory.lookup(key, None)
        assert (lookup.retrieval is not None) == bool(opened[row])
        if lookup.retrieval is None:
            continue
        B, m = memory.num_entries, memory.payload_tokens
        page = page_terms(lookup.retrieval, memory.weighting, payload_tokens=m, num_entries=B)
        scale, log_weight = np.zeros(B), np.full(B, -np.inf)
        scale[page.entries], log_weight[page.entries] = page.value_scale, page.log_weight
        used = np.isfinite(log_weight)
        np.testing.assert_allclose(terms.log_weight[row].numpy()[used], log_weight[used], atol=1e-4)
        np.testing.assert_allclose(terms.value_scale[row].numpy()[used], scale[used], atol=1e-5)
        assert np.all(terms.log_weight[row].numpy()[~used] < -80)  # of a weight that float32 cannot hold


@pytest.mark.parametrize("policy", ["random", "k-center"])
def test_built_memories_share_the_budget_among_tasks_and_keep_what_they_held(
    policy: str, learned: Learned, stream: Stream, backbone: Backbone
) -> None:
    first, second = (bundle for _, bundle in learned("random_memory" if policy == "random" else "kcenter_memory"))
    assert (len(of_task(first, ORDER[0])), len(of_task(second, ORDER[0]))) == (4, 2)
    assert len(of_task(second, ORDER[1])) == 2
    records = [first.metadata.entries.index(second.metadata.entries[row]) for row in of_task(second, ORDER[0])]
    for before, after in zip(payloads(first, records), payloads(second, of_task(second, ORDER[0])), strict=True):
        assert torch.equal(before, after)
    for bundle in (first, second):
        assert float(bundle.temperature) == pytest.approx(0.07)
        assert (bundle.value_gates == 0.5).all()
        assert not bundle.layer_bias.any()
        assert bundle.metadata.weighting == "sqrt"
    # Unrefined: what a single example gives.
    by_digest = {record.source_digest: e for e in stream.tasks[1].train for record in entry_records([e])}
    examples = [by_digest[second.metadata.entries[row].source_digest] for row in of_task(second, ORDER[1])]
    fresh = extract(backbone, examples, M, payload_dtype=torch.float16)
    torch.testing.assert_close(second.payload_values[:, of_task(second, ORDER[1])], fresh.payload_values)


def test_k_center_keeps_the_two_that_lie_farthest_apart(
    learned: Learned,
) -> None:
    """Of the four of the first task: wherever it begins, the second is the one least similar to the first."""
    first, second = (bundle for _, bundle in learned("kcenter_memory"))
    rows = [first.metadata.entries.index(second.metadata.entries[row]) for row in of_task(second, ORDER[0])]
    similarity = first.retrieval_keys.float() @ first.retrieval_keys.float().T
    one, other = rows
    assert int(similarity[one].argmin()) == other or int(similarity[other].argmin()) == one


def test_shares_are_equal_add_up_to_the_budget_and_never_grow() -> None:
    assert shares(32, 3) == [11, 11, 10]
    for budget in (8, 32, 33, 64):
        before = [budget]
        for tasks in range(1, 9):
            now = shares(budget, tasks)
            assert sum(now) == budget
            assert max(now) - min(now) <= 1
            assert all(after <= old for after, old in zip(now, before, strict=False))
            before = now


@pytest.mark.parametrize("name", PAPER)
def test_a_paper_ablation_differs_in_one_setting(name: str, learned: Learned) -> None:
    settings, full = (learned(one)[1][1].metadata.settings for one in (name, "paper"))
    ablated = {
        "paper": {},
        "paper_no_bilevel": {"coupling": "single-level"},
        "paper_no_anchors": {"beta": 0.0},
        "paper_no_coverage": {"gamma": 0.0},
        "fixed_calibration": {"inner_steps": 0},
        "paper_no_gates": {"value_gates": "one"},
        "paper_uniform": {"retrieval": "uniform"},
    }
    assert {key: value for key, value in settings.items() if value != full[key]} == ablated[name]


def test_the_calibration_of_the_papers_ablations(learned: Learned, stream: Stream, backbone: Backbone) -> None:
    bundles = {name: learned(name)[1][1] for name in PAPER}
    for name, bundle in bundles.items():
        assert (float(bundle.temperature) == pytest.approx(0.07, abs=1e-7)) is (name == "fixed_calibration"), name
        assert bool((bundle.value_gates == 0.5).all()) is (name == "fixed_calibration"), name
        assert bool((bundle.value_gates == 1).all()) is (name == "paper_no_gates"), name
    uniform = MemoryIndex.from_bundle(bundles["paper_uniform"], str(stream.folder / "paper_uniform" / "1" / BUNDLE))
    for key in extract_query_keys(backbone, stream.tasks[0].test, batch_size=4).numpy():
        retrieval = uniform.lookup(key, None).retrieval
        assert retrieval is not None
        assert (retrieval.weights == np.float32(1 / uniform.num_entries)).all()
    # Its entries were chosen under it, too: the loss is measured with weights that no query changes.
    assert bundles["paper_uniform"].metadata.settings["retrieval"] == "uniform"


def test_the_single_level_update_takes_one_calibration_step_an_iteration(
    learned: Learned,
) -> None:
    """Adam's first step is as long as its rate, 1e-2, whatever the gradient."""
    artifact, bundle = learned("paper_no_bilevel")[0]
    phi = [math.log(math.expm1(one["temperature"])) for one in artifact.report["history"]]
    assert abs(phi[0] - math.log(math.expm1(0.07))) == pytest.approx(0.01, rel=1e-3)
    assert len(phi) == 2
    assert bundle.num_entries == BUDGET


def test_a_memory_without_a_gate_is_always_used_and_was_trained_so(
    learned: Learned,
) -> None:
    for name in REFINED:
        artifact, bundle = learned(name)[1]
        gateless = name in ("refined_no_gate", "refined_sqrt")
        assert (bundle.gate is None) is gateless
        assert (artifact.report["gate"] is None) is gateless
        assert bundle.metadata.weighting == ("sqrt" if name == "refined_sqrt" else "prior")
    first, second = (bundle for _, bundle in learned("refined_no_gate"))
    for before, after in zip(
        payloads(first, of_task(first, ORDER[0])), payloads(second, of_task(second, ORDER[0])), strict=True
    ):
        assert torch.equal(before, after)


def test_the_prefix_key_looks_at_no_text(learned: Learned) -> None:
    for _, bundle in learned("refined_prefix_key"):
        assert bundle.gate is not None
        assert bundle.gate.keys[:, 0].any()
        assert not bundle.gate.keys[:, 1].any()
    assert all(bundle.gate_keys[:, 1].any() for _, bundle in learned("refined"))


def test_without_quotas_the_new_task_takes_the_room_it_finds(
    learned: Learned,
) -> None:
    first, second = (bundle for _, bundle in learned("refined_no_quotas"))
    assert len(of_task(first, ORDER[0])) == second.num_entries == BUDGET
    assert len(of_task(second, ORDER[0])) < BUDGET
    rows = [first.metadata.entries.index(second.metadata.entries[row]) for row in of_task(second, ORDER[0])]
    for before, after in zip(payloads(first, rows), payloads(second, of_task(second, ORDER[0])), strict=True):
        assert torch.equal(before, after)
    assert [len(of_task(learned("refined")[1][1], task)) for task in ORDER] == [2, 2]


def test_without_refinement_entries_are_as_they_were_extracted(
    learned: Learned, stream: Stream, backbone: Backbone
) -> None:
    artifact, bundle = learned("refined_no_refinement")[0]
    by_digest = {record.source_digest: e for e in stream.tasks[0].train for record in entry_records([e])}
    fresh = extract(backbone, [by_digest[entry.source_digest] for entry in bundle.metadata.entries], 8)
    torch.testing.assert_close(bundle.payload_values.float(), fresh.payload_values, atol=1e-2, rtol=1e-2)
    assert float(bundle.temperature) == pytest.approx(0.07)
    assert artifact.report["history"] == []
    assert not torch.allclose(learned("refined")[0][1].payload_values, bundle.payload_values)


@pytest.mark.parametrize("name", MEMORIES)
def test_what_is_searched_are_three_settings_of_the_method(name: str) -> None:
    method = METHODS[name]
    assert len(method.trials) == (0 if name == "refined_no_refinement" else 3)
    assert len({replace(method, **trial) for trial in method.trials}) == len(method.trials)
    assert "trials" not in {field.name for field in fields(method)}
    # An ablation's own setting is not what is searched.
    for trial in method.trials:
        tried = replace(method, **trial)
        if name == "paper_no_anchors":
            assert tried.beta == 0
        if name == "paper_no_coverage":
            assert tried.gamma == 0


def test_the_selector_gets_every_setting_of_the_method(stream: Stream) -> None:
    context = RunContext(stream.model, 5, 3, 0, 1)
    paper = selector_settings(PaperSettings, Paper(iterations=7, beta=0.25), context)
    assert (paper.budget, paper.seed, paper.iterations, paper.beta) == (5, 3, 7, 0.25)
    refined = selector_settings(RefinedSettings, Refined(steps=9, gate="prefix", entries_per_task=2), context)
    assert (refined.budget, refined.seed, refined.steps, refined.gate) == (5, 3, 9, "prefix")
    # Every field of a recipe's method but these is one of its settings: nothing is lost on the way.
    for kind, settings, own in ((Paper, PaperSettings, set()), (Refined, RefinedSettings, {"base"})):
        known = settings.model_fields.keys()
        assert {field.name for field in fields(kind)} - known == {"name", "anchors_per_task"} | own


def test_the_plugin_serves_what_the_ablations_make(learned: Learned, stream: Stream, tmp_path: Path) -> None:
    """One engine, the bundles whose calibration, weighting or gate is out of the ordinary; against transformers."""
    refined = ["refined_no_gate", "refined_prefix_key", "refined_sqrt"]
    names = ["random_memory", "paper_no_gates", "paper_uniform", *refined] * 2
    bundles = [learned(name)[1][1] for name in names]
    world, asked = make_world(stream.model, tmp_path), prompts(len(names), seed=1)
    with engine(stream.model, enforce_eager=True) as llm:
        offline = MemoryLLM(llm)
        loaded = {name: offline.load_bundle(stream.folder / name / "1" / BUNDLE) for name in set(names)}
        answers = offline.chat(
            [prompt.messages for prompt in asked], greedy(max_tokens=6), memory=[loaded[name] for name in names]
        )
    for name, bundle, prompt, answer in zip(names, bundles, asked, answers, strict=True):
        (completion,) = answer.output.outputs
        assert deviation(world, prompt, completion, bundle, top_k=None, remainder=False) <= TOLERANCE, name

"""Every memory method on two tasks of the demo world, a random tiny LLaVA, a handful of examples and a few steps."""

from itertools import combinations

import numpy as np
import pytest
import torch

from benchmarks.lora_adapter import memory_bytes
from benchmarks.research.continual.methods.built_memory import k_center
from benchmarks.research.continual.methods.memory import BUNDLE
from inducekv_vllm.bundle import Bundle
from inducekv_vllm.bundle.lookup import BundleIndex, QueryFeatures
from inducekv_vllm.retrieval.entry_terms import entry_terms
from selector.backbone import gate_rule, injection
from selector.backbone.bundled_model import BundledModel
from selector.backbone.extraction import extract, extract_keys
from selector.backbone.scoring import Scorer
from selector.data.anchors import AnchorStore
from selector.data.examples import entry_records
from tests.research.learned_streams import BUDGET, MEMORIES, M
from tests.research.small_streams import ORDER

# What an ablation changes in the recipe's settings.
PAPER = {
    "paper": {},
    "paper_no_anchors": {"beta": 0.0},
    "paper_no_coverage": {"gamma": 0.0},
    "fixed_calibration": {"inner_steps": 0},
}


def of_task(bundle: Bundle, task: str) -> list[int]:
    return [row for row, entry in enumerate(bundle.metadata.entries) if entry.task == task]


def kept(first: Bundle, second: Bundle) -> list[int]:
    """The rows of the first task's entries that the second memory still holds, bit by bit."""
    now = of_task(second, ORDER[0])
    before = [first.metadata.entries.index(second.metadata.entries[row]) for row in now]
    assert torch.equal(first.retrieval_keys[before], second.retrieval_keys[now])
    assert torch.equal(first.payload_keys[:, before], second.payload_keys[:, now])
    assert torch.equal(first.payload_values[:, before], second.payload_values[:, now])
    return before


def extracted(backbone, bundle, task):
    """The entries of `task` as its examples give them, in the bundle's order."""
    by_digest = {record.source_digest: e for e in task.train for record in entry_records([e])}
    records = [bundle.metadata.entries[row] for row in of_task(bundle, task.name)]
    return extract(backbone, [by_digest[record.source_digest] for record in records], M, payload_dtype=torch.float16)


@pytest.mark.parametrize("name", MEMORIES)
def test_a_state_is_a_sound_bundle_that_goes_on_from_the_one_before(name, learned, backbone):
    (first_artifact, artifact), (first, bundle) = learned(name).artifacts, learned(name).bundles
    for one, task in ((first, ORDER[0]), (bundle, ORDER[1])):
        one.require_backbone(backbone.fingerprint)
        assert one.num_entries <= one.metadata.budget == BUDGET
        assert of_task(one, task)
    assert bundle.metadata.parent_digest == first.digest
    assert (artifact.kind, artifact.path) == ("bundle", BUNDLE)
    assert artifact.stored_bytes >= sum(t.nbytes for t in (bundle.payload_keys, bundle.payload_values))
    assert artifact.report["digest"] == bundle.digest
    held = artifact.report["composition"]
    assert held.get("after", held) == {task: len(of_task(bundle, task)) for task in ORDER if of_task(bundle, task)}
    assert not (learned(name).states[1] / "progress").exists()
    assert first_artifact != artifact


@pytest.mark.parametrize("name", MEMORIES)
def test_the_serving_side_recalls_what_the_selector_retrieves(name, learned, backbone):
    """Gate, entries and the terms of attention, by the code that runs in the server and by the reference's."""
    stream = learned(name)
    bundle, suite = stream.bundles[1], stream.suite
    asked = [example for task in (*suite.tasks, suite.base) for example in task.test]
    keys = extract_keys(backbone, asked, batch_size=8)
    evidence = BundledModel(Scorer(backbone), bundle).evidence(asked)
    opened, prior = gate_rule.routing(bundle, evidence)
    terms = injection.TensorMemory.from_bundle(bundle).terms(keys, log_prior=prior)
    memory = BundleIndex.from_bundle(bundle)
    for row, features in enumerate(map(QueryFeatures, keys.numpy(), evidence.numpy())):
        lookup = memory.lookup(features, None)
        assert (lookup.retrieval is not None) == bool(opened[row])
        if lookup.retrieval is None:
            continue
        B, m = bundle.num_entries, bundle.payload_tokens
        entering = entry_terms(lookup.retrieval, bundle.metadata.weighting, payload_tokens=m, num_entries=B)
        scale, log_weight = np.zeros(B), np.full(B, -np.inf)
        scale[entering.entries], log_weight[entering.entries] = entering.value_scale, entering.log_weight
        used = np.isfinite(log_weight)
        np.testing.assert_allclose(terms.log_weight[row].numpy()[used], log_weight[used], atol=1e-4)
        np.testing.assert_allclose(terms.value_scale[row].numpy()[used], scale[used], atol=1e-5)
        assert np.all(terms.log_weight[row].numpy()[~used] < -80)  # of a weight that float32 cannot hold


@pytest.mark.parametrize("name", ["random_memory", "kcenter_memory"])
def test_built_memories_share_the_budget_among_tasks_and_keep_what_they_held(name, learned, backbone):
    stream = learned(name)
    first, second = stream.bundles
    assert [len(of_task(first, ORDER[0])), len(kept(first, second)), len(of_task(second, ORDER[1]))] == [4, 2, 2]
    for bundle in (first, second):
        assert float(bundle.temperature) == pytest.approx(0.07)
        assert (bundle.value_gates == 0.5).all()
        assert not bundle.layer_bias.any()
        assert bundle.metadata.weighting == "sqrt"
    fresh = extracted(backbone, second, stream.suite.tasks[1])
    torch.testing.assert_close(second.payload_values[:, of_task(second, ORDER[1])], fresh.payload_values)


@pytest.mark.parametrize("name", PAPER)
def test_a_paper_ablation_differs_in_one_setting_and_in_its_calibration(name, learned):
    bundle = learned(name).bundles[1]
    settings, full = bundle.metadata.settings, learned("paper").bundles[1].metadata.settings
    assert {key: value for key, value in settings.items() if value != full[key]} == PAPER[name]
    assert (float(bundle.temperature) == pytest.approx(0.07, abs=1e-7)) is (name == "fixed_calibration")
    assert bool((bundle.value_gates == 0.5).all()) is (name == "fixed_calibration")


def test_a_refined_memory_keeps_old_entries_and_the_anchors_of_all_tasks(learned, backbone):
    first, second = learned("refined").bundles
    assert kept(first, second) == of_task(first, ORDER[0])
    stream = learned("refined")
    for number, (state, artifact) in enumerate(zip(stream.states, stream.artifacts, strict=True), start=1):
        assert artifact.stored_bytes == memory_bytes(backbone, 2 * number, M, number)  # 2: entries of each task
        store = AnchorStore(state / "anchors")
        assert len(store.read()) == 5 * number
        assert artifact.report["anchor_bytes"] == store.bytes()


def test_k_center_covers_within_twice_the_optimum() -> None:
    """The greedy traversal's known guarantee, against all choices of three of ten keys."""
    keys = torch.nn.functional.normalize(torch.randn(10, 4, generator=torch.manual_seed(1)).double(), dim=-1)

    def radius(rows):
        return float(torch.cdist(keys, keys[list(rows)]).amin(dim=1).max())

    best = min(radius(rows) for rows in combinations(range(10), 3))
    assert all(radius(k_center(keys, 3, first=first)) <= 2 * best for first in range(10))

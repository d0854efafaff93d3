"""Which entries the refined recipe keeps, chooses and trains, with its options: quotas, the gate, the weighting."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from inducekv_vllm.bundle import EntryRecord
from inducekv_vllm.errors import BundleError, ConfigError
from selector.backbone.injection import Memory
from selector.refined.entries import EntryPlan, plan_entries, quotas
from selector.refined.losses import reachable
from selector.refined.settings import RefinedSettings
from selector.refined.training_problem import log_prior, nested_subsets
from selector.refined.update import check_tasks
from selector.update.inputs import TaskInputs

d = 6


def records(*tasks: str) -> tuple[EntryRecord, ...]:
    return tuple(EntryRecord(id=f"{task}{i}", task=task, source_digest=f"{task}{i}") for i, task in enumerate(tasks))


def bundle_of(axes: list[int], *tasks: str, weighting: str = "prior") -> Any:
    """What a plan and the checks look at: entries whose keys are axes."""
    metadata = SimpleNamespace(
        entries=records(*tasks), form="merged", output_map=None, weighting=weighting, recipe="refined"
    )
    return SimpleNamespace(retrieval_keys=torch.eye(d)[axes].half(), metadata=metadata, temperature=torch.tensor(0.07))


def plan_of(previous: Any, training_axes: list[int], budget: int, **changes: Any) -> EntryPlan:
    training: Any = [SimpleNamespace(task="new", id=f"n{i}") for i in range(len(training_axes))]
    settings = RefinedSettings(
        budget=budget, allocation="joint", **{"entry_policy": "k-center", "nested": False} | changes
    )
    return plan_entries(TaskInputs(training, (), (), previous), settings, torch.eye(d)[training_axes])


@pytest.mark.parametrize("seed", range(5))
def test_a_joint_plan_spreads_over_old_and_new(seed: int) -> None:
    """Two tasks hold axis 0 twice, and axis 1; the new examples are two of axis 2, and one of axis 0."""
    previous = bundle_of([0, 0, 1], "a", "a", "b")
    plan = plan_of(previous, [2, 0, 2], budget=3, seed=seed)
    assert len(plan.kept) + len(plan.chosen) == 3
    axes = sorted([[0, 0, 1][row] for row in plan.kept.tolist()] + [[2, 0, 2][row] for row in plan.chosen])
    assert axes == [0, 1, 2]
    assert plan.shares["b"] == 1
    assert plan.shares["new"] == len(plan.chosen)
    assert plan.shrunk == frozenset()


def test_a_joint_plan_takes_everything_where_there_is_room() -> None:
    plan = plan_of(bundle_of([0, 1], "a", "b"), [2, 3], budget=8)
    assert (plan.kept.tolist(), plan.chosen) == ([0, 1], [0, 1])
    assert plan.shares == {"a": 1, "b": 1, "new": 2}
    assert plan_of(None, [0, 1, 2], budget=8).shares == {"new": 3}


@pytest.mark.parametrize("policy", ["random", "k-center"])
def test_the_new_task_always_has_an_entry(policy: str) -> None:
    for seed in range(20):
        plan = plan_of(bundle_of([0, 1, 2, 3, 4], *"abcde"), [0], budget=1, entry_policy=policy, seed=seed)
        assert (plan.kept.tolist(), plan.chosen) == ([], [0])
        assert plan.shares == {"new": 1}


def test_an_evicted_task_has_no_share_and_nothing_is_consolidated() -> None:
    plans = [plan_of(bundle_of([0, 0, 0, 1], *"aaab"), [2, 3, 4], 4, entry_policy="random", seed=s) for s in range(20)]
    assert any("b" not in plan.shares for plan in plans)
    assert all(not plan.shrunk and sum(plan.shares.values()) == 4 for plan in plans)


def test_what_an_example_may_retrieve() -> None:
    """The first entry was made of the first example; the second is of its task, the third of another."""
    entries = records("a", "a", "b")
    examples: Any = [SimpleNamespace(task="a", source_digest="a0"), SimpleNamespace(task="b", source_digest="x")]
    inf = math.inf
    gated = log_prior(examples, entries, RefinedSettings())
    assert gated.tolist() == [[-inf, 0, -inf], [-inf, -inf, 0]]
    ungated = log_prior(examples, entries, RefinedSettings(gate="none"))
    assert ungated.tolist() == [[-inf, 0, 0], [0, 0, 0]]
    assert log_prior(examples[:1], entries[:1], RefinedSettings(gate="none")).tolist() == [[0]]


def test_an_entry_of_no_weight_stays_in_attention_under_sqrt() -> None:
    payload = torch.ones(1, 3, 1, 2, 4)
    memory = Memory(torch.eye(3), payload, payload, torch.tensor(0.07), torch.ones(1), torch.zeros(1), "prior")
    prior = torch.tensor([[0.0, -math.inf, 0.0]])
    assert reachable(memory, prior)[0].payload_keys.shape[1] == 2
    assert reachable(replace(memory, weighting="sqrt"), prior)[0].payload_keys.shape[1] == 3


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"weighting": "sqrt"}, 'with a gate needs another weighting than "sqrt"'),
        ({"weighting": "sqrt", "gate": "fitted"}, 'with a gate needs another weighting than "sqrt"'),
        ({"gate": "wide"}, "gate must be fitted or none, found 'wide'"),
        ({"gate_misses": -0.1}, "gate_misses must be at least 0, found -0.1"),
        ({"gate_misses": 0.6}, "gate_misses must be at most 0.5, found 0.6"),
        ({"allocation": "none"}, "allocation must be quotas or joint"),
        ({"entry_policy": "first"}, "entry_policy must be random or k-center"),
        ({"calibrate": "last"}, "calibrate must be first, every or never"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RefinedSettings(form="merged", **wrong)
    assert RefinedSettings(form="merged", weighting="sqrt", gate="none").weighting == "sqrt"


def test_the_form_decides_the_defaults() -> None:
    default, merged = RefinedSettings(), RefinedSettings(form="merged")
    assert (default.form, default.weighting, default.activation, default.calibrate) == (
        "decoupled",
        "uniform",
        "search",
        "never",
    )
    assert (merged.weighting, merged.activation, merged.calibrate, merged.map_rank) == ("prior", "prompt", "first", 0)
    assert RefinedSettings(form="merged", calibrate="every").calibrate == "every"
    assert RefinedSettings(gate="none").activation == "prompt"


def test_a_memory_refined_for_another_weighting_is_refused() -> None:
    training: Any = [SimpleNamespace(task="new", id="n0", answer="yes")]
    anchors: Any = [SimpleNamespace(task="a", id="a9")]
    inputs = TaskInputs(training, (), anchors, bundle_of([0], "a", weighting="sqrt"))
    settings = RefinedSettings(form="merged", learning_rate=0.1)
    with pytest.raises(BundleError, match="refined for the weighting 'sqrt', found 'prior'"):
        check_tasks(inputs, settings)
    check_tasks(inputs, RefinedSettings(form="merged", learning_rate=0.1, weighting="sqrt", gate="none"))


def test_halves_of_a_quota_are_nested_and_old_entries_are_in_all() -> None:
    new = torch.tensor([False, True, True, False, True, True, True])
    rows = nested_subsets(new, RefinedSettings()).long().tolist()
    assert rows == [[1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0, 0], [1, 1, 0, 1, 0, 0, 0]]
    assert nested_subsets(new, RefinedSettings(nested=False)).tolist() == [[True] * 7]
    assert nested_subsets(torch.tensor([False, True]), RefinedSettings()).tolist() == [[True, True]]


@pytest.mark.parametrize("nested", [True, False])
def test_a_task_whose_quota_is_halved_keeps_its_first_entries(nested: bool) -> None:
    previous = bundle_of([0, 1, 2, 3, 4, 5], *"ababab")
    previous.metadata.settings = {"nested": nested}
    inputs = TaskInputs([SimpleNamespace(task="new", id="n0")] * 3, (), (), previous)  # type: ignore[list-item]
    settings = RefinedSettings(form="merged", budget=4, entries_per_task=3)
    plan = plan_entries(inputs, settings, torch.zeros(3, d))
    assert plan.kept.tolist() == [0, 1]
    assert plan.shares == {"a": 1, "b": 1, "new": 1}
    assert plan.shrunk == (set() if nested else {"a", "b"})


def test_every_task_gets_its_entries_while_the_budget_holds_them() -> None:
    assert quotas({}, "a", budget=32, entries_per_task=8) == {"a": 8}
    assert quotas({"a": 8, "b": 8, "c": 8}, "d", budget=32, entries_per_task=8) == dict.fromkeys("abcd", 8)


def test_one_task_too_many_halves_all_shares() -> None:
    assert quotas(dict.fromkeys("abcd", 8), "e", budget=32, entries_per_task=8) == dict.fromkeys("abcde", 4)


def test_a_task_that_holds_less_than_its_share_keeps_what_it_holds() -> None:
    assert quotas({"a": 2, "b": 8}, "c", budget=12, entries_per_task=8) == {"a": 2, "b": 4, "c": 4}
    assert quotas({"a": 2, "b": 2}, "c", budget=8, entries_per_task=4) == {"a": 2, "b": 2, "c": 4}


@pytest.mark.parametrize("entries_per_task", [1, 2, 3, 5, 8, 13])
def test_a_stream_never_exceeds_the_budget_and_shares_only_shrink(entries_per_task: int) -> None:
    budget, held = 21, {}
    for task in range(21):
        after = quotas(held, str(task), budget=budget, entries_per_task=entries_per_task)
        assert sum(after.values()) <= budget
        assert all(1 <= after[name] <= count for name, count in held.items())
        held = after


def test_a_budget_below_one_entry_a_task_is_refused() -> None:
    with pytest.raises(ConfigError, match="budget of 2 is below one entry for each of 3 tasks"):
        quotas({"a": 1, "b": 1}, "c", budget=2, entries_per_task=4)
    with pytest.raises(ConfigError, match="at least one entry"):
        quotas({}, "a", budget=4, entries_per_task=0)

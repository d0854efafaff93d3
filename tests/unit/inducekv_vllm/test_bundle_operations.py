"""The next versions of bundles: entries taken and joined, another gate, other metadata."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from inducekv_vllm.bundle import (
    ENTRY_AXES,
    FactRecord,
    bundle_without_entries,
    read_bundle,
    with_metadata,
    write_bundle,
)
from inducekv_vllm.errors import BundleError
from tests.bundles import gated_decoupled_bundle, in_layers, random_bundle, random_gate

FORM: dict[str, Any] = {"form": "decoupled", "weighting": "uniform"}


def test_what_is_taken_and_joined_again_is_as_before() -> None:
    whole = gated_decoupled_bundle()
    of_a, of_b = whole.take([0, 1, 3]), whole.take([2, 4])
    assert (of_a.metadata.gate_tasks, of_b.metadata.activations) == (("a",), {"b": "generation"})
    again = of_a.join(of_b, gate=whole.gate)
    assert again.metadata.parent_digest == of_a.digest
    order = torch.tensor([0, 1, 3, 2, 4])
    for name, tensor in whole.tensors().items():
        expected = tensor.index_select(ENTRY_AXES[name], order) if name in ENTRY_AXES else tensor
        assert torch.equal(again.tensors()[name], expected), name
    with pytest.raises(BundleError, match="the entries of two bundles cannot be joined"):
        of_a.join(random_bundle(2, 3, **FORM, activations={"t": "text"}), gate=None)


def test_memory_in_other_layers_cannot_be_joined_but_can_follow_facts() -> None:
    whole = gated_decoupled_bundle()
    some = in_layers(whole, (0, 2))
    of_a, of_b = some.take([0, 1, 3]), some.take([2, 4])
    assert of_a.join(of_b, gate=some.gate).metadata.layers == (0, 2)
    with pytest.raises(BundleError, match=r"one memory is in the layers \[0, 2\], the other in \[0, 1, 2\]"):
        of_a.join(whole.take([2, 4]), gate=some.gate)
    fact = FactRecord(id="f", task="a", source_digest="ab", question="q", answer="a")
    empty = bundle_without_entries(whole.metadata.backbone, recipe="refined", settings={}, facts=(fact,))
    joined = empty.join(some, gate=some.gate, budget=some.metadata.budget)
    assert joined.metadata.layers == (0, 2)
    assert torch.equal(joined.payload_values, some.payload_values)
    assert torch.equal(joined.value_gates, some.value_gates)


def test_a_gate_is_one_field(tmp_path: Path) -> None:
    bundle, gate = gated_decoupled_bundle(), random_gate(seed=7, thresholds=torch.tensor([0.25, 0.5])).stored()
    other = bundle.with_gate(gate, {"gate_misses": 0.1})
    assert other.metadata.settings == {**bundle.metadata.settings, "gate_misses": 0.1}
    write_bundle(other, tmp_path / "b.safetensors")
    for found in (other.gate, read_bundle(tmp_path / "b.safetensors").gate):
        assert found is not None
        assert (found.record, found.tasks) == (gate.record, gate.tasks)
        assert all(torch.equal(found.tensors()[name], tensor) for name, tensor in gate.tensors().items())
    assert bundle.next(gate=None).metadata.gate is None
    with pytest.raises(BundleError, match="bundle: the gate is not the one that the metadata describes"):
        with_metadata(replace(bundle, gate=replace(gate, tasks=("b", "a"))))


def test_a_gate_has_tasks_of_facts_alone() -> None:
    fact = FactRecord(id="f", task="c", source_digest="cd", question="Who keeps the mill?", answer="Ed")
    gate = random_gate(tasks=("a", "b", "c")).stored()
    bundle = gated_decoupled_bundle().next(facts=(fact,), gate=gate)
    assert bundle.take([0]).metadata.gate_tasks == ("a", "c")
    with pytest.raises(BundleError, match="gate task 'c' has no entries, no facts and no adapter"):
        bundle.next(facts=())


def test_the_gate_goes_with_the_last_of_its_tasks() -> None:
    """Facts of a task that it does not know stay, and are found by their words alone."""
    fact = FactRecord(id="f", task="c", source_digest="cd", question="Who keeps the mill?", answer="Ed")
    left = gated_decoupled_bundle().next(facts=(fact,)).take([])
    assert (left.gate, left.metadata.gate_tasks, left.metadata.facts) == (None, (), (fact,))

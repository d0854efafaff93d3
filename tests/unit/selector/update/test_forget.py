"""The next version of a bundle without some entries: what is left is as before, and the gate knows no gone task."""

from collections.abc import Callable

import pytest
import torch

from inducekv_vllm.bundle import Bundle, bundle_digest
from inducekv_vllm.errors import BundleError
from selector.update.forget import Forgotten, rows_to_forget, without_entries
from tests.bundles import gated_decoupled_bundle, random_bundle, random_gated_bundle


@pytest.mark.parametrize("make", [random_bundle, random_gated_bundle, gated_decoupled_bundle])
def test_what_is_left_is_as_before_to_the_bit(make: Callable[[], Bundle]) -> None:
    bundle = make()
    after = without_entries(bundle, [0, 2])
    kept = [1, 3, 4]
    assert after.metadata.entries == tuple(bundle.metadata.entries[row] for row in kept)
    assert after.metadata.parent_digest == bundle.digest
    assert bundle_digest(after) == after.digest != bundle.digest
    for name, tensor in bundle.tensors().items():
        axis = {"retrieval_keys": 0, "payload_keys": 1, "payload_values": 1, "map_in": 1, "map_out": 1}.get(name)
        expected = tensor if axis is None else tensor.index_select(axis, torch.tensor(kept))
        assert torch.equal(after.tensors()[name], expected), name
    same = ("backbone", "budget", "payload_tokens", "weighting", "recipe", "settings", "adapter", "form", "gate_tasks")
    for name in (*same, "activations", "output_map", "format_version"):
        assert getattr(after.metadata, name) == getattr(bundle.metadata, name), name


def test_a_gone_task_has_no_row_in_the_gate() -> None:
    bundle = gated_decoupled_bundle()
    after = without_entries(bundle, [2, 4])
    assert after.metadata.gate_tasks == ("a",)
    assert after.metadata.activations == {"a": "prompt"}
    gate, before = after.gate, bundle.gate
    assert gate is not None
    assert before is not None
    for name in ("center", "scale", "prototypes", "floors"):
        assert torch.equal(getattr(gate, name), getattr(before, name))
    evidence = torch.rand(before.weights.shape[1])
    assert gate.rule.decide(evidence).margins == before.rule.decide(evidence).margins[:1]


@pytest.mark.parametrize(
    ("named", "problem"),
    [
        ({"ids": ["e0", "e9"]}, "there is no entry 'e9'"),
        ({"tasks": ["u"]}, "there is no entry of the task 'u'"),
        ({"tasks": ["t"]}, "all 5 entries would be forgotten, and a bundle needs one: unload"),
    ],
)
def test_what_cannot_be_forgotten(named: dict[str, list[str]], problem: str) -> None:
    with pytest.raises(BundleError, match=f"b.safetensors: {problem}"):
        rows_to_forget(random_bundle(), Forgotten(**named), "b.safetensors")
